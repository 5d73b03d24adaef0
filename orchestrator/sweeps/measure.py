"""How long a step takes: real steps of real runs, side by side on the cluster that will train them."""

import logging
import math
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from statistics import median
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayError
from torch import nn

from moe.cost import train_flops_6mac
from orchestrator.codec import from_dict, to_dict
from orchestrator.config import CheckpointConfig, RunConfig, TrainConfig
from orchestrator.data.batch import Batch
from orchestrator.data.loader import in_process, prefetched
from orchestrator.data.stream import open_stream
from orchestrator.sweeps.budget import steps_to_train
from orchestrator.training.allocator import keep_freed_memory
from orchestrator.training.loop import set_threads, train_step
from orchestrator.training.meter import device_sync
from orchestrator.training.optim import build_optimizer
from orchestrator.training.worker import build_model

log = logging.getLogger(__name__)
MOST = 24  # distinct steps that are measured, before most of a family are interpolated
ROUNDS = 3  # of each, with all others between: neighbours and the machine's mood change
SECONDS = 2.0  # of steps, for each of them and round
WARM_UP = 0.25  # of them
GROUPS = 8  # of steps; a pause of the machine spoils one


@dataclass(frozen=True, kw_only=True)
class Pace:
    """Attributes:
    step_s: of a step.
    start_s: what the first steps take longer, in all: data is read ahead, memory grows to its size.
    """

    step_s: float
    start_s: float

    def mean_s(self, steps: int) -> float:
        """Of a step of a run of so many."""
        return self.step_s + self.start_s / steps


def measured_steps(
    runs: Mapping[str, RunConfig], *, most: int = MOST, rounds: int = ROUNDS, seconds: float = SECONDS
) -> dict[str, float]:
    """trial -> seconds of a step, as ``cost/device_s`` will count them: on average over the run, which begins
    slowly. Not in it: starting processes, evaluation, reports, checkpoints.

    Runs that differ in nothing that decides speed are measured as one. All are submitted to the connected Ray
    at once, each on a trial's CPU or GPU, so that neighbours slow each other down as they will in the sweep.
    What counts is the median of all `rounds`, of `seconds` each. What cannot be measured, for want of memory
    above all, is left out with a warning.

    Approximations:
    - several workers: one worker's share of the batch on one worker that holds all weights; what the workers
      send each other is left out (`moe.plan` has seconds on the links).
    - more than `most` distinct ones: of every family the cheapest, the median and the dearest are measured,
      log(seconds) between them is linear in log(FLOPs).
    """
    alike = {trial: alone(run) for trial, run in runs.items()}
    distinct = list(dict.fromkeys(alike.values()))
    chosen = distinct if len(distinct) <= most else spread(distinct)
    waiting = [
        _pace_on_ray.options(num_cpus=1, num_gpus=int(run.scale.use_gpu)).remote(to_dict(run), seconds)
        for run in rounds * chosen
    ]
    found: dict[RunConfig, list[Pace]] = {}
    for run, one in zip(rounds * chosen, waiting, strict=True):
        try:
            found.setdefault(run, []).append(ray.get(one))
        except RayError as error:
            log.warning(
                "a step of %s cannot be measured: %s", run.model.family(), str(error).splitlines()[-1]
            )
    known = {run: _median(paces) for run, paces in found.items() if paces}
    known |= {run: pace for run in set(distinct) - set(chosen) if (pace := interpolate(run, known))}
    return {
        trial: known[alike[trial]].mean_s(steps_to_train(run))
        for trial, run in runs.items()
        if alike[trial] in known
    }


def alone(run: RunConfig) -> RunConfig:
    """What one worker of `run` computes, as a run of one worker in which only what decides speed is left."""
    workers, train = run.scale.workers, run.train
    return replace(
        run,
        name="measured",
        storage="",
        data=replace(run.data, batch_size=run.data.batch_size // workers, lanes=None),
        train=TrainConfig(
            microbatch=train.microbatch, compute_dtype=train.compute_dtype, optimizer=type(train.optimizer)()
        ),
        checkpoint=CheckpointConfig(),
        scale=replace(run.scale, workers=1, ep=1, dp_replicate=1),
    )


def spread(runs: Sequence[RunConfig]) -> list[RunConfig]:
    """Of every group of `_group` the cheapest, the median and the dearest."""
    groups: dict[Any, list[RunConfig]] = {}
    for run in sorted(runs, key=_flops):
        groups.setdefault(_group(run), []).append(run)
    return [run for g in groups.values() for run in dict.fromkeys((g[0], g[len(g) // 2], g[-1]))]


def interpolate(run: RunConfig, known: Mapping[RunConfig, Pace]) -> Pace | None:
    """From those of the same group, in log(seconds) over log(FLOPs); None outside of what is known."""
    near = sorted((one for one in known if _group(one) == _group(run)), key=_flops)
    if not near or not _flops(near[0]) <= _flops(run) <= _flops(near[-1]):
        return None
    flops = [math.log(_flops(one)) for one in near]

    def at(seconds: list[float]) -> float:
        return float(np.interp(math.log(_flops(run)), flops, seconds))

    return Pace(
        start_s=at([known[one].start_s for one in near]),
        step_s=math.exp(at([math.log(known[one].step_s) for one in near])),
    )


def _median(paces: Sequence[Pace]) -> Pace:
    return Pace(step_s=median(p.step_s for p in paces), start_s=median(p.start_s for p in paces))


def _group(run: RunConfig) -> tuple[str, str, bool]:
    return run.model.family(), run.train.compute_dtype, run.scale.use_gpu


def _flops(run: RunConfig) -> float:
    return train_flops_6mac(run.model, run.data.batch_size)


@ray.remote(max_retries=0)
def _pace_on_ray(run: dict[str, Any], seconds: float) -> Pace:
    return pace(from_dict(RunConfig, run), seconds)


def pace(run: RunConfig, seconds: float) -> Pace:
    """Of a run of one worker: trains it in this process for `seconds`, or a few steps if they take longer."""
    keep_freed_memory()
    set_threads(run.model, run.images_per_pass())
    device = torch.device("cuda" if run.scale.use_gpu else "cpu")
    model = build_model(run, device)
    optimizer = build_optimizer(run.train.optimizer, model)
    stream = open_stream(run, "train", 0, 1)
    began = time.perf_counter()  # where `Meter` begins
    with closing(prefetched(in_process(stream, range(sys.maxsize)), device)) as batches:
        steps = _updates(model, optimizer, batches, run)
        first = _timed(steps, 0)[0] + _timed(steps, WARM_UP * seconds)[0]
        warm_up_s = time.perf_counter() - began
        groups = [_timed(steps, (1 - WARM_UP) * seconds / GROUPS) for _ in range(GROUPS)]
    step_s = median(took / count for count, took in groups)
    return Pace(start_s=max(0.0, warm_up_s - first * step_s), step_s=step_s)


def _updates(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: Iterator[Batch], run: RunConfig
) -> Iterator[None]:
    for step, batch in enumerate(batches):
        train_step(model, optimizer, batch, run, step=step)
        yield


def _timed(steps: Iterator[None], seconds: float) -> tuple[int, float]:
    """How many steps it took to fill `seconds`, at least one, and how long they took."""
    count, began = 0, time.perf_counter()
    while not count or time.perf_counter() - began < seconds:
        next(steps)
        count += 1
    device_sync()
    return count, time.perf_counter() - began

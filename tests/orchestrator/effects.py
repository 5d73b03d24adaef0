"""Observations of a small run, by which configs are compared: weights, losses, batches, files, requests.

Each function takes a `RunConfig`, or a sweep and its options, and returns what can be compared; nothing in it
is a copy of the config, a time, or a random name.
"""

import hashlib
import logging
import math
import os
import shutil
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_pre_hook

from moe import parallel
from moe.expert_parallel import ExpertParallel
from orchestrator import estimate
from orchestrator.checkpoint import manifest as manifests
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.costs import computed
from orchestrator.data.augment.base import at, draw
from orchestrator.data.batch import Batch
from orchestrator.data.stream import fetches_whole_shards, in_process, open_stream
from orchestrator.errors import UsageError
from orchestrator.packing.pack import Sample, write_shards
from orchestrator.runs.metrics_file import Metrics
from orchestrator.runs.run_directory import RunDir, acquire_run_dir
from orchestrator.training import elastic, launch, loop, worker as worker_module
from orchestrator.training.dry_run import fake_ranks
from orchestrator.training.loop import evaluate, train_step
from orchestrator.training.resources import run_resources
from orchestrator.training.worker import Worker, build_model, train_worker
from tests.parts import png, poison_memory

NUMBERS = count()
CAPTIONS = ("a small photo\nthe digit zero", "a digit\nof two\nthree", "a small photo", "one, and one")
# Of reports, what is a time, or the machine's.
TIMES = ("perf/", "system/", "cost/device_s", "cost/marginal_device_s", "checkpoint/age_s", "data/wait_frac")


def digest(values: Any) -> str:
    """Returns a digest of a tensor, or of a tree of them, with their types and shapes."""
    found = hashlib.sha256()

    def add(value: Any) -> None:
        if isinstance(value, Tensor):
            found.update(f"{value.dtype}{tuple(value.shape)}".encode())
            found.update(value.detach().contiguous().view(torch.uint8).numpy().tobytes())
        elif isinstance(value, dict):
            for name in sorted(value):
                found.update(name.encode())
                add(value[name])
        elif isinstance(value, list | tuple):
            for each in value:
                add(each)
        else:
            found.update(repr(value).encode())

    add(values)
    return found.hexdigest()[:16]


def untimed(metrics: Metrics) -> Metrics:
    return {name: value for name, value in metrics.items() if not name.startswith(TIMES)}


# A run's steps, without files.


@cache
def _batch(run: RunConfig, number: int) -> Batch:
    """Random samples with the fields that the run's task and data read."""
    size, side, rng = run.data.batch_size, run.model.image_side(), torch.Generator().manual_seed(number)
    fields: dict[str, Tensor] = {"label": torch.randint(10, (size, 1), generator=rng)}
    for name, field in run.task.fields(run.model).items():
        texts = [CAPTIONS[(n + number) % len(CAPTIONS)].encode() for n in range(size)]
        if name == "sequence":
            texts = [(text * 4)[n : n + run.model.tokens() + 1] for n, text in enumerate(texts)]
        fields[name] = torch.from_numpy(np.stack([field.decode(text) for text in texts]))
    if side:
        fields["image"] = torch.randint(256, (size, 3, side, side), generator=rng, dtype=torch.uint8)
    if mixing := at(run.data.augment, "batch"):
        names = [f"{number}/{n}" for n in range(size)]
        fields["mix"] = torch.from_numpy(draw(mixing, names, side))
    key = torch.arange(size) + 100 * number
    return Batch(fields=fields, valid=(key % 100 < size - 1).float(), key=key, sample=key)


def steps(run: RunConfig) -> dict[str, Any]:
    """All steps of the run and an evaluation, with the model and the optimiser that a worker builds."""
    model = build_model(run, torch.device("cpu"), seed=1)
    optimizer = run.train.optimizer.build(model)
    calls, found = Counter[str](), []
    hook = register_module_forward_pre_hook(lambda module, _: calls.update([type(module).__name__]))
    with hook:
        for step in range(run.train.steps):
            metrics = train_step(model, optimizer, _batch(run, step), run, step=step)
            found.append({name: value.item() for name, value in metrics.items()})
    weights = {name: value for name, value in model.state_dict().items() if value.numel()}
    assert all(value.isfinite().all() for value in weights.values() if value.is_floating_point())
    with patch.object(loop, "WARM_UP", 0):
        measured = untimed(evaluate(model, [_batch(run, 77)], run))
    beside = digest(run.task.before_scores(model))
    metrics, biases = [*found, measured], [float(value.double().sum()) for value in weights.values()]
    assert all(map(math.isfinite, (*biases, *(v for each in metrics for v in each.values()))))
    return {
        "metrics": metrics,
        "weights": digest([*weights.values()]),
        "val": measured,
        "beside": beside,
        "calls": sorted(calls.items()),
    }


def planned(run: RunConfig) -> dict[str, Any]:
    """Costs, memory, traffic and disk, as computed from the config."""
    links = estimate.layout(run, run.ep())
    return {
        "costs": computed(run, run.train.steps),
        "memory": dict(links.memory),
        "traffic": {name: tuple(sent.__dict__.values()) for name, sent in links.traffic.items()},
        "disk": (estimate.checkpoint_bytes(run), estimate.checkpoints_kept(run)),
    }


def split(run: RunConfig) -> list[Any]:
    """Returns how a model is split over the run's workers: what is sharded over which mesh, and chunks."""
    found: list[Any] = []

    def shard(module: nn.Module, *, mesh: Any, **options: Any) -> None:
        names = type(module).__name__, mesh.mesh_dim_names, tuple(mesh.shape)
        found.append((*names, options.get("reshard_after_forward")))

    with fake_ranks(run.scale.workers), patch.object(parallel, "fully_shard", shard):
        model = build_model(run, torch.device("cpu"), seed=None)
    return found + [each.chunks for each in model.modules() if isinstance(each, ExpertParallel)]


def compiled(run: RunConfig) -> int:
    """Returns how many functions are compiled."""
    names: list[Any] = []
    with patch.object(torch, "compile", lambda function, **_: names.append(function) or function):
        build_model(run, torch.device("cpu"), seed=1)
    return len(names)


# The images that a run reads.


@cache
def data_set(root: Path, seed: int = 0, *, broken: bool = False) -> str:
    """Packs 44 images and 12 of validation, of 12 x 20 pixels; three are `broken`."""
    path, rng = root / f"data-{seed}{'-broken' * broken}", np.random.default_rng(seed)
    coarse = rng.integers(0, 256, (56, 6, 10, 3)).repeat(2, axis=1).repeat(2, axis=2)
    images = [png(np.clip(image + rng.integers(-20, 20, image.shape), 0, 255)) for image in coarse]
    for number in (3, 7, 20) if broken else ():
        images[number] = images[number][:60]
    samples = [Sample(image, n % 10, f"{seed}-{n}") for n, image in enumerate(images)]
    write_shards(str(path), map(str, range(10)), {"train": samples[:44], "val": samples[44:]})
    return str(path)


def read(run: RunConfig) -> dict[str, Any]:
    """The batches of more than an epoch of training, and those of the evaluation."""
    training, validation = (open_stream(run, split, 0, run.scale.workers) for split in ("train", "val"))
    first, last = (
        list(in_process(s, r)) for s, r in ((training, range(7)), (validation, validation.steps()))
    )
    return {
        "train": digest([batch.tensors() for batch in first]),
        "order": [batch.sample.tolist() for batch in first],
        "val": digest([batch.tensors() for batch in last]),
    }


def cache_of_a_node(run: RunConfig) -> dict[str, Any]:
    """Returns the bytes of a data set's cache, and whether remote shards would be kept whole in it."""
    with patch("orchestrator.storage.is_local", lambda path: False):
        whole = fetches_whole_shards(run, nodes=1)
    return {"bytes": open_stream(run, "train", 0, 1).data.cache_bytes, "whole": whole}


# A worker of a run, and what it leaves.


class _AskedError(Exception):
    """Ends a run once the observed call was made."""


@contextmanager
def _logged(lines: list[str]) -> Iterator[None]:
    handler, logger = logging.Handler(logging.INFO), logging.getLogger("orchestrator")
    handler.emit = lambda record: lines.append(record.getMessage())
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


def _modes() -> tuple[Any, ...]:
    exact = torch.are_deterministic_algorithms_enabled()
    warns = torch.is_deterministic_algorithms_warn_only_enabled()
    return exact, warns, os.environ.get("CUBLAS_WORKSPACE_CONFIG")


def worker(run: RunConfig) -> dict[str, Any]:
    """A worker's whole run: reports, files, weights, log, and the thread that writes checkpoints."""
    run = override(run, {"storage": f"{run.storage}/{next(NUMBERS)}"})
    reports: list[tuple[int, Metrics]] = []
    lines, threads, modes, commit = [], set[str](), set[Any](), manifests.commit
    error = ""

    def report(step: int, metrics: Metrics) -> None:
        reports.append((step, untimed(metrics)))
        modes.add(_modes())

    def noted(*args: Any, **options: Any) -> None:
        threads.add(threading.current_thread().name.partition("_")[0])
        commit(*args, **options)

    with _logged(lines), patch.object(manifests, "commit", noted), patch.dict(os.environ):
        torch.use_deterministic_algorithms(False)
        try:
            train_worker(run, report=report, read=in_process)
        except UsageError as refused:
            error = str(refused)
        finally:
            poison_memory()
    own = RunDir.of(run)
    kept = manifests.steps(own.checkpoints)
    newest = manifests.folder_of(own.checkpoints, kept[-1]) if kept else ""
    files = manifests.read(newest).weights() if kept else []
    weights = {name: tensor for file in files for name, tensor in load_file(f"{newest}/{file}").items()}
    assert weights or error
    top = sorted(path.name for path in Path(own.path).iterdir() if path.is_file())
    shutil.rmtree(run.storage)
    return {
        "reports": reports,
        "last": reports[-1][1] if reports else {},
        "steps": [step for step, _ in reports],
        "evaluated": [step for step, metrics in reports if "val/loss" in metrics],
        "files": top,
        "kept": kept,
        "weights": digest(weights),
        "log": [line.replace(run.storage, "") for line in lines],
        "threads": threads,
        "modes": modes,
        "error": error,
    }


@cache
def trained(run: RunConfig) -> str:
    """Trains a run to its end, and returns the folder of its last checkpoint."""
    train_worker(run, report=lambda step, metrics: None, read=in_process)
    return manifests.folder_of(RunDir.of(run).checkpoints, run.train.steps)


def device(run: RunConfig) -> str:
    """Returns the device on which a worker builds its model."""
    found: list[str] = []

    def build(run: RunConfig, device: torch.device, **_: Any) -> None:
        found.append(str(device))
        raise _AskedError

    with patch.object(worker_module, "build_model", build):
        try:
            Worker(run, lambda step, metrics: None, in_process)
        except _AskedError:
            return found[0]
    raise AssertionError("it builds no model")


def place(run: RunConfig) -> list[str]:
    """Returns the files of a run that begins, below the folder of its storage; they are removed again."""
    parent = Path(run.storage).parent
    before = {path for path in parent.glob("**/*") if path.is_file()}
    acquire_run_dir(run, "d" * 64)
    found = {path for path in parent.glob("**/*") if path.is_file()} - before
    shutil.rmtree(RunDir.of(run).path)
    return sorted(str(path.relative_to(parent)) for path in found)


# What a run asks of a cluster.


def requests(run: RunConfig) -> dict[str, Any]:
    """Returns what a run reserves, and what it gives Ray Train."""
    given: dict[str, Any] = {}

    class Trainer:
        def __init__(self, work: Any, **arguments: Any) -> None:
            given.update(arguments)

        def fit(self) -> None: ...

    # An object that is put would start a Ray.
    with patch.object(launch, "Trainer", Trainer), patch("ray.put"), patch.dict(os.environ):
        launch.on_workers(lambda config: None, run, {}, with_feeds=False)
    scaling = given["scaling_config"]
    return {
        "workers": scaling.num_workers,
        "gpu": scaling.use_gpu,
        "each": scaling.resources_per_worker,
        "placement": scaling.placement_strategy,
        "backend": given["torch_config"].backend,
        "all": run_resources(run),
        "compute": run.compute_dtype(),
    }


def waits(run: RunConfig) -> list[tuple[int, float]]:
    """Returns what a run asks of a full cluster until it begins again: workers and seconds."""
    asked: list[tuple[int, float]] = []

    def full(each: RunConfig, *, within_s: float) -> bool:
        if len(asked) > run.scale.workers or (asked and each == run):
            raise _AskedError
        asked.append((each.scale.workers, within_s))
        return False

    nothing: Any = SimpleNamespace(want=lambda *_: None)
    with patch.object(elastic, "can_schedule", full):
        try:
            elastic.fit_on_workers(run, nothing, nothing, None, [])
        except _AskedError:
            return asked
    raise AssertionError("it does not wait")


RUNS = (
    steps,
    planned,
    split,
    compiled,
    read,
    cache_of_a_node,
    worker,
    device,
    place,
    requests,
    waits,
)
RUN: dict[str, Callable[[RunConfig], Any]] = {each.__name__: each for each in RUNS}


@cache
def observed(effect: str, config: RunConfig) -> Any:
    """Returns what there is to see of ``steps``, or of a part of it as ``steps:weights``."""
    name, _, part = effect.partition(":")
    if part:
        return observed(name, config)[part]
    return RUN[name](config)

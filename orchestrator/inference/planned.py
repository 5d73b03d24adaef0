"""The time of models before they are trained: random weights take about as long as trained ones.

An exported model does the same work whatever its router decides: a dropless router has a slot for every token
in each expert. So the time of a plan is measured, as that of trained models is. What this machine cannot hold
or time within two minutes is estimated from its FLOPs, on a line through those that were timed.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from moe.model import ModelConfig
from orchestrator.checkpoint.export import write_export
from orchestrator.checkpoint.models import ModelRef, read_model
from orchestrator.config import RunConfig
from orchestrator.costs import FORWARD, computed
from orchestrator.inference.measure import GFLOPS_PER_S, ONE_IMAGE, Say, disturbance, run_clock, write_models
from orchestrator.inference.timing import FEWEST_CALLS, FEWEST_ROUNDS, WARM_UP, times

AT_MOST_S = 120.0  # of timed calls, for which ten rounds are enough
TIMING_S = 15.0  # until which disturbed rounds are repeated
FEWEST_TIMED = 3  # models, from which others are estimated


@dataclass(frozen=True, kw_only=True)
class PlannedTime:
    """Milliseconds of a call of an untrained model, written as ONNX, with one image on one thread.

    Attributes:
        ms, ms_p95: the median and the 95th percentile.
        factor: the error of an estimate: it was right within this factor for each timed model, when it was
            left out of the line; 1 for a time that was measured.
    """

    ms: float
    ms_p95: float
    factor: float = 1.0

    @property
    def least(self) -> float:
        """The least median that is likely. Unlike the 95th percentile, other work hardly moves it."""
        return self.ms / self.factor


def planned_times(runs: Mapping[str, RunConfig], *, say: Say = lambda line: None) -> dict[str, PlannedTime]:
    """Returns the planned time of each run, by the names of `runs`. Runs of equal models are timed once.

    Three kinds of runs have no time: models that read no images, models that cannot be written as ONNX, which
    `say` names, and large models if fewer than three others were timed.

    Raises:
        UsageError: if a package is missing.
    """
    models, names = dict[ModelConfig, RunConfig](), dict[ModelConfig, str]()
    for name, run in runs.items():
        if run.model.image_side():
            models[run.model], names[run.model] = run, name
    gflops = {model: computed(run, 1)[FORWARD] for model, run in models.items()}
    small = _that_fit(models, gflops)
    with TemporaryDirectory(prefix="moe-frontier-") as folder:
        known = {names[m]: _untrained(run, f"{folder}/{n}") for n, (m, run) in enumerate(small.items())}
        files, _ = write_models(known, "onnx", folder, say) if known else ({}, {})
        found = dict[ModelConfig, PlannedTime]()
        if files:
            say(f"timing {len(files)} untrained models in turns: {ONE_IMAGE}")
            rounds, _ = run_clock({name: known[name] for name in files}, files, ONE_IMAGE, TIMING_S)
            if text := disturbance(rounds):
                say(text)
            for name, each in zip(files, times(rounds), strict=True):
                found[known[name].run.model] = PlannedTime(ms=each.p50, ms_p95=each.p95)
    found |= _estimates(found, {model: each for model, each in gflops.items() if model not in small}, gflops)
    return {name: found[run.model] for name, run in runs.items() if run.model in found}


def _that_fit(
    models: Mapping[ModelConfig, RunConfig], gflops: Mapping[ModelConfig, float]
) -> dict[ModelConfig, RunConfig]:
    """The models that this machine can hold and time together, the cheapest first."""
    left = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2
    calls, left_s, fit = FEWEST_ROUNDS * (WARM_UP + FEWEST_CALLS), AT_MOST_S, dict[ModelConfig, RunConfig]()
    for model in sorted(models, key=lambda model: gflops[model]):
        left -= 2 * 4 * computed(models[model], 1)["cost/params"]  # in the runtime, and in the file
        left_s -= calls * gflops[model] / GFLOPS_PER_S
        if left < 0 or left_s < 0:
            break
        fit[model] = models[model]
    return fit


def _untrained(run: RunConfig, path: str) -> ModelRef:
    out = f"{path}.safetensors"
    write_export(out, run.model.build(seed=0).state_dict(), run, more={"step": "0"})
    return read_model(out)


def _estimates(
    timed: Mapping[ModelConfig, PlannedTime],
    large: Mapping[ModelConfig, float],
    gflops: Mapping[ModelConfig, float],
) -> dict[ModelConfig, PlannedTime]:
    """The times of large models, of which the GFLOPs are given; none if too few are timed."""
    if len(timed) < FEWEST_TIMED or not large:
        return {}
    size = np.array([gflops[model] for model in timed])
    ms = np.array([each.ms for each in timed.values()])
    others = [np.arange(len(ms)) != left_out for left_out in range(len(ms))]
    guesses = np.array([_line(size[o], ms[o]) @ (1, x) for o, x in zip(others, size, strict=True)])
    factor = float(np.exp(np.abs(np.log(guesses / ms)).max()))
    tail, line = median(each.ms_p95 / each.ms for each in timed.values()), _line(size, ms)
    found = {model: float(line @ (1, x)) for model, x in large.items()}
    return {model: PlannedTime(ms=each, ms_p95=tail * each, factor=factor) for model, each in found.items()}


def _line(size: NDArray[np.float64], ms: NDArray[np.float64]) -> NDArray[np.float64]:
    """The milliseconds that each call takes, and each GFLOP, by the least relative squares; none negative."""
    return nnls(np.stack([1 / ms, size / ms], axis=1), np.ones(len(ms)))[0]

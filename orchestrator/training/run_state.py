"""The state of a run, which MLflow, the frontier, its page and its table all have from here.

running      it has begun, and the command that trains it or its sweep runs
finished     it has reached its end, and its quality is known
diverged     its loss was not finite
failed       an exception, or a quality that is not finite
stopped      it paused, and early stopping did not go on with it by the end of the sweep
interrupted  it has begun, and none of the above: Ctrl-C, a kill, the end of the budget
"""

import math
from dataclasses import dataclass
from typing import Literal

from orchestrator.training.run_directory import Result, SweepRecord, read_error, read_pauses, read_result

Status = Literal["finished", "stopped", "interrupted", "diverged", "failed", "running"]


@dataclass(frozen=True, kw_only=True)
class RunState:
    """How far the run in a directory has come.

    Attributes:
        reason: why it failed; else empty.
        pauses: by step.
    """

    status: Status
    reason: str
    result: Result | None
    pauses: list[Result]


def unknown_quality(result: Result, quality: str) -> str:
    """Says that the quality of a result or a pause is not finite; empty if it is, or if the run diverged."""
    value = result.metrics.get(quality, math.nan)
    known = math.isfinite(value) or result.status == "diverged"
    return "" if known else f"{quality} is {value} at step {result.step}"


def is_over(sweep: SweepRecord) -> bool:
    """Returns whether a sweep has come to its end, at which paused trials are stopped."""
    return sweep.status in ("finished", "failed")


def read_state(directory: str, *, live: bool, over: bool = True, quality: str = "") -> RunState:
    """Reads how far a run has come: for MLflow, the frontier and tables alike.

    Args:
        live: the command that trains there is running.
        over: the run's sweep has come to its end.
        quality: a metric without which a result or a pause is a failure; empty: none.
    """
    result, pauses = read_result(directory), read_pauses(directory)
    last = result or (pauses[-1] if pauses else None)
    reason = unknown_quality(last, quality) if last and quality else ""
    status: Status
    if result and not reason:
        status = "finished" if result.status == "finished" else "diverged"
    elif reason := reason or read_error(directory):
        status = "failed"
    elif live:
        status = "running"
    else:
        status = "stopped" if pauses and over else "interrupted"
    return RunState(status=status, reason=reason, result=result, pauses=pauses)

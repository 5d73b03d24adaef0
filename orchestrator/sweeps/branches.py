"""Cooldown branches: how a trunk and the runs that leave it differ from the run of their arm.

Source: Soft MoE, section 3.4: one long run at a slowly falling rate, cooled down from several of its steps.
"""

from dataclasses import dataclass
from math import gcd
from typing import Any

from orchestrator.checkpoint.manifest import folder_of, step_of
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.recipe import ConstantConfig, RsqrtConfig, phases
from orchestrator.training.run_directory import checkpoint_directory


@dataclass(frozen=True, kw_only=True)
class Trunk:
    """Attributes:
    at: steps of the trunk that branches leave from; the last is where it ends.
    cooldown: steps of each branch.
    """

    at: tuple[int, ...]
    cooldown: int

    def __post_init__(self) -> None:
        if not self.at or min(self.at) < 1 or list(self.at) != sorted(set(self.at)):
            raise UsageError(f"branches leave at steps that rise from 1, got {self.at}")
        if self.cooldown < 1:
            raise UsageError(f"the cooldown of a branch takes at least 1 step, got {self.cooldown}")


def check_branches(trunk: Trunk, run: RunConfig) -> None:
    """Raises UsageError if no rate of `run` could go on: its schedule must be constant or rsqrt."""
    schedule = run.train.schedule
    if not isinstance(schedule, RsqrtConfig | ConstantConfig):
        raise UsageError(
            f"a trunk needs train.schedule.kind=rsqrt or constant, got {schedule.kind!r}: other rates depend"
            " on where the run ends"
        )
    warmup = _warmup(trunk, run)
    if warmup > trunk.at[0]:
        unset = " (a tenth of the longest branch: set train.schedule.warmup_steps)"
        raise UsageError(
            f"the first branch leaves at step {trunk.at[0]}, within warmup_steps={warmup}"
            f"{unset if schedule.warmup_steps is None else ''}"
        )


def trunk_changes(trunk: Trunk, run: RunConfig) -> dict[str, Any]:
    """The trunk never cools down nor ends early, and keeps the checkpoints that branches leave from."""
    kept = gcd(*trunk.at)
    return {
        "train.steps": trunk.at[-1],
        "train.stop_at": None,
        "train.schedule.warmup_steps": _warmup(trunk, run),
        "train.schedule.cooldown_steps": 0,
        "checkpoint.every": kept,
        "checkpoint.keep_every": kept,
    }


def branch_changes(trunk: Trunk, run: RunConfig, step: int) -> dict[str, Any]:
    """The branch of the trunk `run` at `step`: what a run with its steps would do that cools down then."""
    return {
        "train.steps": step + trunk.cooldown,
        "train.schedule.warmup_steps": run.train.schedule.warmup_steps,
        "train.schedule.cooldown_steps": trunk.cooldown,
        "train.trunk": folder_of(checkpoint_directory(run), step),
    }


def branch_step(run: RunConfig) -> int:
    """Where `run` leaves its trunk; 0 for one that has none."""
    return (run.train.trunk and step_of(run.train.trunk)) or 0


def _warmup(trunk: Trunk, run: RunConfig) -> int:
    """As set, else a tenth of the longest branch: the same for all of them."""
    return phases(run.train.schedule, trunk.at[-1] + trunk.cooldown)[0]

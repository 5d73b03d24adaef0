"""A sweep: arms of one base run, and the trials that they make. What to train, not how or when."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.sweeps.branches import Trunk, branch_changes, check_branches, trunk_changes
from orchestrator.sweeps.estimate import with_ep
from orchestrator.sweeps.search import Space

Role = Literal["trial", "trunk"]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """Attributes:
    base: the run that every arm changes; its name is the sweep's.
    arms: name -> dotted changes of the base.
    quality, cost: the metrics to maximise and to minimise.
    seeds: every arm is trained once with each; none: once, with the base's.
    trunk: every arm is trained once, and cooled down from several of its steps.
    claims: statements about the outcome, as `frontier.claims` reads them.
    space: what a search draws arms from: dotted changes of the base, by Optuna's suggestions under the names
        of their fields.
    """

    base: RunConfig
    arms: Mapping[str, Mapping[str, Any]]
    quality: str = "val/acc1"
    cost: str = "cost/train_flops_6mac"
    seeds: tuple[int, ...] = ()
    trunk: Trunk | None = None
    claims: tuple[str, ...] = ()
    space: Space | None = None

    def trials(self) -> "dict[str, Trial]":
        """By name, trunks before their branches. Raises UsageError naming the arm whose config is refused, or
        whose name is.
        """
        found: dict[str, Trial] = {}
        for arm, changes in self.arms.items():
            if not re.fullmatch(r"[A-Za-z0-9][\w.@+-]*", arm):
                raise UsageError(f"arm {arm!r}: use letters, digits and . _ - + @, for it names a directory")
            for trial in self.of_arm(arm, changes):
                if trial.name in found:
                    raise UsageError(f"arms {found[trial.name].arm!r} and {arm!r} both make {trial.name!r}")
                found[trial.name] = trial
        return found

    def of_arm(self, arm: str, changes: Mapping[str, Any]) -> "list[Trial]":
        """The trials of one arm: for each seed itself, or its trunk and their branches."""
        found: list[Trial] = []
        for seed in self.seeds or (None,):
            name = arm if seed is None else f"{arm}-seed{seed}"
            seeded = dict(changes) if seed is None else {**changes, "train.seed": seed}
            if self.trunk is None:
                found.append(self._trial(name, arm, seeded))
                continue
            run = trial_config(self.base, name, seeded)
            check_branches(self.trunk, run)
            trunk = self._trial(f"{name}-trunk", arm, seeded | trunk_changes(self.trunk, run), role="trunk")
            found.append(trunk)
            for step in self.trunk.at:
                cooled = seeded | branch_changes(self.trunk, trunk.run, step)
                found.append(self._trial(f"{name}-at{step}", f"{arm}-at{step}", cooled, after=trunk.name))
        return found

    def runs(self) -> dict[str, RunConfig]:
        """trial -> its run. Raises UsageError naming the arm whose config is refused."""
        return {name: trial.run for name, trial in self.trials().items()}

    def _trial(
        self,
        name: str,
        arm: str,
        changes: Mapping[str, Any],
        *,
        role: Role = "trial",
        after: str | None = None,
    ) -> "Trial":
        run = trial_config(self.base, name, changes)
        return Trial(name=name, arm=arm, changes=changes, run=run, role=role, after=after)


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Attributes:
    arm: what it is one seed of: trials of an arm are one point of the frontier.
    changes: of the base; with it they make `run`.
    role: a ``trunk`` is no point: nobody has cooled it down.
    after: the trial that must be complete before: a branch's trunk.
    """

    name: str
    arm: str
    changes: Mapping[str, Any]
    run: RunConfig
    role: Role = "trial"
    after: str | None = None


def trial_config(base: RunConfig, name: str, changes: Mapping[str, Any]) -> RunConfig:
    """The run of one trial. Raises UsageError naming the one whose config is refused."""
    try:
        return with_ep(override(base, {**changes, "name": f"{base.name}/trials/{name}"}))
    except UsageError as error:
        raise UsageError(f"arm {name}: {error}") from None

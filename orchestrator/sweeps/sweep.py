"""A sweep: arms of one base run, and the trials that they make. What to train, not how or when."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import Any, Literal, cast

from moe.config import Config, NonNegativeInt
from moe.cost import slots_per_token
from orchestrator.checkpoint.manifest import folder_of
from orchestrator.codec import differences, flat, override, places_of, to_dict
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.estimate import resolve_auto
from orchestrator.runs.run_directory import RunDir
from orchestrator.sweeps.answers import Space

Role = Literal["trial", "trunk", "confirm"]


@dataclass(frozen=True, kw_only=True)
class Trunk(Config):
    """A long run at a slowly falling rate, from which cooldown runs branch off.

    Source: Soft MoE, section 3.4.

    Attributes:
        at: steps of the trunk that branches leave from; the last is where it ends.
        cooldown: steps of each branch.
    """

    at: tuple[int, ...]
    cooldown: int

    def __post_init__(self) -> None:
        super().__post_init__()
        if not self.at or min(self.at) < 1 or list(self.at) != sorted(set(self.at)):
            raise UsageError(f"branches leave at steps that rise from 1, got {self.at}")
        if self.cooldown < 1:
            raise UsageError(f"the cooldown of a branch takes at least 1 step, got {self.cooldown}")

    def changes(self, run: RunConfig) -> dict[str, Any]:
        """Returns the changes from the run of its arm to the trunk, which never cools down or ends early, and
        keeps the checkpoints that branches start from.

        Raises:
            UsageError: if the rate of `run` depends on where the run ends, or still rises at a branch.
        """
        schedule = run.train.schedule
        if schedule.knows_end:
            raise UsageError(
                f"a trunk needs train.schedule.kind=rsqrt or constant, got {schedule.kind!r}: other rates"
                " depend on where the run ends"
            )
        # The same for all branches: as it is set, else a tenth of the longest branch.
        warmup, _ = schedule.phases(self.at[-1] + self.cooldown)
        if warmup > self.at[0]:
            unset = " (a tenth of the longest branch: set train.schedule.warmup_steps)"
            raise UsageError(
                f"the first branch leaves at step {self.at[0]}, within warmup_steps={warmup}"
                f"{unset if schedule.warmup_steps is None else ''}"
            )
        kept = gcd(*self.at)
        return {
            "train.steps": self.at[-1],
            "train.stop_at": None,
            "train.schedule.warmup_steps": warmup,
            "train.schedule.cooldown_steps": 0,
            "checkpoint.every": kept,
            "checkpoint.keep_every": kept,
        }

    def branch_changes(self, trunk: RunConfig, step: int) -> dict[str, Any]:
        """Returns the changes from the run of its arm to the branch from the run `trunk` at `step`."""
        return {
            "train.steps": step + self.cooldown,
            "train.schedule.warmup_steps": trunk.train.schedule.warmup_steps,
            "train.schedule.cooldown_steps": self.cooldown,
            "train.trunk": folder_of(RunDir.of(trunk).checkpoints, step),
        }


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One run of a sweep.

    Attributes:
        arm: trials of an arm are its seeds, and one point of the frontier.
        changes: changes of the base; with them it becomes `run`.
        role: a ``trunk`` is no point, for it was not cooled down; ``confirm`` trains an arm again.
        after: the trial that must be complete before: a branch's trunk.
    """

    name: str
    arm: str
    changes: Mapping[str, Any]
    run: RunConfig
    role: Role = "trial"
    after: str | None = None

    def labels(self, seeded: bool) -> dict[str, str]:
        """The trial in `sweep.json`: its directory, and tags of its MLflow run."""
        directory = self.name if self.role == "confirm" else f"trials/{self.name}"
        labels = {"directory": directory, "role": self.role, "arm": self.arm}
        if seeded:
            labels["seed"] = str(self.run.train.seed)
        if self.after:
            labels |= {"branch.of": self.after, "branch.from": self.run.train.trunk or ""}
        return labels


@dataclass(frozen=True, kw_only=True)
class Sweep(Config):
    """Arms to compare by quality and cost.

    Attributes:
        base: the run that every arm changes; its name is the sweep's.
        arms: name -> dotted changes of the base; or a config, which takes the place of the base or of a part
            of it: a `RunConfig`, ``MoEConfig(router=SoftConfig())``, ``SGDConfig()``. `changes` has them all
            as dotted changes.
        quality, cost: the metrics to maximise and to minimise; by default the quality of the base's task.
        seeds: every arm is trained once with each; none: once, with the base's.
        trunk: every arm is trained once, and cooled down from several of its steps.
        claims: statements about the outcome, as `frontier.claims` reads them.
        space: what a search draws arms from: dotted changes of the base, by Optuna's suggestions under the
            names of their fields.
        published: arm -> its model in the tables of `frontier.published`.
    """

    base: RunConfig
    arms: Mapping[str, Mapping[str, Any] | Config]
    quality: str = ""
    cost: str = "cost/train_flops_6mac"
    seeds: tuple[NonNegativeInt, ...] = ()
    trunk: Trunk | None = None
    claims: tuple[str, ...] = ()
    space: Space | None = None
    published: Mapping[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        # They are differences from the base as it is now, which may change later, as by `--set`.
        changes = {arm: _arm_changes(self.base, arm, given) for arm, given in self.arms.items()}
        object.__setattr__(self, "arms", changes)
        if not self.quality:
            object.__setattr__(self, "quality", self.base.task.quality)

    def based_on(self, base: RunConfig) -> "Sweep":
        """Returns the sweep with another base, whose task decides the quality unless the sweep does."""
        if base is self.base:
            return self
        own = "" if self.quality == self.base.task.quality else self.quality
        return replace(self, base=base, quality=own)

    @property
    def changes(self) -> Mapping[str, Mapping[str, Any]]:
        """Arm -> dotted changes of the base."""
        return cast(Mapping[str, Mapping[str, Any]], self.arms)

    def trials(self, drawn: Mapping[str, Mapping[str, Any]] | None = None) -> dict[str, Trial]:
        """Returns name -> trial, trunks before their branches. Raises UsageError naming the arm whose config
        or name is refused.

        Args:
            drawn: further arms, which a search has drawn: name -> dotted changes of the base.
        """
        more = {arm: changes for arm, changes in (drawn or {}).items() if arm not in self.arms}
        found: dict[str, Trial] = {}
        for trial in (*self._trials_of(more), *self._own):
            if trial.name in found:
                raise UsageError(f"arms {found[trial.name].arm!r} and {trial.arm!r} both make {trial.name!r}")
            found[trial.name] = trial
        return found

    @cached_property
    def _own(self) -> list[Trial]:
        """The trials of the named arms. A sweep is frozen, so they are made once."""
        return self._trials_of(self.changes)

    @cached_property
    def _on_its_devices(self) -> RunConfig:
        """The base with the data type of its devices, for arms that are trained on the same."""
        dtype = self.base.compute_dtype()
        return replace(self.base, train=replace(self.base.train, compute_dtype=dtype))

    def _trials_of(self, arms: Mapping[str, Mapping[str, Any]]) -> list[Trial]:
        found: list[Trial] = []
        for arm, changes in arms.items():
            if not re.fullmatch(r"[A-Za-z0-9][\w.@+-]*", arm):
                raise UsageError(f"arm {arm!r}: use letters, digits and . _ - + @, for it names a directory")
            found += self.of_arm(arm, changes)
        return found

    def of_arm(self, arm: str, changes: Mapping[str, Any]) -> list[Trial]:
        """The trials of one arm: for each seed itself, or its trunk and their branches."""
        found, run = list[Trial](), None
        base = self.base if any(field.startswith("scale") for field in changes) else self._on_its_devices
        for seed in self.seeds or (None,):
            name, seeded = arm, dict(changes)
            if seed is not None:
                name, seeded = f"{arm}-seed{seed}", {**changes, "train.seed": seed}
            if run is None:
                run = trial_config(base, name, seeded, arm)
            elif seed is not None:
                run = replace(run, name=trial_name(base, name), train=replace(run.train, seed=seed))
            if self.trunk is None:
                found.append(Trial(name=name, arm=arm, changes=seeded, run=run))
                continue
            changed, first = seeded | self.trunk.changes(run), f"{name}-trunk"
            trunk = trial_config(base, first, changed)
            found.append(Trial(name=first, arm=arm, changes=changed, run=trunk, role="trunk"))
            for step in self.trunk.at:
                cooled, branch = seeded | self.trunk.branch_changes(trunk, step), f"{name}-at{step}"
                own = trial_config(base, branch, cooled)
                found.append(Trial(name=branch, arm=f"{arm}-at{step}", changes=cooled, run=own, after=first))
        return found

    def runs(self) -> dict[str, RunConfig]:
        """trial -> its run. Raises UsageError naming the arm whose config is refused."""
        return {name: trial.run for name, trial in self.trials().items()}

    def confirmed(self, trial: Trial) -> Trial:
        """Returns the trial for twice its steps."""
        name, steps = f"confirm/{trial.arm}", 2 * trial.run.train.steps
        run = override(trial.run, {"name": f"{self.base.name}/{name}", "train.steps": steps})
        return Trial(name=name, arm=trial.arm, changes=trial.changes, run=run, role="confirm")


def _arm_changes(base: RunConfig, arm: str, given: Mapping[str, Any] | Config) -> dict[str, Any]:
    """Returns the dotted changes from the base to an arm."""
    if isinstance(given, Mapping):
        return dict(given)
    places = places_of(base)
    names = sorted(places.get(type(given), ()))
    if type(given) is type(base):
        run = replace(given, name=base.name, storage=base.storage)
    elif len(names) > 1:
        raise UsageError(f"arm {arm!r}: {given!r} may be {' or '.join(names)}: say which by dotted changes")
    elif not names:
        known = ", ".join(sorted(config.__name__ for config in places))
        raise UsageError(f"arm {arm!r} is {given!r}: give dotted changes, a RunConfig, or one of {known}")
    else:
        try:
            run = override(base, {names[0]: to_dict(given)})
        except UsageError as error:
            raise UsageError(f"arm {arm!r}: {error}") from None
    changes = differences(base, run)
    changes.pop("plugins", None)  # A run finds them itself.
    return changes


def trial_name(base: RunConfig, trial: str) -> str:
    return f"{base.name}/trials/{trial}"


def trial_config(base: RunConfig, name: str, changes: Mapping[str, Any], arm: str = "") -> RunConfig:
    """The run of one trial. Raises UsageError naming the trial, or its `arm`, whose config is refused."""
    try:
        return resolve_auto(override(base, {**changes, "name": trial_name(base, name)}))
    except UsageError as error:
        raise UsageError(f"arm {arm or name}: {error}") from None


# `router` and `capacity` say these
_LEFT_OUT = ("kind", "capacity_factor", "slots_per_expert", "total_slots")


def settings(run: RunConfig) -> dict[str, str | float]:
    """Settings of an arm by short names, for claims, filters and hover texts.

    ``family`` (`ModelConfig.family`), ``router`` (its kind), ``size``, ``capacity`` (expert slots per token:
    k * C, c, or slots / tokens), ``steps`` of training, and every field of the router; of its affinity, the
    kind alone.
    """
    model = run.model
    found: dict[str, str | float] = {
        "family": model.family(),
        "router": model.moe.router.kind if model.moe else "dense",
        "size": model.size(),
        "capacity": round(slots_per_token(model), 3),
        "experts": float(model.moe.num_experts if model.moe else 1),
        "steps": float(run.train.steps),
    }
    if model.moe:
        fields = flat(model.moe.router) | {"images_per_group": model.moe.images_per_group}
        for name, value in fields.items():
            if name.endswith(".kind"):
                found[name.removesuffix(".kind")] = str(value)
            elif "." not in name and name not in _LEFT_OUT and value is not None:
                found[name] = value if isinstance(value, str) else float(value)
    return found

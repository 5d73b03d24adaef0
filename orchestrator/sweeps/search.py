"""Who decides the next trial, from the results so far: random, TPE or NSGA-II over a conditional space.

Sources: Bergstra et al. 2011 (TPE) as optuna extends it to several objectives (Ozaki et al. 2022); Deb et al.
2002 (NSGA-II).
"""

import logging
import math
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import optuna
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import TrialState, create_trial

from orchestrator.codec import changed_fields, flat, override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError

log = logging.getLogger(__name__)
optuna.logging.set_verbosity(optuna.logging.ERROR)  # a line for every trial

Kind = Literal["random", "tpe", "nsga2"]
DRAWS = 100  # for one trial; the second half at random, for a sampler may be in love with what it has seen
# of earlier runs: may differ from what the space proposes, for none of them says how good an arm is
INCIDENTAL = ("name", "data.path", "train.seed", "train.report_every", "train.eval_every")


class Suggest(Protocol):
    """What a space may ask: a part of `optuna.Trial`. `name` is the dotted field that the value is for."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...
    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int: ...
    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float: ...


Space = Callable[[Suggest], Mapping[str, Any]]  # -> dotted changes of the base


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Attributes:
    changes: dotted fields of the base, and their values.
    """

    name: str
    changes: Mapping[str, Any]


class OptunaSearch:
    """Maximises quality and minimises log10(cost).

    A space is define-by-run, so it may be conditional: what it asks may depend on what it was answered.
    ``suggest_categorical("model.moe.router.kind", [None, "soft", "expert_choice"])`` is None where the model
    has no experts. Fields that are always the same are in its changes too, without being asked for.

    ``tpe`` fits every field on the trials that had it. ``nsga2`` crosses only fields that all trials have and
    draws the others at random: not for spaces in which most depends on a kind.
    """

    def __init__(self, space: Space, *, base: RunConfig, count: int, sampler: Kind, seed: int) -> None:
        """`count`: trials in all, those that are restored among them."""
        if count < 1:
            raise UsageError(f"a search needs at least 1 trial, got {count}")
        self.space, self.base, self.count, self.seed = space, base, count, seed
        self.sampler: Kind = sampler
        self._study = optuna.create_study(
            directions=["maximize", "minimize"], sampler=_sampler(sampler, count, seed)
        )
        self._asked: dict[str, optuna.Trial] = {}
        self._seen: set[RunConfig] = set()
        self._again = deque[Trial]()
        self._number = self._proposed = 0

    def next(self) -> Trial | None:
        """None once `count` were proposed, or the space has nothing new.

        Raises:
            UsageError: if all of `DRAWS` suggestions are refused, with the last reason.
        """
        if self._again:
            return self._again.popleft()
        if self._proposed >= self.count:
            return None
        refused, reason = 0, ""
        usual, at_random = self._study.sampler, RandomSampler(seed=self.seed + self._number)
        for draw in range(DRAWS):
            self._study.sampler = usual if draw < DRAWS // 2 else at_random
            asked = self._study.ask()
            try:
                changes = dict(self.space(asked))
                run = override(self.base, changes)
            except UsageError as error:
                refused, reason = refused + 1, str(error)
            else:
                if run not in self._seen:
                    self._study.sampler = usual
                    return self._propose(asked, changes, run)
            self._study.tell(asked, state=TrialState.FAIL)
        self._study.sampler = usual
        if refused == DRAWS:
            raise UsageError(f"the space's last {DRAWS} suggestions were all refused: {reason}")
        log.warning("%d suggestions in a row were nothing new: %d trials", DRAWS, self._proposed)
        return None

    def tell(self, name: str, quality: float | None, cost: float | None) -> None:
        """Not finite counts as None."""
        asked = self._asked.pop(name)
        if quality is None or cost is None or not math.isfinite(quality):
            self._study.tell(asked, state=TrialState.FAIL)
        else:
            self._study.tell(asked, (quality, math.log10(cost)))

    def restore(self, trials: Sequence[tuple[str, Mapping[str, Any], float | None, float | None]]) -> None:
        """Before the first `next`: what an earlier process proposed, as (name, changes, quality, cost).

        Without quality and cost: unfinished, to be proposed again before anything new. With a cost alone:
        over, without a quality. Numbers go on where they ended.

        Raises:
            UsageError: for a trial that the space does not offer any more.
        """
        for name, changes, quality, cost in trials:
            run = override(self.base, changes)
            self._seen.add(run)
            self._number = max(self._number, int(name.rpartition("-")[2]))
            self._proposed += 1
            try:
                self._asked[name] = self._ask_for(_read(self.space, run)[0])
            except _OutsideError as error:
                raise UsageError(f"trial {name} is of another space, {error}: --fresh begins anew") from None
            if quality is None and cost is None:
                self._again.append(Trial(name=name, changes=changes))
            else:
                self.tell(name, quality, cost)
        self._study.sampler = _sampler(self.sampler, self.count, self.seed + len(trials))

    def warm_start(self, runs: Sequence[tuple[RunConfig, float, float]]) -> int:
        """Learns from runs of other sweeps, as (run, quality, cost); how many the space has.

        Left out are those with a value that the space does not offer, and those that differ from what it
        proposes in anything that bears on quality or cost (not: `INCIDENTAL`, nor what may change when a run
        is resumed). They do not count as proposed: a sweep has all of its own frontier.
        """
        taken = 0
        for run, quality, cost in runs:
            try:
                params, changes = _read(self.space, run)
                differs = changed_fields(flat(override(self.base, changes)), flat(run))
            except (_OutsideError, UsageError):
                continue
            if not differs.keys() - set(INCIDENTAL) and math.isfinite(quality):
                self._study.tell(self._ask_for(params), (quality, math.log10(cost)))
                taken += 1
        return taken

    def _propose(self, asked: optuna.Trial, changes: dict[str, Any], run: RunConfig) -> Trial:
        self._number, self._proposed = self._number + 1, self._proposed + 1
        name = f"{self.sampler}-{self._number:04}"
        self._asked[name] = asked
        self._seen.add(run)
        return Trial(name=name, changes=changes)

    def _ask_for(self, params: dict[str, Any]) -> optuna.Trial:
        """A trial of these; in a generation, for NSGA-II puts in and sees only those that ask it for them."""
        self._study.enqueue_trial(params)
        asked, sampler = self._study.ask(), self._study.sampler
        self.space(asked)
        if isinstance(sampler, NSGAIISampler):
            sampler.get_trial_generation(self._study, self._study.get_trials(deepcopy=False)[asked.number])
        return asked


def _sampler(kind: Kind, count: int, seed: int) -> BaseSampler:
    if kind == "random":
        return RandomSampler(seed=seed)
    if kind == "nsga2":  # five generations, if there are trials enough
        return NSGAIISampler(seed=seed, population_size=min(50, max(4, count // 5)))
    # each field by itself: conditional spaces as they are, and on such (two made up, 40 and 100
    # trials, 10 seeds) no worse than multivariate in groups, which is experimental
    return TPESampler(seed=seed, multivariate=False, n_startup_trials=min(10, max(4, count // 4)))


class _OutsideError(Exception):
    """A run has a value that the space does not offer."""


def _read(space: Space, run: RunConfig) -> tuple[dict[str, Any], dict[str, Any]]:
    """What the space asks and proposes, if every answer is what `run` has.

    Raises:
        _OutsideError: if one is not in the distribution it was asked from.
    """
    given = _Given(values=flat(run))
    changes = dict(space(given))
    return given.params, changes


@dataclass(frozen=True, kw_only=True)
class _Given:
    """Answers with the values of a flat config, and keeps them."""

    values: Mapping[str, Any]
    params: dict[str, Any] = field(default_factory=dict)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return self._answer(name, CategoricalDistribution(choices))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        return self._answer(name, IntDistribution(low, high, log=log, step=step))

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        return self._answer(name, FloatDistribution(low, high, log=log, step=step))

    def _answer(self, name: str, distribution: BaseDistribution) -> Any:
        parts = name.split(".")
        above = [".".join(parts[:n]) for n in range(1, len(parts))]
        if name not in self.values and not any(self.values.get(group, 0) is None for group in above):
            raise _OutsideError(f"the run has no {name}")
        value = self.values.get(name)
        try:  # at once: what the space does with it may need what it asked for
            create_trial(state=TrialState.WAITING, params={name: value}, distributions={name: distribution})
        except ValueError as error:
            raise _OutsideError(f"{name}={value!r}: {error}") from None
        self.params[name] = value
        return value

"""Chooses the next arm from the results so far: random, TPE or NSGA-II over a conditional space.

Sources: Bergstra et al. 2011 (TPE) as optuna extends it to several objectives (Ozaki et al. 2022); Deb et al.
2002 (NSGA-II).
"""

import json
import logging
import math
import random
from collections import deque
from collections.abc import Hashable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

import optuna
from optuna.samplers import BaseSampler, NSGAIISampler, RandomSampler, TPESampler
from optuna.trial import TrialState, create_trial

from moe.config import Config, PositiveInt
from orchestrator.codec import changed_fields, flat, override
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.sweeps.answers import OutsideError, Space, as_json, ask_again

log = logging.getLogger(__name__)
optuna.logging.set_verbosity(optuna.logging.ERROR)  # Optuna logs every trial.

Kind = Literal["random", "tpe", "nsga2"]
DRAWS = 50  # for one arm; a space that refuses all of them is an error
DUPLICATES = 5  # draws of known arms before a neighbour of the last one is taken
# An earlier run may differ from the space's proposals in these fields, which do not affect quality or cost.
INCIDENTAL = ("name", "train.seed", "train.report_every", "train.eval_every")


@dataclass(frozen=True, kw_only=True)
class DrawnArm:
    """A name, changes of the base (dotted fields with their values), and the answers that led to them."""

    name: str
    changes: Mapping[str, Any]
    answers: Mapping[str, Any] = field(default_factory=dict, compare=False)


@dataclass(frozen=True, kw_only=True)
class SearchOptions(Config):
    """How a sweep draws arms from its space.

    Attributes:
        trials: arms to draw.
        warm_start: names of sweeps in the same storage, whose complete trials it learns from.
    """

    sampler: Kind = "tpe"
    trials: PositiveInt = 20
    warm_start: tuple[str, ...] = ()


class Refused(UsageError):
    """A draw of a space that the base refuses."""


class OptunaSearch:
    """Maximises quality and minimises log10(cost).

    A space is define-by-run, so it may be conditional: later questions may depend on earlier answers.
    ``suggest_categorical("model.moe.router.kind", [None, "soft", "expert_choice"])`` is None where the model
    has no experts. Fixed fields are in the changes too, without a question.

    ``tpe`` fits every field on the trials that have it. ``nsga2`` crosses only fields that all trials have
    and draws the others at random, so it does not suit spaces in which most fields depend on a kind.

    Args:
        base: the run that an arm changes. Without a base the changes are a config by themselves.
        count: number of arms, including restored arms.
    """

    def __init__(
        self, space: Space, *, base: RunConfig | None = None, count: int, sampler: Kind, seed: int
    ) -> None:
        if count < 1:
            raise UsageError(f"a search needs at least 1 trial, got {count}")
        self.space, self.base, self.count, self.seed = space, base, count, seed
        self.sampler: Kind = sampler
        self._study = optuna.create_study(
            directions=["maximize", "minimize"], sampler=_sampler(sampler, count, seed)
        )
        self._neighbours = optuna.create_study(sampler=RandomSampler(seed=seed))
        self._rng = random.Random(seed)
        self._asked: dict[str, optuna.Trial] = {}
        self._names: dict[Hashable, str] = {}  # of all proposed arms
        self._values: dict[str, tuple[float, float]] = {}
        self._told = set[int]()  # numbers of Optuna's trials
        self._again = deque[DrawnArm]()
        self._number = self._proposed = 0

    def next(self) -> DrawnArm | None:
        """Returns the next arm, or None once `count` arms were proposed or the space has nothing new.

        Raises:
            UsageError: if all of `DRAWS` suggestions are refused, with the last reason.
        """
        if self._again:
            return self._again.popleft()
        if self._proposed >= self.count:
            return None
        duplicates, reason, params = 0, "", dict[str, Any]()
        for _ in range(DRAWS):
            asked = self._study.ask()
            try:
                changes, key = self._drawn(asked)
            except Refused as error:
                reason = str(error)
                self._study.tell(asked, state=TrialState.FAIL)
                continue
            if key not in self._names:
                return self._propose(asked, changes, key)
            self._tell_again(asked, self._names[key])
            duplicates, params = duplicates + 1, asked.params
            if duplicates == DUPLICATES:
                break
        if not duplicates:
            raise UsageError(f"the space's last {DRAWS} suggestions were all refused: {reason}")
        return self._neighbour(params)

    def tell(self, name: str, quality: float | None, cost: float | None) -> None:
        """Records the result of an arm, or its predicted result. A quality that is not finite counts as None.
        A second result is one more observation. An arm that the search has not proposed is left out.
        """
        if (asked := self._asked.get(name)) is None:
            return
        known = None
        if quality is not None and cost is not None and math.isfinite(quality):
            known = self._values[name] = quality, math.log10(cost)
        if asked.number in self._told:
            if known is not None:
                self._study.add_trial(
                    create_trial(params=asked.params, distributions=asked.distributions, values=known)
                )
            return
        self._told.add(asked.number)
        self._study.tell(asked, known, state=None if known else TrialState.FAIL)

    def check_space(self) -> None:
        """Raises UsageError if draws of the space cannot be continued by another process: see `_check`."""
        study = optuna.create_study(sampler=RandomSampler(seed=self.seed))
        for _ in range(DRAWS):
            asked = study.ask()
            with suppress(Refused):
                self._drawn(asked)

    def restore(
        self,
        trials: Sequence[tuple[str, Mapping[str, Any], float | None, float | None]],
        answers: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        """Takes over the proposals of an earlier process, as (name, changes, quality, cost). To be called
        before the first `next`.

        An arm without quality and cost is unfinished, and is proposed again before new arms. An arm with a
        cost alone ended without a quality. The numbers in names continue.

        Args:
            answers: of the arms, by name; an arm without is read from its fields. An arm that the space does
                not offer any more is no lesson for the search.

        Raises:
            UsageError: for an arm without answers that the space does not offer.
        """
        assert self.base is not None
        outside = list[str]()
        for name, changes, quality, cost in trials:
            run = override(self.base, changes)
            self._names[run] = name
            self._number = max(self._number, int(name.rpartition("-")[2]))
            self._proposed += 1
            kept = (answers or {}).get(name)
            try:
                params, again = ask_again(self.space, kept or {}, flat(run))
                if kept is not None and self._key(again) != run:
                    raise OutsideError("it makes other changes of these answers")
                self._asked[name] = self._ask_for(params)
            except (OutsideError, UsageError) as error:
                if kept is None:
                    raise UsageError(
                        f"trial {name} is of another space, {error}: `mode=fresh` begins anew"
                    ) from None
                outside.append(name)
            if quality is None and cost is None:
                self._again.append(DrawnArm(name=name, changes=changes, answers=kept or {}))
            else:
                self.tell(name, quality, cost)
        if outside:
            log.warning(
                "the space of now does not offer %s: they stay, and the search does not learn from them",
                ", ".join(outside),
            )
        self._study.sampler = _sampler(self.sampler, self.count, self.seed + len(trials))

    def warm_start(
        self,
        runs: Sequence[tuple[RunConfig, float, float]],
        answers: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> int:
        """Learns from runs of other sweeps, as (run, quality, cost), and from the answers of arms that a
        search drew, by the names of their runs. Returns how many runs the space offers.

        Left out are runs on other data, and runs with a value that the space does not offer or propose. A run
        may differ in `INCIDENTAL` fields and in those that may change when a run is resumed. These runs do
        not count as proposed: a sweep trains its whole frontier itself.
        """
        assert self.base is not None
        taken = 0
        for run, quality, cost in runs:
            try:
                params, changes = ask_again(self.space, (answers or {}).get(run.name, {}), flat(run))
                differs = changed_fields(flat(override(self.base, changes)), flat(run)).keys() - {*INCIDENTAL}
            except (OutsideError, UsageError):
                continue
            if (digest := _digest(run.data.path)) is not None and digest == _digest(self.base.data.path):
                differs -= {"data.path"}
            if not differs and math.isfinite(quality):
                self._study.tell(self._ask_for(params), (quality, math.log10(cost)))
                taken += 1
        return taken

    def _drawn(self, asked: optuna.Trial) -> tuple[dict[str, Any], Hashable]:
        """Returns the changes of a draw, and what tells them from others.

        Raises:
            Refused: if the base refuses them.
            UsageError: if another process could not go on with them: the same answers must make the same
                changes, and JSON must hold both.
        """
        try:
            changes = dict(self.space(asked))
            key = self._key(changes)
        except UsageError as error:
            raise Refused(str(error)) from None
        if self.base is not None:
            try:
                written = self._key(json.loads(json.dumps(changes)))
                again = self._key(ask_again(self.space, as_json(asked.params))[1])
                reason = "" if written == again == key else "the same answers make other changes"
                if " at 0x" in str(as_json(asked.params)):
                    reason = "an answer has no lasting name"
            except (OutsideError, TypeError, ValueError) as error:
                reason = str(error)
            if reason:
                raise UsageError(
                    f"the space cannot be continued after a stop: with {asked.params} it returns {changes},"
                    f" and {reason}; let the changes depend on the answers alone, and use numbers, text,"
                    " bools, None, and lists of them"
                )
        return changes, key

    def _key(self, changes: Mapping[str, Any]) -> Hashable:
        return tuple(sorted(changes.items())) if self.base is None else override(self.base, changes)

    def _propose(self, asked: optuna.Trial, changes: dict[str, Any], key: Hashable) -> DrawnArm:
        self._number, self._proposed = self._number + 1, self._proposed + 1
        name = f"{self.sampler}-{self._number:04}"
        self._asked[name] = asked
        self._names[key] = name
        return DrawnArm(name=name, changes=changes, answers=as_json(asked.params))

    def _tell_again(self, asked: optuna.Trial, name: str) -> None:
        """Answers another draw of a known arm with its result. TPE would not learn from a failure, and would
        draw the arm again. While the arm runs, the worst result so far keeps the sampler away from it.
        """
        values = self._values.get(name)
        if values is None and self._values:
            qualities, costs = zip(*self._values.values(), strict=True)
            values = min(qualities), max(costs)
        self._study.tell(asked, values, state=None if values else TrialState.FAIL)

    def _neighbour(self, params: dict[str, Any]) -> DrawnArm | None:
        """Returns a new arm that differs from `params` in one field, or in as few as possible."""
        for draw in range(200):
            changed = self._rng.sample(list(params), min(len(params), 1 + draw // 40))
            self._neighbours.enqueue_trial({k: v for k, v in params.items() if k not in changed})
            asked = self._neighbours.ask()
            try:
                changes, key = self._drawn(asked)
            except Refused:
                continue
            if key not in self._names:
                return self._propose(self._ask_for(asked.params), changes, key)
        log.warning("the space has nothing new after %d trials", self._proposed)
        return None

    def _ask_for(self, params: dict[str, Any]) -> optuna.Trial:
        """Returns a trial with these values. NSGA-II sees only trials that it has put into a generation."""
        self._study.enqueue_trial(params)
        asked, sampler = self._study.ask(), self._study.sampler
        self.space(asked)
        if isinstance(sampler, NSGAIISampler):
            sampler.get_trial_generation(self._study, self._study.get_trials(deepcopy=False)[asked.number])
        return asked


def sample(space: Space, base: RunConfig, count: int) -> list[RunConfig]:
    """Returns the runs of `count` random draws from a space, the same in every call; refused draws are left
    out.
    """
    study, runs = optuna.create_study(sampler=RandomSampler(seed=0)), list[RunConfig]()
    for _ in range(count):
        with suppress(UsageError):
            runs.append(override(base, space(study.ask())))
    return runs


def _digest(path: str) -> str | None:
    """Returns the digest of a data set, or None if the data set is missing."""
    try:
        return open_manifest(path).digest()
    except (UsageError, OSError):
        return None


def _sampler(kind: Kind, count: int, seed: int) -> BaseSampler:
    if kind == "random":
        return RandomSampler(seed=seed)
    if kind == "nsga2":
        # Five generations, if there are trials enough.
        return NSGAIISampler(seed=seed, population_size=min(50, max(4, count // 5)))
    # Univariate TPE takes conditional spaces as they are. On two made-up spaces (40 and 100 trials, 10 seeds)
    # it was no worse than multivariate TPE in groups, which is experimental.
    return TPESampler(seed=seed, multivariate=False, n_startup_trials=min(10, max(4, count // 4)))

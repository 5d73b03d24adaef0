"""A first round of a sweep that tunes one field for every arm, on seeds that count for nothing else.

The first round is a sweep of its own, called ``<name>-tune``, with an arm for every arm and value. The sweep
itself then gives every arm the value of the best mean quality. All arms have the same budget: a grid that
grows because of one arm grows for all.
"""

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from moe.config import Config, PositiveInt, did_you_mean
from orchestrator.codec import flat, override
from orchestrator.config import RunConfig
from orchestrator.errors import BudgetExhausted, UsageError
from orchestrator.frontier.points import Point
from orchestrator.planning.findings import require
from orchestrator.planning.preflight import preflight
from orchestrator.runs.run_directory import RunDir
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.sweeps.build import TUNED, sweep_frontier
from orchestrator.sweeps.driver import SweepOptions, trained_trials
from orchestrator.sweeps.queue import RunToCompletion
from orchestrator.sweeps.run import Watch
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking.lost import open_store
from orchestrator.tracking.store import Tracking
from orchestrator.training.cluster import connect
from orchestrator.training.train import with_data, working_in

log = logging.getLogger(__name__)

FIRST_SEED = 1000
GROWTHS = 2  # further values at each end of the grid
DIGITS = 6  # of a value, which names directories

Tried = Mapping[str, Mapping[float, Point]]  # arm -> value -> its point in the first round


@dataclass(frozen=True, kw_only=True)
class Tuning(Config):
    """The grid of a first round.

    Attributes:
        field: dotted name of a number in the run, such as ``train.lr``.
        values: of the field, above 0, for the grid grows by ratios.
        seeds: trials of each arm and value. They have the seeds 1000, 1001 and so on.
        at: a field of the model and its value, such as ``("width", "16")``: arms that have it are tuned.
            Another arm takes the value of the tuned arm with the same name after its first ``-``. None: every
            arm is tuned.
    """

    field: str
    values: tuple[float, ...]
    seeds: PositiveInt = 2
    at: tuple[str, str] | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        values = sorted(self.values)
        if len({*values}) < max(2, len(values)):
            raise UsageError(
                f"a tuning of {self.field} needs at least 2 different values, got {_listed(values)}: a single"
                " value is a change of the base"
            )
        if values[0] <= 0 or any(value != _rounded(value, DIGITS) for value in values):
            raise UsageError(
                f"values of {self.field} must be above 0, for the grid grows by ratios, and have at most"
                f" {DIGITS} digits, for they name directories; got {', '.join(map(str, values))}"
            )
        if self.field == "train.seed":
            raise UsageError("train.seed is no setting to tune: quality is a mean over seeds")
        object.__setattr__(self, "values", tuple(values))

    def arm(self, arm: str, value: float) -> str:
        """Returns the name of the arm that tries a value: ``w16-token@lr0.003``."""
        return f"{arm}@{self.field.rpartition('.')[2]}{value:g}"

    def first_round(self, sweep: Sweep, values: Sequence[float] | None = None) -> Sweep:
        """Returns the sweep that tries the values, by default the first grid.

        Raises:
            UsageError: for a sweep without arms, or with a trunk; for a field that an arm lacks, or that is
                no number; as `tuned_arms`; for a seed that the sweep uses, too.
        """
        if not sweep.arms:
            raise UsageError(f"{self.field} cannot be tuned: the sweep has no arms")
        if sweep.trunk:
            raise UsageError(f"tuning {self.field} needs arms without cooldown branches")
        seeds = tuple(range(FIRST_SEED, FIRST_SEED + self.seeds))
        if used := sorted({run.train.seed for run in sweep.runs().values()} & {*seeds}):
            raise UsageError(
                f"the seeds {_listed(seeds)} are for tuning alone, and the sweep {sweep.base.name} uses"
                f" {_listed(used)}: give it other seeds"
            )
        arms: dict[str, dict[str, Any]] = {}
        for arm in sweep.arms:
            self._check(arm, _run_of(sweep, arm))
        for arm in dict.fromkeys(self.tuned_arms(sweep).values()):
            for value in values or self.values:
                arms[self.arm(arm, value)] = {**sweep.changes[arm], self.field: _number(value)}
        base = override(sweep.base, {"name": f"{sweep.base.name}-tune"})
        return replace(sweep, base=base, arms=arms, seeds=seeds, claims=(), space=None, published={})

    def _check(self, arm: str, run: RunConfig) -> None:
        fields = flat(run)
        if self.field not in fields:
            near = did_you_mean(self.field, fields)
            raise UsageError(f"arm {arm} has no field {self.field}: tune a field that all arms have{near}")
        if isinstance(fields[self.field], bool | str | list):
            raise UsageError(f"{self.field} is {fields[self.field]!r} in arm {arm}: only numbers are tuned")

    def tuned_arms(self, sweep: Sweep) -> dict[str, str]:
        """Returns each arm of the sweep -> the arm whose value it takes: itself, if it is tuned.

        Raises:
            UsageError: if no arm has the field and value of `at`, or an arm has no tuned relative.
        """
        if self.at is None:
            return {arm: arm for arm in sweep.arms}
        field, wanted = self.at
        fields = {arm: flat(_run_of(sweep, arm).model) for arm in sweep.arms}
        tuned = [arm for arm, of in fields.items() if field in of and str(of[field]) == wanted]
        if not tuned:
            found = dict.fromkeys(str(of[field]) for of in fields.values() if field in of)
            there = f"the arms have {', '.join(found)}" if found else "it is no field of the models"
            near = "" if found else did_you_mean(field, {name for of in fields.values() for name in of})
            raise UsageError(f"no arm has model.{field}={wanted}, where arms are to be tuned: {there}{near}")
        taken = dict[str, str]()
        for arm in sweep.arms:
            of = [arm] if arm in tuned else [each for each in tuned if _kind(each) == _kind(arm) != ""]
            if len(of) != 1:
                raise UsageError(
                    f"arm {arm} takes {self.field} from the tuned arm of the same name after the first"
                    f" `-`, as w32-token from w16-token, and there are {len(of)}; tuned are"
                    f" {', '.join(tuned)}: rename the arm, or tune every arm"
                )
            taken[arm] = of[0]
        return taken

    def best(self, tried: Tried) -> dict[str, float]:
        """Returns arm -> its value of the highest mean quality, the lowest of equally good ones. A value with
        a trial that did not finish is out.

        Raises:
            UsageError: naming an arm all of whose values diverged.
        """
        found = dict[str, float]()
        for arm, points in tried.items():
            means = {v: p.quality for v, p in sorted(points.items()) if p.status == "finished"}
            if not means:
                raise UsageError(
                    f"arm {arm} diverged at every {self.field} of {_listed(points)}: give lower values, or"
                    " leave out the arm"
                )
            found[arm] = max(means, key=means.__getitem__)
        return found

    def further(self, values: Sequence[float], best: Mapping[str, float]) -> list[float]:
        """Returns the values by which the sorted grid grows for all arms, because the best value of an arm
        lies at an end: by the ratio of the two outermost values, and at most `GROWTHS` times at each end.
        """
        (low, above), (below, high) = values[:2], values[-2:]
        found = []
        if low in best.values() and sum(value < self.values[0] for value in values) < GROWTHS:
            found.append(_rounded(low * low / above, 3))
        if high in best.values() and sum(value > self.values[-1] for value in values) < GROWTHS:
            found.append(_rounded(high * high / below, 3))
        return [value for value in found if value not in values]

    def applied(self, sweep: Sweep, best: Mapping[str, float]) -> Sweep:
        """Returns the sweep with the value of every arm as a change of the arm."""
        tuned = self.tuned_arms(sweep)
        arms = {a: {**of, self.field: _number(best[tuned[a]])} for a, of in sweep.changes.items()}
        return replace(sweep, arms=arms)


@dataclass(frozen=True, kw_only=True)
class Tuned:
    """The outcome of a first round.

    Attributes:
        tuning: the grid that it began with.
        values: the grid, as it has grown.
        tried: tuned arm -> value -> the mean over its seeds, and how they ended.
        best: tuned arm -> its value.
        sweep, options: the second round, for `run_sweep`.
    """

    tuning: Tuning
    values: tuple[float, ...]
    tried: Tried
    best: Mapping[str, float]
    sweep: Sweep
    options: SweepOptions


def tune(
    sweep: Sweep,
    tuning: Tuning,
    options: SweepOptions | None = None,
    *,
    progress: bool | Watch = True,
    store: Tracking | None = None,
) -> Tuned:
    """Trains the first round of a sweep until its grid grows no more, and returns the second round. The same
    call again continues.

    Args:
        options: of both rounds. What the first round spends is missing from the budget of the second.
        progress, store: as for `run_sweep`.

    Raises:
        UsageError: as `Tuning.first_round` and `Tuning.best`; for a sweep that cannot be trained here; if a
            trial failed, or the budget does not hold the first round.
    """
    options = options or SweepOptions()
    if options.search:
        raise UsageError(f"tuning {tuning.field} needs named arms: leave out `search`")
    own = SweepDir.of(tuning.first_round(sweep).base)
    mine = store = store or open_store(sweep.base.storage)
    # What the second round needs is checked before hours are spent on the first.
    sweep, retrain = sweep.based_on(with_data(sweep.base)), bool(options.retrain)
    require(preflight(sweep, connect=lambda: connect(log.info), open_store=lambda: mine, retrain=retrain))
    values = tuning.values
    if options.mode == "fresh":  # The second round of an earlier start must not outlive its first round.
        with working_in(RunDir.of(sweep.base).path, "fresh", store):
            pass
    elif record := own.record():  # An earlier process may have grown the grid.
        tried = [changes[tuning.field] for changes in record.arms.values() if tuning.field in changes]
        values = tuple(sorted({*values, *map(float, tried)}))
    # Early stopping compares arms by what they would add to the frontier, so it would leave values of weak
    # arms untried; and a value that is ahead early, as a high rate may be, need not be the best at the end.
    first_options = replace(options, policy=RunToCompletion(), retrain=0)
    while True:
        first = tuning.first_round(sweep, values)
        with trained_trials(first, first_options, progress=progress, store=store) as run:
            left, failures, budget, say = run.trials_left(), run.failures(), run.budget, run.watch.say
        if failures:
            reasons = "".join(f"\n  {name}: {reason}" for name, reason in failures.items())
            raise UsageError(f"{len(failures)} trials of {first.base.name} failed:{reasons}")
        if left:
            raise BudgetExhausted(
                f"Budget exhausted: {left} trials of {first.base.name}, the first round, not finished."
                f" {budget.way_out}"
            )
        points = {point.arm: point for point in sweep_frontier(own.path)[0].points}
        arms = dict.fromkeys(tuning.tuned_arms(sweep).values())
        tried = {arm: {value: points[tuning.arm(arm, value)] for value in values} for arm in arms}
        best = tuning.best(tried)
        further = list[float]()
        for value in tuning.further(values, best):
            try:
                tuning.first_round(sweep, [value]).runs()
                further.append(value)
            except UsageError as error:
                say(f"the grid cannot grow: {error}")
        if not further:
            break
        say(f"{tuning.field}: the best lies at an end for an arm, so all arms also try {_listed(further)}")
        values = tuple(sorted({*values, *further}))
        first_options = replace(first_options, mode="auto")
    if at_end := [arm for arm, value in best.items() if value in (values[0], values[-1])]:
        say(f"{tuning.field}: the grid stopped growing; the best lies at its end for {', '.join(at_end)}")
    label = _summary(tuning, first, values, best)
    options = replace(
        options,
        mode="auto",
        budget=options.budget.less(budget.spent_s),
        labels={**options.labels, TUNED: label},
    )
    sweep = tuning.applied(sweep, best)
    return Tuned(tuning=tuning, values=values, tried=tried, best=best, sweep=sweep, options=options)


def _summary(tuning: Tuning, first: Sweep, values: Sequence[float], best: Mapping[str, float]) -> str:
    """A sentence on what was tried and chosen."""
    chosen = {value: [arm for arm in best if best[arm] == value] for value in sorted({*best.values()})}
    arms = "; ".join(f"{value:g} for {', '.join(of)}" for value, of in chosen.items())
    at = f" at {'='.join(tuning.at)}" if tuning.at else ""
    seeds = f"{tuning.seeds} seed{'s' * (tuning.seeds != 1)}"
    return f"Tuned {tuning.field} on {seeds}{at}, of {_listed(values)} ({first.base.name}): {arms}."


def _run_of(sweep: Sweep, arm: str) -> RunConfig:
    return sweep.of_arm(arm, sweep.changes[arm])[0].run


def _kind(arm: str) -> str:
    return arm.partition("-")[2]


def _rounded(value: float, digits: int) -> float:
    return float(f"{value:.{digits}g}")


def _number(value: float) -> float:
    """An int for a whole number: fields for integers take no others."""
    return int(value) if value == int(value) else value


def _listed(values: Sequence[float] | Mapping[float, Any]) -> str:
    return ", ".join(f"{value:g}" for value in values)

"""The first round that tunes a field: its arms, the choice, the grid that grows for all, both rounds."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.sweeps import tuning as module
from orchestrator.sweeps.budget import Budget
from orchestrator.sweeps.driver import SweepOptions
from orchestrator.sweeps.queue import RunToCompletion
from orchestrator.sweeps.search import SearchOptions
from orchestrator.sweeps.stopping import EarlyStopping
from orchestrator.sweeps.sweep import Sweep, Trunk
from orchestrator.sweeps.tuning import Tuned, Tuning, tune
from tests.made_directories import end_sweep
from tests.orchestrator.frontier.samples import NAN, point

RATES = Tuning(field="train.lr", values=(0.03, 0.003, 0.01))
AT_16 = replace(RATES, at=("width", "16"))
Quality = Callable[[str, float], float | str]  # of an arm at a value


def sweep_of(*arms: str, seeds: tuple[int, ...] = (0, 1), **changes: Any) -> Sweep:
    """Arms such as ``w16-soft``, whose models have this width."""
    fields = {f"model.{name}": value for name, value in changes.items()}
    base = override(RunConfig(), {"name": "mine", "train.steps": 3, "train.report_every": 1})
    made = {arm: {"model.width": int(arm[1:3]), "model.heads": 1, **fields} for arm in arms}
    return Sweep(base=base, arms=made, seeds=seeds, claims=("arm=w16-a beats arm=w16-b",))


def test_the_first_round_is_a_sweep_of_its_own() -> None:
    sweep = sweep_of("w16-a", "w16-b")
    first = RATES.first_round(sweep)
    assert (first.base.name, first.seeds, first.claims) == ("mine-tune", (1000, 1001), ())
    trials = first.trials()
    assert list(trials)[:3] == ["w16-a@lr0.003-seed1000", "w16-a@lr0.003-seed1001", "w16-a@lr0.01-seed1000"]
    assert len(trials) == 2 * 3 * 2
    rates = {trial.arm: trial.run.train.lr for trial in trials.values()}
    assert rates["w16-b@lr0.03"] == 0.03
    model = trials["w16-a@lr0.01-seed1000"].run.model
    assert model == sweep.trials()["w16-a-seed0"].run.model


def test_fields_for_integers_get_integers() -> None:
    warmup = Tuning(field="train.schedule.warmup_steps", values=(1.0, 2.0), seeds=1)
    runs = warmup.first_round(sweep_of("w16-a")).runs()
    found = {name: run.train.schedule.warmup_steps for name, run in runs.items()}
    assert found == {"w16-a@warmup_steps1-seed1000": 1, "w16-a@warmup_steps2-seed1000": 2}


@pytest.mark.parametrize(
    ("values", "says"),
    [
        ((0.1,), "needs at least 2 different values, got 0.1: a single value is a change of the base"),
        ((0.1, 0.2, 0.1), "needs at least 2 different values, got 0.1, 0.1, 0.2"),
        ((0.0, 0.1), "must be above 0, for the grid grows by ratios"),
        ((0.12345678, 0.1), "at most 6 digits, for they name directories; got 0.1, 0.12345678"),
        ((float("nan"), 0.1), "values must be a tuple of numbers"),
    ],
)
def test_grids_that_are_none(values: tuple[float, ...], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Tuning(field="train.lr", values=values)


@pytest.mark.parametrize(
    ("tuning", "sweep", "says"),
    [
        ({}, {"seeds": (5, 1001)}, "seeds 1000, 1001 are for tuning alone, and the sweep mine uses 1001"),
        ({"field": "train.rate"}, {}, "arm w16-a has no field train.rate: tune a field that all arms have"),
        ({"field": "train.l"}, {}, "did you mean 'train.lr'?"),
        ({"field": "data.augment"}, {}, r"data.augment is \[\] in arm w16-a: only numbers are tuned"),
        ({"field": "model.moe.num_experts"}, {"moe": None}, "arm w16-a has no field model.moe.num_experts"),
        ({"at": ("width", "17")}, {}, "no arm has model.width=17, .*: the arms have 16, 32"),
        ({"at": ("wide", "16")}, {}, "model.wide=16, .*: it is no field of the models"),
    ],
)
def test_sweeps_that_cannot_be_tuned(tuning: dict[str, Any], sweep: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        replace(RATES, **tuning).first_round(sweep_of("w16-a", "w32-a", **sweep))


def test_the_seed_is_no_setting() -> None:
    with pytest.raises(UsageError, match=r"train.seed is no setting to tune"):
        replace(RATES, field="train.seed")


def test_branches_and_searches_are_not_tuned() -> None:
    sweep = sweep_of("w16-a")
    with pytest.raises(UsageError, match="needs arms without cooldown branches"):
        RATES.first_round(replace(sweep, trunk=Trunk(at=(2,), cooldown=1)))
    with pytest.raises(UsageError, match="the sweep has no arms"):
        RATES.first_round(replace(sweep, arms={}))
    with pytest.raises(UsageError, match="needs named arms: leave out `search`"):
        tune(sweep, RATES, SweepOptions(search=SearchOptions(sampler="random", trials=1)))


def test_other_widths_take_the_value_of_the_arm_of_their_name() -> None:
    sweep = sweep_of("w16-a", "w16-a-b", "w32-a", "w32-a-b")
    tuned = {"w16-a": "w16-a", "w16-a-b": "w16-a-b", "w32-a": "w16-a", "w32-a-b": "w16-a-b"}
    assert AT_16.tuned_arms(sweep) == tuned
    assert {arm.partition("@")[0] for arm in AT_16.first_round(sweep).arms} == {"w16-a", "w16-a-b"}
    done = AT_16.applied(sweep, {"w16-a": 0.01, "w16-a-b": 0.03})
    assert [changes["train.lr"] for changes in done.changes.values()] == [0.01, 0.03, 0.01, 0.03]
    assert done.changes["w32-a"]["model.width"] == 32
    assert RATES.tuned_arms(sweep) == {arm: arm for arm in sweep.arms}


@pytest.mark.parametrize(
    ("arms", "says"),
    [
        (("w16-a", "w32-b"), "arm w32-b takes train.lr from .* there are 0; tuned are w16-a: rename the arm"),
        (("w16", "w32"), "arm w32 takes .* there are 0"),
        (("w16-a", "w16x-a", "w32-a"), "arm w32-a takes .* there are 2; tuned are w16-a, w16x-a"),
    ],
)
def test_an_arm_without_a_tuned_relative_is_refused(arms: tuple[str, ...], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        AT_16.first_round(sweep_of(*arms))


def tried(**qualities: float) -> Mapping[float, Any]:
    """Points by their value, as ``v1=0.5``; diverged if nan."""
    return {
        float(name[1:]): point(name, "dense", 1e9, q, "finished" if q == q else "diverged")
        for name, q in qualities.items()
    }


def test_the_best_mean_is_chosen() -> None:
    """The lowest of equally good values; not one that diverged."""
    found = {
        "a": tried(v3=0.7, v1=0.5, v2=0.6),
        "b": tried(v3=0.7, v1=0.5, v2=0.7),
        "c": tried(v1=0.5, v2=0.1, v3=NAN),
    }
    assert RATES.best(found) == {"a": 3, "b": 2, "c": 1}
    with pytest.raises(UsageError, match=r"arm d diverged at every train.lr of 1, 2: give lower values, or"):
        RATES.best({"d": tried(v1=NAN, v2=NAN)})


def test_the_grid_grows_at_its_ends_and_at_most_twice() -> None:
    """The grid grows by the ratio of its two outermost values, 3 above and 3.33 below."""
    grid = RATES.values
    assert grid == (0.003, 0.01, 0.03)
    assert RATES.further(grid, {"a": 0.01}) == []
    assert RATES.further(grid, {"a": 0.01, "b": 0.03}) == [0.09]
    assert RATES.further(grid, {"a": 0.003, "b": 0.03}) == [0.0009, 0.09]
    assert RATES.further((*grid, 0.09), {"a": 0.09}) == [0.27]
    assert RATES.further((*grid, 0.09, 0.27), {"a": 0.27}) == []
    assert RATES.further((*grid, 0.09, 0.27), {"a": 0.003}) == [0.0009]
    assert RATES.further((0.00027, 0.0009, *grid), {"a": 0.00027}) == []
    narrow = Tuning(field="train.lr", values=(0.1, 0.1001))
    assert narrow.further(narrow.values, {"a": 0.1001}) == [], "rounded, the next value is the first"


class Rounds:
    """Stands for training: the trials of a first round end at once, by a function of arm and value."""

    def __init__(self, quality: Quality, field: str, spent_s: float, left: int) -> None:
        self.quality, self.field, self.spent_s, self.left = quality, field, spent_s, left
        self.options = list[SweepOptions]()
        self.grids = list[list[float]]()
        self.fresh = list[str]()
        self.said = list[str]()

    @contextmanager
    def trained_trials(self, first: Sweep, options: SweepOptions, **_: Any) -> Iterator[Any]:
        self.options.append(options)
        self.grids.append(sorted({changes[self.field] for changes in first.changes.values()}))
        ends = {}
        for name, trial in first.trials().items():
            ends[name] = self.quality(trial.arm.partition("@")[0], trial.changes[self.field])
        SweepDir(end_sweep(first, ends)).update(lambda was: {"arms": first.changes})
        failed = {n: end for n, end in ends.items() if isinstance(end, str) and end != "diverged"}
        yield SimpleNamespace(
            trials_left=lambda: self.left,
            failures=lambda: failed,
            budget=SimpleNamespace(spent_s=self.spent_s, way_out="Run again"),
            watch=SimpleNamespace(say=self.said.append),
        )

    @contextmanager
    def working_in(self, directory: str, mode: str, store: object) -> Iterator[None]:
        self.fresh.append(f"{mode} {Path(directory).name}")
        yield


@pytest.fixture
def rounds(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, digits: str
) -> Callable[..., tuple[Tuned, Rounds]]:
    """Tunes a sweep of two arms by such rounds."""
    base = override(sweep_of("w16-a").base, {"storage": str(tmp_path), "data.path": digits, "train.lr": 0.5})
    sweep = replace(sweep_of("w16-a", "w16-b"), base=base)

    def run(quality: Quality, tuning: Tuning = RATES, *, spent_s=0.0, left=0, **options: Any):
        made = Rounds(quality, tuning.field, spent_s, left)
        monkeypatch.setattr(module, "trained_trials", made.trained_trials)
        monkeypatch.setattr(module, "working_in", made.working_in)
        monkeypatch.setattr(module, "preflight", lambda *_, **__: [])
        store: Any = object()
        return tune(sweep, tuning, SweepOptions(**options), store=store), made

    return run


def near(best: Mapping[str, float]) -> Quality:
    """Each arm is the better, the nearer its value is to its best."""
    return lambda arm, value: 1 - abs(value - best[arm])


def test_every_arm_gets_its_best_value(rounds: Any) -> None:
    tuned, made = rounds(near({"w16-a": 0.01, "w16-b": 0.012}))
    assert made.grids == [[0.003, 0.01, 0.03]]
    assert tuned.best == {"w16-a": 0.01, "w16-b": 0.01}
    assert {trial.run.train.lr for trial in tuned.sweep.trials().values()} == {0.01}
    assert tuned.options.labels == {
        "tuned": "Tuned train.lr on 2 seeds, of 0.003, 0.01, 0.03 (mine-tune): 0.01 for w16-a, w16-b."
    }
    assert made.said == []


def test_a_grid_that_one_arm_grows_grows_for_all(rounds: Any) -> None:
    tuned, made = rounds(near({"w16-a": 0.01, "w16-b": 9.0}))
    assert made.grids[1:] == [[0.003, 0.01, 0.03, 0.09], [0.003, 0.01, 0.03, 0.09, 0.27]]
    assert tuned.values == (0.003, 0.01, 0.03, 0.09, 0.27)
    assert {arm: len(points) for arm, points in tuned.tried.items()} == {"w16-a": 5, "w16-b": 5}
    assert tuned.best == {"w16-a": 0.01, "w16-b": 0.27}
    assert made.said[-1] == "train.lr: the grid stopped growing; the best lies at its end for w16-b"


def test_a_grown_grid_is_continued(rounds: Any) -> None:
    """Its arms are in the record, and a sweep must have the arms that it began with."""
    quality = near({"w16-a": 0.01, "w16-b": 0.05})
    tuned, made = rounds(quality)
    again, second = rounds(quality)
    assert len(made.grids) == 2
    assert second.grids == made.grids[1:]
    assert (again.best, again.options) == (tuned.best, tuned.options)


def test_a_grid_does_not_grow_beyond_what_runs_take(rounds: Any) -> None:
    """A grid of 2 and 3 steps would grow to 1.33 and 4.5, which are no numbers of steps."""
    tuning = Tuning(field="train.schedule.warmup_steps", values=(2.0, 3.0))
    tuned, made = rounds(near({"w16-a": 0.0, "w16-b": 9.0}), tuning)
    assert made.grids == [[2, 3]]
    assert tuned.best == {"w16-a": 2, "w16-b": 3}
    refused, other, stopped = made.said
    assert refused.startswith("the grid cannot grow: arm w16-a@warmup_steps1.33: ")
    assert "warmup_steps must be an integer or None, got 1.33" in refused
    assert "got 4.5" in other
    assert stopped.endswith("the grid stopped growing; the best lies at its end for w16-a, w16-b")


def test_early_stopping_is_for_the_second_round(rounds: Any) -> None:
    tuned, made = rounds(near({"w16-a": 0.01, "w16-b": 0.01}), policy=EarlyStopping(), retrain=1)
    assert isinstance(made.options[0].policy, RunToCompletion)
    assert made.options[0].retrain == 0
    assert isinstance(tuned.options.policy, EarlyStopping)
    assert tuned.options.retrain == 1


def test_what_the_first_round_spends_is_missing_from_the_budget(rounds: Any) -> None:
    quality, money = near({"w16-a": 0.01, "w16-b": 0.01}), Budget(usd=3, usd_per_hour=1.5)
    tuned, made = rounds(quality, spent_s=1800.0, budget=money)
    assert made.options[0].budget == money
    assert tuned.options.budget.limit_s() == 5400
    assert rounds(quality, spent_s=1800.0)[0].options.budget == Budget()
    with pytest.raises(UsageError, match=r"Budget exhausted: 2 of 2 device-hours are spent. Run again with"):
        rounds(quality, spent_s=7200.0, budget=money)
    with pytest.raises(UsageError, match="Budget exhausted: 3 trials of mine-tune, the first round, not"):
        rounds(quality, left=3, budget=money)


def test_a_trial_that_failed_is_named(rounds: Any) -> None:
    """A value that diverged is out; one that failed is repeated, so that no value has another budget."""
    tuned, _ = rounds(lambda arm, value: "diverged" if value > 0.005 else 0.5)
    assert tuned.values[:3] == (0.00027, 0.0009, 0.003)
    assert tuned.best == {"w16-a": 0.00027, "w16-b": 0.00027}
    with pytest.raises(UsageError, match=r"4 trials of mine-tune failed:\n  w16-a@lr0.03-seed1000: no space"):
        rounds(lambda arm, value: "no space" if value == 0.03 else 0.5)


def test_a_fresh_start_moves_both_rounds_aside(rounds: Any) -> None:
    tuned, made = rounds(near({"w16-a": 0.05, "w16-b": 0.01}), mode="fresh")
    assert made.fresh == ["fresh mine"]
    assert [options.mode for options in made.options] == ["fresh", "auto"]
    assert tuned.options.mode == "auto"
    _, made = rounds(near({"w16-a": 0.01, "w16-b": 0.01}), mode="resume")
    assert (made.fresh, [options.mode for options in made.options]) == ([], ["resume"])

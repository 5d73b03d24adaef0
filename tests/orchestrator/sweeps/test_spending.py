"""A bound on what a user spends in a month, over all runs and sweeps of a storage."""

import calendar
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.errors import BudgetExhausted
from orchestrator.runs.measurements import USER
from orchestrator.runs.metrics_file import MetricsWriter
from orchestrator.runs.run_directory import Result, RunDir, acquire_run_dir, read_json, write_json
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.sweeps.budget import MORE, Budget, BudgetTracker
from orchestrator.sweeps.driver import SweepOptions
from orchestrator.sweeps.spending import READ_EVERY_S, OthersSpending, month_of
from orchestrator.sweeps.sweep import Sweep
from tests.made_directories import DIGEST, begin_sweep, run_at
from tests.orchestrator.effects import data_set
from tests.orchestrator.option_cases import SMALL
from tests.orchestrator.sweep_effects import swept
from tests.orchestrator.sweeps.test_budget import Trials, job

END_OF_JULY = calendar.timegm((2026, 8, 1, 0, 0, 0))
JULY, AUGUST = "2026-07", "2026-08"


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Seconds before or after the end of July, which the test advances itself."""
    now = [-100.0]
    monkeypatch.setattr("orchestrator.sweeps.spending.time.monotonic", lambda: now[0])
    monkeypatch.setattr("orchestrator.sweeps.spending.time.time", lambda: END_OF_JULY + now[0])
    return now


def sweep_at(root: Path | str, name: str, months: dict[str, dict[str, float]] | None = None) -> str:
    """Begins a sweep of ada's, that has spent so much. Returns its directory."""
    sweep = Sweep(base=run_at(root, name), arms={"a": {}})
    directory = begin_sweep(sweep, labels={USER: "ada"}, began_s=END_OF_JULY - 40 * 86400)
    if months is not None:
        write_json(SweepDir(directory).spent, {"device_s": 0.0, "jobs": [], "running": [], "months": months})
    return directory


def months_in(directory: str) -> dict[str, dict[str, float]]:
    return read_json(SweepDir(directory).spent)["months"]


def test_months_are_those_of_utc(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are the same on every machine."""
    monkeypatch.setenv("TZ", "Pacific/Kiritimati")  # 14 hours ahead
    time.tzset()
    try:
        assert [month_of(END_OF_JULY - 1), month_of(END_OF_JULY + 1)] == ["2026-07", "2026-08"]
    finally:
        monkeypatch.undo()
        time.tzset()


def test_a_sweep_charges_months_and_owners(tmp_path: Path, clock: list[float]) -> None:
    """Two workers: 99 s of July and 11 s of August in processes that are killed, 10 s in another user's."""
    directory, trials = sweep_at(tmp_path, "mine"), Trials(tmp_path / "mine", clock)
    state = trials.make("a", 1e9, workers=2)
    for owner, until in (("ada", -1.0), ("ada", 10.0), ("bob", 20.0)):
        tracker = BudgetTracker(Budget(), directory, owner=owner)
        tracker.begin(job(state))
        clock[0] = until
        tracker.save()
    assert months_in(directory) == {JULY: {"ada": 198}, AUGUST: {"ada": 22, "bob": 20}}
    tracker = BudgetTracker(Budget(), directory, owner="bob")
    tracker.leave()
    assert tracker.spent_s == 240
    assert months_in(directory) == {JULY: {"ada": 198}, AUGUST: {"ada": 22, "bob": 20}}


def test_a_sweep_of_an_earlier_version_has_spent_in_the_month_in_which_it_began(
    tmp_path: Path, clock: list[float]
) -> None:
    directory = sweep_at(tmp_path, "mine")
    left = {"device_s": 20.0, "usd": 0.0, "pace": []}
    write_json(SweepDir(directory).spent, {"device_s": 100.0, "usd": 0.0, "jobs": [], "running": [left]})
    other = OthersSpending(f"{tmp_path}/other", "ada")
    sweep_at(tmp_path, "other")
    assert (other.device_s("2026-06"), other.device_s(JULY)) == (120, 0)
    BudgetTracker(Budget(), directory, owner="bob").save()
    assert months_in(directory) == {"2026-06": {"ada": 120}, JULY: {"bob": 0}}


def test_a_job_begins_if_the_month_of_its_owner_holds_it(tmp_path: Path, clock: list[float]) -> None:
    """Of 100 s, 40 are spent elsewhere and 10 here, and what runs needs 20 of its 30 s more."""
    elsewhere = sweep_at(tmp_path, "elsewhere", {"2026-06": {"ada": 500.0}, JULY: {"ada": 40.0, "bob": 90.0}})
    directory, trials = sweep_at(tmp_path, "mine"), Trials(tmp_path / "mine", clock)
    tracker = BudgetTracker(Budget(owner_hours=100 / 3600), directory, owner="ada", flops_per_s=1e8)
    tracker.begin(job(trials.make("runs", 3e9)))
    clock[0] += 10
    fits, large = trials.make("fits", 3e9), trials.make("large", 4e9)
    assert tracker.admits(job(fits), fits)
    assert not tracker.admits(job(large), large)
    assert tracker.way_out == (
        f"ada has spent 0.01389 of 0.0277778 device-hours in 2026-07 (UTC) below {tmp_path}, and 0.01667 more"
        " are needed. Run again with a larger `owner_hours`, or next month, to continue"
    )
    unpredicted = BudgetTracker(Budget(owner_hours=1 / 3600), directory, owner="ada")
    assert not unpredicted.admits(job(fits), fits)
    assert f"below {tmp_path}. Run again" in unpredicted.way_out
    unpredicted.budget, unpredicted.flops_per_s = Budget(hours=0.001), 1e8
    assert not unpredicted.admits(job(fits), fits)
    assert unpredicted.way_out == MORE, "of the bound that refuses it"
    sweep_at(tmp_path, "elsewhere", {JULY: {"ada": 29.0}})
    assert not tracker.admits(job(large), large), "it is read again each half minute"
    clock[0] += READ_EVERY_S
    tracker.leave()  # 40 s are spent here
    assert not tracker.admits(job(large), large)
    storage.delete(elsewhere)
    clock[0] += READ_EVERY_S
    assert tracker.admits(job(large), large)
    sweep_at(tmp_path, "elsewhere", {JULY: {"ada": 100.0}, AUGUST: {"ada": 60.0}})
    clock[0] = 0.0
    assert tracker.admits(job(large), large), "another month begins"
    assert months_in(directory) == {JULY: {"ada": 40}}


def test_other_directories_are_read_for_a_bound_of_the_month_alone(
    tmp_path: Path, clock: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    names, trials = list[str](), Trials(tmp_path / "mine", clock)
    directory, state = sweep_at(tmp_path, "mine"), trials.make("a", 1e9)
    monkeypatch.setattr(storage, "names", lambda place: names.append(place) or [])
    for bound, read in ((None, []), (1.0, [str(tmp_path)])):
        tracker = BudgetTracker(Budget(hours=1.0, owner_hours=bound), directory, owner="ada")
        assert tracker.admits(job(state), state)
        tracker.save()
        assert names == read


Report = Callable[..., RunConfig]


@pytest.fixture
def reported(tmp_path: Path, clock: list[float]) -> Report:
    """``reported("one", {-50: 10.0})``: ada's run reports so many device-seconds at these times."""

    def write(name: str, reports: dict[float, float], owner: str = "ada", **costs: float) -> RunConfig:
        run, began = run_at(tmp_path, name), clock[0]
        acquire_run_dir(run, DIGEST, labels={USER: owner})
        writer = MetricsWriter(run)
        for step, (clock[0], device_s) in enumerate(reports.items()):
            metrics = {"cost/device_s": device_s}
            if costs:
                metrics["cost/marginal_device_s"] = device_s - costs["trunk"]
            writer.report(step, metrics)
        writer.close()
        clock[0] = began
        return run

    return write


@pytest.fixture
def july(tmp_path: Path) -> Callable[[], float]:
    """What ada has spent in July, as another sweep of hers reads it now."""
    directory = sweep_at(tmp_path, "asks")
    return lambda: OthersSpending(directory, "ada").device_s(JULY)


def test_runs_count_by_their_reports(
    tmp_path: Path, clock: list[float], reported: Report, july: Callable[[], float]
) -> None:
    reported("one", {-50: 10.0, -10: 30.0, 10: 70.0})
    assert july() == 30
    reported("another", {-50: 1000.0}, owner="bob")
    assert july() == 30
    reported("branch", {-50: 1005.0}, trunk=1000.0)
    assert july() == 35
    reported("resumed", {-50: 10.0, -40: 8.0, -30: 12.0})  # of a checkpoint of less than 8
    assert july() == 35 + 14
    follows = OthersSpending(f"{tmp_path}/asks", "ada")
    for sum_s in (49, 54):
        assert follows.device_s(JULY) == sum_s
        reported("one", {20: 72.0} if sum_s == 54 else {-5: 75.0})
        clock[0] += READ_EVERY_S


def test_a_run_that_ended_in_an_earlier_month_is_not_read(
    clock: list[float], reported: Report, july: Callable[[], float]
) -> None:
    run = reported("old", {-50: 10.0})
    for time_s, read in ((END_OF_JULY - 5, 10), (END_OF_JULY - 40 * 86400, 0)):
        RunDir.of(run).write_result(Result(status="finished", step=3, metrics={}, time_s=time_s))
        assert july() == read


def test_each_start_of_a_sweep_counts_once(
    tmp_path: Path, clock: list[float], july: Callable[[], float]
) -> None:
    """A copy does not, nor the sweep that asks, nor what is damaged, another program's, or not among runs."""
    sweep_at(tmp_path, "one", {JULY: {"ada": 10.0}})
    sweep_at(tmp_path, "one.old-1", {JULY: {"ada": 1.0}})  # moved aside by --fresh
    assert july() == 11
    shutil.copytree(tmp_path / "one", tmp_path / "copy")
    write_json(f"{tmp_path}/asks/spent.json", {"months": {JULY: {"ada": 1000.0}}})
    shutil.copytree(tmp_path / "asks", tmp_path / "asks-copied")
    (tmp_path / "mlflow.db").touch()
    (tmp_path / "notes").mkdir()
    (tmp_path / "notes/spent.json").write_text('{"months": {"2026-07": {"ada": 1000}}}')
    (tmp_path / "list").mkdir()
    (tmp_path / "list/spent.json").write_text("[7]")
    sweep_at(tmp_path, "damaged", {JULY: {"ada": 1000.0}})
    (tmp_path / "damaged/sweep.json").write_text("{")
    shutil.copytree(tmp_path / "one", tmp_path / "features")
    assert july() == 11


def test_a_sweep_stops_for_its_owner(tmp_path: Path, clock: list[float]) -> None:
    """Whom its labels name: another user's spending does not matter."""
    home = tmp_path / "home"
    fields = {"storage": str(home), "data.path": data_set(tmp_path), "name": "mine", "train.steps": 8}
    sweep = Sweep(base=override(RunConfig(), SMALL | fields), arms={"a": {}, "b": {"model.width": 32}})
    sweep_at(home, "first", {JULY: {"ada": 3600 * 1001.0}})
    options = SweepOptions(budget=Budget(owner_hours=1000.0), labels={USER: "ada"})
    with pytest.raises(BudgetExhausted, match=r"a single trial\. ada has spent 1001 of 1000 device-hours in"):
        swept(sweep, options)
    assert len(swept(sweep, replace(options, labels={USER: "bob"}))["order"]) == 2

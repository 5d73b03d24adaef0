"""What commands found out follows a run or a sweep to MLflow."""

from pathlib import Path

import mlflow
import pytest

from orchestrator.runs.measurements import write_measurement
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking import find
from orchestrator.tracking.find import SWEEP_KEY, find_by_tag
from orchestrator.tracking.store import Tracking
from orchestrator.tracking.sync import Sync, send
from tests.made_directories import begin, begin_sweep, end, end_sweep, run_at, sweep_record
from tests.mlflow_reader import RunInfo, children, newest_of
from tests.orchestrator.tracking.conftest import open_store
from tests.orchestrator.tracking.stores import Sqlite


def shown(tracking: Tracking, directory: str) -> RunInfo:
    found = newest_of(tracking, directory)
    assert found
    return found


def measure(directory: str, accuracy: float) -> None:
    write_measurement(
        directory,
        {"eval/digits/acc1": accuracy, "eval/digits/loss": float("nan")},
        tables={f"eval/{accuracy}.json": {"class": ["a", "b"], "accuracy": [accuracy, float("nan")]}},
        files={f"pages/{accuracy}.html": b"<p>"},
        data={"digits": {"path": "/shards/digits", "digest": "d"}},
        labels={"eval.latency": "batch 8"},
    )


@pytest.mark.filterwarnings("ignore")
def test_a_run_that_was_measured_twice(
    sqlite: Sqlite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent once, also by several processes; tables are those that MLflow's pages and its Python read."""
    tracking, run = open_store(sqlite), run_at(tmp_path, "one")
    directory = begin(run)
    end(run, 10, val__acc1=0.5)
    measure(directory, 0.25)
    for _ in range(2):
        assert Sync(tracking, directory).update() == []
    monkeypatch.setattr("time.time", lambda: 2e9)
    measure(directory, 0.75)
    early = Sync(tracking, directory)
    for sync in (early, early, Sync(tracking, directory)):
        assert sync.update() == []
    info = shown(tracking, directory)
    assert [value for _, value in info.history("eval/digits/acc1")] == [0.25, 0.75]
    assert "eval/digits/loss" not in info.metrics
    assert (info.tags["eval.data.digits"], info.tags["eval.latency"]) == ("/shards/digits", "batch 8")
    assert info.read_text("pages/0.75.html") == "<p>"
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)  # its search has no client of its own
    mlflow.set_tracking_uri(None)
    for accuracy in (0.25, 0.75):
        table = tracking.client.load_table(
            tracking.experiment_id, f"eval/{accuracy}.json", run_ids=[info.run_id]
        )
        assert table["accuracy"].fillna(-1).tolist() == [accuracy, -1]


def test_a_trial_that_was_measured_later(sqlite: Sqlite, tmp_path: Path) -> None:
    """It alone is sent, as part of its sweep; a command that trains there sends it at its end."""
    tracking = open_store(sqlite)
    sweep = Sweep(base=run_at(tmp_path, "s"), arms={"a": {}, "b": {"train.lr": 0.5}, "c": {}})
    directory = end_sweep(sweep, {"a": 0.5, "b": 0.6})
    trials = {name: f"{directory}/trials/{name}" for name in "ab"}
    measure(trials["a"], 0.25)
    assert send(directory, tracking, only=[trials["a"]]) == ""
    parent = shown(tracking, directory)
    assert (parent.status, [run.name for run in children(tracking, parent.run_id)]) == ("FINISHED", ["a"])
    assert shown(tracking, trials["a"]).metrics["eval/digits/acc1"] == 0.25
    follower = Sync(tracking, directory)
    follower.update(live=True)
    measure(trials["b"], 0.75)
    measure(directory, 0.125)
    follower.update()
    assert shown(tracking, trials["b"]).metrics["eval/digits/acc1"] == 0.75
    assert shown(tracking, directory).metrics["eval/digits/acc1"] == 0.125


def test_a_study(sqlite: Sqlite, tmp_path: Path) -> None:
    """A folder with measurements alone is a run of its own."""
    tracking, folder = open_store(sqlite), str(tmp_path / "studies" / "capacity-1")
    write_measurement(folder, {"study/a": 1.0}, labels={"role": "study"}, files={"study.png": b"\x89"})
    for _ in range(2):
        assert send(folder, tracking, only=[folder]) == ""
    info = shown(tracking, folder)
    assert (info.name, info.status, info.tags["role"]) == ("capacity-1", "FINISHED", "study")
    assert info.metrics == {"study/a": 1.0}
    assert len(find_by_tag(tracking, "directory", folder)) == 1


def test_trials_over_several_pages(sqlite: Sqlite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "PAGE", 4)
    tracking = open_store(sqlite)
    sweep = Sweep(base=run_at(tmp_path, "many"), arms={f"a{i}": {"train.lr": 0.1 + i} for i in range(9)})
    directory = begin_sweep(sweep)
    for run in sweep.runs().values():
        begin(run)
    Sync(tracking, directory).update(live=True)
    found = find_by_tag(tracking, SWEEP_KEY, sweep_record(directory).key)
    assert [run.info.run_name for run in found] == [f"a{i}" for i in range(9)]

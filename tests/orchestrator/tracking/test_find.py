"""Sweeps and trials are found in MLflow, and commands write to their runs."""

from pathlib import Path

import mlflow
import numpy as np
import pytest

from orchestrator.errors import UsageError
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking import find
from orchestrator.tracking.find import RunWriter, children, create_run, find_run, find_sweep
from orchestrator.tracking.store import Tracking, open_reader
from orchestrator.tracking.sync import Sync
from tests.made_directories import end_sweep, run_at
from tests.orchestrator.tracking.conftest import open_store
from tests.orchestrator.tracking.stores import Sqlite


def test_a_sweep_and_its_children(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A sweep is found by its name; trials come oldest first, over several pages."""
    monkeypatch.setattr(find, "PAGE", 4)
    name = f"sweep-of-{tmp_path.name}"
    sweep = Sweep(base=run_at(tmp_path, name), arms={f"arm-{i}": {"train.lr": 0.1 + i} for i in range(9)})
    Sync(tracking, end_sweep(sweep, dict.fromkeys(sweep.trials(), 0.5))).update()
    create_run(tracking, name, {"role": "no sweep"})
    quoted = f'it\'s a "sweep" 100% of {tmp_path.name}'  # by hand: our names have no quotes
    by_hand = create_run(tracking, quoted, {"role": "sweep"})
    create_run(tracking, quoted.replace("'", "x"), {"role": "sweep"})

    reader = open_reader(tracking.uri)
    found = find_sweep(reader, name)
    assert (found.name, found.status) == (name, "FINISHED")
    assert find_sweep(reader, quoted).run_id == by_hand.run_id
    create_run(tracking, "notes", {"mlflow.parentRunId": found.run_id})
    trials = children(reader, found.run_id)
    assert {trial.name: trial.config() for trial in trials} == sweep.runs()
    with pytest.raises(UsageError, match="no sweep 'nothing' at"):
        find_sweep(reader, "nothing")
    with pytest.raises(UsageError, match=r"has no config of ours in its tag moe_frontier.config"):
        found.config()


def test_writing_to_a_run(tracking: Tracking) -> None:
    run_id = tracking.client.create_run(tracking.experiment_id, run_name="theirs").info.run_id
    run = RunWriter(tracking, run_id)
    run.log({"hypervolume": 0.5, "nan": float("nan")}, step=3)
    run.tag(pareto="true")
    run.write_text("notes/page.html", "<p>")
    run.finish()
    found = find_run(tracking, run_id)
    assert (found.history("hypervolume"), found.metrics) == ([(3, 0.5)], {"hypervolume": 0.5})
    assert (found.tags["pareto"], found.read_text("notes/page.html")) == ("true", "<p>")
    assert found.status == "FINISHED"
    with pytest.raises(UsageError, match="MLflow at"):
        run.tag(**{"x" * 300: "too long a name"})
    with pytest.raises(UsageError, match="MLflow at"):
        found.read_text("not there.txt")


@pytest.mark.filterwarnings("ignore")
def test_tables_are_those_of_mlflow(sqlite: Sqlite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tracking = open_store(sqlite)
    run = create_run(tracking, "tables", {})
    names = [f"{tmp_path.name}.json", f"{tmp_path.name}-more.json"]
    run.write_table(names[0], {"arm": ["a", "b"], "acc": np.array([0.5, float("nan")])})
    run.write_table(names[1], {"n": [1]})
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)  # its search has no client of its own
    mlflow.set_tracking_uri(None)
    table = tracking.client.load_table(tracking.experiment_id, names[0])
    assert table["arm"].tolist() == ["a", "b"]
    assert table["acc"].fillna(-1).tolist() == [0.5, -1]
    assert len(tracking.client.load_table(tracking.experiment_id, names[1])) == 1

"""What is there: sweeps, their children, runs of other tools; and orphans."""

import time
from pathlib import Path

import pytest

from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.tracking import (
    EXPERIMENT,
    Tracking,
    children,
    close_orphans,
    find_runs,
    find_sweep,
    open_reader,
    search,
    track,
    track_training,
    writer,
)
from tests.orchestrator.tracking.conftest import Open
from tests.orchestrator.tracking.stores import Sqlite, Store


def test_a_sweep_and_its_children(tracking: Tracking, tmp_path: Path) -> None:
    """The newest sweep of the name, whatever quotes it has, and its children, oldest first."""
    name = f'it\'s a "sweep" 100% of {tmp_path.name}'
    first = track(tracking, str(tmp_path / "first"), name, tags={"role": "sweep"})
    time.sleep(0.002)  # start times have milliseconds
    sweep = track(tracking, str(tmp_path / "second"), name, tags={"role": "sweep"})
    track(tracking, str(tmp_path / "no sweep"), name, tags={})
    track(tracking, str(tmp_path / "like it"), name.replace("'", "x"), tags={"role": "sweep"})
    runs = [RunConfig(name=f"sweep/arm-{i}") for i in range(3)]
    for run in runs:
        trial = track_training(tracking, run, str(tmp_path / run.name), parent=sweep, role="trial")
        trial.log(3, {"val/acc1": 0.5})
        trial.finish("FINISHED")
        time.sleep(0.002)
    track_training(tracking, RunConfig(), str(tmp_path / "stranger"), parent=first)
    assert tracking.flush(60) == 0

    reader = open_reader(tracking.uri)
    found = find_sweep(reader, name)
    assert (found.run_id, found.name, found.status) == (sweep.run_id(), name, "RUNNING")
    trials = children(reader, found.run_id)
    assert [trial.name for trial in trials] == ["arm-0", "arm-1", "arm-2"]
    assert [trial.config() for trial in trials] == runs
    assert all(trial.metrics == {"val/acc1": 0.5} for trial in trials)
    with pytest.raises(UsageError, match="no sweep 'nothing' at"):
        find_sweep(reader, "nothing")
    with pytest.raises(UsageError, match=r"has no config of ours in its tag moe_frontier.config"):
        found.config()


def test_children_of_many_pages(
    reopen: Open, sqlite: Sqlite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(search, "PAGE", 4)
    tracking = reopen(sqlite)
    sweep = track(tracking, str(tmp_path), "many", tags={"role": "sweep"})
    for i in range(9):
        track_training(tracking, RunConfig(name=f"many/{i}"), str(tmp_path / str(i)), parent=sweep)
    tracking.flush(60)
    assert sorted(run.name for run in children(tracking, sweep.run_id())) == [*"012345678"]


def test_runs_of_other_tools(tracking: Tracking, tmp_path: Path) -> None:
    client, name = tracking.client, f"theirs-{tmp_path.name}"
    experiment = client.create_experiment(name)
    for i in range(3):
        run_id = client.create_run(experiment, run_name=f"run-{i}").info.run_id
        client.log_metric(run_id, "acc", i / 2, step=1)
        client.log_param(run_id, "width", 10 * i)
    found = find_runs(tracking, name, "metrics.acc >= 0.5")
    assert [(run.name, run.metrics["acc"], run.params["width"]) for run in found] == [
        ("run-1", 0.5, "10"),
        ("run-2", 1.0, "20"),
    ]
    with pytest.raises(UsageError, match="no experiment 'nobody'"):
        find_runs(tracking, "nobody", "")
    with pytest.raises(UsageError, match=r"MLflow at .*: Invalid"):
        find_runs(tracking, EXPERIMENT, "this is no filter")


def test_orphans_are_closed(reopen: Open, store: Store, tmp_path: Path) -> None:
    """After --fresh: the first sweep's runs that still run end as KILLED; those of the second, and of other
    directories, go on.
    """
    tracking, runs = reopen(store), {}
    for place in ("here", "here afresh", "elsewhere"):
        directory = tmp_path / place.split()[0]
        (directory / "mlflow_run.json").unlink(missing_ok=True)  # as --fresh does
        runs[place] = track(tracking, str(directory), "sweep", tags={"role": "sweep"})
        for child in ("running", "finished"):
            folder = str(tmp_path / place / child)
            runs[f"{place} {child}"] = track_training(tracking, RunConfig(), folder, parent=runs[place])
        runs[f"{place} finished"].finish("FINISHED")
    tracking.flush(60)
    ended = close_orphans(tracking, str(tmp_path / "here"), {runs["here afresh"].run_id()})
    assert {run.run_id for run in ended} == {runs["here"].run_id(), runs["here running"].run_id()}
    status = {place: tracking.client.get_run(run.run_id()).info.status for place, run in runs.items()}
    assert status == {
        "here": "KILLED",
        "here running": "KILLED",
        "here finished": "FINISHED",
        "here afresh": "RUNNING",
        "here afresh running": "RUNNING",
        "here afresh finished": "FINISHED",
        "elsewhere": "RUNNING",
        "elsewhere running": "RUNNING",
        "elsewhere finished": "FINISHED",
    }
    assert close_orphans(tracking, str(tmp_path / "here"), {runs["here afresh"].run_id()}) == []


def test_a_reader_may_write_a_little(reopen: Open, store: Store, tmp_path: Path) -> None:
    tracking = reopen(store)
    run_id = track(tracking, str(tmp_path), f"page of {tmp_path.name}", tags={"role": "sweep"}).run_id()
    reader = open_reader(store.uri)
    run = writer(reader, find_sweep(reader, f"page of {tmp_path.name}"))
    run.write_text("frontier.html", "<p>")
    run.tag(hypervolume="0.5")
    found = find_sweep(reader, f"page of {tmp_path.name}")
    assert (found.run_id, found.tags["hypervolume"], found.read_text("frontier.html")) == (
        run_id,
        "0.5",
        "<p>",
    )
    with pytest.raises(UsageError, match="MLflow refuses"):
        run.tag(**{"x" * 300: "too long a name"})
    with pytest.raises(UsageError, match="MLflow at"):
        found.read_text("not there.txt")

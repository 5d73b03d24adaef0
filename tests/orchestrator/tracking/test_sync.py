"""MLflow shows a directory completely, and each value once, after any interruption."""

import json
import re
import shutil
import sqlite3
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.codec import flat
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.runs.lock import move_aside
from orchestrator.runs.run_directory import Result, RunDir, write_json
from orchestrator.runs.sweep_directory import SUMMARY, SweepDir
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking.base import Following
from orchestrator.tracking.find import KEY, check_original
from orchestrator.tracking.registry import checkpoint_of, registered_name
from orchestrator.tracking.store import Tracking, open_tracking
from orchestrator.tracking.sync import Sync
from tests.made_directories import begin, begin_sweep, end, report, run_at, sweep_record
from tests.mlflow_reader import RunInfo, children, find_sweep, newest_of
from tests.orchestrator.tracking.conftest import open_store
from tests.orchestrator.tracking.stores import Sqlite, Store

NAN, INF = float("nan"), float("inf")


def found(tracking: Tracking, directory: str) -> RunInfo:
    run = newest_of(tracking, directory)
    assert run is not None
    return run


def shown(tracking: Tracking, run: RunConfig, directory: str) -> RunInfo:
    Sync(tracking, directory).update()
    return found(tracking, directory)


def test_a_run_from_its_start_to_its_end(tracking: Tracking, tmp_path: Path) -> None:
    run = run_at(tmp_path, "one")
    directory, mirror = begin(run), None
    mirror = Sync(tracking, directory)
    mirror.update(live=True)
    assert found(tracking, directory).status == "RUNNING"
    report(run, {10: {"train/loss": 3.0}, 20: {"train/loss": 2.0, "val/acc1": 0.25}})
    mirror.update(live=True)
    assert found(tracking, directory).metrics == {"train/loss": 2.0, "val/acc1": 0.25}
    Path(directory, "bad_images.csv").write_text("grüße")
    end(run, 30, train__loss=1.0, val__acc1=0.5, cost__params=640.0, data__fingerprint=2.0**40)
    mirror.update()

    info = found(tracking, directory)
    assert (info.name, info.status) == ("one", "FINISHED")
    assert info.end_s == pytest.approx(1_800_000_030)
    assert info.params == {name: str(value) for name, value in flat(run).items()} | {"cost/params": "640"}
    assert info.history("train/loss") == [(80, 3.0), (160, 2.0), (240, 1.0)]
    assert info.history("val/acc1") == [(160, 0.25), (240, 0.5)]
    assert set(info.metrics) == {"train/loss", "val/acc1"}  # constants are params, the fingerprint is a tag
    assert info.tags["data_fingerprint"] == str(2**40)
    assert info.tags["role"] == "train"
    assert info.read_text("bad_images.csv") == "grüße"
    (used,) = tracking.client.get_run(info.run_id).inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest) == ("digits", "d" * 36)
    assert json.loads(used.dataset.source) == {"uri": "/shards/digits"}
    assert dict(tracking.client.get_experiment(tracking.experiment_id).tags)["mlflow.experimentKind"]


def test_saying_it_again_changes_nothing(tracking: Tracking, store: Store, tmp_path: Path) -> None:
    """Updates come from the same process, from later ones, and from two at the same time."""
    run = run_at(tmp_path, "again")
    directory = begin(run)
    early = Sync(tracking, directory)
    early.update(live=True)
    end(run, 10, train__loss=1.0, val__acc1=0.5)
    first = shown(tracking, run, directory)
    early.update()
    for _ in range(2):
        again = shown(open_store(store), run, directory)
        assert replace(again, tracking=first.tracking) == first
    assert again.history("val/acc1") == [(80, 0.5)]
    (model,) = tracking.client.search_logged_models([tracking.experiment_id], "tags.weights = 'w1'")[:1]
    assert model.tags["checkpoint"].endswith("/step-00000010")


def test_a_lost_database_gets_everything_again(tmp_path: Path, empty_store: Callable[[Path], str]) -> None:
    run = run_at(tmp_path, "lost")
    directory = begin(run)
    report(run, {10: {"train/loss": 3.0}})
    for name in ("a", "b"):
        tracking = open_tracking(empty_store(tmp_path / name), artifacts=str(tmp_path / "files"))
        Sync(tracking, directory).update(live=True)
        if name == "a":
            report(run, {20: {"train/loss": 2.0}})
    assert found(tracking, directory).history("train/loss") == [(80, 3.0), (160, 2.0)]


def test_a_resumed_run_repeats_no_step(tracking: Tracking, tmp_path: Path) -> None:
    """MLflow keeps the values it got first; the file says that they were trained again."""
    run = run_at(tmp_path, "resumed")
    directory = begin(run)
    report(run, {10: {"train/loss": 3.0}, 20: {"train/loss": 2.0}})
    Sync(tracking, directory).update(live=True)
    report(run, {20: {"train/loss": 2.5, "val/acc1": 0.5}, 30: {"train/loss": 1.0}})
    info = shown(tracking, run, directory)
    assert info.history("train/loss") == [(80, 3.0), (160, 2.0), (240, 1.0)]
    assert info.history("val/acc1") == [(160, 0.5)]


def test_what_is_not_finite_stays_out(tracking: Tracking, tmp_path: Path) -> None:
    """A side metric that is infinite once makes no run diverged; a loss that ended it does."""
    fine, gone = (run_at(tmp_path, name) for name in ("fine", "gone"))
    directory = begin(fine)
    report(fine, {10: {"val/loss": INF, "val/acc1": 0.5}})
    end(fine, 20, val__loss=1.0, val__acc1=0.9)
    info = shown(tracking, fine, directory)
    assert (info.status, "diverged" in info.tags) == ("FINISHED", False)
    assert info.history("val/loss") == [(160, 1.0)]
    directory = begin(gone)
    end(gone, 10, status="diverged", train__loss=NAN)
    info = shown(tracking, gone, directory)
    assert (info.status, info.tags["diverged"], info.metrics) == ("FAILED", "true", {})


def test_ends_follow_from_the_files(tracking: Tracking, tmp_path: Path) -> None:
    """An error, a pause, a restart that finishes: tags of earlier ends go."""
    run = run_at(tmp_path, "ends")
    directory = begin(run)
    assert shown(tracking, run, directory).status == "KILLED"  # no process is running
    RunDir(directory).write_error("Traceback\nOSError: disk full\n")
    info = shown(tracking, run, directory)
    assert (info.status, info.tags["error"]) == ("FAILED", "OSError: disk full")
    assert "OSError: disk full" in info.read_text("error.txt")
    storage.delete(f"{directory}/error.txt")
    RunDir(directory).write_result(Result(status="paused", step=10, metrics={"val/acc1": 0.5}))
    Sync(tracking, directory).update(live=True)
    info = found(tracking, directory)
    assert (info.status, info.tags["paused"], "error" in info.tags) == ("RUNNING", "10", False)
    assert info.history("val/acc1") == [(80, 0.5)]  # no report of the run says it
    info = shown(tracking, run, directory)
    assert (info.status, info.tags["stopped"], "paused" in info.tags) == ("KILLED", "10", False)
    end(run, 20, val__acc1=0.75)
    info = shown(tracking, run, directory)
    assert (info.status, "stopped" in info.tags) == ("FINISHED", False)


def make_sweep(tmp_path: Path, name: str = "mini", **fields: object) -> tuple[Sweep, str]:
    """Three arms, of which `a` has finished, `b` runs and `c` never began."""
    sweep = Sweep(base=run_at(tmp_path, name), arms={"a": {}, "b": {"train.lr": 0.5}, "c": {}})
    directory = begin_sweep(sweep, labels={"mlflow.source.name": "jobs/pareto_sweep.py"}, **fields)
    runs = sweep.runs()
    begin(runs["a"])
    begin(runs["b"])
    end(runs["a"], 10, weights="weights of a", val__acc1=0.75)
    report(runs["b"], {10: {"train/loss": 2.0}})
    return sweep, directory


def summary(alias: str = "pareto-knee") -> dict[str, object]:
    model = {
        "run": "a",
        "checkpoint": "checkpoints/step-00000010",
        "weights": "weights of a",
        "description": "Sweep mini, arm a: val/acc1 0.75",
    }
    return {
        "time_s": 1_800_000_100.0,
        "note": "# Sweep mini",
        "metrics": {"hypervolume": 0.5},
        "tags": {"hypervolume.reference": "x=1"},
        "pareto": ["a"],
        "aliases": {alias: model},
        "files": ["frontier.html"],
        "tables": {"frontier.json": {"columns": ["arm"], "data": [["a"]]}},
    }


def test_a_sweep_and_its_trials(tracking: Tracking, tmp_path: Path) -> None:
    _, directory = make_sweep(tmp_path)
    mirror = Sync(tracking, directory)
    mirror.update(live=True)
    parent = found(tracking, directory)
    assert (parent.status, parent.name, parent.tags["role"]) == ("RUNNING", "mini", "sweep")
    trials = {run.name: run for run in children(tracking, parent.run_id)}
    assert {name: run.status for name, run in trials.items()} == {"a": "FINISHED", "b": "RUNNING"}
    assert trials["b"].tags.items() >= {"role": "trial", "arm": "b", "trial": "b"}.items()

    Path(directory, "frontier.html").write_text("<p>")
    write_json(f"{directory}/{SUMMARY}", summary())
    SweepDir(directory).write(replace(sweep_record(directory), status="finished"))
    mirror.update()
    parent = found(tracking, directory)
    assert (parent.status, parent.metrics) == ("FINISHED", {"hypervolume": 0.5})
    assert parent.tags["mlflow.note.content"] == "# Sweep mini"
    assert parent.tags["mlflow.source.name"] == "jobs/pareto_sweep.py"
    assert parent.read_text("frontier.html") == "<p>"
    assert json.loads(parent.read_text("frontier.json"))["data"] == [["a"]]
    trials = {run.name: run for run in children(tracking, parent.run_id)}
    assert {name: run.status for name, run in trials.items()} == {"a": "FINISHED", "b": "KILLED"}
    assert (trials["a"].tags["pareto"], "pareto" in trials["b"].tags) == ("true", False)
    uri, weights = checkpoint_of("models:/mini@pareto-knee", tracking.uri)
    assert (uri, weights) == (f"{directory}/trials/a/checkpoints/step-00000010", "weights of a")


def named(tracking: Tracking, model: str) -> dict[str, str]:
    """alias -> version."""
    return {a: str(v) for a, v in tracking.client.get_registered_model(model).aliases.items()}


def test_aliases_follow_the_frontier(sqlite: Sqlite, tmp_path: Path) -> None:
    """An alias that the sweep no longer has is removed, one set by hand stays; the version stays the same."""
    tracking, name = open_store(sqlite), f"aliases-{tmp_path.name}"
    _, directory = make_sweep(tmp_path, name, status="finished")
    for alias in ("pareto-knee", "pareto-best"):
        write_json(f"{directory}/{SUMMARY}", summary(alias))
        Sync(tracking, directory).update()
        tracking.client.set_registered_model_alias(name, "in-use", "1")
    assert named(tracking, name) == {"pareto-best": "1", "in-use": "1"}
    by_hand = tracking.client.create_model_version(name, str(tmp_path)).version
    tracking.client.set_registered_model_alias(name, "confirmed", by_hand)
    write_json(f"{directory}/{SUMMARY}", summary() | {"aliases": {}})  # no trial is complete any more
    Sync(tracking, directory).update()
    assert named(tracking, name) == {"confirmed": "2", "in-use": "1"}
    version = tracking.client.get_model_version(name, "1")
    assert version.description == "Sweep mini, arm a: val/acc1 0.75"


def test_what_was_moved_aside_keeps_its_weights_and_ends(sqlite: Sqlite, tmp_path: Path) -> None:
    """After --fresh, the registered version of the old sweep says where its weights are now; the new sweep
    has the name, also in MLflow, and keeps the aliases when the old one is sent again.
    """
    tracking = open_store(sqlite)
    name = f"moved-{tmp_path.name}"
    _, directory = make_sweep(tmp_path, name)
    write_json(f"{directory}/{SUMMARY}", summary())
    Sync(tracking, directory).update()
    aside = move_aside(directory)
    assert aside is not None
    Sync(tracking, aside).update()
    uri, weights = checkpoint_of(f"models:/{name}/1", sqlite.uri)
    assert (uri, weights) == (f"{aside}/trials/a/checkpoints/step-00000010", "weights of a")
    old = found(tracking, aside)
    assert {run.status for run in children(tracking, old.run_id)} == {"FINISHED", "KILLED"}
    make_sweep(tmp_path, name)
    Sync(tracking, directory).update(live=True)
    new = found(tracking, directory)
    assert new.run_id != old.run_id
    assert len(children(tracking, old.run_id)) == 2

    write_json(f"{directory}/{SUMMARY}", summary())
    for place in (directory, aside):
        Sync(tracking, place).update()
        assert named(tracking, name) == {"pareto-knee": "2"}
        assert find_sweep(tracking, name).run_id == new.run_id
    assert find_sweep(tracking, f"{name}.old-1").run_id == old.run_id
    assert named(tracking, f"{name}.old-1") == {"pareto-knee": "1"}


def test_sweeps_of_one_name_are_told_apart(sqlite: Sqlite, tmp_path: Path, caplog) -> None:
    """The second one registers its models under another name."""
    tracking, name = open_store(sqlite), f"same-{tmp_path.name}"
    directories = [make_sweep(tmp_path / place, name)[1] for place in ("here", "there")]
    keys = [sweep_record(directory).key for directory in directories]
    for directory in (*directories, *directories):
        write_json(f"{directory}/{SUMMARY}", summary())
        Sync(tracking, directory).update()
    assert len({found(tracking, directory).run_id for directory in directories}) == 2
    names = [name, f"{name}-{keys[1][:6]}"]
    assert [registered_name(tracking, key) for key in keys] == names
    for directory, model in zip(directories, names, strict=True):
        location, _ = checkpoint_of(f"models:/{model}@pareto-knee", sqlite.uri)
        assert location.startswith(f"{directory}/")
    assert (
        caplog.text.count(f"are registered as {names[1]}: {name} belongs to the sweep in {directories[0]}")
        == 1
    )


def test_a_model_made_by_hand_stays_as_it_is(sqlite: Sqlite, tmp_path: Path) -> None:
    tracking, name = open_store(sqlite), f"theirs-{tmp_path.name}"
    tracking.client.create_registered_model(name)
    tracking.client.create_model_version(name, str(tmp_path))
    tracking.client.set_registered_model_alias(name, "pareto-knee", "1")
    _, directory = make_sweep(tmp_path, name)
    write_json(f"{directory}/{SUMMARY}", summary())
    Sync(tracking, directory).update()
    assert named(tracking, name) == {"pareto-knee": "1"}
    assert (
        registered_name(tracking, sweep_record(directory).key) == f"{name}-{sweep_record(directory).key[:6]}"
    )


def test_a_copy_does_not_take_over_what_mlflow_shows(sqlite: Sqlite, tmp_path: Path) -> None:
    """A moved storage does, and a copy whose database was copied too has its own."""
    tracking = open_store(sqlite)
    _, directory = make_sweep(tmp_path / "old")
    Sync(tracking, directory).update()
    old = found(tracking, directory)
    copy = shutil.copytree(directory, tmp_path / "copy")
    refusal = f"{copy} is a copy of {directory}, which MLflow at .* `tracking_uri`"
    with pytest.raises(UsageError, match=refusal):
        check_original(tracking, str(copy))
    assert re.search(refusal, Sync(tracking, str(copy)).update()[0])
    assert found(tracking, directory).run_id == old.run_id

    shutil.copy(sqlite.uri.removeprefix("sqlite:///"), tmp_path / "copy" / "mlflow.db")
    copied = open_tracking(f"sqlite:///{tmp_path}/copy/mlflow.db", artifacts=str(tmp_path))
    Sync(copied, str(copy)).update()
    assert found(copied, str(copy)).run_id == old.run_id

    moved = shutil.move(tmp_path / "old", tmp_path / "new")
    check_original(tracking, f"{moved}/mini")
    Sync(tracking, f"{moved}/mini").update()
    assert found(tracking, f"{moved}/mini").run_id == old.run_id
    assert len(children(tracking, old.run_id)) == 2


def test_a_damaged_file_keeps_back_its_own_trial_alone(sqlite: Sqlite, tmp_path: Path, caplog) -> None:
    tracking = open_store(sqlite)
    sweep, directory = make_sweep(tmp_path)
    begin(sweep.runs()["c"])
    damaged = f"{directory}/trials/a/result.json"
    Path(damaged).write_text("{")
    lines = list[str]()
    with Following(Sync(tracking, directory), lines.append):
        pass
    trials = children(tracking, found(tracking, directory).run_id)
    assert {run.name for run in trials} == {"b", "c"}
    (line,) = lines
    for text in (line, caplog.text):
        assert f"trial a: {damaged} is damaged" in text
        assert "does not answer" not in text
    Path(f"{directory}/trials/a/error.txt").write_bytes(b"\xff")
    Path(damaged).unlink()
    (line,) = Sync(tracking, directory).update()
    assert f"trial a: {directory}/trials/a cannot be read: 'utf-8' codec" in line


def test_a_server_that_lost_its_data_gets_everything_again(tmp_path: Path, empty_store) -> None:
    """In the same process, whose trial `a` was complete before."""
    tracking = open_tracking(empty_store(tmp_path), artifacts=str(tmp_path))
    _, directory = make_sweep(tmp_path)
    mirror = Sync(tracking, directory)
    mirror.update(live=True)
    with sqlite3.connect(tracking.uri.removeprefix("sqlite:///")) as database:
        for table in ("metrics", "latest_metrics", "params", "tags", "inputs", "runs"):
            database.execute(f"delete from {table}")
    mirror.update(live=True)
    trials = {run.name: run for run in children(tracking, found(tracking, directory).run_id)}
    assert trials["a"].history("val/acc1") == [(80, 0.75)]
    assert trials["b"].status == "RUNNING"


def test_a_deleted_sweep_is_made_again_while_it_runs(sqlite: Sqlite, tmp_path: Path) -> None:
    tracking = open_store(sqlite)
    sweep, directory = make_sweep(tmp_path)
    mirror = Sync(tracking, directory)
    mirror.update(live=True)
    old = found(tracking, directory)
    tracking.client.delete_run(old.run_id)
    report(sweep.runs()["b"], {20: {"train/loss": 1.0}})
    mirror.update(live=True)
    new = found(tracking, directory)
    assert new.run_id != old.run_id
    trials = {run.name: run for run in children(tracking, new.run_id)}
    assert set(trials) == {"a", "b"}
    assert trials["b"].metrics["train/loss"] == 1.0


def test_a_trial_that_began_anew_is_another_run(sqlite: Sqlite, tmp_path: Path) -> None:
    """Its directory was deleted meanwhile; its first numbers are before the last ones of the other."""
    tracking = open_store(sqlite)
    sweep, directory = make_sweep(tmp_path)
    run, mirror = sweep.runs()["b"], Sync(tracking, directory)
    report(run, {20: {"train/loss": 3.0}})
    mirror.update(live=True)
    shutil.rmtree(RunDir.of(run).path)
    begin(run)
    report(run, {5: {"train/loss": 9.0}})
    mirror.update(live=True)
    record = RunDir.of(run).record()
    assert record
    runs = tracking.client.search_runs([tracking.experiment_id], f"tags.`{KEY}` = '{record.key}'")
    assert [each.data.metrics["train/loss"] for each in runs] == [9.0]


def test_one_refused_run_keeps_no_other_back(sqlite: Sqlite, tmp_path: Path, caplog) -> None:
    tracking = open_store(sqlite)
    sweep, directory = make_sweep(tmp_path)
    report(sweep.runs()["b"], {20: {"what? a name": 1.0}})
    mirror = Sync(tracking, directory)
    mirror.update(live=True)
    mirror.update(live=True)
    assert caplog.text.count("metrics of b: ") == 1
    parent = found(tracking, directory)
    assert [run.name for run in children(tracking, parent.run_id) if run.status == "FINISHED"] == ["a"]


def test_a_deleted_run_is_not_made_again_by_the_same_process(sqlite: Sqlite, tmp_path: Path) -> None:
    tracking, run = open_store(sqlite), run_at(tmp_path, "deleted")
    directory = begin(run)
    mirror = Sync(tracking, directory)
    mirror.update(live=True)
    tracking.client.delete_run(found(tracking, directory).run_id)
    report(run, {10: {"train/loss": 1.0}})
    mirror.update(live=True)
    assert newest_of(tracking, directory) is None


@pytest.mark.parametrize("began_ms", [1, None])
def test_an_empty_twin_is_deleted(began_ms: int | None, sqlite: Sqlite, tmp_path: Path) -> None:
    """A request to create a run that seemed lost arrived after all, before or after the next one."""
    tracking, run = open_store(sqlite), run_at(tmp_path, "twins")
    directory = begin(run)
    Sync(tracking, directory).update(live=True)
    first = found(tracking, directory)
    twin = tracking.client.create_run(tracking.experiment_id, began_ms, tags={KEY: first.tags[KEY]})
    Sync(tracking, directory).update(live=True)
    assert tracking.client.get_run(twin.info.run_id).info.lifecycle_stage == "deleted"
    assert found(tracking, directory).run_id == first.run_id


def test_what_a_lost_request_held_is_sent_by_the_next(
    sqlite: Sqlite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def lost(*_: object) -> None:
        raise ConnectionError("away")

    tracking, run = open_store(sqlite), run_at(tmp_path, "lost")
    directory, mirror = begin(run), Sync(tracking, RunDir.of(run).path)
    mirror.update(live=True)
    report(run, {1: {"train/loss": 3.0}})
    with monkeypatch.context() as patch:
        patch.setattr(tracking.client, "log_batch", lost)
        with pytest.raises(ConnectionError):
            mirror.update(live=True)
    report(run, {2: {"train/loss": 2.0}})
    mirror.update(live=True)
    assert found(tracking, directory).history("train/loss") == [(8, 3.0), (16, 2.0)]

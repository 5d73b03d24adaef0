"""MLflow as real stores: one run per directory, nothing twice, nothing infinite, everything in order."""

import json
from dataclasses import replace
from pathlib import Path

import mlflow
import numpy as np
import pytest

from moe.layer import MoEConfig
from moe.presets import PRESETS
from moe.routers import SoftConfig
from orchestrator.codec import flat
from orchestrator.config import DataConfig, RunConfig, TrainConfig
from orchestrator.tracking import EXPERIMENT, Found, TrackedRun, Tracking, track, track_training, writer
from orchestrator.tracking.find import found_run
from orchestrator.tracking.known import KEY, find_known
from tests.orchestrator.tracking.conftest import Open
from tests.orchestrator.tracking.stores import Sqlite, Store

NAN, INF = float("nan"), float("inf")
RUN = RunConfig(
    name="sweep/arm-3",
    model=replace(PRESETS["debug"], moe=MoEConfig(num_experts=4, router=SoftConfig())),
    data=DataConfig(path="/data", batch_size=8),
)


def found(tracking: Tracking, run: TrackedRun) -> Found:
    assert tracking.flush(60) == 0
    return found_run(tracking, run.run_id())


def runs_of(tracking: Tracking, directory: Path) -> list[str]:
    query = f"tags.directory = '{directory}'"
    return [run.info.run_id for run in tracking.client.search_runs([tracking.experiment_id], query)]


def test_a_run_from_its_start_to_its_end(tracking: Tracking, tmp_path: Path) -> None:
    sweep = track(tracking, str(tmp_path), "sweep", tags={"role": "sweep"})
    run = track_training(
        tracking,
        RUN,
        str(tmp_path / "arm"),
        parent=sweep,
        dataset=("s3://bucket/digits", "f" * 64),
        role="trial",
    )
    run.log(1, {"loss": 3.0})
    run.log(5, {"loss": 2.0, "acc": 0.5})
    run.tag(arm="arm-3")
    run.write_text("notes/a.txt", "grüße")
    page = tmp_path / "page.html"
    page.write_text("<p>")
    run.write_file(page)
    page.unlink()
    run.finish("FINISHED")

    one = found(tracking, run)
    assert (one.name, one.status) == ("arm-3", "FINISHED")
    assert one.end_s >= one.start_s
    assert one.params == {name: str(value) for name, value in flat(RUN).items()}
    assert one.config() == RUN
    assert one.metrics == {"loss": 2.0, "acc": 0.5}
    assert (one.history("loss"), one.history("acc")) == ([(8, 3.0), (40, 2.0)], [(40, 0.5)])
    assert (one.read_text("notes/a.txt"), one.read_text("page.html")) == ("grüße", "<p>")
    expected = {"role": "trial", "arm": "arm-3", "mlflow.parentRunId": sweep.run_id()}
    assert expected.items() <= one.tags.items()
    assert one.tags["directory"] == str(tmp_path / "arm")
    (used,) = tracking.client.get_run(one.run_id).inputs.dataset_inputs
    assert (used.dataset.name, used.dataset.digest) == ("digits", "f" * 36)
    assert json.loads(used.dataset.source) == {"uri": "s3://bucket/digits"}
    assert [(tag.key, tag.value) for tag in used.tags] == [("mlflow.data.context", "training")]
    assert tracking.client.get_experiment(tracking.experiment_id).name == EXPERIMENT
    if not tracking.uri.startswith("http"):
        assert one.url is None
    else:
        assert one.url == f"{tracking.uri}/#/experiments/{tracking.experiment_id}/runs/{one.run_id}"


def test_a_directory_has_one_run(reopen: Open, store: Store, tmp_path: Path) -> None:
    """Three processes go on with it: after an end, a failure and a crash."""
    ids, folder = [], tmp_path / "run"
    for i, status in enumerate(("FAILED", None, "FINISHED")):
        tracking = reopen(store)
        run = track(tracking, str(folder), "one", tags={f"process{i}": "yes"})
        ids.append(run.run_id())
        assert found(tracking, run).status == "RUNNING"
        run.log(i, {"loss": float(i)})
        if status == "FAILED":
            run.tag(error="out of memory")
        if status:
            run.finish(status)
        assert found(tracking, run).status == (status or "RUNNING")
    assert set(ids) == {*runs_of(tracking, folder)}
    assert len(set(ids)) == 1
    one = found(tracking, run)
    assert {"process0": "yes", "process1": "yes", "process2": "yes"}.items() <= one.tags.items()
    assert one.history("loss") == [(0, 0.0), (1, 1.0), (2, 2.0)]
    assert "error" not in one.tags  # it did finish in the end


def test_another_store_or_a_deleted_run_means_a_new_one(reopen: Open, sqlite: Sqlite, tmp_path: Path) -> None:
    (tmp_path / "mlflow_run.json").write_text(json.dumps({"uri": "http://other", "key": "0" * 32}))
    tracking = reopen(sqlite)
    first = track(tracking, str(tmp_path), "moved", tags={}).run_id()
    assert track(tracking, str(tmp_path), "moved", tags={}).run_id() == first
    tracking.client.delete_run(first)
    second = track(reopen(sqlite), str(tmp_path), "moved", tags={}).run_id()
    assert second != first
    assert runs_of(tracking, tmp_path) == [second]


def test_an_empty_twin_is_deleted(reopen: Open, sqlite: Sqlite) -> None:
    """A repeated request made the twin, after the run that was written to."""
    tracking = reopen(sqlite)
    client, experiment = tracking.client, tracking.experiment_id
    written, empty = (
        client.create_run(experiment, start_time=start, tags={KEY: "twins"}).info.run_id for start in (1, 2)
    )
    client.log_param(written, "a", 1)
    known = find_known(client, experiment, "twins")
    assert known
    assert known.run_id == written
    assert client.get_run(empty).info.lifecycle_stage == "deleted"


def test_a_replayed_step_is_not_written_twice(reopen: Open, store: Store, tmp_path: Path) -> None:
    """By the same object, and by one that a new process makes; with the outbox of the first or without."""
    tracking = reopen(store)
    run = track(tracking, str(tmp_path), "replay", batch_size=2, tags={})
    run.log(1, {"loss": 3.0})
    run.log(2, {"loss": 2.0})
    run.log(2, {"loss": 99.0})
    for spool in ("outbox", "of another node"):
        tracking = reopen(store, spool=spool)
        run = track(tracking, str(tmp_path), "replay", batch_size=2, tags={})
        run.log(1, {"loss": 99.0})
        run.log(2, {"loss": 99.0, "val": 0.25})
        run.log(2, {"val": 99.0})
    run.log(3, {"loss": 1.0})
    one = found(tracking, run)
    assert one.history("loss") == [(2, 3.0), (4, 2.0), (6, 1.0)]
    assert one.history("val") == [(4, 0.25)]


def test_what_is_not_finite_is_dropped_and_tagged(tracking: Tracking, tmp_path: Path) -> None:
    run = track(tracking, str(tmp_path), "diverging", tags={})
    run.log(1, {"loss": 3.0, "acc": 0.1})
    assert "diverged" not in found(tracking, run).tags
    run.log(2, {"loss": NAN, "norm": INF, "acc": 0.2})
    run.log(3, {"loss": -INF})
    one = found(tracking, run)
    assert one.metrics == {"loss": 3.0, "acc": 0.2}
    assert one.tags["diverged"] == "true"
    assert one.history("loss") == [(1, 3.0)]


def test_params_are_those_of_the_start(reopen: Open, sqlite: Sqlite, tmp_path: Path) -> None:
    """A resumed run may be split another way, but MLflow's params never change."""
    first = track_training(reopen(sqlite), RUN, str(tmp_path))
    first_id = first.run_id()
    tracking = reopen(sqlite)
    again = track_training(tracking, replace(RUN, train=TrainConfig(microbatch=2)), str(tmp_path))
    one = found(tracking, again)
    assert one.run_id == first_id
    assert one.params["train.microbatch"] == "None"
    assert one.config() == RUN
    assert not list((tmp_path / "outbox").rglob("refused.jsonl"))


def test_a_config_may_be_longer_than_a_tag(reopen: Open, sqlite: Sqlite, tmp_path: Path) -> None:
    """20,000 characters; MLflow takes 8,000, and cuts off the rest without a word."""
    run = replace(RUN, data=DataConfig(path=f"/{'very-long/' * 2000}", batch_size=8))
    tracking = reopen(sqlite)
    assert found(tracking, track_training(tracking, run, str(tmp_path))).config() == run


def test_tags_come_and_go(tracking: Tracking, tmp_path: Path) -> None:
    run = track(tracking, str(tmp_path), "tags", tags={"a": "1", "b": "2"})
    run.tag(a="3", c="4")
    run.untag("b", "c", "never there")
    run.tag(c="5")
    tags = found(tracking, run).tags
    assert (tags["a"], tags["c"], "b" in tags) == ("3", "5", False)


@pytest.mark.filterwarnings("ignore")
def test_tables_are_those_of_mlflow(
    tracking: Tracking, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = track(tracking, str(tmp_path), "tables", tags={})
    names = [f"{tmp_path.name}.json", f"{tmp_path.name}-more.json"]
    run.write_table(names[0], {"arm": ["a", "b"], "acc": np.array([0.5, NAN])})
    run.write_table(names[1], {"n": [1]})
    assert tracking.flush(60) == 0
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking.uri)  # its search has no client of its own
    mlflow.set_tracking_uri(None)
    table = tracking.client.load_table(tracking.experiment_id, names[0])
    assert table["arm"].tolist() == ["a", "b"]
    assert table["acc"].fillna(-1).tolist() == [0.5, -1]
    assert len(tracking.client.load_table(tracking.experiment_id, names[1])) == 1


def test_writing_to_a_run_that_somebody_else_made(tracking: Tracking, tmp_path: Path) -> None:
    theirs = tracking.client.create_run(tracking.experiment_id, run_name="theirs").info.run_id
    ours = track(tracking, str(tmp_path), "ours", tags={})
    for one in (found_run(tracking, theirs), found(tracking, ours)):
        run = writer(tracking, one)
        run.tag(pareto="true")
        run.log_at(3, {"hypervolume": 0.5})
        assert run.run_id() == one.run_id
        again = found(tracking, run)
        assert (again.tags["pareto"], again.history("hypervolume")) == ("true", [(3, 0.5)])
        assert again.status == "RUNNING"

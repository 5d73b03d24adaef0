"""Servers without logged models, as MLflow 2 and Azure ML are, and rights that are withdrawn for a while.

A server of MLflow 2.22.4 was tried by hand: it answers 404 with a page to all that it does not know, as here.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow.exceptions import MlflowException
from mlflow.protos import databricks_pb2 as codes

from orchestrator.runs.measurements import write_measurement
from orchestrator.sweeps.publish import publish
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking import base
from orchestrator.tracking.base import Following
from orchestrator.tracking.registry import registered_name
from orchestrator.tracking.store import Tracking, open_tracking
from orchestrator.tracking.sync import Sync
from tests.made_directories import begin, end, end_sweep, report, run_at, sweep_record
from tests.mlflow_reader import children, newest_of
from tests.orchestrator.tracking.conftest import open_store
from tests.orchestrator.tracking.stores import Sqlite

MODELS = (
    *("search_logged_models", "create_logged_model", "finalize_logged_model", "set_logged_model_tags"),
    *("log_model_artifacts", "delete_logged_model_tag"),
)


def refusing(code: int) -> Callable[..., None]:
    def refused(*_: object, **__: object) -> None:
        raise MlflowException("<!doctype html>", code)

    return refused


@pytest.fixture
def old(sqlite: Sqlite, monkeypatch: pytest.MonkeyPatch) -> Tracking:
    tracking = open_store(sqlite)
    for name in MODELS:
        monkeypatch.setattr(tracking.client, name, refusing(codes.ENDPOINT_NOT_FOUND))
    return tracking


def test_all_but_models_arrives(old: Tracking, tmp_path: Path) -> None:
    """Nothing is said to be missing, because a line before the training has said it."""
    arms = {name: {"train.lr": rate} for name, rate in (("a", 0.1), ("b", 0.2))}
    directory = end_sweep(Sweep(base=run_at(tmp_path, "old"), arms=arms), {"a": 0.5, "b": 0.75})
    publish(directory)
    write_measurement(f"{directory}/trials/a", {"eval/x/acc1": 0.25}, files={"pages/x.html": b"<p>"})
    Path(directory, "trials", "b", "bad_images.csv").write_text("name")
    old, said = replace(old, has_models=False), list[str]()
    with Following(Sync(old, directory), said.append):
        pass
    assert said == []
    sweep = newest_of(old, directory)
    assert sweep
    assert sweep.status == "FINISHED"
    assert "<html" in sweep.read_text("frontier.html")
    trials = {run.name: run for run in children(old, sweep.run_id)}
    assert [(trials[name].status, trials[name].metrics["val/acc1"]) for name in "ab"] == [
        ("FINISHED", 0.5),
        ("FINISHED", 0.75),
    ]
    assert len(trials["a"].params) > 50
    assert trials["a"].read_text("pages/x.html") == "<p>"
    assert trials["b"].read_text("bad_images.csv") == "name"
    assert registered_name(old, sweep_record(directory).key) is None


def test_it_is_asked_and_said_at_the_start(
    old: Tracking, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once. A store is asked only if it may be old."""
    assert open_tracking(old.uri, artifacts="").has_models
    client = old.client
    monkeypatch.setattr("orchestrator.tracking.store._client_of", lambda uri: client)
    monkeypatch.setattr("orchestrator.tracking.store._check_server", lambda uri: None)
    assert not open_tracking("http://127.0.0.1:1", artifacts="").has_models
    (line,) = caplog.messages
    assert "MLflow at http://127.0.0.1:1 has no logged models" in line


def test_a_right_that_is_withdrawn_for_a_while(
    sqlite: Sqlite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last update has everything, and nothing is said at the end."""
    tracking, run = open_store(sqlite), run_at(tmp_path, "withdrawn")
    directory, said = begin(run), list[str]()
    monkeypatch.setattr(base, "EVERY_S", 0.05)
    follower = Sync(tracking, directory)
    follower.update(live=True)
    with monkeypatch.context() as patch:
        for name in ("log_batch", "log_inputs", "set_terminated", "create_run", "search_runs"):
            patch.setattr(tracking.client, name, refusing(codes.PERMISSION_DENIED))
        report(run, {1: {"train/loss": 3.0}})
        (line,) = follower.update(live=True)
        assert line.startswith("metrics of withdrawn: ")
        report(run, {2: {"train/loss": 2.0}})
        assert follower.update(live=True) == [line]
    with base.Following(follower, said.append):
        end(run, 3, train__loss=1.0)
    assert said == []
    info = newest_of(tracking, directory)
    assert info
    assert (info.status, info.history("train/loss")) == ("FINISHED", [(8, 3.0), (16, 2.0), (24, 1.0)])

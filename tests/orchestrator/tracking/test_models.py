"""Checkpoints as models whose bytes stay where they are, ranked and named."""

from pathlib import Path

import pytest

from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.tracking import (
    MODEL,
    TrackedRun,
    Tracking,
    checkpoint_of,
    log_checkpoint,
    register,
    track_training,
)
from tests.orchestrator.tracking.conftest import Open
from tests.orchestrator.tracking.stores import Sqlite, Store


def trained(tracking: Tracking, directory: Path, acc: float) -> tuple[TrackedRun, str]:
    """A run with a checkpoint at its last step."""
    run = track_training(tracking, RunConfig(name=directory.name), str(directory))
    run.log(1, {"val/acc1": acc / 2})
    run.log(2, {"val/acc1": acc})
    uri = f"s3://bucket/{directory}/it's/step-2"
    log_checkpoint(run, f"{directory.name}-c0.5", uri, 2, {"val/acc1": acc})
    return run, uri


def test_models_are_ranked(reopen: Open, store: Store, tmp_path: Path) -> None:
    """Each once, also if the next process says it again; the run's own metrics have no second row."""
    accuracies = {"a": 0.5, "b": 0.9, "c": 0.7}
    for _ in range(2):
        tracking = reopen(store)
        runs = {name: trained(tracking, tmp_path / name, acc)[0] for name, acc in accuracies.items()}
        assert tracking.flush(60) == 0
    ids = {run.run_id() for run in runs.values()}
    best_first = {"field_name": "metrics.val/acc1", "ascending": False}
    models = tracking.client.search_logged_models(
        [tracking.experiment_id], "metrics.`val/acc1` > 0.6", order_by=[best_first]
    )
    ours = [model for model in models if model.source_run_id in ids]
    assert [model.name for model in ours] == ["b-c0-5", "c-c0-5"]
    assert ours[0].tags["checkpoint"] == f"s3://bucket/{tmp_path}/b/it's/step-2"
    assert ours[0].params == {"step": "128"}  # images: 2 steps of 64
    assert [(m.key, m.step, m.value) for m in ours[0].metrics] == [("val/acc1", 128, 0.9)]
    rows = tracking.client.get_metric_history(runs["b"].run_id(), "val/acc1")
    assert [(row.step, row.value) for row in rows] == [(64, 0.45), (128, 0.9)]


def test_aliases_move(reopen: Open, store: Store, tmp_path: Path) -> None:
    tracking = reopen(store)
    (one, first), (two, second) = (trained(tracking, tmp_path / name, 0.5) for name in ("a", "b"))
    version = register(tracking, one.run_id(), first, "pareto-knee")
    assert register(tracking, one.run_id(), first, "pareto-best") == version  # not a second version
    other = register(tracking, two.run_id(), second, "pareto-knee")
    assert int(other) == int(version) + 1
    for name, uri, config in (
        ("@pareto-best", first, "a"),
        ("@pareto-knee", second, "b"),
        (f"/{version}", first, "a"),
    ):
        found = checkpoint_of(f"models:/{MODEL}{name}", store.uri)
        assert found == (uri, RunConfig(name=config))


def test_models_that_are_not_there(
    reopen: Open, sqlite: Sqlite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tracking = reopen(sqlite)
    run, _ = trained(tracking, tmp_path / "a", 0.5)
    with pytest.raises(UsageError, match=r"knows no checkpoint /elsewhere of run [0-9a-f]{32}"):
        register(tracking, run.run_id(), "/elsewhere", "pareto-knee")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", sqlite.uri)
    for name in ("nothing@best", "nothing/1", f"{MODEL}@nothing", f"{MODEL}/999"):
        for uri in (sqlite.uri, None):
            with pytest.raises(UsageError, match=f"no model models:/{name} of ours at sqlite:"):
                checkpoint_of(f"models:/{name}", uri)
    with pytest.raises(
        UsageError, match="models:/x names no version: write models:/x@ALIAS or models:/x/VERS"
    ):
        checkpoint_of("models:/x", sqlite.uri)

"""Checkpoints as models whose bytes stay where they are, ranked and named."""

from pathlib import Path

import pytest

from orchestrator.errors import UsageError
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking.registry import checkpoint_of, register
from orchestrator.tracking.store import Tracking
from orchestrator.tracking.sync import Sync
from tests.made_directories import end_sweep, run_at
from tests.mlflow_reader import children, find_sweep
from tests.orchestrator.tracking.conftest import open_store
from tests.orchestrator.tracking.stores import Sqlite


def finished(tracking: Tracking, folder: Path, accuracies: dict[str, float]) -> dict[str, str]:
    """A sweep; trial -> MLflow run."""
    sweep = Sweep(base=run_at(folder, folder.name), arms={arm: {} for arm in accuracies})
    Sync(tracking, end_sweep(sweep, accuracies)).update()
    return {run.name: run.run_id for run in children(tracking, find_sweep(tracking, folder.name).run_id)}


def test_models_are_ranked(tracking: Tracking, tmp_path: Path) -> None:
    runs = finished(tracking, tmp_path, {"a": 0.5, "b-c0.5": 0.9, "c": 0.7})
    best_first = {"field_name": "metrics.val/acc1", "ascending": False}
    models = tracking.client.search_logged_models(
        [tracking.experiment_id], "metrics.`val/acc1` > 0.6", order_by=[best_first]
    )
    ours = [model for model in models if model.source_run_id in runs.values()]
    assert [model.name for model in ours] == ["b-c0-5", "c"]
    assert ours[0].params == {"step": "24"}  # images: 3 steps of 8
    assert ("val/acc1", 24, 0.9) in [(m.key, m.step, m.value) for m in ours[0].metrics]
    rows = tracking.client.get_metric_history(runs["b-c0.5"], "val/acc1")
    assert [(row.step, row.value) for row in rows] == [(24, 0.9)]  # the run's own metric has no second row


def test_aliases_move(tracking: Tracking, tmp_path: Path) -> None:
    runs, name = finished(tracking, tmp_path, {"a": 0.5, "b": 0.6}), f"model of {tmp_path.name}"

    def model(arm: str) -> tuple[str, dict[str, str]]:
        return runs[arm], {"uri": f"/somewhere/{arm}", "weights": arm, "description": f"arm {arm}"}

    sweep = {"key": tmp_path.name, "directory": str(tmp_path)}
    first = register(tracking, name, {"knee": model("a"), "best": model("a")}, **sweep)
    assert first["knee"] == first["best"]
    tracking.client.set_registered_model_alias(name, "made-by-hand", first["knee"])
    second = register(tracking, name, {"knee": model("b"), "best": model("a")}, **sweep)
    assert (second["best"], int(second["knee"])) == (first["best"], int(first["best"]) + 1)
    for alias, arm in (("@best", "a"), ("@knee", "b"), ("@made-by-hand", "a"), ("/1", "a")):
        uri, weights = checkpoint_of(f"models:/{name}{alias}", tracking.uri)
        assert (uri, weights) == (f"/somewhere/{arm}", arm)


def test_models_that_are_not_there(sqlite: Sqlite, tmp_path: Path) -> None:
    tracking = open_store(sqlite)
    unknown = {"uri": "/elsewhere", "weights": "x", "description": ""}
    (run_id,) = finished(tracking, tmp_path, {"a": 0.5}).values()
    assert register(tracking, "empty", {"knee": (run_id, unknown)}, key="x", directory="/x") == {}
    for name in ("nothing@best", "nothing/1", "empty@knee", "empty/999"):
        with pytest.raises(UsageError, match=f"no model models:/{name} at sqlite:"):
            checkpoint_of(f"models:/{name}", sqlite.uri)
    with pytest.raises(
        UsageError, match="models:/x names no version: write models:/x@ALIAS or models:/x/VERS"
    ):
        checkpoint_of("models:/x", sqlite.uri)

"""Checkpoints whose metrics the run has, or not, at their step or past it."""

from pathlib import Path

from orchestrator.config import RunConfig
from orchestrator.tracking import log_checkpoint, track_training
from tests.orchestrator.tracking.conftest import Open
from tests.orchestrator.tracking.stores import Sqlite


def test_a_model_gets_the_rows_of_its_step(reopen: Open, sqlite: Sqlite, tmp_path: Path) -> None:
    """Of a checkpoint at step 2, 128 images: `newest` has its last row there, `older` goes on to 192, `early`
    ended at 64, and `unknown` was never logged. What the run has gets no second row.
    """
    tracking = reopen(sqlite)
    run = track_training(tracking, RunConfig(name="steps"), str(tmp_path / "steps"))
    run.log(1, {"early": 1.0})
    run.log(2, {"newest": 2.0, "older": 2.0})
    run.log(3, {"older": 3.0})
    names = ("newest", "older", "early", "unknown")
    log_checkpoint(run, "steps", "s3://bucket/steps/step-2", 2, dict.fromkeys(names, 2.0))
    assert tracking.flush(60) == 0
    found = tracking.client.search_logged_models([tracking.experiment_id], "name = 'steps'")
    assert {(m.key, m.step, m.value) for m in found[0].metrics} == {(name, 128, 2.0) for name in names}
    history = {
        name: [(row.step, row.value) for row in tracking.client.get_metric_history(run.run_id(), name)]
        for name in names
    }
    assert history == {
        "newest": [(128, 2.0)],
        "older": [(128, 2.0), (192, 3.0)],
        "early": [(64, 1.0), (128, 2.0)],
        "unknown": [(128, 2.0)],
    }

"""A real sweep on a real Ray: outcomes, what MLflow holds, and the same command again."""

from pathlib import Path

import pytest
from mlflow import MlflowClient

from orchestrator.codec import flat, override
from orchestrator.config import RunConfig, UsageError
from orchestrator.frontier.points import on_front
from orchestrator.sweeping.confirm import knees
from orchestrator.sweeping.report import publish
from orchestrator.sweeping.sweep import (
    Outcomes,
    Sweep,
    check_sweep,
    claim_sweep,
    keep_weights_only,
    run_sweep,
)
from orchestrator.tracking import Tracking, open_tracking, track
from orchestrator.training.checkpoint.weights import newest
from orchestrator.training.worker import Result, checkpoint_directory, run_directory

pytestmark = pytest.mark.usefixtures("cluster")

ARMS = {
    "dense": {},
    "soft": {"model.moe.router.kind": "soft", "model.moe.num_experts": 2},
    "broken": {"model.moe.router.kind": "expert_choice", "model.moe.num_experts": 2},
}


@pytest.fixture
def sweep(digits: str, tmp_path: Path) -> Sweep:
    changes = {"name": "tiny", "data.path": digits, "storage": str(tmp_path / "home"), "train.steps": 10}
    return Sweep(base=override(RunConfig(), changes), arms=ARMS)


def swept(sweep: Sweep, tracking: Tracking) -> Outcomes:
    claim_sweep(sweep, "auto")
    tags = {"role": "sweep", "objective.quality": sweep.quality, "objective.cost": sweep.cost}
    parent = track(tracking, run_directory(sweep.base), sweep.base.name, tags=tags)
    outcomes = run_sweep(sweep, tracking, parent, max_concurrent=None, progress=lambda arm, outcomes: None)
    parent.finish("FINISHED")
    return outcomes


def test_a_failing_trial_is_named_and_mended_by_the_same_command(sweep, tmp_path):
    tracking = open_tracking(f"sqlite:///{tmp_path}/mlflow.db", artifacts=str(tmp_path / "artifacts"))
    client = MlflowClient(tracking.uri)

    in_the_way = Path(sweep.base.storage) / "tiny/trials/broken/checkpoints"  # a file where a folder must be
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    outcomes = swept(sweep, tracking)
    assert "Not a directory" in str(outcomes.pop("broken"))
    assert all(isinstance(outcome, Result) for outcome in outcomes.values())
    runs = {run.info.run_name: run for run in client.search_runs([tracking.experiment_id])}
    assert {name: run.info.status for name, run in runs.items()} == {
        "tiny": "FINISHED",
        "dense": "FINISHED",
        "soft": "FINISHED",
        "broken": "FAILED",
    }
    assert "Not a directory" in runs["broken"].data.tags["error"]
    frontier = publish(tracking, "tiny", str(tmp_path / "report"))
    assert {p.arm: p.status for p in frontier.points} == {
        "dense": "finished",
        "soft": "finished",
        "broken": "failed",
    }

    in_the_way.unlink()
    outcomes = swept(sweep, tracking)
    assert all(isinstance(outcome, Result) for outcome in outcomes.values())
    again = {run.info.run_name: run for run in client.search_runs([tracking.experiment_id])}
    assert {n: r.info.run_id for n, r in again.items()} == {n: r.info.run_id for n, r in runs.items()}
    assert {run.info.status for run in again.values()} == {"FINISHED"}

    frontier = publish(tracking, "tiny", str(tmp_path / "report"))
    marked = {
        n for n, run in again.items() if client.get_run(run.info.run_id).data.tags.get("pareto") == "true"
    }
    assert marked == {p.arm for p, front in zip(frontier.points, on_front(frontier), strict=True) if front}
    assert marked
    assert [p.arm for p in knees(frontier, 1)] != ["dense"]
    parent = again["tiny"].info.run_id
    assert {a.path for a in client.list_artifacts(parent)} == {"frontier.html", "frontier.png"}
    assert (tmp_path / "report" / "frontier.html").stat().st_size > 10_000

    on = {p.arm for p, front in zip(frontier.points, on_front(frontier), strict=True) if front}
    before = {arm: newest(checkpoint_directory(run))[1] for arm, run in sweep.runs().items()}
    freed = keep_weights_only(sweep, frontier)
    after = {arm: newest(checkpoint_directory(run))[1] for arm, run in sweep.runs().items()}
    assert {arm for arm, manifest in after.items() if manifest.has_optimizer()} == on
    assert (freed > 0) == (on != set(sweep.arms))
    assert all(before[arm].step == after[arm].step for arm in sweep.arms)

    for run in again.values():
        for name in run.data.metrics:
            steps = [metric.step for metric in client.get_metric_history(run.info.run_id, name)]
            assert len(steps) == len(set(steps)), (run.info.run_name, name)
    soft = again["soft"]
    assert soft.data.params == {k: str(v) for k, v in flat(sweep.runs()["soft"]).items()}
    assert len(soft.data.metrics) <= 60


def test_a_changed_sweep_is_refused_and_so_is_a_bad_arm(sweep):
    claim_sweep(sweep, "auto")
    changed = Sweep(base=override(sweep.base, {"train.lr": 1.0}), arms=ARMS)
    with pytest.raises(UsageError, match=r"train\.lr: 0\.001 -> 1\.0"):
        claim_sweep(changed, "auto")
    bad = Sweep(base=sweep.base, arms={"worse": {"model.moe.num_experts": 1}})
    with pytest.raises(UsageError, match=r"arm worse: .*num_experts must be at least 2, got 1"):
        check_sweep(bad)

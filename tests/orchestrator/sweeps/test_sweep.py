"""A real sweep on a real Ray: outcomes, what MLflow holds, and the same command again."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import ray
from mlflow import MlflowClient

from jobs.show import ended_line
from orchestrator.checkpoint.find import newest
from orchestrator.codec import flat, override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.evaluation.models import load_model
from orchestrator.frontier.points import on_front
from orchestrator.sweeps.agenda import Outcome
from orchestrator.sweeps.branches import Trunk
from orchestrator.sweeps.catalog.scales import SCALES
from orchestrator.sweeps.catalog.space import families_space
from orchestrator.sweeps.check import check_fits, check_sweep, claim_sweep
from orchestrator.sweeps.log import TrialLog
from orchestrator.sweeps.models import register_frontier
from orchestrator.sweeps.prices import Budget
from orchestrator.sweeps.purse import Purse
from orchestrator.sweeps.report import publish
from orchestrator.sweeps.run import Options, SweepRun, keep_weights_only
from orchestrator.sweeps.search import OptunaSearch
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking import Tracking, children, find_sweep, open_tracking, track
from orchestrator.training.cluster import most_resources
from orchestrator.training.worker import Result, checkpoint_directory, run_directory
from tests.orchestrator.sweeps.watch import Unwatched
from tests.parts import start_ray

pytestmark = pytest.mark.usefixtures("cluster")

ARMS = {
    "dense": {},
    "soft": {"model.moe.router.kind": "soft", "model.moe.num_experts": 2},
    "broken": {"model.moe.router.kind": "expert_choice", "model.moe.num_experts": 2},
}
FILES = {"frontier.html", "frontier.png", "frontier.svg", "frontier.json"}


@pytest.fixture
def sweep(digits: str, tmp_path: Path) -> Sweep:
    changes = {"name": "tiny", "data.path": digits, "storage": str(tmp_path / "home"), "train.steps": 10}
    return Sweep(base=override(RunConfig(), changes), arms=ARMS)


@pytest.fixture
def tracking(empty_store: Callable[[Path], str], tmp_path: Path) -> Iterator[Tracking]:
    folder = str(tmp_path / "artifacts")
    with open_tracking(empty_store(tmp_path), artifacts=folder, spool=str(tmp_path / "spool")) as store:
        yield store


def swept(
    sweep: Sweep,
    tracking: Tracking,
    options: Options | None = None,
    ended: Callable[[str, Outcome], None] = lambda name, outcome: None,
) -> dict[str, Outcome]:
    claim_sweep(sweep, "auto")
    tags = {"role": "sweep", "objective.quality": sweep.quality, "objective.cost": sweep.cost}
    parent = track(tracking, run_directory(sweep.base), sweep.base.name, tags=tags)
    purse = Purse(Budget(), run_directory(sweep.base))
    run = SweepRun(sweep, TrialLog(sweep, tracking, parent), purse, options or Options(at_once=1))
    run.recover()
    run.work(Unwatched(ended))
    parent.finish("FINISHED")
    tracking.flush(timeout_s=None)
    return run.outcomes()


def test_a_failing_trial_is_named_and_mended_by_the_same_command(sweep, tracking, tmp_path):
    sweep = replace(sweep, arms={arm: ARMS[arm] for arm in ("soft", "broken")})
    client = MlflowClient(tracking.uri)
    in_the_way = Path(sweep.base.storage) / "tiny/trials/broken/checkpoints"  # a file where a folder must be
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    outcomes = swept(sweep, tracking)
    assert "Not a directory" in str(outcomes.pop("broken"))
    assert all(isinstance(outcome, Result) for outcome in outcomes.values())
    assert "Traceback" in (in_the_way.parent / "error.txt").read_text()
    runs = {run.info.run_name: run for run in client.search_runs([tracking.experiment_id])}
    assert {name: run.info.status for name, run in runs.items()} == {
        "tiny": "FINISHED",
        "soft": "FINISHED",
        "broken": "FAILED",
    }
    assert "Not a directory" in runs["broken"].data.tags["error"]
    frontier = publish(tracking, "tiny", str(tmp_path / "report"))
    assert {p.arm: p.status for p in frontier.points} == {
        "soft": "finished",
        "broken": "failed",
    }

    in_the_way.unlink()
    outcomes = swept(sweep, tracking)
    assert all(isinstance(outcome, Result) for outcome in outcomes.values())
    again = {run.info.run_name: run for run in client.search_runs([tracking.experiment_id])}
    assert {n: r.info.run_id for n, r in again.items()} == {n: r.info.run_id for n, r in runs.items()}
    assert {run.info.status for run in again.values()} == {"FINISHED"}
    assert "error" not in again["broken"].data.tags

    frontier = publish(tracking, "tiny", str(tmp_path / "report"))
    found = [client.get_run(run.info.run_id) for run in again.values()]
    marked = {run.info.run_name for run in found if run.data.tags.get("pareto") == "true"}
    on = {p.arm for p, front in zip(frontier.points, on_front(frontier), strict=True) if front}
    assert marked == on
    assert on
    parent = again["tiny"].info.run_id
    assert {a.path for a in client.list_artifacts(parent)} == FILES
    assert (tmp_path / "report" / "frontier.html").stat().st_size > 10_000

    versions = register_frontier(tracking, frontier)
    assert set(versions) == {"pareto-fast", "pareto-knee", "pareto-best"}
    model = load_model("models:/moe-frontier@pareto-best", tracking_uri=tracking.uri)
    assert not model.training

    before = {arm: newest(checkpoint_directory(run))[1] for arm, run in sweep.runs().items()}
    freed = keep_weights_only(sweep.trials().values(), frontier)
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
    (dataset,) = client.get_run(soft.info.run_id).inputs.dataset_inputs
    assert sweep.base.data.path in dataset.dataset.source


class PauseAll:
    """A policy that trains every trial to its fifth step, and `best` alone to the end."""

    def __init__(self, best: str) -> None:
        self.best = best

    def jobs(self, standings):
        from orchestrator.sweeps.agenda import Job

        for one in standings:
            if one.waiting and not one.reached:
                yield Job(trial=one.trial, until=5)
            elif one.waiting and one.trial.name == self.best:
                yield Job(trial=one.trial, until=one.steps)


@pytest.mark.smoke
def test_stopped_trials_are_no_points_and_go_on_when_they_may(sweep, tracking):
    outcomes = swept(sweep, tracking, Options(policy=PauseAll("soft"), at_once=1))
    assert list(outcomes) == ["soft"]
    runs = {run.name: run for run in children(tracking, find_sweep(tracking, "tiny").run_id)}
    assert {name: run.status for name, run in runs.items()} == {
        "dense": "KILLED",
        "soft": "FINISHED",
        "broken": "KILLED",
    }
    assert runs["dense"].tags["stopped"] == "5"
    frontier = publish(tracking, "tiny", f"{sweep.base.storage}/report")
    assert {p.arm: p.status for p in frontier.points} == {
        "dense": "stopped",
        "soft": "finished",
        "broken": "stopped",
    }
    outcomes = swept(sweep, tracking)  # now to the end, from step 5
    assert {name: outcome.status for name, outcome in outcomes.items()} == dict.fromkeys(ARMS, "finished")
    after = {run.name: run for run in children(tracking, find_sweep(tracking, "tiny").run_id)}
    assert {name: run.run_id for name, run in after.items()} == {n: run.run_id for n, run in runs.items()}
    assert {run.status for run in after.values()} == {"FINISHED"}
    assert "stopped" not in after["dense"].tags
    assert after["dense"].metrics["resumed/step"] == 5


@pytest.mark.smoke
def test_branches_follow_their_trunk_and_are_charged_as_asked(sweep, tracking):
    sweep = replace(
        sweep,
        arms={"dense": {}},
        trunk=Trunk(at=(4, 8), cooldown=2),
        cost="cost/marginal_train_flops_6mac",
    )
    lines: list[str] = []
    outcomes = swept(sweep, tracking, ended=lambda name, end: lines.append(ended_line(sweep, end)))
    assert list(outcomes) == ["dense-trunk", "dense-at4", "dense-at8"]
    assert all(isinstance(outcome, Result) for outcome in outcomes.values()), outcomes
    assert len(lines) == 3
    frontier = publish(tracking, "tiny", f"{sweep.base.storage}/report")
    assert [p.arm for p in frontier.points] == ["dense-at4", "dense-at8"]
    assert len({p.cost for p in frontier.points}) == 1  # two steps each


@pytest.mark.slow  # two sweeps
def test_interrupted_it_leaves_nothing_running_and_the_same_command_goes_on(sweep, tracking):
    def interrupt(name: str, outcome: Outcome) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        swept(sweep, tracking, Options(at_once=2), interrupt)
    tracking.flush(timeout_s=None)
    found = children(tracking, find_sweep(tracking, "tiny").run_id)
    assert "RUNNING" not in {run.status for run in found}
    ray.shutdown()  # as it goes with its driver, and the trials with it
    start_ray()
    assert len(swept(sweep, tracking)) == 3
    again = children(tracking, find_sweep(tracking, "tiny").run_id)
    assert {run.status for run in again} == {"FINISHED"}
    assert {run.run_id for run in found} <= {run.run_id for run in again}


@pytest.mark.slow  # two sweeps
def test_a_search_draws_arms_and_goes_on_where_it_was(sweep, tracking):
    space = families_space(SCALES["tiny"])
    sweep = replace(sweep, arms={}, space=space)

    def search(count: int) -> Options:
        return Options(search=OptunaSearch(space, base=sweep.base, count=count, sampler="random", seed=0))

    first = swept(sweep, tracking, search(2))
    assert list(first) == ["random-0001", "random-0002"]
    more = swept(sweep, tracking, search(3))
    assert list(more) == ["random-0001", "random-0002", "random-0003"]
    assert all(isinstance(outcome, Result) for outcome in more.values()), more
    assert {name: more[name] for name in first} == first


def test_without_an_autoscaler_the_most_is_what_is_up():
    """By a private function of Ray's, which would raise here if it moved."""
    assert most_resources()["CPU"] == ray.cluster_resources()["CPU"] == 2


def test_a_changed_sweep_is_refused_and_so_is_a_bad_arm(sweep):
    claim_sweep(sweep, "auto")
    Path(run_directory(sweep.base), "spent.json").write_text("{}")  # something has been trained
    changed = replace(sweep, base=override(sweep.base, {"train.lr": 1.0}))
    with pytest.raises(UsageError, match=r"train\.lr: 0\.001 -> 1\.0"):
        claim_sweep(changed, "auto")
    with pytest.raises(UsageError, match=r"seeds: \[\] -> \[0, 1\]"):
        claim_sweep(replace(sweep, seeds=(0, 1)), "auto")
    bad = replace(sweep, arms={"worse": {"model.moe.num_experts": 1}})
    with pytest.raises(UsageError, match=r"arm worse: .*num_experts must be at least 2, got 1"):
        check_sweep(bad)
    with pytest.raises(UsageError, match=r"names \['colour'\]; the arms have"):
        check_sweep(replace(sweep, claims=("colour=red beats family=dense",)))
    wide = replace(sweep, arms={"wide": {"scale.workers": 4, "model.moe": None}})
    with pytest.raises(UsageError, match=r"arm wide: 4 workers x 0\.5 CPU \+ 1 CPU for data = 3 CPUs"):
        check_fits(wide)

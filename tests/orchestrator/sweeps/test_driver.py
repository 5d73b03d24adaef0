"""Real sweeps, most on a real Ray, through the public API: outcomes, MLflow, the same call again."""

import socket
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import ray
import torch
from mlflow import MlflowClient

from moe import MoEConfig, SoftConfig
from orchestrator.checkpoint.manifest import newest
from orchestrator.codec import flat, override
from orchestrator.config import RunConfig, TrainConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.evaluation.models import load_model
from orchestrator.frontier.frontier import Frontier
from orchestrator.planning.preflight import check_sweep, unfit
from orchestrator.runs.measurements import measurements, write_measurement
from orchestrator.runs.run_directory import Result, RunDir
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.sweeps import driver
from orchestrator.sweeps.arms import families_space
from orchestrator.sweeps.budget import Budget, BudgetTracker
from orchestrator.sweeps.driver import SweepOptions, acquire_sweep_dir, run_sweep
from orchestrator.sweeps.progress import ended_line
from orchestrator.sweeps.queue import Job, Outcome, Policy, RunToCompletion
from orchestrator.sweeps.run import SweepRun, Watch
from orchestrator.sweeps.scales import TINY
from orchestrator.sweeps.search import SearchOptions
from orchestrator.sweeps.sweep import Sweep, Trunk
from orchestrator.tracking.store import Tracking, open_tracking
from orchestrator.training.cluster import connect
from orchestrator.training.fit import fit
from orchestrator.training.train import train
from tests.made_directories import end_sweep, run_at
from tests.mlflow_reader import children, newest_of

pytestmark = pytest.mark.usefixtures("cluster")

ARMS = {
    "dense": {},
    "soft": {"model.moe.router.kind": "soft", "model.moe.num_experts": 2},
    "broken": {"model.moe.router.kind": "expert_choice", "model.moe.num_experts": 2},
}
FILES = {"frontier.html", "frontier.png", "frontier.svg", "frontier.json"}


class Outcomes(Watch):
    """Keeps how trials ended, and may act when one does."""

    def __init__(self, ended: Callable[[str], None] = lambda name: None) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self.run: SweepRun | None = None
        self._ended = ended

    def start(self, run: SweepRun) -> None:
        self.run = run

    def ended(self, name: str, outcome: Outcome) -> None:
        self.outcomes[name] = outcome
        self._ended(name)


@pytest.fixture
def sweep(digits: str, tmp_path: Path) -> Sweep:
    changes = {"name": "tiny", "data.path": digits, "storage": str(tmp_path / "home"), "train.steps": 10}
    return Sweep(base=override(RunConfig(), changes), arms=ARMS)


@pytest.fixture
def tracking(empty_store: Callable[[Path], str], tmp_path: Path) -> Tracking:
    return open_tracking(empty_store(tmp_path), artifacts=str(tmp_path / "artifacts"))


def swept(
    sweep: Sweep, tracking: Tracking, options: SweepOptions | None = None, watch: Outcomes | None = None
) -> tuple[Frontier, dict[str, Outcome]]:
    watch = watch or Outcomes()
    frontier = run_sweep(
        sweep, replace(options or SweepOptions(), max_concurrent=1), progress=watch, store=tracking
    )
    return frontier, watch.outcomes


def train_here(sweep: Sweep) -> None:
    """Leaves the directories of a sweep whose trials are complete, without a process for them."""
    acquire_sweep_dir(sweep, resume=False, labels={})
    for run in sweep.runs().values():
        fit(run)


def shown(tracking: Tracking, sweep: Sweep) -> dict[str, str]:
    """trial -> its status in MLflow."""
    parent = newest_of(tracking, RunDir.of(sweep.base).path)
    assert parent is not None
    return {run.name: run.status for run in children(tracking, parent.run_id)}


@pytest.mark.smoke
def test_a_failing_trial_is_named_and_mended_by_the_same_call(sweep, tracking):
    sweep = replace(sweep, arms={arm: ARMS[arm] for arm in ("soft", "broken")})
    client, folder = MlflowClient(tracking.uri), Path(RunDir.of(sweep.base).path)
    in_the_way = folder / "trials/broken/checkpoints"  # a file where a folder must be
    in_the_way.parent.mkdir(parents=True)
    in_the_way.touch()
    frontier, outcomes = swept(sweep, tracking)
    assert "Not a directory" in str(outcomes.pop("broken"))
    assert all(isinstance(outcome, Result) for outcome in outcomes.values())
    assert "Traceback" in (in_the_way.parent / "error.txt").read_text()
    runs = {run.info.run_name: run for run in client.search_runs([tracking.experiment_id])}
    assert {name: run.info.status for name, run in runs.items()} == {
        "tiny": "FAILED",
        "soft": "FINISHED",
        "broken": "FAILED",
    }
    assert "Not a directory" in runs["broken"].data.tags["error"]
    assert {p.arm: p.status for p in frontier.points} == {"soft": "finished", "broken": "failed"}

    in_the_way.unlink()
    watch = Outcomes()
    frontier, outcomes = swept(sweep, tracking, watch=watch)
    assert list(outcomes) == ["broken"]
    assert watch.run
    stands = watch.run.snapshot()
    assert (stands.complete, stands.front) == (2, len(frontier.front))
    assert stands.hypervolume == pytest.approx(frontier.hypervolume)
    again = {run.info.run_name: run for run in client.search_runs([tracking.experiment_id])}
    assert {n: r.info.run_id for n, r in again.items()} == {n: r.info.run_id for n, r in runs.items()}
    assert {run.info.status for run in again.values()} == {"FINISHED"}
    assert "error" not in again["broken"].data.tags

    marked = {run.info.run_name for run in again.values() if run.data.tags.get("pareto") == "true"}
    on = {p.arm for p in frontier.front}
    assert marked == on
    assert on
    assert {a.path for a in client.list_artifacts(again["tiny"].info.run_id)} == FILES
    assert (folder / "frontier.html").stat().st_size > 10_000

    aliases = dict(client.get_registered_model("tiny").aliases)
    assert set(aliases) == {"pareto-fast", "pareto-knee", "pareto-best"}
    assert not load_model("models:/tiny@pareto-best", tracking_uri=tracking.uri).training
    manifests = {arm: newest(RunDir.of(run).checkpoints)[1] for arm, run in sweep.runs().items()}
    assert {arm for arm, manifest in manifests.items() if manifest.has_optimizer()} == on

    for run in again.values():
        for name in run.data.metrics:
            steps = [metric.step for metric in client.get_metric_history(run.info.run_id, name)]
            assert len(steps) == len(set(steps)), (run.info.run_name, name)
    soft = again["soft"]
    flat_config = {name: str(value) for name, value in flat(sweep.runs()["soft"]).items()}
    assert flat_config.items() <= soft.data.params.items()
    assert len(soft.data.metrics) <= 60
    (dataset,) = client.get_run(soft.info.run_id).inputs.dataset_inputs
    assert sweep.base.data.path in dataset.dataset.source


@pytest.mark.smoke
@pytest.mark.usefixtures("no_pictures", "trials_here")
def test_fresh_weights_never_take_the_name_of_others(sweep, tracking, tmp_path, capsys):
    """Two storages share one MLflow store: sweeps of one name each get the frontier of their own arms. After
    --fresh the first version still loads its own weights, from where they were moved to.
    """
    sweep = replace(sweep, arms={"dense": {}})
    theirs = replace(
        sweep, base=override(sweep.base, {"storage": str(tmp_path / "theirs")}), arms={"theirs": {}}
    )
    for each in (sweep, theirs):
        train_here(each)
        swept(each, tracking)
    frontier, outcomes = swept(sweep, tracking)
    assert outcomes == {}
    assert [p.arm for p in frontier.points] == ["dense"]

    first = load_model("models:/tiny/1", tracking_uri=tracking.uri).state_dict()
    other = replace(sweep, base=override(sweep.base, {"train.seed": 5}))
    capsys.readouterr()
    run_sweep(other, SweepOptions(mode="fresh"), progress=False, store=tracking)
    assert capsys.readouterr().out == ""
    again = load_model("models:/tiny/1", tracking_uri=tracking.uri).state_dict()
    assert all(first[name].equal(again[name]) for name in first)
    newer = load_model("models:/tiny@pareto-best", tracking_uri=tracking.uri).state_dict()
    assert any(not first[name].equal(newer[name]) for name in first)
    weights = Path(f"{RunDir.of(sweep.base).path}.old-1/trials/dense/checkpoints")
    weights.rename(weights.with_name("gone"))
    Path(RunDir.of(sweep.base).path, "trials/dense/checkpoints").rename(weights)
    with pytest.raises(UsageError, match="holds other weights than were registered"):
        load_model("models:/tiny/1", tracking_uri=tracking.uri)


def test_more_arms_and_seeds_may_come_but_none_may_change(sweep):
    """What was trained stays true; the record of the sweep grows."""
    sweep = replace(sweep, seeds=(0,))
    acquire_sweep_dir(sweep, resume=False, labels={})
    more = replace(sweep, arms={**ARMS, "plain": {}, "wide": {"model.width": 32}}, seeds=(0, 1))
    acquire_sweep_dir(more, resume=True, labels={})
    record = SweepDir.of(sweep.base).record()
    assert record is not None
    assert (list(record.arms), record.seeds, len(record.trials)) == ([*ARMS, "plain", "wide"], [0, 1], 10)
    assert record.val_images == open_manifest(sweep.base.data.path).rows("val")
    for changed, what in (
        (replace(more, base=override(more.base, {"train.lr": 1.0})), r"train\.lr: 0\.001 -> 1\.0"),
        (replace(more, seeds=(1, 2)), r"seeds: \[0, 1\] -> \[1, 2\]"),
        (replace(more, seeds=()), r"seeds: \[0, 1\] -> \[\]"),
        (replace(more, arms=ARMS), r"arms.plain: \{\} -> None"),
        (replace(more, arms={**more.arms, "wide": {"model.width": 64}}), r"arms.wide: .* -> .*64"),
        (replace(more, cost="cost/device_s"), "cost: 'cost/train_flops_6mac' -> 'cost/device_s'"),
    ):
        with pytest.raises(UsageError, match=what):
            acquire_sweep_dir(changed, resume=False, labels={})


def test_a_bad_sweep_is_refused_before_anything_is_trained(sweep):
    bad = replace(sweep, arms={"worse": {"model.moe.num_experts": 0}})
    with pytest.raises(UsageError, match=r"arm worse: .*num_experts must be at least 1, got 0"):
        check_sweep(bad)
    with pytest.raises(UsageError, match=r"names \['colour'\]; the arms have"):
        check_sweep(replace(sweep, claims=("colour=red beats family=dense",)))
    wide = replace(sweep, arms={"wide": {"scale.workers": 4, "model.moe": None}})
    assert unfit(wide)["wide"].startswith("4 workers x 0.5 CPU + 1 CPU for data = 3 CPUs")


def test_one_run_by_itself(sweep, tracking, capsys):
    run = override(sweep.base, {"name": "one"})
    reported = []
    result = train(run, progress=lambda step, metrics: reported.append(step), store=tracking)
    assert (result.status, reported) == ("finished", [10])
    info = newest_of(tracking, RunDir.of(run).path)
    assert info is not None
    assert (info.status, info.metrics["val/acc1"]) == ("FINISHED", result.metrics["val/acc1"])
    assert train(run, store=tracking) == result == RunDir.of(run).result()
    assert capsys.readouterr().out == ""
    train(override(run, {"name": "silent"}), progress=False, store=tracking)
    assert capsys.readouterr().out == ""
    train(override(run, {"name": "shown"}), store=tracking)
    assert capsys.readouterr().out.startswith("step 10/10  train/loss ")
    with pytest.raises(UsageError, match="one belongs to a run, and this is a sweep"):
        run_sweep(Sweep(base=run, arms={"a": {}}), SweepOptions(mode="fresh"), store=tracking)


@pytest.mark.smoke
def test_a_notebook_needs_no_data_and_no_mlflow(tracking, tmp_path, capsys, monkeypatch):
    """The digits below the storage, arms as configs, progress, models of the frontier. The same call
    continues.
    """
    base = RunConfig(name="demo", storage=str(tmp_path / "home"), train=TrainConfig(steps=10))
    sweep = Sweep(base=base, arms={"dense": {}, "soft": MoEConfig(num_experts=2, router=SoftConfig())})
    # In a notebook Tune would choose a reporter that erases what is shown.
    monkeypatch.setattr("ray.tune.tune._detect_reporter", None)
    frontier = run_sweep(sweep, SweepOptions(max_concurrent=1), store=tracking)
    said = capsys.readouterr().out
    assert "[ 1/2] dense              val/acc1 0." in said
    assert "[ 2/2] soft               val/acc1 0." in said
    record = SweepDir.of(base).record()
    assert record is not None
    assert record.base["data"]["path"] == f"{tmp_path}/home/data/digits"
    assert record.arms == {"dense": {}, "soft": {"model.moe.num_experts": 2, "model.moe.router.kind": "soft"}}
    again, outcomes = swept(sweep, tracking)
    assert outcomes == {}
    by_name = load_model("demo@knee", root=base.storage)
    for model in (frontier.knee.load(), again[frontier.knee.arm].load(), by_name):
        assert torch.equal(model.head.weight, by_name.head.weight)
    alone = fit(override(base, {"name": "alone", "data.path": record.base["data"]["path"]}))
    assert torch.equal(alone.load().head.weight, frontier["dense"].load().head.weight)


@pytest.mark.usefixtures("no_pictures")
@pytest.mark.parametrize(("left", "retrained"), [(0, ["b"]), (1, [])])
def test_arms_are_retrained_once_no_trial_is_left(left, retrained, tmp_path, monkeypatch):
    sweep = Sweep(base=run_at(tmp_path, "s"), arms={"a": {}, "b": {}})
    end_sweep(sweep, {"a": 0.8, "b": 0.9})
    states = {t.name: SimpleNamespace(trial=t, outcome="ended", reached={}) for t in sweep.trials().values()}
    found, queue = [], SimpleNamespace(states=states)
    run = SimpleNamespace(sweep=sweep, trials_left=lambda: left, queue=queue, retrain=found.append)
    monkeypatch.setattr(driver, "trained_trials", lambda *_, **options: nullcontext(run))
    run_sweep(sweep, SweepOptions(retrain=1))
    assert found == retrained


class Said(Watch):
    """Keeps the lines for the user."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def say(self, line: str) -> None:
        self.lines.append(line)


def test_the_knee_is_trained_again_only_within_the_budget(sweep):
    said, spent = Said(), BudgetTracker(Budget(hours=1), RunDir.of(sweep.base).path)
    spent.spent_s = 3601
    SweepRun(sweep, spent, RunToCompletion(), watch=said).retrain("dense")
    assert said.lines == ["dense is not trained again: the budget does not hold it"]


@dataclass(frozen=True, kw_only=True)
class PauseAll(Policy):
    """Trains every trial to its fifth step, and `best` alone to the end."""

    kind: Literal["pause_all"] = "pause_all"
    best: str = ""

    def jobs(self, states):
        for state in states:
            if state.waiting and not state.reached:
                yield Job(state=state, until=5)
            elif state.waiting and state.name == self.best:
                yield Job(state=state, until=state.steps)


@pytest.mark.smoke
@pytest.mark.usefixtures("no_pictures", "trials_here")
def test_stopped_trials_are_no_points_and_go_on_when_they_may(sweep, tracking):
    """One of them was paused before; the other pauses and goes on in the same sweep."""
    sweep = replace(sweep, arms={arm: ARMS[arm] for arm in ("dense", "soft")})
    acquire_sweep_dir(sweep, resume=False, labels={})
    fit(sweep.runs()["dense"], until=5)
    frontier, outcomes = swept(sweep, tracking, SweepOptions(policy=PauseAll(best="soft")))
    assert outcomes["soft"].status == "finished"
    assert shown(tracking, sweep) == {"dense": "KILLED", "soft": "FINISHED"}
    assert {p.arm: p.status for p in frontier.points} == {"dense": "stopped", "soft": "finished"}
    frontier, outcomes = swept(sweep, tracking)  # now to the end, from step 5
    assert {p.status for p in frontier.points} == {"finished"}
    assert set(shown(tracking, sweep).values()) == {"FINISHED"}
    assert outcomes["dense"].metrics["resumed/step"] == 5


@pytest.mark.smoke
@pytest.mark.usefixtures("no_pictures", "trials_here")
def test_branches_follow_their_trunk_and_are_charged_as_asked(sweep, tracking):
    sweep = replace(
        sweep, arms={"dense": {}}, trunk=Trunk(at=(4, 8), cooldown=2), cost="cost/marginal_train_flops_6mac"
    )
    frontier, outcomes = swept(sweep, tracking)
    assert list(outcomes) == ["dense-trunk", "dense-at4", "dense-at8"]
    assert all(isinstance(outcome, Result) for outcome in outcomes.values()), outcomes
    assert len([ended_line(sweep, outcome) for outcome in outcomes.values()]) == 3
    assert [p.arm for p in frontier.points] == ["dense-at4", "dense-at8"]
    assert len({p.cost for p in frontier.points}) == 1  # two steps each


@pytest.mark.smoke
@pytest.mark.usefixtures("no_pictures")
def test_interrupted_it_leaves_nothing_running(sweep, tracking):
    """Neither in MLflow nor in Ray: in a notebook the driver lives on. That the same call goes on is in
    tests/jobs/test_interrupted.py.
    """

    def interrupt(name: str) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        swept(sweep, tracking, watch=Outcomes(interrupt))
    assert "RUNNING" not in shown(tracking, sweep).values()
    record = SweepDir.of(sweep.base).record()
    assert record is not None
    assert record.status == "interrupted"
    while ray.available_resources()["CPU"] < 2:
        time.sleep(0.2)


@pytest.mark.slow  # two sweeps
def test_a_search_draws_arms_and_goes_on_where_it_was(sweep, tracking):
    space = families_space(TINY)
    sweep = replace(sweep, arms={}, space=space)

    def search(count: int) -> SweepOptions:
        return SweepOptions(search=SearchOptions(sampler="random", trials=count))

    _, first = swept(sweep, tracking, search(2))
    assert list(first) == ["random-0001", "random-0002"]
    frontier, more = swept(sweep, tracking, search(3))
    assert list(more) == ["random-0003"]
    assert [p.arm for p in frontier.points] == [*first, *more]
    assert {p.status for p in frontier.points} == {"finished"}


@pytest.mark.usefixtures("no_cluster")
def test_the_address_of_submitted_jobs_is_no_cluster_to_join(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_ADDRESS", "http://127.0.0.1:8265")
    with pytest.raises(UsageError, match="is the address for `ray job submit`: submit the command"):
        connect()


@pytest.mark.usefixtures("no_cluster")
def test_a_cluster_that_is_gone_is_named_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(UsageError, match=f"no Ray cluster answers at {address} .*RAY_ADDRESS=local"):
        connect()


def test_what_is_no_sweep(digits: str, tmp_path: Path) -> None:
    base = RunConfig(storage=str(tmp_path))
    with pytest.raises(TypeError, match=r"takes a Sweep, got a RunConfig; train\(run\) trains one run"):
        run_sweep(base)  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError, match="the sweep has no arms"):
        run_sweep(Sweep(base=base, arms={}))
    with pytest.raises(UsageError, match="has no space to search"):
        run_sweep(Sweep(base=base, arms={}), SweepOptions(search=SearchOptions()))
    run = override(base, {"data.path": digits})
    with pytest.raises(UsageError, match="nothing to resume"):
        train(run, mode="resume", progress=False)
    assert not list(tmp_path.iterdir())


def test_an_arm_that_was_added_is_measured_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sweep = Sweep(base=run_at(tmp_path, "s"), arms={"a": {}, "b": {"train.lr": 0.5}})
    end_sweep(sweep, {"a": 0.5, "b": 0.6})
    of = {arm: RunDir.of(run).path for arm, run in sweep.runs().items()}
    write_measurement(of["a"], {"cost/made": 1.0})
    made: Any = SimpleNamespace(kind="cost/made", of_models=lambda models: [2.0 for _ in models])
    monkeypatch.setattr(driver, "read_model", lambda location: location)
    driver.measure_costs(sweep.trials().values(), made)
    assert [each.metrics["cost/made"] for each in measurements(of["b"])] == [2.0]


def test_a_continued_sweep_has_the_labels_of_now(tmp_path: Path, digits: str) -> None:
    sweep = Sweep(base=override(run_at(tmp_path, "s"), {"data.path": digits}), arms={"a": {}})
    for team in ("a", "b"):
        assert acquire_sweep_dir(sweep, resume=False, labels={"team": team}).labels == {"team": team}


@pytest.mark.parametrize(("spent_s", "times"), [(1e3, 0), (1e4, 1)])
def test_measuring_may_take_a_tenth_of_the_sweep(
    spent_s: float, times: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found, sweep = [], Sweep(base=run_at(tmp_path, "s"), arms={"a": {}})
    states = {t.name: SimpleNamespace(trial=t) for t in sweep.trials().values()}
    run: Any = SimpleNamespace(sweep=sweep, trials_left=lambda: 0, queue=SimpleNamespace(states=states))
    run.budget, run.watch = SimpleNamespace(spent_s=spent_s), SimpleNamespace(say=print)
    monkeypatch.setattr(driver, "estimated_s", lambda arms: 600.0)
    monkeypatch.setattr(driver, "complete_measurement", lambda *_, **options: found.append(1))
    driver.measure_inference(run, SweepOptions(measure="auto"))
    assert len(found) == times

"""From MLflow to a frontier: seeds, stopped and diverged trials, branches, runs of other tools."""

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mlflow import MlflowClient

from moe.cost import train_flops_6mac
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.frontier.frontier import Frontier
from orchestrator.sweeps.branches import Trunk
from orchestrator.sweeps.foreign import foreign_frontier
from orchestrator.sweeps.report import Axes, publish, read_frontier, write_files
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking import Tracking, find_runs, open_reader, open_tracking, track, track_training

ENDS = {"seed0": 0.8, "seed1": 0.9}


@pytest.fixture
def store(empty_store: Callable[[Path], str], tmp_path: Path) -> Iterator[Tracking]:
    with open_tracking(
        empty_store(tmp_path), artifacts=f"{tmp_path}/files", spool=f"{tmp_path}/spool"
    ) as tracking:
        yield tracking


def told(store: Tracking, sweep: Sweep, folder: Path, ends: dict[str, float | str]) -> Frontier:
    """What a sweep tells MLflow; `ends`: trial -> its quality, or how else it ended."""
    tags = {"role": "sweep", "objective.quality": sweep.quality, "objective.cost": sweep.cost}
    tags |= {"seeds": str(max(1, len(sweep.seeds)))}
    parent = track(store, f"{folder}/{sweep.base.name}", sweep.base.name, tags=tags)
    for name, trial in sweep.trials().items():
        if name not in ends:
            continue
        run = track_training(
            store,
            trial.run,
            f"{folder}/{name}",
            parent=parent,
            role=trial.role,
            arm=trial.arm,
            trial=name,
        )
        end = ends[name]
        if isinstance(end, float):
            metrics = {"val/acc1": end, "cost/train_flops_6mac": 1e9, "cost/device_s": 2.0}
            run.log(3, metrics | {"cost/marginal_train_flops_6mac": 1e8})
        elif end != "FAILED":
            run.log(1, {"cost/train_flops_6mac": 1.0})
            run.tag(**{end: "true"})
        run.finish("FINISHED" if isinstance(end, float) or end == "diverged" else "FAILED")
    parent.finish("FINISHED")
    return publish(store, sweep.base.name, str(folder / "report"))


def test_a_point_is_the_mean_of_its_seeds_which_all_must_be_complete(store, tmp_path):
    sweep = Sweep(base=override(RunConfig(), {"name": "s"}), arms={"a": {}, "b": {}}, seeds=(0, 1))
    ends = {"a-seed0": 0.8, "a-seed1": 0.9, "b-seed0": 0.95, "b-seed1": "FAILED"}
    frontier = told(store, sweep, tmp_path, ends)
    a, b = frontier.points
    assert (a.arm, a.status, a.qualities) == ("a", "finished", (0.8, 0.9))
    assert a.quality == pytest.approx(0.85)
    assert (b.arm, b.status) == ("b", "failed")
    assert {run_id for run_id, _ in frontier.spending} == {*a.run_ids, *b.run_ids}
    assert sum(seconds for _, seconds in frontier.spending) == 6.0
    assert math.isnan(b.quality)
    client = MlflowClient(store.uri)
    tags = {r.info.run_name: r.data.tags for r in client.search_runs([store.experiment_id])}
    assert {name for name, of in tags.items() if of.get("pareto") == "true"} == {"a-seed0", "a-seed1"}


def test_an_arm_whose_seeds_were_not_all_begun_is_no_point(store, tmp_path):
    sweep = Sweep(base=override(RunConfig(), {"name": "s"}), arms={"a": {}, "b": {}}, seeds=(0, 1))
    frontier = told(store, sweep, tmp_path, {"a-seed0": 0.99, "b-seed0": 0.8, "b-seed1": 0.9})
    assert {p.arm: p.status for p in frontier.points} == {"a": "stopped", "b": "finished"}
    assert [p.arm for p in frontier.front] == ["b"]


def test_stopping_makes_nobody_cheap(store, tmp_path):
    """It was told the cost of the steps it made; its place is that of all of them."""
    sweep = Sweep(base=override(RunConfig(), {"name": "s"}), arms={"a": {}, "b": {}})
    frontier = told(store, sweep, tmp_path, {"a": 0.8, "b": "stopped"})
    run = sweep.runs()["b"]
    whole = train_flops_6mac(run.model, images=run.train.steps * run.data.batch_size)
    assert frontier.points[1].cost == whole


@pytest.mark.parametrize("how", ["stopped", "diverged"])
def test_what_did_not_finish_is_counted_and_never_judged(how, store, tmp_path):
    sweep = Sweep(base=override(RunConfig(), {"name": "s"}), arms={"a": {}, "b": {}})
    frontier = told(store, sweep, tmp_path, {"a": 0.8, "b": how})
    assert [p.status for p in frontier.points] == ["finished", how]
    assert [p.arm for p in frontier.front] == ["a"]


def test_the_page_says_how_branches_are_charged(store, tmp_path):
    sweep = Sweep(
        base=override(RunConfig(), {"name": "s"}), arms={"a": {}}, trunk=Trunk(at=(50, 90), cooldown=9)
    )
    marginal = replace(sweep, cost="cost/marginal_train_flops_6mac")
    frontier = told(store, marginal, tmp_path, {"a-trunk": 0.1, "a-at50": 0.5, "a-at90": 0.6})
    assert [p.arm for p in frontier.points] == ["a-at50", "a-at90"]  # the trunk is none
    assert {p.cost for p in frontier.points} == {1e8}
    assert "only its own steps" in frontier.note
    assert "only its own steps" in (tmp_path / "report/frontier.html").read_text()
    assert "cost/train_flops_6mac" in frontier.panels


def test_it_is_built_again_from_mlflow_alone(store, tmp_path):
    sweep = Sweep(base=override(RunConfig(), {"name": "it's"}), arms={"a": {}, "b": {}})
    first = told(store, sweep, tmp_path, {"a": 0.8, "b": 0.9})
    again = read_frontier(open_reader(store.uri), "it's")
    assert again.points == first.points
    assert again.hypervolume == first.hypervolume
    write_files(again, str(tmp_path / "again"))
    page = (tmp_path / "again/frontier.html").read_text()
    assert page == (tmp_path / "report/frontier.html").read_text()
    with pytest.raises(UsageError, match="no sweep 'other'"):
        read_frontier(open_reader(store.uri), "other")


def test_runs_of_another_tool_that_names_its_metrics(store):
    client = MlflowClient(store.uri)
    experiment = client.create_experiment("theirs")
    for name, cost, quality in (("small", 1.0, 0.5), ("large", 9.0, 0.8), ("poor", 10.0, 0.6)):
        run = client.create_run(experiment, run_name=name).info.run_id
        client.log_param(run, "optimizer", "adam" if name == "small" else "sgd")
        client.log_metric(run, "gpu_hours", cost)
        client.log_metric(run, "accuracy", quality)
        client.set_terminated(run)
    runs = find_runs(open_reader(store.uri), "theirs", "")
    axes = Axes(quality="accuracy", cost="gpu_hours", chance=0.1)
    claims = ["optimizer=adam beats optimizer=sgd"]
    frontier = foreign_frontier("theirs", runs, axes, family="optimizer", claims=claims)
    assert [p.arm for p in frontier.front] == ["small", "large"]
    assert {p.family for p in frontier.points} == {"adam", "sgd"}
    with pytest.raises(
        UsageError, match="none of 3 runs has both 'acc' and 'gpu_hours'; their metrics: accuracy"
    ):
        foreign_frontier("theirs", runs, replace(axes, quality="acc"), family="optimizer", claims=[])

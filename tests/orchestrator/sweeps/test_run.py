"""A search from its draws to its frontier, with trials that end as soon as they begin."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.costs import computed
from orchestrator.runs.run_directory import Result, RunDir
from orchestrator.sweeps import run as run_module
from orchestrator.sweeps.budget import Budget, BudgetTracker
from orchestrator.sweeps.build import sweep_frontier
from orchestrator.sweeps.driver import acquire_sweep_dir
from orchestrator.sweeps.engine import Hooks
from orchestrator.sweeps.queue import RunToCompletion, TrialQueue
from orchestrator.sweeps.run import SweepRun
from orchestrator.sweeps.search import OptunaSearch
from orchestrator.sweeps.sweep import Sweep
from tests.made_directories import end, sweep_record

pytestmark = pytest.mark.usefixtures("cluster")

FLOPS = "cost/train_flops_6mac"


def space(trial: Any) -> dict[str, Any]:
    return {"model.width": trial.suggest_categorical("model.width", [16, 32, 64, 128])}


@pytest.fixture
def trained(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The trials of a sweep's jobs, each of which ends with an accuracy that rises with its width."""
    names = []

    def run_jobs(queue: TrialQueue, hooks: Hooks) -> None:
        while job := queue.next():
            hooks.began(job)
            run = job.trial.run
            cost = computed(run, run.train.steps)[FLOPS]
            end(run, 3, val__acc1=0.5 + run.model.width / 1000, cost__train_flops_6mac=cost)
            result = RunDir.of(run).result()
            assert result
            queue.done(job.trial.name, result)
            names.append(job.trial.name)

    monkeypatch.setattr(run_module, "run_jobs", run_jobs)
    return names


def search(sweep: Sweep, count: int) -> None:
    acquire_sweep_dir(sweep, resume=False, labels={})
    budget = BudgetTracker(Budget(), RunDir.of(sweep.base).path)
    drawing = OptunaSearch(space, base=sweep.base, count=count, sampler="random", seed=0)
    SweepRun(sweep, budget, RunToCompletion(), search=drawing).work()


def test_seeds_and_arms_that_are_added_to_a_search_are_on_its_frontier(
    digits: str, tmp_path: Path, trained: list[str]
) -> None:
    fields = {"name": "s", "data.path": digits, "storage": str(tmp_path)}
    sweep = Sweep(base=override(RunConfig(), fields), arms={}, space=space, seeds=(0,))
    directory = RunDir.of(sweep.base).path
    search(sweep, 2)
    assert trained == ["random-0001-seed0", "random-0002-seed0"]
    reference = sweep_record(directory).reference[FLOPS]
    search(replace(sweep, seeds=(0, 1)), 3)
    assert trained[2:] == ["random-0001-seed1", "random-0002-seed1", "random-0003-seed0", "random-0003-seed1"]
    frontier, record, _ = sweep_frontier(directory)
    assert record.trials.keys() == {*trained}
    assert [(point.arm, point.status, len(point.qualities)) for point in frontier.points] == [
        (f"random-000{number}", "finished", 2) for number in (1, 2, 3)
    ]
    assert frontier.front
    widest = override(sweep.base, {"model.width": 128})
    highest = computed(widest, widest.train.steps)[FLOPS]
    assert frontier.bound[0] == reference == pytest.approx(1.1 * highest), "of the space, not of the draws"
    search(replace(sweep, seeds=(0, 1), arms={"named": {"model.width": 48}}), 3)
    assert trained[6:] == ["named-seed0", "named-seed1"]


@pytest.fixture
def two_seeds(tmp_path: Path, digits: str) -> SweepRun:
    fields = {"name": "s", "data.path": digits, "storage": str(tmp_path)}
    sweep = Sweep(base=override(RunConfig(), fields), arms={"a": {}}, seeds=(0, 1))
    return SweepRun(sweep, BudgetTracker(Budget(), RunDir.of(sweep.base).path), RunToCompletion())


def test_what_is_left_is_shared_by_the_devices(two_seeds: SweepRun, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(two_seeds.budget, "can_estimate", lambda: True)
    monkeypatch.setattr(two_seeds.budget, "remaining_s", lambda states: 100.0)
    for state in two_seeds.queue.states.values():
        state.running = True
    assert two_seeds.snapshot().left_s == 50


def test_a_search_learns_no_quality_of_an_arm_with_a_failed_seed(two_seeds: SweepRun) -> None:
    states = two_seeds.queue.states
    states["a-seed0"].outcome = Result(status="finished", step=3, metrics={"val/acc1": 0.5})
    states["a-seed1"].outcome = "out of memory"
    assert two_seeds._values("a") == (None, 0.0)

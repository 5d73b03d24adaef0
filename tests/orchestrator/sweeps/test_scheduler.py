"""The scheduler in a plain Tuner, with a function that uses nothing of this project."""

import math
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from ray import tune

from orchestrator.frontier.pareto import hypervolume_2d
from orchestrator.runs.notice import Stopped
from orchestrator.sweeps.scheduler import OUTCOME, FrontierScheduler
from tests.orchestrator.sweeps.plain_trainable import COST, STEPS, quality, train

pytestmark = pytest.mark.usefixtures("cluster")


def run(folder: Path, arms: list[str], *, dies_at: int = 0, **options: Any) -> tuple[FrontierScheduler, Any]:
    scheduler = FrontierScheduler(
        cost=lambda config: COST.get(config["arm"], 1.0),
        steps=lambda config: STEPS,
        metric="quality",
        time_attr="step",
        **options,
    )
    space = {"arm": tune.grid_search(arms), "seed": tune.grid_search([0, 1])}
    tuning = tune.TuneConfig(scheduler=scheduler, reuse_actors=True)
    return scheduler, fit(folder, tuning, space | {"folder": str(folder), "dies_at": dies_at})


def fit(folder: Path, tuning: tune.TuneConfig, space: dict[str, Any] | None = None) -> Any:
    return tune.Tuner(
        tune.with_resources(train, {"cpu": 1}),
        param_space=space,
        tune_config=tuning,
        run_config=tune.RunConfig(
            name="sweep",
            storage_path=str(folder),
            verbose=0,
            failure_config=tune.FailureConfig(max_failures=2),
        ),
    ).fit()


@pytest.mark.smoke
def test_nearly_all_of_the_hypervolume_at_half_of_the_cost(tmp_path: Path) -> None:
    """The sweep ends although trials stay paused, and trains no step of a trial twice. The dearest size adds
    little, for the hypervolume ends at 1.1 times its cost. An arm whose quality is not a number ends at its
    first report, and nothing is expected of it.
    """
    scheduler, results = run(tmp_path, [*COST, "nan"])
    final: dict[str, list[float]] = {}
    for result in results:
        if result.metrics.get("step") == STEPS:
            final.setdefault(result.config["arm"], []).append(result.metrics["quality"])
    complete = [arm for arm, seeds in final.items() if len(seeds) == 2]

    def hypervolume(arms: list[str]) -> float:
        points = np.array([(math.log10(COST[arm]), -quality(arm, 0, STEPS)) for arm in arms])
        return hypervolume_2d(points, np.array([math.log10(1.1 * max(COST.values())), 0.0]))

    assert hypervolume(complete) > 0.985 * hypervolume(list(COST))
    assert scheduler.spent < 0.5 * 2 * sum(COST.values())
    for mark in tmp_path.glob("*-[01]"):
        steps = [int(line) for line in mark.read_text().split()]
        assert steps == sorted(set(steps)), mark.name
    assert {r.metrics["step"] for r in results if r.config and r.config["arm"] == "nan"} == {4}
    failed = [state for state in scheduler.queue.states.values() if state.failed]
    assert {state.outcome for state in failed} == {"quality is nan at step 4"}
    assert failed[0].arm not in scheduler.policy.predictions([*scheduler.queue.states.values()])


@pytest.mark.smoke
def test_a_killed_process_resumes_and_a_budget_ends_the_sweep(tmp_path: Path) -> None:
    """Every trial dies once after its rung. The budget holds the two smallest arms."""
    scheduler, results = run(tmp_path, ["good0", "good1", "good2", "good5"], dies_at=6, budget=6.5)
    ended = {(r.config["arm"], r.config["seed"]): r.metrics["step"] for r in results if r.config}
    assert ended == {(arm, seed): STEPS for arm in ("good0", "good1") for seed in (0, 1)}
    assert scheduler.spent == 6
    assert "6\n5\n6\n7" in (tmp_path / "good0-0").read_text()
    assert not results.errors


@pytest.mark.slow
def test_what_a_notice_has_stopped_has_no_outcome(tmp_path: Path) -> None:
    """Tune completes what is paused when it ends, with the last report."""
    scheduler, _ = run(tmp_path, ["good0"])
    (name, state), *_ = scheduler._states.items()
    before = state.outcome
    trial: Any = SimpleNamespace(trial_id=name)
    scheduler.on_trial_complete(None, trial, {OUTCOME: Stopped({"good0": 7})})
    assert state.outcome is before


@pytest.mark.slow
def test_known_results_are_not_trained_again(tmp_path: Path) -> None:
    scheduler, results = run(tmp_path, ["good0"], known=lambda config: {STEPS: 0.3})
    assert scheduler.spent == 0
    assert len(results) == 2
    assert not list(tmp_path.glob("good0-*"))


def test_what_tune_reserves_is_added_to_the_need() -> None:
    scheduler = FrontierScheduler(
        cost=lambda config: 1.0,
        steps=lambda config: 3,
        metric="quality",
        need=lambda _: {"CPU": 2, "GPU": 1},
    )
    placed = tune.PlacementGroupFactory([{"CPU": 1}])
    trial: Any = SimpleNamespace(trial_id="t", config={}, placement_group_factory=placed)
    assert scheduler._new_state(trial).need == {"CPU": 3, "GPU": 1}

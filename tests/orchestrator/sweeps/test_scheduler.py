"""The scheduler in a plain Tuner, with a function that uses nothing of this project."""

import json
import math
import os
import signal
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ray import tune

from orchestrator.frontier.pareto import pareto_front
from orchestrator.sweeps.scheduler import FrontierScheduler
from orchestrator.sweeps.search import ArmSearcher, OptunaSearch

pytestmark = pytest.mark.usefixtures("cluster")

STEPS = 32
# Two arms of each of six sizes. The second arm is worse everywhere, and all learn at the same pace.
COST = {f"{name}{size}": 2.0**size for size in range(6) for name in ("good", "bad")}


def quality(arm: str, seed: int, step: int) -> float:
    if arm == "nan":
        return math.nan
    final = 0.3 + 0.1 * np.log2(COST[arm]) - (0.25 if arm.startswith("bad") else 0.0)
    return float(final * (1 - 0.6 * step**-0.5)) + 0.002 * seed


def train(config: dict[str, Any]) -> None:
    """Goes on from its checkpoint. `config["dies_at"]` kills its process once at that step."""
    start = 0
    if checkpoint := tune.get_checkpoint():
        with checkpoint.as_directory() as folder:
            start = json.loads(Path(folder, "step.json").read_text())
    for step in range(start + 1, STEPS + 1):
        mark = Path(config["folder"], f"{config['arm']}-{config['seed']}")
        with mark.open("a") as file:
            file.write(f"{step}\n")
        if step == config["dies_at"] and mark.read_text().count(f"\n{step}\n") == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if step in (2, 8, STEPS):
            with tempfile.TemporaryDirectory() as folder:
                Path(folder, "step.json").write_text(json.dumps(step))
                value = quality(config["arm"], config["seed"], step)
                saved = tune.Checkpoint.from_directory(folder)
                tune.report({"step": step, "quality": value}, checkpoint=saved)


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
def test_the_exhaustive_frontier_at_lower_cost(tmp_path: Path) -> None:
    """The sweep ends although trials stay paused, and trains no step of a trial twice."""
    scheduler, results = run(tmp_path, list(COST))
    final: dict[str, list[float]] = {}
    for result in results:
        if result.metrics.get("step") == STEPS:
            final.setdefault(result.config["arm"], []).append(result.metrics["quality"])
    complete = [arm for arm, seeds in final.items() if len(seeds) == 2]

    def front(arms: list[str]) -> set[str]:
        points = np.array([(COST[arm], -quality(arm, 0, STEPS)) for arm in arms])
        return {arm for arm, on in zip(arms, pareto_front(points), strict=True) if on}

    assert front(complete) == front(list(COST)) == {arm for arm in COST if arm.startswith("good")}
    assert scheduler.spent < 0.8 * 2 * sum(COST.values())
    for mark in tmp_path.glob("*-[01]"):
        steps = [int(line) for line in mark.read_text().split()]
        assert steps == sorted(set(steps)), mark.name


def test_a_killed_process_resumes_and_a_budget_ends_the_sweep(tmp_path: Path) -> None:
    """Every trial dies once after its first rung. The budget holds the small arm and a rung of the large."""
    scheduler, results = run(tmp_path, ["good0", "good5"], dies_at=4, budget=4.5)
    ended = {(r.config["arm"], r.config["seed"]): r.metrics["step"] for r in results if r.config}
    assert ended == {("good0", 0): STEPS, ("good0", 1): STEPS, ("good5", 0): 2}
    assert scheduler.spent == 4
    assert "4\n3\n4\n5" in (tmp_path / "good0-0").read_text()
    assert not results.errors


def test_a_quality_that_is_not_a_number_ends_its_arm(tmp_path: Path) -> None:
    """Not even its second seed is tried, and what is expected of an arm without a quality is nothing."""
    scheduler, results = run(tmp_path, ["nan", "good0"])
    ended = {(r.config["arm"], r.config["seed"]): r.metrics["step"] for r in results if r.config}
    assert ended == {("nan", 0): 2, ("good0", 0): STEPS, ("good0", 1): STEPS}
    (failed,) = [state for state in scheduler.queue.states.values() if state.failed]
    assert failed.outcome == "quality is nan at step 2"
    assert scheduler.predicted(failed.name) is None


def test_known_results_are_not_trained_again(tmp_path: Path) -> None:
    scheduler, results = run(tmp_path, ["good0"], known=lambda config: {STEPS: 0.3})
    assert scheduler.spent == 0
    assert len(results) == 2
    assert not list(tmp_path.glob("good0-*"))


def test_a_search_draws_arms_when_there_is_room(tmp_path: Path) -> None:
    """Two trials at a time on two CPUs. Stopped trials count with their prediction; Optuna has none open."""

    def space(trial: Any) -> dict[str, Any]:
        arm = trial.suggest_categorical("arm", list(COST))
        return {"arm": arm, "seed": 0, "folder": str(tmp_path), "dies_at": 0}

    search = OptunaSearch(space, count=6, sampler="tpe", seed=0)
    scheduler = FrontierScheduler(
        cost=lambda config: COST[config["arm"]],
        steps=lambda config: STEPS,
        metric="quality",
        time_attr="step",
    )
    searcher = ArmSearcher(
        search,
        quality="quality",
        cost=lambda config: COST[config["arm"]],
        wanted=lambda: scheduler.wants_more,
        predicted=scheduler.predicted,
    )
    results = fit(tmp_path, tune.TuneConfig(scheduler=scheduler, search_alg=searcher, num_samples=-1))
    assert len({result.config["arm"] for result in results}) == 6
    # An arm that was drawn again before there was any result failed.
    states = Counter(trial.state.name for trial in search._study.trials)
    assert states["COMPLETE"] >= 6
    assert states.keys() <= {"COMPLETE", "FAIL"}

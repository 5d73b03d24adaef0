"""Costs and stopping policies of a user's own, in a real sweep: a file each (`tests/own`)."""

import itertools
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.inference import energy
from orchestrator.planning.preflight import check_metrics
from orchestrator.runs.metrics_file import read_metrics
from orchestrator.runs.run_directory import RunDir
from orchestrator.sweeps import build
from orchestrator.sweeps.build import sweep_frontier
from orchestrator.sweeps.driver import (
    SweepOptions,
    acquire_sweep_dir,
    measure_costs,
    run_sweep,
    with_counted_cost,
)
from orchestrator.sweeps.queue import Policy, TrialState
from orchestrator.sweeps.search import SearchOptions
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.fit import fit
from orchestrator.units import axis_title
from tests.own.energy import EnergyCost
from tests.own.halfway import HalfwayConfig

ENERGY = EnergyCost.kind


@pytest.fixture
def sweep(digits: str, tmp_path: Path) -> Sweep:
    fields = {"name": "tiny", "data.path": digits, "storage": str(tmp_path), "train.steps": 4}
    base = override(RunConfig(), fields | {"train.report_every": 2})
    return Sweep(base=base, arms={"narrow": {"model.width": 16}, "wide": {"model.width": 32}}, cost=ENERGY)


@pytest.fixture
def joules(monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """A counter in place of NVML's that rises by 5 J with each reading."""
    count = itertools.count(1)
    monkeypatch.setattr(EnergyCost, "read", staticmethod(lambda gpu: 5000.0 * next(count)))
    return count


def test_a_sweep_counts_an_energy_and_judges_by_it(sweep: Sweep, joules: Iterator[int]) -> None:
    check_metrics(sweep)
    counting = with_counted_cost(sweep)
    assert counting.base.train.costs == (ENERGY,)
    assert with_counted_cost(counting) is counting
    acquire_sweep_dir(counting, resume=False, labels={})
    for run in counting.runs().values():
        fit(run)
    frontier, _, trials = sweep_frontier(RunDir.of(sweep.base).path)
    # Each step ends with a checkpoint, whose reading is 5 J above that at the start of the step.
    rows = read_metrics(trials[0].directory)
    assert [row.metrics[ENERGY] for row in rows] == [10.0, 20.0]
    assert {point.arm: point.cost for point in frontier.points} == {"narrow": 20.0, "wide": 20.0}
    assert frontier.cost_name == ENERGY
    assert axis_title(ENERGY) == "Energy of training (J)"
    assert frontier.within(ENERGY, 19.0).points == ()
    assert frontier.within("cost/params", frontier["narrow"].costs["cost/params"]).points == (
        frontier["narrow"],
    )
    assert frontier.at_cost("cost/params").front


def test_a_run_counts_on_when_it_is_resumed(sweep: Sweep, joules: Iterator[int]) -> None:
    run = with_counted_cost(sweep).runs()["narrow"]
    fit(run, until=2)
    assert fit(run).metrics[ENERGY] == 20.0


def test_what_cannot_be_read_is_said_before_training(sweep: Sweep) -> None:
    with pytest.raises(UsageError, match=f"{ENERGY} cannot be read here: .*use_gpu"):
        fit(with_counted_cost(sweep).runs()["narrow"])


def test_a_cost_of_trained_models_is_measured_once(sweep: Sweep, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = replace(sweep, cost="perf/memory_gib")
    check_metrics(plain)
    acquire_sweep_dir(plain, resume=False, labels={})
    for run in plain.runs().values():
        fit(run)
    monkeypatch.setattr(EnergyCost, "of_models", lambda self, models: [float(m.step) for m in models])
    trials, cost = [*plain.trials().values()], EnergyCost()
    measure_costs(trials, cost)
    monkeypatch.setattr(EnergyCost, "of_models", lambda self, models: [0.0 for _ in models])
    measure_costs(trials, cost)
    frontier, *_ = sweep_frontier(RunDir.of(sweep.base).path)
    assert all(point.costs[ENERGY] == 4.0 and point.cost > 0 for point in frontier.points)


@pytest.mark.parametrize(
    ("cost", "why"),
    [
        ("perf/memory_gb", "did you mean 'perf/memory_gib'"),
        ("perf/images_per_s", "more of it is better"),
        ("val/acc1", "more of it is better"),
    ],
)
def test_a_cost_that_no_run_reports_is_refused(sweep: Sweep, cost: str, why: str) -> None:
    with pytest.raises(UsageError, match=why):
        check_metrics(replace(sweep, cost=cost))


def test_a_time_beside_training_is_no_cost(sweep: Sweep) -> None:
    with pytest.raises(UsageError, match=r"is timed while others train.* take cost='infer/ms'"):
        run_sweep(replace(sweep, cost="perf/ms_per_image"))
    space = replace(sweep, cost="infer/ms", space=lambda trial: {"model.depth": 2})
    with pytest.raises(UsageError, match="a search cannot learn from it"):
        run_sweep(space, SweepOptions(search=SearchOptions(sampler="random", trials=1)))


def test_what_this_machine_does_not_show_is_said_before_training(
    sweep: Sweep, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(energy, "POWERCAP", str(tmp_path))
    with pytest.raises(UsageError, match="the energy of processors cannot be read: there is no"):
        run_sweep(replace(sweep, cost="infer/energy_mj"))
    monkeypatch.setattr(build, "core_usd_per_hour", lambda: math.nan)
    with pytest.raises(
        UsageError, match=r"infer/usd_per_million needs the price of a CPU-core: .*prices.yaml"
    ):
        run_sweep(replace(sweep, cost="infer/usd_per_million"))


def test_a_policy_of_a_file_stops_arms() -> None:
    """The dearer arm is worse halfway: it is passed by, and its prediction is known."""
    policy = HalfwayConfig(margin=0.01)
    assert Policy.kinds["halfway"] is HalfwayConfig
    states = [TrialState(name, arm=name, cost=cost, steps=8, need={}) for name, cost in (("b", 3), ("a", 1))]
    dear, cheap = states
    assert [(job.state.name, job.until) for job in policy.jobs(states)] == [("a", 4), ("b", 4)]
    cheap.reached, dear.reached = {4: 0.6}, {4: 0.605}
    assert [(job.state.name, job.until) for job in policy.jobs(states)] == [("a", 8)]
    assert policy.predictions(states) == {"a": 0.6, "b": 0.605}
    assert {arm: (round(gain, 3), left) for arm, (gain, left) in policy.passed_by(states).items()} == {
        "b": (0.005, 0.375)
    }

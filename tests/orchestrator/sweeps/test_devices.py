"""Trials of 1, 2 and 4 workers share four CPUs: none waits for ever, none is started into nothing."""

from pathlib import Path

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.driver import run_sweep
from orchestrator.sweeps.sweep import Sweep
from tests.parts import start_ray

pytestmark = pytest.mark.slow  # workers of their own for every large trial


@pytest.fixture
def four_cpus(no_cluster: None) -> None:
    start_ray(num_cpus=4)


@pytest.mark.usefixtures("four_cpus")
def test_mixed_trials_all_end(digits: str, tmp_path: Path) -> None:
    changes = {"name": "mixed", "data.path": digits, "storage": str(tmp_path), "train.steps": 4}
    base = override(RunConfig(), changes | {"model.moe.num_experts": 4})
    workers = [1, 4, 2, 1, 2, 1]
    arms = {f"w{n}-{i}": {"scale.workers": n, "scale.ep": min(n, 2)} for i, n in enumerate(workers)}
    frontier = run_sweep(Sweep(base=base, arms=arms))
    assert {p.arm: p.status for p in frontier.points} == dict.fromkeys(arms, "finished")

"""Nodes are lost, replaced, lost for good, come back and are drained: the losses of an undisturbed run."""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from tests.orchestrator.training.three_nodes import STEPS

ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def happened(digits: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """``happened("drained", ..)`` returns the folder of the runs' reports; raylets are started once."""

    @cache
    def run(*scenarios: str) -> Path:
        folder = tmp_path_factory.mktemp("home")
        command = [sys.executable, "-m", "tests.orchestrator.training.three_nodes", digits, str(folder)]
        done = subprocess.run(
            [*command, *scenarios],
            cwd=ROOT,
            env=os.environ | {"RAY_AUTH_MODE": "disabled"},
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-3000:]
        return folder

    return run


@pytest.fixture
def lost(happened: Callable[..., Path]) -> Path:
    return happened("lost_and_replaced")


@pytest.fixture
def home(happened: Callable[..., Path]) -> Path:
    return happened("lost_for_good", "drained")


def found(home: Path, scenario: str) -> dict[str, Any]:
    """Returns the reports of a run, after comparing each step with the undisturbed run."""
    run, alone = (json.loads((home / f"{name}.json").read_text()) for name in (scenario, "alone"))
    assert run["error"] == "''"
    expected = dict(alone["reports"])
    assert {step for step, *_ in run["reports"]} == set(range(1, STEPS + 1)) == set(expected)
    for step, loss, _ in run["reports"]:
        assert loss == pytest.approx(expected[step], rel=1e-4), step
    return run


@pytest.mark.slow  # `test_machines` loses a machine
def test_an_expert_parallel_group_across_two_nodes_loses_one(lost):
    run = found(lost, "lost_and_replaced")
    before, after = map(set, run["nodes"])
    assert len(before) == 2, "the group spans two nodes"
    assert len(before & after) <= 1


@pytest.mark.slow
def test_fewer_workers_go_on_and_all_when_they_are_back(home):
    run = found(home, "lost_for_good")
    assert [len(nodes) for nodes in run["nodes"]] == [4, 2, 4]
    steps = [step for step, *_ in run["reports"]]
    again = [step for step, after in pairwise(steps) if after <= step]
    assert len(again) == 1, "the loss of a node repeats steps, growing does not"


@pytest.mark.slow
def test_device_seconds_add_up_over_changing_workers(home):
    costs = [cost for *_, cost in found(home, "drained")["reports"]]
    assert costs == sorted(costs)
    assert costs[0] > 0


@pytest.mark.slow
def test_a_node_that_is_about_to_go_is_left_with_nothing_to_repeat(home):
    run = found(home, "drained")
    assert [len(nodes) for nodes in run["nodes"]] == [4, 2]
    steps = [step for step, *_ in run["reports"]]
    assert steps == sorted(set(steps))

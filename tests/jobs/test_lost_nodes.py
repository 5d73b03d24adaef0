"""A sweep on three nodes loses one of them, then its driver, and ends as if nothing had happened."""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mlflow import MlflowClient

ROOT = Path(__file__).parents[2]
SWEEP = """
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.sweep import Sweep

def make():
    soft = {"model.moe.router.kind": "soft", "model.moe.num_experts": 4}
    arms = {f"one-{dim}": soft | {"model.mlp_dim": dim} for dim in (32, 48, 64, 96)}
    two = {"scale.workers": 2, "scale.ep": 2}
    arms |= {f"two-{dim}": soft | two | {"model.mlp_dim": dim} for dim in (32, 64)}
    fields = {"name": "six", "train.steps": 200, "train.report_every": 5, "checkpoint.every": 10}
    fields |= {"scale.wait_s": 5}
    return Sweep(base=override(RunConfig(), fields), arms=arms)
"""

pytestmark = pytest.mark.slow


@pytest.fixture
def nodes() -> Iterator[subprocess.Popen[str]]:
    env = os.environ | {"RAY_AUTH_MODE": "disabled"}
    command = [sys.executable, "-m", "tests.nodes"]
    pipe = subprocess.PIPE
    cluster = subprocess.Popen(command, cwd=ROOT, env=env, stdin=pipe, stdout=pipe, text=True)
    yield cluster
    assert cluster.stdin
    cluster.stdin.close()
    cluster.wait(timeout=60)


def start(home: Path, address: str) -> subprocess.Popen[bytes]:
    home.mkdir(exist_ok=True)
    (home / "six.py").write_text(SWEEP)
    command = [
        "jobs/pareto_sweep.py",
        "--sweep",
        f"{home}/six.py:make",
        "--confirm",
        "0",
        "--measure",
        "never",
    ]
    env = os.environ | {"MOE_FRONTIER_HOME": str(home), "RAY_ADDRESS": address, "RAY_AUTH_MODE": "disabled"}
    with (home / "log.txt").open("ab") as log:
        return subprocess.Popen([sys.executable, *command], cwd=ROOT, env=env, stdout=log, stderr=log)


def complete(home: Path) -> int:
    return len(list(home.glob("six/trials/*/result.json")))


def wait_for(count: int, home: Path, driver: subprocess.Popen[bytes]) -> None:
    give_up = time.monotonic() + 400
    while complete(home) < count:
        assert driver.poll() is None, (home / "log.txt").read_text()[-3000:]
        assert time.monotonic() < give_up, (home / "log.txt").read_text()[-3000:]
        time.sleep(0.2)


def results(home: Path) -> dict[str, tuple[float, float, float]]:
    names = ("train/loss", "train/grad_norm", "val/loss")
    found = {}
    for file in home.glob("six/trials/*/result.json"):
        result = json.loads(file.read_text())
        assert result["status"] == "finished"
        found[file.parent.name] = tuple(result["metrics"][name] for name in names)
    return found


def test_a_node_and_the_driver_are_lost(tmp_path, nodes):
    alone = start(tmp_path / "alone", "local")
    address = nodes.stdout.readline().strip()
    assert alone.wait(timeout=500) == 0, (tmp_path / "alone/log.txt").read_text()[-3000:]

    home = tmp_path / "home"
    driver = start(home, address)
    wait_for(1, home, driver)
    nodes.stdin.write("remove\n")
    nodes.stdin.flush()  # it is gone at once, and `done` when the others know it: trainings go on meanwhile
    wait_for(2, home, driver)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    assert complete(home) < 6
    assert nodes.stdout.readline() == "done\n"
    driver = start(home, address)
    assert driver.wait(timeout=500) == 0, (home / "log.txt").read_text()[-3000:]

    found, expected = results(home), results(tmp_path / "alone")
    assert found.keys() == expected.keys()
    assert len(found) == 6
    for name, values in expected.items():
        assert found[name] == pytest.approx(values, rel=1e-3), name
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name("moe-frontier").experiment_id])
    assert sorted(run.info.status for run in runs) == ["FINISHED"] * 7

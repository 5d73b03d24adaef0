"""Two machines whose hostnames /etc/hosts has at 127.0.1.1 train one model; one is cut off for a while."""

import os
import subprocess
import sys
import time

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.runs.metrics_file import read_metrics
from orchestrator.runs.run_directory import RunDir
from orchestrator.training.fit import fit
from tests.machines import DISK, ROOT, machines, start_ray

STEPS = 20
CHANGES = {
    "model.moe.router.kind": "soft",
    "model.moe.num_experts": 4,
    "train.microbatch": 2,  # steps that leave time to pull the cable
    "train.report_every": 1,
    "train.steps": STEPS,
}
NEVER_S = 240


@pytest.mark.smoke
def test_an_expert_parallel_group_across_machines_loses_its_network(digits, empty_store, tmp_path):
    """It stands still while the cable is out, continues when it is in again, and ends with the losses of one
    undisturbed worker.
    """
    run = override(RunConfig(), {**CHANGES, "data.path": digits, "storage": str(tmp_path), "name": "wired"})
    # also temporary files, where Ray Train keeps its state, are of one machine
    env = os.environ | {
        "RAY_TMPDIR": DISK,
        "TMPDIR": DISK,
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": str(ROOT),
    }
    env.pop("RAY_ADDRESS")
    log = tmp_path / "log.txt"
    with machines(2) as (head, other), log.open("w") as output:
        start_ray(head, env, "--head", "--include-dashboard=false")
        start_ray(other, env, f"--address={head.address}:6379")
        command = [sys.executable, "jobs/train.py", "--name", "wired", "--workers", "2", "--ep", "2"]
        places = ["--storage", run.storage, "--data", digits, "--tracking-uri", empty_store(tmp_path)]
        fields = ["--set", *(f"{name}={value}" for name, value in CHANGES.items())]
        env["RAY_ADDRESS"] = f"{head.address}:6379"
        driver = head.start(*command, *places, *fields, env=env, stdout=output, stderr=subprocess.STDOUT)
        deadline = time.monotonic() + NEVER_S
        while len(losses(run)) < 2:
            assert driver.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.1)
        other.plug("down")
        time.sleep(1)  # what was on its way arrives
        before = losses(run)
        time.sleep(5)
        assert losses(run) == before, "the machines do not need the cable"
        assert len(before) < STEPS, "the cable came out too late"
        other.plug("up")
        assert driver.wait(NEVER_S) == 0, log.read_text()[-3000:]
    alone = override(run, {"name": "alone"})
    fit(alone, lambda step, metrics: None)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    assert len(losses(run)) == STEPS


def losses(run: RunConfig) -> dict[int, float]:
    return {row.step: row.metrics["train/loss"] for row in read_metrics(RunDir.of(run).path)}

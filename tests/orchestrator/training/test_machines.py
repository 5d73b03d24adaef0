"""Two machines whose hostnames /etc/hosts has at 127.0.1.1 train one model; one is cut off, and then lost."""

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
from tests.jobs.test_interrupted import rows_in
from tests.machines import DISK, ROOT, machines, start_ray

STEPS = 40
PACED = ["--plugin", "tests/paced.py", "--set", "train.optimizer.kind=paced"]  # AdamW, slowly
CHANGES = {
    "model.moe.router.kind": "soft",
    "model.moe.num_experts": 4,
    "checkpoint.every": 5,
    "train.report_every": 1,
    "train.steps": STEPS,
}
ONE_CPU = "--num-cpus=1"  # a worker and a process that decodes
NEVER_S = 240


@pytest.mark.smoke
def test_an_expert_parallel_group_across_machines_loses_its_network_and_one_of_them(
    digits, empty_store, tmp_path
):
    """It stands still while the cable is out, and continues when it is in again. When all processes of a
    machine are killed, it starts again on the node that takes their place. It ends with the losses of one
    undisturbed worker.
    """
    run = override(RunConfig(), {**CHANGES, "data.path": digits, "storage": str(tmp_path), "name": "wired"})
    # also temporary files, where Ray Train keeps its state, are of one machine
    env = os.environ | {
        "RAY_TMPDIR": DISK,
        "TMPDIR": DISK,
        "RAY_AUTH_MODE": "disabled",
        "PYTHONPATH": str(ROOT),
        "PACE_S": "0.5",  # steps leave time to pull the cable
    }
    env.pop("RAY_ADDRESS")
    log = tmp_path / "log.txt"
    with machines(2) as (head, other), log.open("w") as output:
        start_ray(head, env, "--head", "--include-dashboard=false", ONE_CPU)
        start_ray(other, env, f"--address={head.address}:6379", ONE_CPU)
        command = [sys.executable, "jobs/train.py", "--name", "wired", "--workers", "2", "--ep", "2"]
        places = ["--storage", run.storage, "--data", digits, "--tracking-uri", empty_store(tmp_path)]
        fields = [*PACED, *(f"{name}={value}" for name, value in CHANGES.items())]
        env["RAY_ADDRESS"] = f"{head.address}:6379"
        driver = head.start(*command, *places, *fields, env=env, stdout=output, stderr=subprocess.STDOUT)

        def reach(step: int) -> None:
            deadline = time.monotonic() + NEVER_S
            while len(losses(run)) < step:
                assert driver.poll() is None, log.read_text()[-3000:]
                assert time.monotonic() < deadline, log.read_text()[-3000:]
                time.sleep(0.1)

        reach(2)
        other.plug("down")
        before = None
        while before != (before := losses(run)):  # what was on its way arrives
            time.sleep(5)
        assert len(before) < STEPS - 20, "the machines do not need the cable, or it came out too late"
        other.plug("up")
        reach(len(before) + 8)  # a checkpoint is saved, and some steps more
        for process in other.processes("ray"):
            process.kill()
        assert len(losses(run)) < STEPS, "they were killed too late"
        start_ray(other, env, f"--address={head.address}:6379", ONE_CPU)
        assert driver.wait(NEVER_S) == 0, log.read_text()[-3000:]
    (resumed,) = [row["resumed"] for row in rows_in(tmp_path / "wired/metrics.jsonl") if "resumed" in row]
    assert 5 <= resumed < STEPS
    alone = override(run, {"name": "alone"})
    fit(alone, lambda step, metrics: None)
    assert losses(run) == pytest.approx(losses(alone), rel=1e-5)
    assert len(losses(run)) == STEPS


def losses(run: RunConfig) -> dict[int, float]:
    return {row.step: row.metrics["train/loss"] for row in read_metrics(RunDir.of(run).path)}

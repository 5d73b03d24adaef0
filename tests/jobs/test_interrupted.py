"""Ctrl-C, and the signal of `ray job stop` and Kubernetes: MLflow knows it, and so does the user."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mlflow import MlflowClient

from tests.jobs.bare import run_bare

ROOT = Path(__file__).parents[2]

# a background job of a shell ignores SIGINT, and so does what it starts
START = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
INTERRUPT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from jobs._cli import command
with command("waiting"):
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(30)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM])
def test_a_command_says_how_to_go_on(sent):
    done = run_bare("-c", INTERRUPT, str(int(sent)))
    assert done.returncode == 128 + sent
    assert "Interrupted. Run the same command again to continue." in done.stderr


@pytest.mark.parametrize(
    "sent",
    [
        pytest.param(signal.SIGINT, marks=pytest.mark.slow),
        pytest.param(signal.SIGTERM, marks=pytest.mark.smoke),
    ],
)
def test_a_run_of_two_workers_is_told_to_stop(sent, tmp_path):
    command = ["jobs/train.py", "--name", "run", "--workers", "2", "--set", "train.steps=5000"]
    process = subprocess.Popen(
        [sys.executable, "-c", START, *command],
        cwd=ROOT,
        env=os.environ
        | {"MOE_FRONTIER_HOME": str(tmp_path), "RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout
    try:
        for line in process.stdout:
            if line.startswith("step "):
                break
        process.send_signal(sent)
        assert process.wait(timeout=3) == 128 + sent
        assert "Interrupted. Run the same command again to continue." in process.stdout.read()
    finally:
        process.kill()  # else a run of 5000 steps goes on beside the other tests
    client = MlflowClient(f"sqlite:///{tmp_path}/mlflow.db")
    (run,) = client.search_runs([e.experiment_id for e in client.search_experiments()])
    assert run.info.status == "KILLED"

"""`ray job submit` against a head started as the README says, with token authentication.

tests/cluster/test_sweep_on_a_cluster.py stops a submitted sweep, which then continues.
"""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from tests.parts import command_of, free_port, to_each

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    shell = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    return shell | {
        "PATH": f"{Path(RAY).parent}:{os.environ['PATH']}",  # as in an activated .venv
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "MOE_FRONTIER_HOME": str(tmp_path / "home"),
        "RAY_USAGE_STATS_ENABLED": "0",
    }


@pytest.fixture
def head(env: dict[str, str]) -> Iterator[str]:
    """The dashboard's address. Only this head's processes are ended; they all name its directory."""
    folder = tempfile.mkdtemp(prefix="ray")  # short: sockets lie in it
    dashboard = free_port()
    command = [
        RAY,
        "start",
        "--head",
        f"--port={free_port()}",
        f"--dashboard-port={dashboard}",
        "--num-cpus=2",
    ]
    command += ["--dashboard-host=127.0.0.1", f"--temp-dir={folder}"]
    command += [f"--dashboard-agent-listen-port={free_port()}"]  # the default may be another Ray's
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
    yield f"http://127.0.0.1:{dashboard}"
    to_each(psutil.Process.kill, [each for each in psutil.process_iter() if folder in command_of(each)])
    shutil.rmtree(folder, ignore_errors=True)


def submit(env: dict[str, str], head: str, *command: str) -> subprocess.CompletedProcess[str]:
    job = [RAY, "job", "submit", "--working-dir", ".", "--", "python", *command]
    env = env | {"RAY_ADDRESS": head}
    for _ in range(10):
        done = subprocess.run(
            job, cwd=ROOT, env=env, capture_output=True, text=True, timeout=300, check=False
        )
        if "No available agent to submit job" not in done.stdout + done.stderr:
            return done
        time.sleep(3)  # a head takes jobs a few seconds after `ray start` returns
    raise TimeoutError("the head never took a job")


@pytest.mark.slow
def test_a_submitted_job_trains_and_its_exit_code_tells_the_truth(env, head):
    """Its router is a plugin, whose text travels to the workers."""
    cosine = [
        "--plugin",
        f"{ROOT}/tests/own/cosine.py",
        "--set",
        "model.moe.router.kind=cosine",
        "train.steps=10",
    ]
    done = submit(env, head, "jobs/train.py", "--name", "submitted", "--workers", "2", "--ep", "2", *cosine)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "submitted is complete: finished after 10 steps" in done.stdout
    assert (Path(env["MOE_FRONTIER_HOME"]) / "submitted/result.json").exists()

    failed = submit(env, head, "jobs/train.py", "--name", "wrong", "--set", "train.stepz=1")
    assert failed.returncode != 0
    assert "error: unknown field train.stepz" in failed.stdout + failed.stderr

    stranger = submit(env | {"RAY_AUTH_TOKEN_PATH": "/dev/null"}, head, "jobs/train.py", "--help")
    assert stranger.returncode != 0


@pytest.mark.slow
def test_a_failing_trial_is_a_failed_job(env, head, tmp_path):
    """A learning rate that no number survives is an outcome; a third of all images damaged is a failure."""
    made = submit(
        env, head, "jobs/pareto_sweep.py", "--set", "train.steps=1", "--confirm", "0", "--measure", "never"
    )
    assert made.returncode == 0, made.stdout[-3000:]
    shards = sorted((Path(env["MOE_FRONTIER_HOME"]) / "data/cluttered-digits/train").iterdir())
    for shard in shards[::3]:
        shard.write_bytes(bytes(shard.stat().st_size))
    again = submit(
        env,
        head,
        "jobs/pareto_sweep.py",
        "--set",
        "train.steps=1",
        "--name",
        "broken",
        "--confirm",
        "0",
        "--measure",
        "never",
    )
    assert again.returncode == 1
    assert "36 runs failed" in again.stdout

"""`ray job submit` against a head started as the README says, with token authentication."""

import os
import secrets
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))

pytestmark = pytest.mark.slow  # a minute: a head, and two jobs with workers of their own


@pytest.fixture
def env(tmp_path: Path) -> dict[str, str]:
    token = tmp_path / "token"
    token.write_text(secrets.token_hex(32))
    return os.environ | {
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
    dashboard = _free_port()
    command = [
        RAY,
        "start",
        "--head",
        f"--port={_free_port()}",
        f"--dashboard-port={dashboard}",
        "--num-cpus=2",
    ]
    command += ["--dashboard-host=127.0.0.1", f"--temp-dir={folder}"]
    subprocess.run(command, env=env, check=True, capture_output=True, timeout=120)
    yield f"http://127.0.0.1:{dashboard}"
    for process in psutil.process_iter(["cmdline"]):
        if folder in " ".join(process.info["cmdline"] or []):
            process.kill()
    shutil.rmtree(folder, ignore_errors=True)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]  # from the kernel's own range, above the one that Ray gives to workers


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


def test_a_submitted_job_trains_and_its_exit_code_tells_the_truth(env, head):
    soft = ["--workers", "2", "--ep", "2", "--set", "model.moe.router.kind=soft", "--set", "train.steps=10"]
    done = submit(env, head, "jobs/train.py", "--name", "submitted", *soft)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    assert "submitted is complete: finished after 10 steps" in done.stdout
    assert (Path(env["MOE_FRONTIER_HOME"]) / "submitted/result.json").exists()

    failed = submit(env, head, "jobs/train.py", "--name", "wrong", "--set", "train.stepz=1")
    assert failed.returncode != 0
    assert "error: unknown field train.stepz" in failed.stdout + failed.stderr

    stranger = submit(env | {"RAY_AUTH_TOKEN_PATH": "/dev/null"}, head, "jobs/train.py", "--help")
    assert stranger.returncode != 0

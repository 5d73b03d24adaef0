"""`ray job submit` against a head started as the README says, with token authentication."""

import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from tests.jobs.small_sweep import ARMS
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
        "RAY_JOB_STOP_WAIT_TIME_S": "60",  # a busy machine needs more than the 3 s of the default
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


def submit(
    env: dict[str, str], head: str, *command: str, flags: Sequence[str] = ()
) -> subprocess.CompletedProcess[str]:
    job = [RAY, "job", "submit", "--working-dir", ".", *flags, "--", "python", *command]
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


SWEEP = [
    "jobs/pareto_sweep.py",
    "--sweep",
    f"{ROOT}/tests/jobs/small_sweep.py:make",
    "--confirm",
    "0",
    "--measure",
    "never",
]
SWEEP += ["--max-concurrent", "1"]


def frontier(home: Path) -> dict[str, tuple[str, float, float, str]]:
    """trial -> status, quality, cost and whether it is on the frontier, as MLflow has them."""
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    experiment = client.get_experiment_by_name("moe-frontier")
    assert experiment
    runs = [run for run in client.search_runs([experiment.experiment_id]) if run.data.tags["role"] == "trial"]
    found = {
        run.info.run_name or "": (
            run.info.status,
            run.data.metrics.get("val/acc1", 0.0),
            run.data.metrics.get("cost/train_flops_6mac", 0.0),
            run.data.tags.get("pareto", "false"),
        )
        for run in runs
    }
    assert len(found) == len(runs)
    return found


@pytest.mark.smoke
def test_stopped_and_submitted_again_it_finds_what_a_laptop_finds(env, head, undisturbed):
    home = Path(env["MOE_FRONTIER_HOME"])
    detached = submit(env, head, *SWEEP, flags=["--no-wait", "--submission-id", "first"])
    assert detached.returncode == 0, detached.stdout + detached.stderr
    give_up = time.monotonic() + 600
    while not list(home.glob("small/trials/*/result.json")):
        assert time.monotonic() < give_up, ray_job(env, head, "logs", "first")
        time.sleep(0.2)
    ray_job(env, head, "stop", "first")
    statuses = {run[0] for run in frontier(home).values()}
    assert statuses <= {"FINISHED", "KILLED"}, "MLflow knows that it was stopped"
    assert len(list(home.glob("small/trials/*/result.json"))) < ARMS

    done = submit(env, head, *SWEEP)
    assert done.returncode == 0, done.stdout[-3000:]
    assert frontier(home) == undisturbed


def ray_job(env: dict[str, str], head: str, *command: str) -> str:
    done = subprocess.run(
        [RAY, "job", *command], env=env | {"RAY_ADDRESS": head}, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


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

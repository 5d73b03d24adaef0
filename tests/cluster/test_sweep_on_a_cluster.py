"""A sweep on a cluster ends as if nothing had happened, whatever is stopped or killed meanwhile. No secret of
its user's environment is in a log, a page, a database, a directory, or shown by a dashboard.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from tests.cluster.commented import CLUSTER
from tests.cluster.test_local import processes
from tests.jobs.small_sweep import ARMS
from tests.jobs.test_killed_sweep import State, state, trainers
from tests.jobs.test_plugins import GUESTS
from tests.orchestrator.tracking.stores import wait_until
from tests.parts import free_port, system_program

ROOT = CLUSTER.parent
SCRIPT = str(CLUSTER / "local.sh")
SWEEP = f"{ROOT}/tests/jobs/small_sweep.py:make"
MARK = "Pl4nted"  # every secret holds it
SAS = f"sv=2024-11-04&ss=b&sig={MARK}sas%3D"
SECRETS = {
    "AWS_ACCESS_KEY_ID": f"AKIA{MARK}id",
    "AWS_SECRET_ACCESS_KEY": f"{MARK}aws",
    "AWS_SESSION_TOKEN": f"{MARK}session",
    "AWS_SECURITY_TOKEN": f"{MARK}security",
    "MLFLOW_TRACKING_PASSWORD": f"{MARK}mlflow",
    "MLFLOW_TRACKING_USERNAME": "team",
    "AZURE_STORAGE_CONNECTION_STRING": f"AccountName=a;AccountKey={MARK}key==",
    "AZURE_STORAGE_ACCOUNT_KEY": f"{MARK}key==",
    "AZURE_STORAGE_SAS_TOKEN": SAS,
    "AZURE_CLIENT_SECRET": f"{MARK}client",
    "GOOGLE_SERVICE_ACCOUNT_KEY": json.dumps({"type": "service_account", "private_key": f"{MARK}gcs"}),
    "HF_TOKEN": f"hf_{MARK}",
    "WANDB_API_KEY": f"{MARK}wandb",
}


@pytest.fixture
def folder() -> Iterator[Path]:
    folder = tempfile.mkdtemp(prefix="ray")  # short: sockets lie in it
    yield Path(folder)
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture
def server(folder: Path) -> Iterator[str]:
    """The URI of an MLflow server."""
    port = free_port()
    command = [sys.executable, "-m", "mlflow", "server", "--port", str(port), "--workers", "1"]
    command += ["--backend-store-uri", f"sqlite:///{folder}/mlflow.db"]
    command += ["--artifacts-destination", f"{folder}/artifacts"]
    with (folder / "server.log").open("w") as log:
        process = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        wait_until(lambda: _answers(f"http://127.0.0.1:{port}/health"), 600)
        yield f"http://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait()


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


@pytest.fixture
def redis(folder: Path) -> Iterator[str]:
    """The address of a Redis."""
    port = free_port()
    command = [system_program("redis-server", "redis-server"), "--port", str(port), "--save", ""]
    command += ["--bind", "127.0.0.1", "--dir", str(folder)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        yield f"127.0.0.1:{port}"
        process.terminate()


@pytest.fixture
def env(folder: Path, server: str, redis: str) -> Iterator[dict[str, str]]:
    """The environment of a shell with secrets, in which a cluster of two nodes was started. Redis has the
    state of its control server.
    """
    env = SECRETS | {
        "HOME": str(folder),
        "PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin",
        "CLUSTER_DIR": f"{folder}/c",
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": f"{folder}/token",
        "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",  # as in the file `env` of the cluster
        "MOE_FRONTIER_HOME": f"{folder}/home",
        "MLFLOW_TRACKING_URI": server,
        "CPUS_PER_NODE": "2",
        "REDIS": redis,
        "RAY_JOB_STOP_WAIT_TIME_S": "60",  # a busy machine needs more than the 3 s of the default
        "READY_S": "600",
    }
    ports = (
        "RAY_PORT",
        "DASHBOARD_PORT",
        "RAY_CLIENT_PORT",
        "AUTOSCALER_METRIC_PORT",
        "DASHBOARD_METRIC_PORT",
    )
    env |= {name: str(free_port()) for name in ports}
    # Ray's token: its owner alone may read it.
    (folder / "token").write_text(f"{MARK}ray{'0' * 55}")
    try:
        done = subprocess.run([SCRIPT, "start", "1"], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        yield env
    finally:
        subprocess.run([SCRIPT, "stop"], env=env, check=True, capture_output=True)


@pytest.mark.smoke
def test_it_is_stopped_and_killed_and_shows_no_secret(
    env: dict[str, str], folder: Path, undisturbed: State
) -> None:
    """A submitted sweep is stopped. A driver that joins the cluster continues it, and is killed. While the
    next one trains, the process of a trial and the control server are killed. It finds what a laptop finds.
    Then a job whose workers Ray Train starts, with a model of the user's own.
    """
    gcs, dashboard = Path(env["CLUSTER_DIR"], "ports").read_text().split()
    assert (folder / "token").stat().st_mode & 0o777 == 0o600
    assert {at for each in processes(env) for at in listens_at(each)} <= {"127.0.0.1", "::1"}
    joined = env | {"RAY_ADDRESS": f"127.0.0.1:{gcs}", "PYTHONPATH": str(ROOT)}
    at_dashboard = env | {"RAY_ADDRESS": f"http://127.0.0.1:{dashboard}"}
    submit = ["ray", "job", "submit", "--working-dir", "."]
    sweep = ["jobs/pareto_sweep.py", "--sweep", SWEEP, "--max-concurrent", "1"]
    sweep += ["--confirm", "0", "--measure", "never"]
    store = f"sqlite:///{folder}/mlflow.db"

    said = run(at_dashboard, [*submit, "--no-wait", "--submission-id", "first", "--", "python", *sweep])
    wait_until(lambda: len(results(env)) > 0, 600)
    said += run(at_dashboard, ["ray", "job", "stop", "first"])
    assert len(results(env)) < ARMS
    (experiment,) = MlflowClient(store).search_experiments(filter_string="name = 'moe-frontier'")
    found = MlflowClient(store).search_runs([experiment.experiment_id])
    assert {each.info.status for each in found} <= {"FINISHED", "KILLED"}, "MLflow knows that it was stopped"

    with (folder / "driver.log").open("a") as log:

        def driver() -> subprocess.Popen[str]:
            return subprocess.Popen([sys.executable, *sweep], cwd=ROOT, env=joined, stdout=log, stderr=log)

        killed = driver()
        wait_until(lambda: len(results(env)) > 1, 600)
        killed.kill()
        killed.wait()
        assert len(results(env)) < ARMS
        wait_until(lambda: not trainers(processes(env)), 600)  # else the next would be taken for one of them
        last = driver()
        wait_until(lambda: bool(trainers(processes(env))), 600)
        (first,) = trainers(processes(env))
        first.kill()
        wait_until(lambda: bool({*trainers(processes(env))} - {first}), 600)
        assert last.poll() is None
        (control,) = [one for one in processes(env) if one.name() == "gcs_server"]
        control.kill()
        assert last.wait(600) == 0, (folder / "driver.log").read_text()[-3000:]
    assert state(store) == undisturbed
    shown = [asked(env, f"http://127.0.0.1:{dashboard}{path}") for path in ASKED]

    job = ["python", "jobs/train.py", "--name", "wide", "--workers", "2", "--ep", "2"]
    job += ["--plugin", f"{ROOT}/tests/own/convnet.py", "--set", *GUESTS["convnet"]]
    job += ["train.steps=4", "train.report_every=2"]
    said += run(at_dashboard, [*submit, "--", *job])
    shown += [asked(env, f"http://127.0.0.1:{dashboard}{path}") for path in ASKED]
    assert "train_trial" in shown[0], "the actors of trials are shown"
    assert "jobs/pareto_sweep.py" in shown[1], "the command lines of drivers are shown"
    assert not [line for line in said.splitlines() if MARK in line]
    assert not [text[max(0, text.find(MARK) - 200) :][:300] for text in shown if MARK in text]
    assert not files_with(MARK, folder)


def results(env: dict[str, str]) -> list[Path]:
    return [*Path(env["MOE_FRONTIER_HOME"]).glob("small/trials/*/result.json")]


# Of the dashboard: actors with their environments, jobs with their command lines, and more of each.
ASKED = (
    "/api/v0/actors?detail=1",
    "/api/jobs/",
    "/api/v0/jobs?detail=1",
    "/api/v0/tasks?detail=1",
    "/api/v0/runtime_envs?detail=1",
    "/nodes?view=details",
    "/api/actors",
)


def listens_at(process: psutil.Process) -> set[str]:
    try:
        found = process.net_connections("tcp")
    except psutil.Error:  # it has ended
        return set()
    return {each.laddr.ip.removeprefix("::ffff:") for each in found if each.status == psutil.CONN_LISTEN}


def asked(env: dict[str, str], url: str) -> str:
    token = Path(env["RAY_AUTH_TOKEN_PATH"]).read_text()
    request = urllib.request.Request(url, headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=60) as answer:
            return answer.read().decode()
    except urllib.error.HTTPError as error:  # an error shows nothing either
        return error.read().decode()


def run(env: dict[str, str], command: list[str], *, code: int = 0) -> str:
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=900
    )
    assert done.returncode == code, done.stdout + done.stderr
    return done.stdout + done.stderr


def files_with(mark: str, folder: Path) -> list[str]:
    """Returns the files that hold the text, in plain bytes, and where; without the token itself, and without
    the copies of this project that jobs unpack.
    """
    found = []
    for place, below, names in os.walk(folder):
        below[:] = [name for name in below if name != "working_dir_files"]
        for path in (Path(place, name) for name in names):
            if (
                path.is_file()
                and path != folder / "token"
                and mark.encode() in (content := path.read_bytes())
            ):
                at = content.find(mark.encode())
                found.append(f"{path.relative_to(folder)}: {content[max(0, at - 100) : at + 60]!r}")
    return found

"""A sweep whose driver, workers and tracking server go away ends as if nothing had happened."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from mlflow import MlflowClient

from orchestrator import storage, stores
from tests.jobs.small_sweep import ARMS
from tests.orchestrator.clouds import azure, environment, google
from tests.parts import command_of, free_port

ROOT = Path(__file__).parents[2]
State = dict[str, tuple[str, float, float, str]]


def start(home: Path, *interpreter: str, concurrent: int = 2, **env: str) -> subprocess.Popen[bytes]:
    job = [
        "jobs/pareto_sweep.py",
        "--sweep",
        "tests/jobs/small_sweep.py:make",
        "--confirm",
        "0",
        "--measure",
        "never",
    ]
    command = [*interpreter, *job, "--max-concurrent", str(concurrent)]
    home.mkdir(exist_ok=True)
    with (home / "log.txt").open("ab") as log:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ
            | {"MOE_FRONTIER_HOME": str(home), "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
            | env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def complete(home: Path) -> int:
    return len(list(home.glob("small/trials/*/result.json")))


def until(condition: Callable[[], bool], driver: subprocess.Popen[bytes], home: Path) -> None:
    give_up = time.monotonic() + 600
    while not condition():
        assert driver.poll() is None, (home / "log.txt").read_text()[-3000:]
        assert time.monotonic() < give_up, (home / "log.txt").read_text()[-3000:]
        time.sleep(0.2)


def kill_driver(driver: subprocess.Popen[bytes]) -> None:
    """As the machine's memory keeper would; its Ray goes with it."""
    family = psutil.Process(driver.pid).children(recursive=True)
    driver.send_signal(signal.SIGKILL)
    driver.wait()
    psutil.wait_procs(family, timeout=30)


def state(uri: str) -> State:
    """Of every child: status, quality, cost and whether it is on the frontier; no (key, step) twice."""
    client = MlflowClient(uri)
    found: State = {}
    experiment = client.get_experiment_by_name("moe-frontier")
    assert experiment is not None
    runs = client.search_runs([experiment.experiment_id])
    parents = [run for run in runs if run.data.tags.get("role") == "sweep"]
    assert [run.info.status for run in parents] == ["FINISHED"]
    for run in runs:
        if run.data.tags.get("role") == "sweep":
            continue
        assert run.data.tags["mlflow.parentRunId"] == parents[0].info.run_id
        name = run.info.run_name or ""
        assert name not in found, f"{name} has two runs"
        for metric in run.data.metrics:
            steps = [row.step for row in client.get_metric_history(run.info.run_id, metric)]
            assert len(steps) == len(set(steps)), (name, metric)
            assert metric.startswith("resumed/") or steps == sorted(steps), (name, metric)
        losses = [row.step for row in client.get_metric_history(run.info.run_id, "train/loss")]
        assert losses == [64 * step for step in range(5, 61, 5)], name  # none is missing
        metrics = run.data.metrics
        found[name] = (
            run.info.status,
            metrics["val/acc1"],
            metrics["cost/train_flops_6mac"],
            run.data.tags.get("pareto", "false"),
        )
    return found


@pytest.mark.slow  # `test_sweep_on_a_cluster` kills both
def test_the_driver_and_a_worker_are_killed(tmp_path, undisturbed):
    """The sweep trains one trial at a time; the sweeps below train two."""
    home = tmp_path / "home"
    driver = start(home, concurrent=1)
    until(lambda: complete(home) >= 2, driver, home)
    kill_driver(driver)
    driver = start(home, concurrent=1)
    family = psutil.Process(driver.pid).children
    until(lambda: bool(trainers(family(recursive=True))), driver, home)
    trainers(family(recursive=True))[0].kill()
    assert driver.wait(timeout=900) == 0, (home / "log.txt").read_text()[-3000:]
    assert state(f"sqlite:///{home}/mlflow.db") == undisturbed


# Runs a file as the interpreter does, with leases of 9 seconds.
SHORT_LEASES = """
import runpy, sys
from orchestrator.runs import lock
lock.LEASE_S, sys.argv = 9.0, sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.slow  # `test_storage` and `test_lock` hold the rules of each cloud
@pytest.mark.parametrize(("scheme", "cloud"), [("gs", google), ("az", azure)])
def test_the_driver_is_killed_with_all_files_in_a_cloud(scheme, cloud, tmp_path, undisturbed, monkeypatch):
    home, root = tmp_path / "home", f"{scheme}://bucket/runs"
    uri = f"sqlite:///{home}/mlflow.db"
    with cloud() as (proxy, make_bucket):
        make_bucket("bucket")
        env = environment(scheme, proxy.url)
        for name, value in env.items():
            monkeypatch.setenv(name, value)
        stores.forget()

        def results() -> int:
            return sum(name.endswith("/result.json") for name in storage.files(f"{root}/small/trials"))

        def driver() -> subprocess.Popen[bytes]:
            places = {"MOE_FRONTIER_HOME": root, "MLFLOW_TRACKING_URI": uri}
            return start(home, "-c", SHORT_LEASES, **env, **places)

        first = driver()
        until(lambda: results() >= 2, first, home)
        kill_driver(first)
        assert 2 <= results() < ARMS
        assert driver().wait(timeout=900) == 0, (home / "log.txt").read_text()[-3000:]
        assert results() == ARMS
    stores.forget()
    assert state(uri) == undisturbed
    assert not any(file.name.startswith(("small", "runs")) for file in home.iterdir())


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_the_driver_is_killed_at_random_moments_and_the_database_lost(tmp_path, undisturbed):
    """Twenty kills, some of them while Ray starts; the database is deleted once, after the tenth or later."""
    home, moments, lost = tmp_path / "home", random.Random(0), False
    for kill in range(20):
        driver = start(home)
        with suppress(subprocess.TimeoutExpired):  # a driver that ends before its kill has no more to do
            driver.wait(timeout=moments.uniform(1, 60))
        assert driver.poll() in (None, 0), (home / "log.txt").read_text()[-3000:]
        if driver.returncode is None:
            kill_driver(driver)
        if kill >= 9 and not lost and (home / "mlflow.db").exists():
            (home / "mlflow.db").unlink()
            lost = True
    assert lost
    assert start(home).wait(timeout=900) == 0, (home / "log.txt").read_text()[-3000:]
    assert state(f"sqlite:///{home}/mlflow.db") == undisturbed


def trainers(among: Iterable[psutil.Process]) -> list[psutil.Process]:
    """The processes in which trials train."""
    return [one for one in among if "ImplicitFunc" in command_of(one)]


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Callable[[], subprocess.Popen[bytes]]]:
    """Starts `mlflow server` on the same port and store, as often as it is called."""
    port = free_port()
    started: list[subprocess.Popen[bytes]] = []

    def serve() -> subprocess.Popen[bytes]:
        import urllib.request

        store = f"sqlite:///{tmp_path}/server.db"
        command = ["-m", "mlflow", "server", "--backend-store-uri", store, "--host", "127.0.0.1"]
        command += ["--port", str(port), "--workers", "1", "--artifacts-destination", str(tmp_path / "files")]
        started.append(subprocess.Popen([sys.executable, *command], start_new_session=True))
        for _ in range(600):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=1)
                break
            except OSError:
                time.sleep(0.2)
        started[-1].args = f"http://127.0.0.1:{port}"  # pyright: ignore
        return started[-1]

    yield serve
    for one in started:
        if one.poll() is None:
            os.killpg(one.pid, signal.SIGKILL)


@pytest.mark.slow
def test_the_tracking_server_is_away_for_some_trials(tmp_path, undisturbed, server):
    home, first = tmp_path / "home", server()
    uri = str(first.args)
    driver = start(home, MLFLOW_TRACKING_URI=uri)
    until(lambda: complete(home) >= 2, driver, home)
    os.killpg(first.pid, signal.SIGKILL)
    first.wait()
    until(lambda: complete(home) >= ARMS - 1, driver, home)
    server()
    assert driver.wait(timeout=900) == 0, (home / "log.txt").read_text()[-3000:]
    assert state(uri) == undisturbed

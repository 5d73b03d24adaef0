"""The doctor as a command, on a healthy laptop and with faults that are really there.

Ray is a head as the README starts it, with a token of its own; each run of the doctor is a process.
"""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from orchestrator.doctor import cluster
from tests.parts import free_port, start_ray

ROOT = Path(__file__).parents[2]
RAY = str(Path(sys.executable).with_name("ray"))


@dataclass(frozen=True)
class Told:
    code: int
    findings: dict[str, dict[str, str]]
    progress: str

    def status(self, *checks: str) -> list[str]:
        return [self.findings[check]["status"] for check in checks]

    def found(self, check: str) -> str:
        return self.findings[check]["found"] + " -> " + self.findings[check]["way_out"]


def doctor(env: dict[str, str], *flags: str, shell: str = "") -> Told:
    """`shell`: what a shell does before it becomes the doctor."""
    command = [sys.executable, "jobs/doctor.py", "--json", *flags]
    if shell:
        command = ["bash", "-c", f'{shell} && exec "$@"', "bash", *command]
    done = subprocess.run(
        command, cwd=ROOT, env=env, capture_output=True, text=True, timeout=400, check=False
    )
    assert done.stdout.startswith("{"), done.stdout[-2000:] + done.stderr[-3000:]
    findings = json.loads(done.stdout)["findings"]  # one document, and nothing else
    return Told(done.returncode, {found["check"]: found for found in findings}, done.stderr)


@pytest.fixture(scope="module")
def folder() -> Iterator[Path]:
    """Short, for sockets lie in it."""
    path = Path(tempfile.mkdtemp(prefix="ray"))
    yield path
    for process in psutil.process_iter(["cmdline"]):
        if str(path) in " ".join(process.info["cmdline"] or []):  # all of this head's, and they alone
            process.kill()
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="module")
def env(folder: Path) -> dict[str, str]:
    token = folder / "token"
    token.write_text(secrets.token_hex(32))
    token.chmod(0o600)
    ours = {
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN_PATH": str(token),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
        "PATH": f"{Path(RAY).parent}:{os.environ['PATH']}",  # as in an activated .venv: jobs run `python`
        "MOE_FRONTIER_HOME": str(folder / "home"),
    }
    theirs = {n: v for n, v in os.environ.items() if not n.startswith("MLFLOW_") and n != "RAY_ADDRESS"}
    return theirs | ours


@pytest.fixture(scope="module")
def head(env: dict[str, str], folder: Path) -> dict[str, str]:
    """The environment of a user of that head."""
    port = free_port()
    start = [RAY, "start", "--head", f"--port={port}", f"--dashboard-port={free_port()}", "--num-cpus=2"]
    start += ["--dashboard-host=127.0.0.1", f"--temp-dir={folder}/head", "--object-store-memory=100000000"]
    start += [f"--dashboard-agent-listen-port={free_port()}"]  # other Rays here have the usual one
    subprocess.run(start, env=env, check=True, capture_output=True, timeout=180)
    return env | {"RAY_ADDRESS": f"127.0.0.1:{port}"}


@pytest.mark.smoke
def test_a_healthy_laptop_passes(env: dict[str, str], tmp_path: Path) -> None:
    """A Ray is started as the sweep would start it, and nothing stays behind."""
    home = tmp_path / "home"
    told = doctor(env | {"RAY_ADDRESS": "local", "MOE_FRONTIER_HOME": str(home)})
    assert told.code == 0, told.progress
    assert "fail" not in told.status(*told.findings)
    fine = ("token", "variables", "sweep", "data", "storage", "cluster", "resources", "tracking", "clocks")
    assert set(told.status(*fine)) == {"ok"}, told.progress
    assert "2 workers over gloo: all-reduce" in told.found("collectives")
    assert os.listdir(home) == []
    assert "collectives" in told.progress


@pytest.mark.slow
def test_faults_of_the_place_are_all_found_at_once(head: dict[str, str], digits: str, tmp_path: Path) -> None:
    """Six are planted: no check keeps another from being run."""
    shards = tmp_path / "shards"
    shutil.copytree(digits, shards)
    damaged = max(shards.rglob("*.parquet"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    (tmp_path / "file").touch()
    other = tmp_path / "packages/optuna-4.0.0.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: optuna\nVersion: 4.0.0\n")
    planted = {"MLFLOW_RUN_ID": "0123", "PYTHONPATH": f"{other.parent}:{ROOT}"}
    flags = ["--data", str(shards), "--storage", str(tmp_path / "file/runs"), "--workers", "8"]
    flags += ["--tracking-uri", f"http://me:s3cret@127.0.0.1:{free_port()}"]
    told = doctor(head | planted, *flags, shell="ulimit -n 1000")
    assert told.code == 1
    places = ("variables", "data", "storage", "tracking", "versions", "resources", "open files")
    assert set(told.status(*places)) == {"fail"}, told.progress
    assert "unset MLFLOW_RUN_ID" in told.found("variables")
    assert "copy it again" in told.found("data")
    assert "optuna 5" in told.found("versions")
    assert "8 workers x 0.5 CPU + 1 CPU for data = 5 CPUs, the cluster has at most 2" in told.found(
        "resources"
    )
    assert "this process: ulimit -n is 1000" in told.found("open files")
    assert told.status("clocks", "dashboard", "nodes", "shared memory") == ["ok"] * 4
    assert "s3cret" not in str(told)


@pytest.mark.slow
def test_a_wrong_token_is_refused_and_does_not_hang(head: dict[str, str], tmp_path: Path) -> None:
    wrong = tmp_path / "token"
    wrong.write_text(secrets.token_hex(32))
    wrong.chmod(0o600)
    (tmp_path / "mlflow.db").touch()
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    told = doctor(head | {"RAY_AUTH_TOKEN_PATH": str(wrong)}, "--tracking-uri", uri)
    assert told.code == 1
    assert told.status("token", "address", "cluster", "nodes", "clocks") == [
        "ok",
        "fail",
        "skip",
        "skip",
        "skip",
    ]
    assert "refuses the token" in told.found("address")
    assert told.status("tracking", "data") == ["warn", "ok"]
    assert "mlflow db upgrade" in told.found("tracking")


@pytest.mark.slow
def test_nobody_answers_and_there_is_no_token(env: dict[str, str], tmp_path: Path) -> None:
    away = {"RAY_ADDRESS": f"127.0.0.1:{free_port()}", "RAY_AUTH_TOKEN_PATH": str(tmp_path / "none")}
    told = doctor(env | away)
    assert told.code == 1
    assert told.status("token", "address", "cluster") == ["fail", "fail", "skip"]
    assert "nobody answers" in told.found("address")


@pytest.mark.slow
def test_two_rays_and_a_dashboard_in_public(cluster_of_two: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """192.0.2.0/24 is nobody's (RFC 5737)."""
    assert cluster.check_dashboard({}).status == "ok"
    monkeypatch.setenv("RAY_OVERRIDE_DASHBOARD_URL", "http://192.0.2.1:8265")
    assert cluster.check_dashboard({"RAY_AUTH_MODE": "token"}).status == "warn"
    assert cluster.check_dashboard({"RAY_AUTH_MODE": "disabled"}).status == "fail"
    monkeypatch.setenv("RAY_OVERRIDE_DASHBOARD_URL", "")
    assert "no dashboard" in cluster.check_dashboard({}).found


@pytest.fixture
def cluster_of_two(head: dict[str, str], no_cluster: None) -> None:
    """A second Ray on this machine, beside the head."""
    start_ray(num_cpus=1, dashboard=True)
    assert cluster.check_instances().status == "warn"


@pytest.mark.slow
def test_a_node_with_a_disk_of_its_own_and_a_job(head: dict[str, str], folder: Path) -> None:
    """The node is a raylet with mounts of its own: another storage, and 16 MiB of /dev/shm."""
    if subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("mounts need rights: run as root, or with CAP_SYS_ADMIN")
    home = folder / "apart"
    home.mkdir()
    mounts = f"mount -t tmpfs none {home} && mount -t tmpfs -o size=16m none /dev/shm && ulimit -n 4000"
    start = [
        RAY,
        "start",
        f"--address={head['RAY_ADDRESS']}",
        "--num-cpus=1",
        "--object-store-memory=100000000",
    ]
    start += [f"--temp-dir={folder}/head", f"--dashboard-agent-listen-port={free_port()}"]
    shell = ["unshare", "-m", "bash", "-c", f'{mounts} && exec "$@"', "bash"]
    subprocess.run([*shell, *start], env=head, check=True, capture_output=True, timeout=180)
    told = doctor(head, "--storage", str(home), "--workers", "2")
    assert told.code == 1
    assert told.status("storage", "storage, nodes", "open files", "shared memory", "cluster") == [
        "ok",
        "fail",
        "warn",
        "warn",
        "ok",
    ], told.progress
    assert "is not shared by all nodes" in told.found("storage, nodes")
    assert "2 nodes up" in told.found("cluster")
    assert told.status("collectives", "clocks") == ["ok", "ok"], told.progress

    dashboard = ray_dashboard(head)
    job = [RAY, "job", "submit", "--working-dir", ".", "--", "python", "jobs/doctor.py"]
    job += ["--storage", str(home)]
    submitted = head | {"RAY_ADDRESS": dashboard}
    for _ in range(10):
        done = subprocess.run(
            job, cwd=ROOT, env=submitted, capture_output=True, text=True, timeout=300, check=False
        )
        if "No available agent to submit job" not in done.stderr:
            break
        time.sleep(3)
    assert done.returncode == 1  # as the finding says
    assert "is not shared by all nodes" in done.stdout, done.stdout[-3000:] + done.stderr[-2000:]


def ray_dashboard(head: dict[str, str]) -> str:
    """Asked in a process of its own, which has the head's token."""
    ask = "import ray; print(ray.init(logging_level='error').address_info['webui_url'])"
    done = subprocess.run(
        [sys.executable, "-c", ask], env=head, capture_output=True, text=True, timeout=120, check=True
    )
    return f"http://{done.stdout.split()[-1]}"

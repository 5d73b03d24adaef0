"""`cluster/local.sh` starts a real cluster; a node is drained when its cloud reclaims it."""

import contextlib
import json
import shutil
import stat
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_server

import psutil
import pytest

from tests.cluster.commented import CLUSTER
from tests.parts import system_program

BIN = Path(sys.executable).parent
SCRIPT = str(CLUSTER / "local.sh")
# Control server, dashboard, Ray Client, the dashboard's agent, metrics of the autoscaler and of the dashboard
PORTS_OF_ANY_RAY = (6379, 8265, 10001, 52365, 44217, 44227)


def test_wrong_commands_and_a_taken_port_are_refused(tmp_path):
    for command, said in ((["begin"], "usage"), (["start", "none"], "workers: a number"), ([], "usage")):
        done = subprocess.run([SCRIPT, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert said in done.stderr
    with create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "CLUSTER_DIR": str(tmp_path / "c")}
        done = subprocess.run(
            [SCRIPT, "start"], env=env | {"RAY_PORT": port}, capture_output=True, text=True, check=False
        )
        assert (done.returncode, done.stdout) == (1, "")
        assert done.stderr == f"error: RAY_PORT={port}: this port is taken\n"


@pytest.mark.parametrize("dead", ["head", "dashboard"])
def test_a_cluster_whose_head_died_does_not_run(dead, tmp_path):
    """Its other nodes still run and would wait for a head. Without its dashboard a head takes no jobs."""
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "CLUSTER_DIR": str(tmp_path)}
    node = subprocess.Popen(["sleep", "600"], env=env | {"MOE_FRONTIER_LOCAL_CLUSTER": str(tmp_path)})
    try:
        with create_server(("127.0.0.1", 0)) as head, create_server(("127.0.0.1", 0)) as dashboard:
            (tmp_path / "ports").write_text(f"{head.getsockname()[1]} {dashboard.getsockname()[1]}\n")
            done = subprocess.run([SCRIPT, "start"], env=env, capture_output=True, text=True, check=True)
            assert "it runs already" in done.stdout
            {"head": head, "dashboard": dashboard}[dead].close()
            for command in ("start", "status"):
                done = subprocess.run([SCRIPT, command], env=env, capture_output=True, text=True, check=False)
                assert (done.returncode, done.stdout) == (1, "")
                assert done.stderr.startswith(
                    f"error: the head of {tmp_path} does not answer: `{SCRIPT} stop` ends"
                )
    finally:
        node.kill()
        node.wait()


@contextlib.contextmanager
def listening(*ports: int) -> Iterator[None]:
    """Holds these ports, as another Ray would; a port that cannot be held is in use already."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            with contextlib.suppress(OSError):
                stack.enter_context(create_server(("", port)))
        yield


@pytest.fixture(scope="module")
def env() -> Iterator[dict[str, str]]:
    """The environment of a shell without a virtual environment, with a folder and a token of its own."""
    folder = tempfile.mkdtemp(prefix="ray")  # short: sockets lie in it
    yield {
        "HOME": str(Path.home()),
        "PATH": "/usr/bin:/bin",
        "CLUSTER_DIR": f"{folder}/c",
        "RAY_AUTH_TOKEN_PATH": f"{folder}/secret/token",
        "MOE_FRONTIER_HOME": f"{folder}/home",
        "CPUS_PER_NODE": "1",
    }
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def started(env: dict[str, str]) -> Iterator[str]:
    """Output of `start` while another Ray holds its ports."""
    try:
        with listening(*PORTS_OF_ANY_RAY):
            done = subprocess.run([SCRIPT, "start"], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        yield done.stdout
    finally:
        subprocess.run([SCRIPT, "stop"], env=env, check=True, capture_output=True)


def dashboard(env: dict[str, str]) -> str:
    lines = Path(env["CLUSTER_DIR"], "env").read_text().splitlines()
    return next(line for line in lines if "RAY_ADDRESS=" in line).partition("=")[2]


def ray(env: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    with_token = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": dashboard(env)}
    return subprocess.run(
        [str(BIN / "ray"), *command], env=with_token | env, capture_output=True, text=True, check=False
    )


def submit(env: dict[str, str], folder: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Submits a job from a shell that has only read the file written by `start`."""
    bare = {name: env[name] for name in ("HOME", "PATH")}
    lines = 'source "$1" && shift && ray job submit --working-dir "$@"'
    args = [f"{env['CLUSTER_DIR']}/env", str(folder), "--", *command]
    return subprocess.run(
        ["bash", "-c", lines, "bash", *args], env=bare, capture_output=True, text=True, check=False
    )


def nodes(env: dict[str, str]) -> list[dict]:
    done = ray(env, "list", "nodes", "--format", "json", "--detail")
    assert done.returncode == 0, done.stderr
    return [node for node in json.loads(done.stdout) if node["state"] == "ALIVE"]


def processes(env: dict[str, str]) -> set[psutil.Process]:
    """The processes started by `start`, and their children."""
    found = set()
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MOE_FRONTIER_LOCAL_CLUSTER") == env["CLUSTER_DIR"]:
                found |= {process, *process.children(recursive=True)}
    return found


def runs(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


@pytest.mark.slow  # it starts three nodes
def test_start_brings_up_three_nodes_behind_a_token(env, started):
    token = Path(env["RAY_AUTH_TOKEN_PATH"])
    assert stat.S_IMODE(token.stat().st_mode) == 0o600
    assert token.read_text() not in started
    cpus = sorted(node["resources_total"].get("CPU", 0) for node in nodes(env))
    assert cpus == [0, 1, 1]  # the head trains nothing

    stranger = ray(env | {"RAY_AUTH_MODE": "disabled"}, "list", "nodes")
    assert stranger.returncode != 0
    assert "Unauthorized" in stranger.stdout + stranger.stderr
    wrong = Path(env["CLUSTER_DIR"]) / "wrong"
    wrong.write_text("0" * 64)
    assert ray(env | {"RAY_AUTH_TOKEN_PATH": str(wrong)}, "job", "list").returncode != 0


JOB = """
import os, ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy as On

ray.init(logging_level="error")
home = ray.remote(num_cpus=0)(lambda: (os.environ["MOE_FRONTIER_HOME"], os.listdir(".")))
places = [On(node["NodeID"], soft=False) for node in ray.nodes()]
print("seen", *ray.get([home.options(scheduling_strategy=place).remote() for place in places]))
print("still here", os.listdir(os.getcwd()))
"""


@pytest.mark.slow
def test_it_takes_jobs_beside_another_ray_and_without_an_activated_environment(env, started, tmp_path):
    """A job finds its environment and its code on every node, and a second start changes nothing.

    Nodes that shared a folder would remove the driver's working directory when they unpack it too.
    """
    assert f"dashboard  {dashboard(env)} " in started
    assert f"source {env['CLUSTER_DIR']}/env" in started
    assert "entrypoint='true'" not in ray(env, "job", "list").stdout  # the trial job of `start` is deleted
    (tmp_path / "job.py").write_text(JOB)
    job = submit(env, tmp_path, "python", "job.py")
    assert job.returncode == 0, job.stdout + job.stderr
    one = f"('{env['MOE_FRONTIER_HOME']}', ['job.py'])"
    assert f"seen {one} {one} {one}\nstill here ['job.py']\n" in job.stdout
    before = {node["node_id"] for node in nodes(env)}
    again = subprocess.run([SCRIPT, "start"], env=env, capture_output=True, text=True, check=True)
    assert "it runs already" in again.stdout
    assert {node["node_id"] for node in nodes(env)} == before


class Metadata(BaseHTTPRequestHandler):
    """The interruption notices of both clouds' metadata services; no notice until `ends` is set."""

    ends: datetime | None = None

    def do_PUT(self) -> None:
        assert self.path == "/latest/api/token"
        assert self.headers["X-aws-ec2-metadata-token-ttl-seconds"]
        self.reply("a-session-token")

    def do_GET(self) -> None:
        ends = type(self).ends
        if self.path == "/latest/meta-data/spot/instance-action":
            if self.headers["X-aws-ec2-metadata-token"] != "a-session-token":
                self.send_error(401)
            elif ends is None:
                self.send_error(404)
            else:
                self.reply(json.dumps({"action": "terminate", "time": f"{ends:%Y-%m-%dT%H:%M:%SZ}"}))
        elif (
            self.path == "/computeMetadata/v1/instance/preempted"
            and self.headers["Metadata-Flavor"] == "Google"
        ):
            self.reply("FALSE" if ends is None else "TRUE")
        else:
            self.send_error(400)

    def reply(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *_: object) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize(("cloud", "seconds"), [("aws", 120), ("gcp", 30)])
def test_a_node_is_drained_when_its_cloud_takes_it_back(env, started, cloud, seconds):
    """An idle node leaves at once."""
    node = next(one for one in nodes(env) if one["resources_total"].get("CPU"))
    Metadata.ends = None
    server = ThreadingHTTPServer(("127.0.0.1", 0), Metadata)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    port = Path(env["CLUSTER_DIR"], "port").read_text().strip()
    watch = [str(CLUSTER / "drain_on_notice.sh"), cloud, "--address", f"127.0.0.1:{port}"]
    where = {
        "PATH": f"{BIN}:{env['PATH']}",
        "METADATA_URL": f"http://127.0.0.1:{server.server_port}",
        "POLL_S": "0.2",
        "RAY_AUTH_MODE": "token",
    }
    watcher = subprocess.Popen(
        [*watch, "--node-id", node["node_id"]], env=env | where, stdout=subprocess.PIPE, text=True
    )
    try:
        time.sleep(2)
        assert watcher.poll() is None  # no notice, no drain
        Metadata.ends = datetime.now(UTC) + timedelta(seconds=120)
        said, _ = watcher.communicate()
        assert watcher.returncode == 0
        left = int(said.split(" s: draining")[0].split()[-1])
        assert seconds - 5 <= left <= seconds
        while node["node_id"] in {one["node_id"] for one in nodes(env)}:
            time.sleep(1)
    finally:
        watcher.kill()
        server.shutdown()


@pytest.mark.slow
def test_stop_ends_all_its_processes_and_no_other(env, started):
    ours = processes(env)
    assert len(ours) > 3
    idle = [sys.executable, "-c", "import time; time.sleep(600)", env["CLUSTER_DIR"]]
    bystander = subprocess.Popen(idle, cwd=env["CLUSTER_DIR"])
    try:
        for said in ("stopped", "nothing of"):
            done = subprocess.run([SCRIPT, "stop"], env=env, capture_output=True, text=True, check=True)
            assert said in done.stdout
        assert [process for process in ours if runs(process)] == []
        assert bystander.poll() is None
    finally:
        bystander.kill()


COUNT = """
import os, sys, time, ray
ray.init(logging_level="error")

@ray.remote(num_cpus=1)
class Counter:
    n = 0
    def up(self):
        self.n += 1
        return self.n

counter, places = Counter.remote(), sorted(node["NodeID"] for node in ray.nodes())
print("counted", ray.get(counter.up.remote()), flush=True)
open(sys.argv[1], "w").close()
while os.path.exists(sys.argv[1]):
    time.sleep(0.5)
print("counted", ray.get(counter.up.remote()), places == sorted(node["NodeID"] for node in ray.nodes()))
"""


@pytest.mark.slow  # `test_sweep_on_a_cluster` kills it
def test_a_control_server_with_its_state_in_redis_comes_back(env, tmp_path):
    """A job that runs goes on with its actor and its nodes, and the cluster takes another."""
    redis = system_program("redis-server", "redis-server")
    with create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    command = [redis, "--port", port, "--bind", "127.0.0.1", "--save", "", "--dir", str(tmp_path)]
    env = env | {"CLUSTER_DIR": f"{env['CLUSTER_DIR']}r", "REDIS": f"127.0.0.1:{port}"}
    flag, work = tmp_path / "flag", tmp_path / "work"
    work.mkdir()
    (work / "count.py").write_text(COUNT)
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as store, ThreadPoolExecutor() as pool:
        try:
            subprocess.run([SCRIPT, "start", "1"], env=env, check=True, capture_output=True)
            (control,) = [one for one in processes(env) if one.name() == "gcs_server"]
            job = pool.submit(submit, env, work, "python", "count.py", str(flag))
            while not flag.exists():
                assert not job.done(), job.result()
                time.sleep(0.2)
            control.kill()
            time.sleep(3)
            flag.unlink()
            done = job.result()
            assert done.returncode == 0, done.stdout + done.stderr
            assert "counted 1\n" in done.stdout
            assert "counted 2 True" in done.stdout
            assert submit(env, work, "true").returncode == 0
            assert len(nodes(env)) == 2
        finally:
            flag.unlink(missing_ok=True)
            subprocess.run([SCRIPT, "stop"], env=env, check=True, capture_output=True)
            store.terminate()

"""`cluster/local.sh` starts a real cluster, and a node of it leaves when its cloud asks for it."""

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
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from socket import create_server

import psutil
import pytest

from tests.cluster.commented import CLUSTER

BIN = Path(sys.executable).parent
SCRIPT = str(CLUSTER / "local.sh")
# Control server, dashboard, Ray Client, the dashboard's agent, metrics of the autoscaler and of the dashboard
PORTS_OF_ANY_RAY = (6379, 8265, 10001, 52365, 44217, 44227)


@pytest.mark.parametrize("script", sorted(path.name for path in CLUSTER.glob("*.sh")))
def test_shellcheck_finds_nothing(script):
    done = subprocess.run([BIN / "shellcheck", CLUSTER / script], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_wrong_command_is_refused():
    for command, said in ((["begin"], "usage"), (["start", "none"], "workers: a number"), ([], "usage")):
        done = subprocess.run([SCRIPT, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert said in done.stderr


@contextlib.contextmanager
def listening(*ports: int) -> Iterator[None]:
    """Holds these ports, as another Ray would. Those that really are another program's are held already."""
    with contextlib.ExitStack() as stack:
        for port in ports:
            with contextlib.suppress(OSError):
                stack.enter_context(create_server(("", port)))
        yield


def test_a_port_that_is_asked_for_and_taken_is_refused(tmp_path):
    with create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
        for name in ("RAY_PORT", "DASHBOARD_PORT"):
            env = {
                "HOME": str(tmp_path),
                "PATH": "/usr/bin:/bin",
                "CLUSTER_DIR": str(tmp_path / "c"),
                name: port,
            }
            done = subprocess.run([SCRIPT, "start"], env=env, capture_output=True, text=True, check=False)
            assert (done.returncode, done.stdout) == (1, "")
            assert done.stderr == f"error: {name}={port}: this port is taken\n"


@pytest.fixture(scope="module")
def env() -> Iterator[dict[str, str]]:
    """A shell in which no virtual environment is activated, with a folder and a token of this test alone."""
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
    """What `start` printed, beside another Ray."""
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
    """Submits a job from a shell that knows nothing but the file which `start` wrote."""
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
    """The processes that `start` started, and all that those started."""
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


def listeners() -> dict[int, psutil.Process]:
    """Which process listens on which port of this machine."""
    found = {}
    for connection in psutil.net_connections("inet"):
        if connection.status == psutil.CONN_LISTEN and connection.laddr and connection.pid:
            with contextlib.suppress(psutil.Error):
                found[connection.laddr.port] = psutil.Process(connection.pid)
    return found


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


@pytest.mark.slow
def test_it_takes_jobs_beside_another_ray_and_without_an_activated_environment(env, started, tmp_path):
    assert "waiting for the nodes and a first job" in started
    assert f"dashboard  {dashboard(env)} " in started
    ours = processes(env)
    assert not [port for port, process in listeners().items() if process in ours and port in PORTS_OF_ANY_RAY]
    job = submit(env, tmp_path, "python", "-c", "import ray, torch")
    assert job.returncode == 0, job.stdout + job.stderr
    jobs = ray(env, "job", "list").stdout
    assert "import ray, torch" in jobs
    assert "entrypoint='true'" not in jobs  # the job with which `start` tried it is deleted


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
def test_a_job_finds_its_environment_and_its_code_on_every_node(env, started, tmp_path):
    """Nodes that shared a folder would remove the driver's working directory when they unpack it too."""
    (tmp_path / "job.py").write_text(JOB)
    job = submit(env, tmp_path, "python", "job.py")
    assert job.returncode == 0, job.stdout + job.stderr
    one = f"('{env['MOE_FRONTIER_HOME']}', ['job.py'])"
    assert f"seen {one} {one} {one}\nstill here ['job.py']\n" in job.stdout
    assert f"source {env['CLUSTER_DIR']}/env" in started


@pytest.mark.slow
def test_started_twice_it_says_that_it_runs(env, started):
    before = {node["node_id"] for node in nodes(env)}
    again = subprocess.run([SCRIPT, "start"], env=env, capture_output=True, text=True, check=True)
    assert "it runs already" in again.stdout
    assert {node["node_id"] for node in nodes(env)} == before
    status = subprocess.run([SCRIPT, "status"], env=env, capture_output=True, text=True, check=True)
    assert "0.0/2.0 CPU" in status.stdout


class Metadata(BaseHTTPRequestHandler):
    """The two clouds' metadata services, as far as they speak of interruptions. Silent until `ends`."""

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
    """Idle, it leaves at once; what a training does in that time is tested with trainings."""
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
def test_stop_ends_all_of_it_and_nothing_else(env, started):
    ours = processes(env)
    bound = {port for port, process in listeners().items() if process in ours}
    assert len(ours) > 3
    assert len(bound) > 3
    idle = [sys.executable, "-c", "import time; time.sleep(600)", env["CLUSTER_DIR"]]
    bystander = subprocess.Popen(idle, cwd=env["CLUSTER_DIR"])
    begin = time.time()
    try:
        done = subprocess.run([SCRIPT, "stop"], env=env, capture_output=True, text=True, check=True)
        assert [process for process in ours if runs(process)] == []
        held = {port: process for port, process in listeners().items() if port in bound}
        assert [port for port, process in held.items() if process.create_time() < begin] == []
        assert "stopped" in done.stdout
        assert bystander.poll() is None
        again = subprocess.run([SCRIPT, "stop"], env=env, capture_output=True, text=True, check=True)
        assert "nothing of" in again.stdout
    finally:
        bystander.kill()

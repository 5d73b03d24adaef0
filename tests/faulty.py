"""A cluster of whole machines on which runs train while faults happen."""

import os
import re
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from orchestrator import storage
from orchestrator.runs.metrics_file import METRICS, LineReader
from tests.machines import DISK, ROOT, Machine, start_ray
from tests.orchestrator.tracking.stores import Postgres, wait_until
from tests.parts import system_program, to_each

PACE_S = 0.3
EVERY = 10  # steps between checkpoints
NEVER_S = 500.0
AHEAD = "+2h"  # the clock of the last node
STEPS = 3  # that show that a run goes on
TRIAL = r"ray::.*(ImplicitFunc|train_trial)"
WORKER = r"ray::.*TrainWorker"
NOTICED = re.compile(
    r"lost |restart|no step for|no report for|does not answer|failed|died|dead|gone|waits|error|cannot|again"
)
PLUGIN = str(ROOT / "tests/paced.py")
FIELDS = {
    "train.optimizer.kind": "paced",
    "train.report_every": 1,
    "train.steps": 100_000,
    "train.schedule.warmup_steps": 100,
    "checkpoint.every": EVERY,
    "data.batch_size": 60,
    "data.lanes": 6,
    "model.moe.router.kind": "soft",
    "model.moe.num_experts": 6,
    "scale.wait_s": 5,
}
SWEEP = f"""
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.sweep import Sweep

def make():
    arms = {{f"one-{{dim}}": {{"model.mlp_dim": dim}} for dim in (32, 64)}}
    arms["two"] = {{"scale.workers": 2, "scale.ep": 2}}
    return Sweep(base=override(RunConfig(), {FIELDS | {"name": "sweep"}}), arms=arms)
"""


Lines = list[dict[str, Any]]  # of a metrics file
Records = dict[str, Lines]  # of each training, by its directory


class Command:
    """A command of ours on a machine: its lines, and when they came."""

    def __init__(self, machine: Machine, log: Path, *command: str, **options: Any) -> None:
        self.lines: list[tuple[float, str]] = []
        pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        self.process = machine.start(sys.executable, *command, **pipe, **options)
        self._thread = threading.Thread(target=self._listen, args=(log,), daemon=True)
        self._thread.start()

    def _listen(self, log: Path) -> None:
        assert self.process.stdout
        with log.open("a") as file:
            for line in self.process.stdout:
                self.lines.append((time.monotonic(), line.rstrip()))
                file.write(f"{time.monotonic():.1f} {line}")
                file.flush()

    def signal(self, number: int) -> None:
        for process in psutil.Process(self.process.pid).children():  # of nsenter
            process.send_signal(number)

    def wait(self, seconds: float = NEVER_S) -> int:
        code = self.process.wait(seconds)
        self._thread.join()
        return code


class Run:
    """A training, or a sweep of three, as its directories and its driver show it."""

    def __init__(self, name: str, root: str, command: Sequence[str], process: str) -> None:
        self.name, self.root, self.command, self.process = name, root, command, process
        self.driver: Command | None = None

    def directories(self) -> list[str]:
        trials = storage.join(self.root, self.name, "trials")
        found = [storage.join(trials, name) for name in storage.names(trials)]
        return sorted(found) or [storage.join(self.root, self.name)]

    def records(self) -> Records:
        return {directory: LineReader(directory, METRICS).new() for directory in self.directories()}

    def unfinished(self) -> set[str]:
        """Folders of checkpoints that have no manifest yet."""
        return {
            f"{directory}/checkpoints/{folder}"
            for directory in self.directories()
            for folder in storage.names(f"{directory}/checkpoints")
            if storage.size(f"{directory}/checkpoints/{folder}/manifest.json") is None
        }


class Cluster:
    """m1 has the services and the switch, m2 the head and the drivers; m3, m4 and m5 have two CPUs each."""

    def __init__(self, found: Sequence[Machine], folder: Path, digits: str, stack: ExitStack) -> None:
        self.services, self.head, *self.nodes = found
        self.folder, self.digits = folder, digits
        self.storage = folder / "storage"
        (folder / "sweep.py").write_text(SWEEP)
        at = self.services.address
        self.env = os.environ | {
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_ENDPOINT_URL": f"http://{at}:9000",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "MLFLOW_TRACKING_URI": f"http://{at}:5000",
            "PACE_S": str(PACE_S),
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
            "RAY_TMPDIR": DISK,
            "RAY_grpc_client_keepalive_time_ms": "90000",  # as in the files of clusters
            "RAY_grpc_client_keepalive_timeout_ms": "60000",
            "TMPDIR": DISK,
        }
        self.env.pop("RAY_ADDRESS")
        self.postgres = Postgres(self.services.enter)
        stack.callback(self.postgres.remove)
        self.start_mlflow()
        self.serve(
            system_program("redis-server", "redis-server"),
            "--port",
            "6390",
            "--protected-mode",
            "no",
            "--save",
            "",
        )
        self.serve(sys.executable, "-m", "moto.server", "-H", at, "-p", "9000")
        self.services.connect("10.77.0.254")
        wait_until(self._bucket, 120)
        head = ("--head", "--num-cpus=0", "--include-dashboard=false")
        start_ray(self.head, self.env | {"RAY_REDIS_ADDRESS": f"{at}:6390"}, *head)
        system_program("faketime", "faketime")
        self.join(*self.nodes[:-1])
        self.join(self.nodes[-1], LD_PRELOAD="/usr/$LIB/faketime/libfaketime.so.1", FAKETIME=AHEAD)
        self.runs = {
            "training": self.run("training", str(self.storage)),
            "sweep": self.run("sweep", str(self.storage)),
            "training on S3": self.run("training", "s3://runs/home"),
        }

    def _bucket(self) -> bool:
        """Makes the bucket, as soon as S3 answers."""
        request = urllib.request.Request(f"{self.env['AWS_ENDPOINT_URL']}/runs", method="PUT")
        with suppress(OSError):
            return urllib.request.urlopen(request, timeout=5).status == 200
        return False

    def run(self, name: str, root: str) -> Run:
        places = ["--storage", root, "--data", self.digits, "--plugin", PLUGIN]
        if name == "sweep":
            what = [
                "jobs/pareto_sweep.py",
                "--sweep",
                f"{self.folder}/sweep.py:make",
                "--confirm",
                "0",
                "--measure",
                "never",
            ]
            return Run(name, root, [*what, *places], TRIAL)
        fields = ["--set", *(f"{field}={value}" for field, value in FIELDS.items())]
        what = ["jobs/train.py", "--name", name, "--workers", "3", "--ep", "3"]
        return Run(name, root, [*what, *places, *fields], WORKER)

    def serve(self, *command: str) -> None:
        with (self.folder / "services.log").open("a") as log:
            self.services.start(*command, stdout=log, stderr=log, env=self.env)

    def start_mlflow(self) -> None:
        where = ["--host", self.services.address, "--port", "5000", "--workers", "1"]
        files = [
            "--backend-store-uri",
            self.postgres.uri,
            "--artifacts-destination",
            str(self.folder / "files"),
        ]
        self.serve(sys.executable, "-m", "mlflow", "server", *where, *files)

    def join(self, *nodes: Machine, **env: str) -> None:
        """Ray starts on them; at once, because it takes seconds."""
        with ThreadPoolExecutor() as pool:
            where = f"--address={self.head.address}:6379"
            list(pool.map(lambda node: start_ray(node, self.env | env, where), nodes))

    def heal(self) -> None:
        """Every node that is off, or that has left the cluster, joins it again."""
        left = [node for node in self.nodes if not node.processes("raylet/raylet")]
        for node in left:
            if not node.is_on():
                node.boot()
            to_each(psutil.Process.kill, node.processes("ray"))
        self.join(*left)

    def start(self, run: Run) -> Command:
        env = self.env | {"RAY_ADDRESS": f"{self.head.address}:6379"}
        return Command(self.head, self.folder / f"{run.name}.log", *run.command, env=env)

    def busy(self, what: str) -> dict[Machine, list[psutil.Process]]:
        """Nodes that have such processes."""
        return {node: found for node in self.nodes if (found := node.processes(what))}


@contextmanager
def small_disk(path: Path) -> Iterator[None]:
    """A disk of its own, which a fault may fill."""
    path.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "none", path], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", path], check=True)

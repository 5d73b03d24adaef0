"""The table of faults: what happens, at which moment, and what the run is to do then."""

import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import psutil

from tests.faulty import AHEAD, EVERY, Cluster, Run
from tests.machines import DISK, Machine
from tests.parts import to_each

# training: between two checkpoints. checkpoint: while one is written. restart: while the run starts again,
# because a worker was killed. sweep: while its three trials train.
Moment = Literal["training", "checkpoint", "restart", "sweep", "training on S3", "checkpoint on S3"]
# goes on: without a restart. restarts: from its last checkpoint, by itself. ends: the driver does; the same
# command, given again, goes on.
Outcome = Literal["goes on", "restarts", "ends"]
POSTGRES = r"^postgres:|bin/postgres "
Act = Callable[[Cluster, Run], Iterator[None]]  # prepares, yields at the moment, strikes and mends


@dataclass(frozen=True)
class Fault:
    name: str
    moment: Moment
    act: Act
    expected: Outcome
    most: int = 2 * EVERY  # steps to repeat
    may_restart: bool = False  # if a connection broke of which Ray has not heard

    def __str__(self) -> str:
        return f"{self.name}, {self.moment}"


def victim(cluster: Cluster, run: Run) -> Machine:
    """The last node that has a process of the run."""
    return [*cluster.busy(run.process)][-1]


def one(cluster: Cluster, run: Run) -> psutil.Process:
    return cluster.busy(run.process)[victim(cluster, run)][0]


def worker_killed(cluster: Cluster, run: Run) -> Iterator[None]:
    process = one(cluster, run)
    yield
    process.kill()


def worker_stopped(cluster: Cluster, run: Run) -> Iterator[None]:
    process = one(cluster, run)
    yield
    process.suspend()
    time.sleep(40)
    process.resume()


def raylet_killed(cluster: Cluster, run: Run) -> Iterator[None]:
    (raylet,) = victim(cluster, run).processes("raylet/raylet")
    yield
    raylet.kill()


def power_off(cluster: Cluster, run: Run) -> Iterator[None]:
    machine = victim(cluster, run)
    yield
    machine.off()


def cable(seconds: float) -> Act:
    def act(cluster: Cluster, run: Run) -> Iterator[None]:
        machine = victim(cluster, run)
        yield
        machine.plug("down")
        time.sleep(seconds)
        machine.plug("up")

    return act


def head_cut_off(cluster: Cluster, run: Run) -> Iterator[None]:
    yield
    cluster.head.plug("down")
    time.sleep(20)
    cluster.head.plug("up")


def control_server_killed(cluster: Cluster, run: Run) -> Iterator[None]:
    """Its supervisor starts it again."""
    (server,) = cluster.head.processes("gcs_server")
    command, env = server.cmdline(), server.environ()
    yield
    server.kill()
    time.sleep(5)
    cluster.head.start(*command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def clock_ahead(cluster: Cluster, run: Run) -> Iterator[None]:
    """The clock of the last node is so from its start, until it is restarted."""
    assert cluster.busy(run.process)[cluster.nodes[-1]][0].environ()["FAKETIME"] == AHEAD
    yield


def full(path: str) -> Act:
    """A disk is full for 15 s: it becomes as small as what it holds."""

    def act(cluster: Cluster, run: Run) -> Iterator[None]:
        machine = victim(cluster, run)
        yield
        used = machine.run("df", "--output=used", "--block-size=1", path).split()[-1]
        machine.run("mount", "-o", f"remount,size={used}", path)
        time.sleep(15)
        machine.run("mount", "-o", "remount,size=2g", path)

    return act


def storage_full(cluster: Cluster, run: Run) -> Iterator[None]:
    return full(str(cluster.storage))(cluster, run)


def slow_link(rate: str) -> Act:
    def act(cluster: Cluster, run: Run) -> Iterator[None]:
        machine = victim(cluster, run)
        yield
        shape = ("rate", rate, "burst", "64kb", "latency", "200ms")
        machine.network("tc", "qdisc", "add", "dev", "card", "root", "tbf", *shape)
        time.sleep(15)
        machine.network("tc", "qdisc", "del", "dev", "card", "root")

    return act


def lossy_link(cluster: Cluster, run: Run) -> Iterator[None]:
    machine = victim(cluster, run)
    yield
    drop = (
        "INPUT",
        "-i",
        "card",
        "-m",
        "statistic",
        "--mode",
        "random",
        "--probability",
        "0.02",
        "-j",
        "DROP",
    )
    machine.network("iptables-legacy", "-A", *drop)
    time.sleep(15)
    machine.network("iptables-legacy", "-D", *drop)


def silent(service: str) -> Act:
    """The processes of a service stop for 20 s."""

    def act(cluster: Cluster, run: Run) -> Iterator[None]:
        found = cluster.services.processes(service)
        yield
        to_each(psutil.Process.suspend, found)
        time.sleep(20)
        to_each(psutil.Process.resume, found)

    return act


def refused(cluster: Cluster, run: Run) -> Iterator[None]:
    """As a server that was killed, and that has all its objects when it comes back."""
    yield
    refuse = ("INPUT", "-p", "tcp", "--dport", "9000", "-j", "REJECT", "--reject-with", "tcp-reset")
    cluster.services.network("iptables-legacy", "-A", *refuse)
    time.sleep(20)
    cluster.services.network("iptables-legacy", "-D", *refuse)


def tracking_killed(cluster: Cluster, run: Run) -> Iterator[None]:
    found = cluster.services.processes("mlflow")
    yield
    to_each(psutil.Process.kill, found)
    time.sleep(15)
    cluster.start_mlflow()


def database_killed(cluster: Cluster, run: Run) -> Iterator[None]:
    found = cluster.services.processes(POSTGRES)
    yield
    to_each(psutil.Process.kill, found)
    time.sleep(10)
    cluster.postgres.start()


def second_driver(cluster: Cluster, run: Run) -> Iterator[None]:
    """It is refused, and says why."""
    yield
    second = cluster.start(run)
    assert second.wait() == 1
    assert any("works in" in line for _, line in second.lines), second.lines[-5:]


def driver_killed(cluster: Cluster, run: Run) -> Iterator[None]:
    assert run.driver
    yield
    run.driver.signal(signal.SIGKILL)


def both(*acts: Act) -> Act:
    def act(cluster: Cluster, run: Run) -> Iterator[None]:
        begun = [act(cluster, run) for act in acts]
        for each in begun:
            next(each)
        yield
        for each in begun:
            next(each, None)

    return act


FAULTS = [
    Fault("a node's clock 2 h ahead", "training", clock_ahead, "goes on"),
    Fault("power off", "training", power_off, "restarts"),
    Fault("one machine's link at 10 Mbit/s, 15 s", "training", slow_link("10mbit"), "goes on"),
    Fault("2 % of packets lost on a link, 15 s", "training", lossy_link, "goes on"),
    Fault("cable out for 10 s", "training", cable(10), "goes on"),
    Fault("control server killed, again after 5 s", "training", control_server_killed, "goes on"),
    Fault("worker stopped (SIGSTOP) for 40 s", "training", worker_stopped, "goes on"),
    Fault("a node's disk full for 15 s", "training", full(DISK), "goes on"),
    Fault("tracking server silent for 20 s", "training", silent("mlflow"), "goes on"),
    Fault("tracking server killed, again after 15 s", "training", tracking_killed, "goes on"),
    Fault("its Postgres silent for 20 s", "training", silent(POSTGRES), "goes on"),
    Fault("its Postgres killed, again after 10 s", "checkpoint", database_killed, "goes on"),
    Fault("second driver of the same run: refused", "training", second_driver, "goes on"),
    # Both come before faults that make new connections: one that it broke may end a worker minutes later.
    Fault("head's cable out for 20 s", "training", head_cut_off, "goes on", may_restart=True),
    Fault("worker killed", "checkpoint", worker_killed, "restarts"),
    Fault("worker killed", "restart", worker_killed, "restarts"),
    Fault("cable out for 80 s", "training", cable(80), "restarts"),
    Fault("storage full for 15 s", "checkpoint", storage_full, "restarts"),
    Fault(
        "raylet, control server killed", "training", both(raylet_killed, control_server_killed), "restarts"
    ),
    Fault("driver killed", "checkpoint", driver_killed, "ends"),
    Fault("trial killed", "sweep", worker_killed, "restarts", most=6 * EVERY),
    Fault("power off", "sweep", power_off, "restarts", most=6 * EVERY),
    Fault("head's cable out for 20 s", "sweep", head_cut_off, "goes on", may_restart=True),
    Fault("driver killed", "sweep", driver_killed, "ends", most=6 * EVERY),
    Fault("S3 silent for 20 s", "training on S3", silent("moto"), "goes on"),
    Fault("S3 refuses connections for 20 s", "checkpoint on S3", refused, "goes on"),
]

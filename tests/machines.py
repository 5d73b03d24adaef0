"""Whole machines on this one: each has a network, a hostname, processes and a disk at `DISK` of its own.

They hang on one switch, and share all other files. Needs root. A machine lives as long as its first process,
which reads from this process: however this one ends, the machine and all that runs on it end too.
"""

import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest

from tests.parts import system_program

ROOT = Path(__file__).parents[1]
DISK = "/media"  # a folder that every Linux has, and that nothing of ours uses
NAMESPACES = ("--net", "--pid", "--uts", "--mount")
# As Debian and Ubuntu install it, /etc/hosts has the hostname at an address that only this machine can reach.
BOOT = f"""set -e
echo "$0" > /proc/sys/kernel/hostname
mount -t tmpfs none {DISK}
printf '127.0.0.1 localhost\\n127.0.1.1 %s\\n' "$0" > {DISK}/hosts
mount --bind {DISK}/hosts /etc/hosts
ip link set lo up
echo booted
exec cat"""


class Machine:
    """A machine with the address 10.77.0.<number>. The first one has the switch, with a port for another."""

    def __init__(self, number: int, holder: subprocess.Popen[str], switch: "Machine | None") -> None:
        assert holder.stdout
        assert holder.stdout.readline() == "booted\n"
        self.address, self._switch, self._port = f"10.77.0.{number}", switch, f"port{number}"
        (first,) = psutil.Process(holder.pid).children()
        self._pid = first.pid
        if switch:
            card = ("type", "veth", "peer", "name", "card", "netns", str(self._pid))
            switch.ip("link", "add", self._port, *card)
            switch.ip("link", "set", self._port, "master", "card", "up")
        else:
            self.ip("link", "add", "card", "type", "bridge")
        self.ip("address", "add", f"{self.address}/24", "dev", "card")
        self.ip("link", "set", "card", "up")

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        """Starts a command on this machine, in the folder of the project."""
        enter = ["nsenter", f"--target={self._pid}", *NAMESPACES, "--wd", "--"]
        return subprocess.Popen([*enter, *command], text=True, **options)

    def run(self, *command: str, **options: Any) -> None:
        process = self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        said, _ = process.communicate()
        assert process.returncode == 0, (command, said[-3000:])

    def ip(self, *command: str) -> None:
        """Changes its network, from outside: there, processes are called by their numbers here."""
        subprocess.run(["nsenter", f"--target={self._pid}", "--net", "ip", *command], check=True)

    def plug(self, how: str) -> None:
        """Pulls the cable (``down``), or puts it in again (``up``)."""
        assert self._switch
        self._switch.ip("link", "set", self._port, how)


@contextmanager
def machines(count: int) -> Iterator[Sequence[Machine]]:
    """Boots machines; the test skips, and says why, where they are not allowed."""
    ip = system_program("ip", "iproute2")
    may = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", ip, "link", "add", "card", "type", "bridge"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if may.returncode:
        pytest.skip(f"machines need root and namespaces: {may.stderr.strip()}")
    with ExitStack() as stack:
        found: list[Machine] = []
        for number in range(1, count + 1):
            command = ["unshare", *NAMESPACES, "--kill-child", "--mount-proc", "sh", "-c", BOOT, f"m{number}"]
            holder = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT
            )
            stack.enter_context(holder)  # closes its stdin and waits
            found.append(Machine(number, holder, found[0] if found else None))
        yield found


def start_ray(machine: Machine, env: dict[str, str], *where: str) -> None:
    """Starts a node of two CPUs: the head, or one that joins ``--address=..``."""
    ports = ("--min-worker-port=0", "--max-worker-port=0", "--num-cpus=2", "--object-store-memory=100000000")
    ray = str(Path(sys.executable).with_name("ray"))
    machine.run(ray, "start", *where, f"--node-ip-address={machine.address}", *ports, env=env)

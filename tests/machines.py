"""Whole machines on this one: each has a network, a hostname, processes and a disk at `DISK` of its own.

They hang on one switch, and share all other files. Needs root. A machine lives as long as its first process,
which reads from this process: however this one ends, the machine and all that runs on it end too.
"""

import os
import re
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import psutil

from tests.parts import system_program, without

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
cat
exit # the shell stays, and buries processes that nobody waits for"""


class Machine:
    """A machine with the address 10.77.0.<number>. The first one has the switch, with a port for another."""

    def __init__(self, number: int, switch: "Machine | None") -> None:
        self.name, self.address = f"m{number}", f"10.77.0.{number}"
        self._switch, self._port = switch, f"port{number}"
        self.boot()

    def boot(self) -> None:
        """Starts it, the first time or after `off`."""
        command = ["unshare", *NAMESPACES, "--kill-child", "--mount-proc", "sh", "-c", BOOT, self.name]
        pipe = subprocess.PIPE
        self._holder = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, cwd=ROOT)
        assert self._holder.stdout
        assert self._holder.stdout.readline() == "booted\n"
        (first,) = psutil.Process(self._holder.pid).children()
        self._pid = first.pid
        if self._switch:
            card = ("type", "veth", "peer", "name", "card", "netns", str(self._pid))
            self._switch.network("ip", "link", "add", self._port, *card)
            self._switch.network("ip", "link", "set", self._port, "master", "card", "up")
        else:
            self.network("ip", "link", "add", "card", "type", "bridge")
        self.network("ip", "address", "add", f"{self.address}/24", "dev", "card")
        self.network("ip", "link", "set", "card", "up")

    @property
    def enter(self) -> list[str]:
        """The words before a command that let it run on this machine, in the folder of the project."""
        return ["nsenter", f"--target={self._pid}", *NAMESPACES, "--wd", "--"]

    def start(self, *command: str, **options: Any) -> subprocess.Popen[str]:
        return subprocess.Popen([*self.enter, *command], text=True, **options)

    def run(self, *command: str, **options: Any) -> str:
        """Returns what the command prints."""
        process = self.start(*command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options)
        said, _ = process.communicate()
        assert process.returncode == 0, (command, said[-3000:])
        return said

    def processes(self, name: str) -> list[psutil.Process]:
        """Returns its processes whose command lines match, but for the first."""
        found = []
        with suppress(OSError):  # it is off
            inside = os.readlink(f"/proc/{self._pid}/ns/pid")
            for process in psutil.process_iter(["cmdline"]):
                line = " ".join(process.info["cmdline"] or ())
                if process.pid != self._pid and line and re.search(name, line):
                    with suppress(OSError):
                        if os.readlink(f"/proc/{process.pid}/ns/pid") == inside:
                            found.append(process)
        return found

    def network(self, *command: str) -> None:
        """Changes its network, from outside: there, processes are called by their numbers here."""
        subprocess.run(["nsenter", f"--target={self._pid}", "--net", *command], check=True)

    def plug(self, how: str) -> None:
        """Pulls the cable (``down``), or puts it in again (``up``)."""
        assert self._switch
        self._switch.network("ip", "link", "set", self._port, how)

    def connect(self, address: str) -> None:
        """Gives the network of this process an address at the switch of this machine."""
        # Connections that nobody closed keep an earlier switch, and its cable, for minutes.
        subprocess.run(["ip", "link", "delete", "machines"], stderr=subprocess.DEVNULL, check=False)
        ours = ("type", "veth", "peer", "name", "machines", "netns", str(os.getpid()))
        self.network("ip", "link", "add", "host", *ours)
        self.network("ip", "link", "set", "host", "master", "card", "up")
        subprocess.run(["ip", "address", "add", f"{address}/24", "dev", "machines"], check=True)
        subprocess.run(["ip", "link", "set", "machines", "up"], check=True)

    def off(self) -> None:
        """Cuts the power: nobody is told."""
        if self._switch:
            self._switch.network("ip", "link", "delete", self._port)
        self._holder.kill()
        self._holder.communicate()

    def is_on(self) -> bool:
        return self._holder.poll() is None


@contextmanager
def machines(count: int) -> Iterator[Sequence[Machine]]:
    """Boots machines; a test is nothing `without` them where they are not allowed."""
    ip = system_program("ip", "iproute2")
    may = subprocess.run(
        ["unshare", *NAMESPACES, "--fork", ip, "link", "add", "card", "type", "bridge"],
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    if may.returncode:
        without(f"machines need root and namespaces: {may.stderr.strip()}")
    found: list[Machine] = []
    try:
        for number in range(1, count + 1):
            found.append(Machine(number, found[0] if found else None))
        yield found
    finally:
        for machine in reversed(found):
            if machine.is_on():
                machine.off()


def start_ray(machine: Machine, env: dict[str, str], *where: str) -> None:
    """Starts a node of two CPUs: the head, or one that joins ``--address=..``."""
    ports = ("--min-worker-port=0", "--max-worker-port=0", "--num-cpus=2", "--object-store-memory=100000000")
    ray = str(Path(sys.executable).with_name("ray"))
    machine.run(ray, "start", *ports, *where, f"--node-ip-address={machine.address}", env=env)

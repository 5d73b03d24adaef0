"""The doctor's checks of machines: the pairs that it tries, what it says, and a machine beyond reach."""

import json
import os
import subprocess
import sys
from itertools import combinations
from typing import Any

import pytest

from orchestrator.errors import UsageError
from orchestrator.planning.machines import GIB, Probes, rounds, unreachable
from tests.machines import DISK, ROOT, machines, start_ray


@pytest.mark.parametrize("count", [1, 2, 5, 8])
def test_every_node_meets_every_other_once(count):
    """In rounds whose pairs share no node; with an odd number one pauses."""
    names = [f"m{i}" for i in range(count)]
    found = list(rounds(names))
    assert all(len({name for pair in pairs for name in pair}) == 2 * len(pairs) for pairs in found)
    assert sorted(tuple(sorted(pair)) for pairs in found for pair in pairs) == [*combinations(names, 2)]


@pytest.mark.parametrize(
    ("problems", "rates", "said"),
    [
        ([("a", "b"), ("b", "c")], [("a", "c")], "b cannot be reached"),
        (
            [("a", "b")],
            [("a", "c"), ("b", "c")],
            "nodes do not reach each other (a - b: refused; GB/s: a - c 1.00",
        ),
        ([("a", "b")], [], "a, b cannot be reached"),
    ],
)
def test_it_names_who_cannot_be_reached(problems, rates, said):
    assert unreachable(dict.fromkeys(problems, "refused"), dict.fromkeys(rates, 1.0)).startswith(said)


class Answers(Probes):
    """Probes that answer at once."""

    def __init__(self, ahead: dict[str, float], disks: dict[str, tuple[int, int, int]]) -> None:
        self.nodes = {name: {"Resources": {"object_store_memory": 2 * GIB}} for name in disks}
        self._probes: Any = ahead
        self._disks = disks

    def _ahead_s(self, probe: Any) -> float:
        return probe

    def _ask(self, method: str) -> dict[str, Any]:
        return self._disks


def test_clocks_and_disks():
    well, full, small = (4 * GIB, 100 * GIB, 50 * GIB), (4 * GIB, 100 * GIB, GIB), (GIB, 100 * GIB, 50 * GIB)
    good = Answers({"a": 0.25, "b": -0.5}, {"a": well})
    assert good.check_clocks() == "within 0.75 s of each other"
    assert good.check_disks() == "/dev/shm of 4.0 GiB at least, 50.0 GiB of Ray's disk free at least"
    bad = Answers({"a": 0.0, "b": -7200.0}, {"a": well, "b": full, "c": small})
    with pytest.raises(UsageError, match=r"from this one: b -7200 s\. Set them by NTP"):
        bad.check_clocks()
    with pytest.raises(UsageError, match=r"b: 1\.0 of 100\.0 GiB of .* are free; c: /dev/shm has 1\.0 GiB"):
        bad.check_disks()


@pytest.mark.slow  # of three minutes; the tests above hold what it says
def test_the_doctor_names_a_machine_that_cannot_be_reached(digits, tmp_path):
    """Hostnames are at 127.0.1.1 in /etc/hosts. The last machine uses a network that it alone has, as of its
    containers.
    """
    env = os.environ | {"RAY_TMPDIR": DISK, "RAY_AUTH_MODE": "disabled", "PYTHONPATH": str(ROOT)}
    env.pop("RAY_ADDRESS")
    doctor = [sys.executable, "jobs/plan.py", "--check", "--json", "--storage", str(tmp_path)]
    with machines(3) as (head, other, last):
        last.network("ip", "link", "add", "own", "type", "bridge")
        last.network("ip", "address", "add", "9.0.0.1/24", "dev", "own")  # gloo connects to the lower address
        last.network("ip", "link", "set", "own", "up")
        start_ray(head, env, "--head", "--include-dashboard=false")
        start_ray(other, env, f"--address={head.address}:6379")
        start_ray(last, env | {"GLOO_SOCKET_IFNAME": "own"}, f"--address={head.address}:6379")
        env["RAY_ADDRESS"] = f"{head.address}:6379"
        job = head.start(*doctor, "--data", digits, env=env, stdout=subprocess.PIPE)
        findings = json.loads(job.communicate()[0])["findings"]
    found = {one["check"]: (one["ok"], one["message"]) for one in findings}
    assert {name: ok for name, (ok, _) in found.items() if name in ("network", "clocks", "disks")} == {
        "network": False,
        "clocks": True,
        "disks": True,
    }
    who, _, why = found["network"][1].partition(" cannot be reached by training workers (")
    assert who.startswith(last.address), found
    assert "; GB/s: 10.77.0." in why, "the other two reach each other"

"""Checks of a cluster's machines: whether and how fast they reach each other, their clocks and disks."""

import shutil
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import ray
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
from torch._C._distributed_c10d import TCPStore
from torch.distributed import distributed_c10d

from orchestrator.errors import UsageError, reason_of
from orchestrator.estimate import GIB
from orchestrator.planning.findings import Finding, run_check
from orchestrator.training.resources import ANSWER_S, node_name
from orchestrator.training.torch_trainer import use_interface_of_ray

SENT_MB = 64
CONNECT_S = 10
FAILING_ROUNDS = 3
ROUNDS = 7  # in each, all nodes exchange with one other node: all pairs of up to eight nodes
MOST_PAIRS = 6  # in a line
CLOCKS_S = 60.0  # times in MLflow are wrong by more than this; S3 refuses requests at 15 minutes
FULL = 0.05  # of a disk, below which Ray 2.60 does not spill to it


def check_machines(nodes: Sequence[dict[str, Any]], *, use_gpu: bool) -> list[Finding]:
    """Checks `nodes`, entries of `ray.nodes` that are up."""
    with Probes(nodes, use_gpu=use_gpu) as probes:
        return [
            run_check("network", probes.check_network),
            run_check("clocks", probes.check_clocks),
            run_check("disks", probes.check_disks),
        ]


class Probes:
    """A process on each node that is up, as a context."""

    def __init__(self, nodes: Sequence[dict[str, Any]], *, use_gpu: bool) -> None:
        kind: Any = ray.remote(num_cpus=0, num_gpus=int(use_gpu), max_restarts=0)(_Probe)
        self.nodes = {node_name(node): node for node in nodes}
        self._probes: dict[str, Any] = {
            name: kind.options(
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
            ).remote()
            for name, node in self.nodes.items()
        }

    def __enter__(self) -> "Probes":
        return self

    def __exit__(self, *error: object) -> None:
        for probe in self._probes.values():
            ray.kill(probe)

    def check_network(self) -> str:
        """All nodes exchange `SENT_MB` by the library that exchanges gradients. Raises UsageError."""
        rates, problems = dict[tuple[str, str], float](), dict[tuple[str, str], str]()
        for number, pairs in enumerate(rounds(list(self.nodes))):
            # More rounds tell which of two nodes it is.
            if number == ROUNDS or (problems and number == FAILING_ROUNDS):
                break
            for pair, answer in self._exchange(pairs).items():
                if isinstance(answer, str):
                    problems[pair] = answer
                else:
                    rates[pair] = answer
        if problems:
            raise UsageError(unreachable(problems, rates))
        if not rates:
            return "one node has no network to check"
        return f"all-reduce of {SENT_MB} MB between two nodes, {slowest(rates)}"

    def check_clocks(self) -> str:
        """Raises UsageError if the clock of a node is more than `CLOCKS_S` from this one."""
        ahead = {name: self._ahead_s(probe) for name, probe in self._probes.items()}
        far = [f"{name} {seconds:+.0f} s" for name, seconds in ahead.items() if abs(seconds) > CLOCKS_S]
        if far:
            raise UsageError(f"clocks differ from this one: {', '.join(far)}. Set them by NTP")
        return f"within {max(ahead.values()) - min(ahead.values()):.2f} s of each other"

    def check_disks(self) -> str:
        """Raises UsageError if a node's shared memory is smaller than its object store, or its disk full."""
        found = self._ask("disks")
        problems = []
        for name, (shm, total, free) in found.items():
            store = self.nodes[name]["Resources"].get("object_store_memory", 0)
            if shm < store:
                problems.append(
                    f"{name}: /dev/shm has {shm / GIB:.1f} GiB, Ray's object store {store / GIB:.1f}: give"
                    " containers more shared memory, or start Ray with a smaller object store"
                )
            if free < FULL * total:
                problems.append(f"{name}: {free / GIB:.1f} of {total / GIB:.1f} GiB of Ray's disk are free")
        if problems:
            raise UsageError("; ".join(problems))
        least_shm, least_free = (min(sizes[i] for sizes in found.values()) / GIB for i in (0, 2))
        return f"/dev/shm of {least_shm:.1f} GiB at least, {least_free:.1f} GiB of Ray's disk free at least"

    def _ahead_s(self, probe: Any) -> float:
        ray.get(probe.now.remote(), timeout=ANSWER_S)  # the first call waits for the process
        asked = time.time()
        now: float = ray.get(probe.now.remote(), timeout=ANSWER_S)
        return now - (asked + time.time()) / 2

    def _ask(self, method: str) -> dict[str, Any]:
        asked = {name: getattr(probe, method).remote() for name, probe in self._probes.items()}
        return {name: ray.get(answer, timeout=ANSWER_S) for name, answer in asked.items()}

    def _exchange(self, pairs: Sequence[tuple[str, str]]) -> dict[tuple[str, str], float | str]:
        """Returns GB/s of each pair, or why there are none. They share no node, so all exchange at once."""
        places = {pair: ray.get(self._probes[pair[0]].listen.remote(), timeout=ANSWER_S) for pair in pairs}
        asked = {
            pair: [self._probes[name].exchange.remote(place, rank) for rank, name in enumerate(pair)]
            for pair, place in places.items()
        }
        found: dict[tuple[str, str], float | str] = {}
        for pair, answers in asked.items():
            both = [_rate(answer) for answer in answers]
            found[pair] = next((why for why in both if isinstance(why, str)), both[0])
        return found


def _rate(answer: Any) -> float | str:
    """Returns what `exchange` returned, or why it failed."""
    try:
        return ray.get(answer, timeout=ANSWER_S)
    except Exception as error:
        return reason_of(error)


class _Probe:
    """Answers for a node."""

    def __init__(self) -> None:
        use_interface_of_ray()
        self._store: Any = None

    def now(self) -> float:
        return time.time()

    def disks(self) -> tuple[int, int, int]:
        """Returns the bytes of shared memory, and those of the disk that Ray spills to, in all and free."""
        node: Any = ray._private.worker._global_node  # pyright: ignore
        disk = shutil.disk_usage(node.get_session_dir_path())
        shm = shutil.disk_usage("/dev/shm").total if Path("/dev/shm").exists() else 0
        return shm, disk.total, disk.free

    def listen(self) -> tuple[str, int]:
        address = ray.util.get_node_ip_address()
        self._store = TCPStore(address, 0, 2, True, timedelta(seconds=CONNECT_S), wait_for_workers=False)
        return address, self._store.port

    def exchange(self, place: tuple[str, int], rank: int) -> float:
        """Returns GB/s of an all-reduce over two processes, each of which sends all bytes once."""
        limit, gpu = timedelta(seconds=CONNECT_S), torch.cuda.is_available()
        store = self._store if rank == 0 else TCPStore(*place, 2, False, limit)
        # No `init_process_group`: after one that failed, this process would count its groups differently.
        kind: Any = distributed_c10d.ProcessGroupNCCL if gpu else distributed_c10d.ProcessGroupGloo
        group = kind(store, rank, 2, limit)
        tensor = torch.zeros(SENT_MB * 1_000_000 // 4, device="cuda" if gpu else "cpu")
        group.allreduce([tensor]).wait()  # connects
        began = time.perf_counter()
        group.allreduce([tensor]).wait()
        if gpu:
            torch.cuda.synchronize()
        return SENT_MB / 1000 / (time.perf_counter() - began)


def rounds(nodes: Sequence[str]) -> Iterator[list[tuple[str, str]]]:
    """Yields pairs that share no node, until every node has met every other: the circle of a tournament."""
    ring: list[str | None] = [*nodes, *([None] if len(nodes) % 2 else [])]
    for _ in range(len(ring) - 1):
        half = len(ring) // 2
        pairs = zip(ring[:half], reversed(ring[half:]), strict=True)
        yield [(a, b) for a, b in pairs if a is not None and b is not None]
        ring = [ring[0], ring[-1], *ring[1:-1]]


def slowest(rates: Mapping[tuple[str, str], float]) -> str:
    """Lists the slowest pairs with their rates."""
    shown = sorted(rates, key=lambda pair: rates[pair])[:MOST_PAIRS]
    listed = ", ".join(f"{' - '.join(pair)} {rates[pair]:.2f}" for pair in shown)
    more = f" and {len(rates) - len(shown)} faster pairs" if len(rates) > len(shown) else ""
    return f"GB/s: {listed}{more}"


def unreachable(problems: Mapping[tuple[str, str], str], rates: Mapping[tuple[str, str], float]) -> str:
    """Names the nodes that reached no other, or else the pairs that did not reach each other."""
    well = {name for pair in rates for name in pair}
    failures = Counter(name for pair in problems for name in pair if name not in well)
    alone = [name for name, count in failures.items() if count > 1 or len(problems) == 1]
    others = f"; {slowest(rates)}" if rates else ""
    lost = [f"{' - '.join(pair)}: {reason}" for pair, reason in problems.items()]
    who = (
        f"{', '.join(alone)} cannot be reached by training workers"
        if alone
        else "nodes do not reach each other"
    )
    return (
        f"{who} ({'; '.join(lost)}{others}). Open all TCP ports between the nodes; if they share several"
        " networks, set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface before `ray start`"
    )

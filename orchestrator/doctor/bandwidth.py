"""How fast workers exchange tensors, placed as training places them: all-reduce and all-to-all.

Bandwidths are bus bandwidths: of n workers with b bytes each, 2 (n - 1) / n * b / s for all-reduce and
(n - 1) / n * b / s for all-to-all, so that they compare with the links' own whatever n is.
Source: nccl-tests, PERFORMANCE.md.
"""

import socket
import statistics
import time
from datetime import timedelta
from typing import Any

import ray
import torch
import torch.distributed as dist
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from orchestrator.config import RunConfig
from orchestrator.doctor.report import Finding, Skipped, fail, ok, warn
from orchestrator.training.resources import placement, worker_resources

REPEATS = 5
NUMBERS = {"gloo": 1 << 20, "nccl": 1 << 26}  # float32 of each worker
SLOW_GB_PER_S = {
    "gloo": 0.05,
    "nccl": 1.0,
}  # half of 1 Gbit/s; a tenth of 80 Gbit/s
PLACE_S = 15.0
MEASURE_S = 60.0


@ray.remote
class Rank:
    """One worker of the exchange."""

    def address(self) -> str:
        """Where rank 0 waits for the others."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"tcp://{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    def measure(self, address: str, rank: int, world: int, backend: str) -> dict[str, float]:
        """Median seconds of each collective."""
        dist.init_process_group(
            backend, init_method=address, rank=rank, world_size=world, timeout=timedelta(seconds=PLACE_S)
        )
        try:
            numbers = NUMBERS[backend] // world * world
            sent = torch.ones(numbers, device="cuda" if backend == "nccl" else "cpu")
            got = torch.empty_like(sent)
            return {
                "all_reduce": _seconds(lambda: dist.all_reduce(sent)),
                "all_to_all": _seconds(lambda: dist.all_to_all_single(got, sent)),
            }
        finally:
            dist.destroy_process_group()


def check_collectives(run: RunConfig, workers: int) -> Finding:
    """Between `workers` workers such as `run` has, while the cluster has room for them."""
    if workers == 1:
        raise Skipped("one worker exchanges nothing")
    backend = "nccl" if run.scale.use_gpu else "gloo"
    group = placement_group([worker_resources(run)] * workers, strategy=placement(run))
    ranks: list[Any] = []
    try:
        if not group.wait(PLACE_S):
            raise Skipped(f"needs: room for {workers} workers; the cluster is busy, or has not grown yet")
        each = worker_resources(run)
        for index in range(workers):
            place = PlacementGroupSchedulingStrategy(group, placement_group_bundle_index=index)
            rank = Rank.options(
                num_cpus=each["CPU"], num_gpus=each.get("GPU", 0), scheduling_strategy=place
            ).remote()
            ranks.append(rank)
        address = ray.get(ranks[0].address.remote(), timeout=MEASURE_S)
        asked = [rank.measure.remote(address, i, workers, backend) for i, rank in enumerate(ranks)]
        seconds = ray.get(asked, timeout=MEASURE_S)
    except GetTimeoutError:
        return fail(f"{workers} workers did not meet over {backend} in {MEASURE_S:g} s", _WAY_OUT)
    finally:
        for rank in ranks:
            ray.kill(rank)
        remove_placement_group(group)
    return judge(backend, workers, {name: max(one[name] for one in seconds) for name in seconds[0]})


def judge(backend: str, workers: int, seconds: dict[str, float]) -> Finding:
    """`seconds`: of the slowest rank, for each collective."""
    sent_bytes = 4 * (NUMBERS[backend] // workers * workers)
    share = (workers - 1) / workers
    reduced = 2 * share * sent_bytes / seconds["all_reduce"] / 1e9
    exchanged = share * sent_bytes / seconds["all_to_all"] / 1e9
    told = f"{workers} workers over {backend}: all-reduce {reduced:.2f} GB/s, all-to-all {exchanged:.2f} GB/s"
    least = SLOW_GB_PER_S[backend]
    if min(reduced, exchanged) < least:
        return warn(f"{told}, less than {least:g}", _WAY_OUT)
    return ok(told)


_WAY_OUT = (
    "see which interface is used (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME, NCCL_DEBUG=INFO), that all ports"
    " are open between nodes, and choose scale.ep so that experts stay near"
)


def _seconds(collective: Any) -> float:
    took = []
    for _ in range(1 + REPEATS):  # the first one opens connections
        dist.barrier()
        started = time.perf_counter()
        collective()
        if torch.cuda.is_initialized():
            torch.cuda.synchronize()
        took.append(time.perf_counter() - started)
    return statistics.median(took[1:])

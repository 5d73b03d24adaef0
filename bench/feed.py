"""Blocks and images per second that one feed gives to the workers of a run, and the CPU that this takes.

  python bench/feed.py [--rounds N] [--seconds S] [--workers N] [--out FILE]

Two forms are compared, in turn and with the same blocks: the product's feed (long tasks), and plain Ray tasks
that each worker submits for itself, some in flight. (`bench/results/feed.json` also has "short tasks", the
form before: a task of Ray Data for every block. The bench of its commit measured it.) First a copy of ready
bytes takes the place of decoding, of 1 kB and of 150 kB per image: what is left is the work of the feed. Then
photograph-like JPEGs of 91 kB are decoded to 224 px. The product's feed is also measured with the blocks of a
run of 8 workers and more, half of which it serves.

Workers are threads of this process which only receive blocks. Medians over rounds. Then the number of feeds
is computed that 8, 64 and 512 GPUs need, if a feed's process may use 60 % of a core.
"""

import importlib
import itertools
import json
import math
import os
import statistics
import tempfile
import threading
import time
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import psutil
import ray

from bench.harness import RESULTS, ROOT, Record, options
from bench.images import draw, pack
from bench.provenance import provenance
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data import ray_data
from orchestrator.data.batch import PartialBatch, Traffic
from orchestrator.data.read_plan import LARGE_WORKERS, ReadPlan
from orchestrator.data.stream import open_stream

CORES = os.cpu_count() or 1
SHARE = 222  # images per worker and step: one block of 32 MiB at 224 px
STEPS = 1 << 20
HOOK = "bench.feed.use_ready_bytes"
JPEGS = 200
BUSY = 0.6  # of a core that a feed's process may use
FORMS = ("long tasks", "plain tasks")
PROCESSES = ("feed", "workers", "tasks", "ray")
LARGE = "150 kB, large run"
CASES = {"1 kB": 18, "150 kB": 224, "JPEG": 224, LARGE: 224}  # case -> pixels per side


class ReadyStream(NamedTuple):
    """Stands for a stream: copies ready bytes instead of decoding."""

    size: int

    def fetch(self, step: int, slots: range) -> int:
        return len(slots)

    def decode(self, n: int) -> PartialBatch:
        ints, fields = np.zeros(n, np.int64), {"image": _ready(n, self.size).copy()}
        fields["label"] = np.zeros((n, 1), np.int64)
        return PartialBatch(fields, np.zeros(n, np.float32), ints, ints, [], Traffic())


@lru_cache(maxsize=4)
def _ready(images: int, size: int) -> Any:
    return np.random.default_rng(0).integers(0, 256, (images, size, size, 3), np.uint8)


def stream_of(run: RunConfig, split: Any, rank: int, workers: int, whole: bool = False) -> Any:
    return (
        open_stream(run, split, rank, workers, whole=whole)
        if run.data.path
        else ReadyStream(run.model.image_side())
    )


def use_ready_bytes() -> None:
    """Runs once in every process that Ray starts."""
    ray_data.open_stream = stream_of  # pyright: ignore[reportAttributeAccessIssue]


def decoded(plan: ReadPlan, number: int) -> list[PartialBatch]:
    rank, chunk = plan.block(number)
    stream = stream_of(plan.run, plan.split, rank, plan.workers)
    return [stream.decode(stream.fetch(step, slots)) for step, slots in chunk]


def by_server(server: Any, plan: ReadPlan, rank: int) -> Iterator[Any]:
    """Yields a worker's blocks from the product's server."""
    reading = ray.get(server.join.remote(plan, rank))
    numbers = iter(range(rank, plan.block_count(), len(plan.ranks)))
    asked = deque(server.block.remote(reading, n) for n in islice(numbers, ray_data.BLOCKS_AHEAD))
    while asked:
        (block,) = ray.get(asked.popleft())
        asked.extend(server.block.remote(reading, n) for n in islice(numbers, 1))
        yield ray.get(block)


def by_tasks(task: Any, plan: ReadPlan, rank: int) -> Iterator[Any]:
    """Yields a worker's blocks, made by plain tasks: together as many as a feed has room for.

    The workers share `task`, and so the CPUs: Ray lets a CPU go on with the tasks of the same function, and
    with a function for each worker some get no block at all.
    """
    numbers = iter(range(rank, plan.block_count(), len(plan.ranks)))
    ahead = ray_data.READY_BLOCKS + math.ceil(ray_data.BLOCKS_PER_TASK * CORES / len(plan.ranks))
    waiting = deque(task.remote(plan, n) for n in islice(numbers, ahead))
    while waiting:
        yield ray.get(waiting.popleft())
        waiting.extend(task.remote(plan, n) for n in islice(numbers, 1))


def measure(form: str, server: Any, run: RunConfig, workers: int, seconds: float) -> Record:
    """Reads for a third of the time, and measures the rest; `workers` read of those that share a batch."""
    plan = ReadPlan(run, "train", 0, STEPS, run.data.batch_size // SHARE, range(workers))
    received, stop, task = [0] * workers, threading.Event(), ray.remote(decoded)

    def read(rank: int) -> None:
        for block in by_server(server, plan, rank) if server else by_tasks(task, plan, rank):
            del block
            received[rank] += 1
            if stop.is_set():
                return

    with ThreadPoolExecutor(workers) as pool:
        done = [pool.submit(read, rank) for rank in range(workers)]
        while not all(received):
            time.sleep(0.1)
        time.sleep(seconds / 3)
        blocks, began, used = sum(received), time.perf_counter(), cpu_seconds(server)
        time.sleep(seconds)
        blocks, took = sum(received) - blocks, time.perf_counter() - began
        used = {name: value - used.get(name, 0) for name, value in cpu_seconds(server).items()}
        stop.set()
        for one in done:
            one.result()
    if server:  # ends what is being read
        empty = plan._replace(stop=0, run=override(run, {"train.seed": run.train.seed + 1}))
        ray.get([server.join.remote(empty, rank) for rank in range(workers)])
    while ray.available_resources().get("CPU") != CORES:  # tasks that were submitted ahead
        time.sleep(0.1)
    images = blocks * len(plan.block(0)[1]) * SHARE
    found = {"form": form, "images": images, "blocks_per_s": blocks / took, "images_per_s": images / took}
    return found | {f"{name}_cpu_ms_per_block": 1000 * used.get(name, 0) / blocks for name in PROCESSES}


def cpu_seconds(server: Any) -> dict[str, float]:
    """Returns the CPU seconds so far of the feed's process, the workers, the tasks and Ray's daemons."""
    feed = ray.get(server.__ray_call__.remote(lambda _: os.getpid())) if server else -1
    found: dict[str, float] = {"workers": sum(psutil.Process().cpu_times()[:2])}
    for process in psutil.Process().children(recursive=True):
        try:
            times, title = process.cpu_times(), " ".join(process.cmdline()[:1])
        except psutil.Error:
            continue
        name = "feed" if process.pid == feed else "tasks" if title.startswith("ray::") else "ray"
        found[name] = found.get(name, 0) + times.user + times.system
    return found


def report(records: list[Record]) -> list[Record]:
    """Prints the medians and their ratios, and the number of feeds; returns the latter."""
    found: dict[tuple[str, str], Record] = {}
    for case, form in dict.fromkeys((record["case"], record["form"]) for record in records):
        rows = [record for record in records if (record["case"], record["form"]) == (case, form)]
        of = {key: statistics.median(row[key] for row in rows) for key in rows[0] if "_per_" in key}
        rates = "".join(f" {value:8.1f} {key}" for key, value in of.items() if "cpu" not in key)
        cpu = "".join(f" {key.split('_')[0]} {value:.2f}" for key, value in of.items() if "cpu" in key)
        print(f"{case:18}{form:12}{rates}; CPU ms per block:{cpu}")
        found[case, form] = of
    # A feed's process uses some CPU at any rate, and some for each block.
    ours = [of for (_, form), of in found.items() if form == FORMS[0]]
    rates = [of["blocks_per_s"] for of in ours]
    cores = [of["blocks_per_s"] * of["feed_cpu_ms_per_block"] / 1000 for of in ours]
    slope, always = np.polyfit(rates, cores, 1)
    of = found[LARGE, FORMS[0]]
    most = (BUSY - always) / slope * of["images_per_s"] / of["blocks_per_s"]
    print(f"a feed uses {always:.3f} cores, and {1000 * slope:.2f} ms for a block: {most:.0f} images/s")
    feeds = [
        {"gpus": gpus, "images_per_s_per_gpu": rate, "feeds": math.ceil(gpus * rate / most)}
        for gpus, rate in itertools.product((8, 64, 512), (4000, 15000))
    ]
    for row in feeds:
        print(f"{row}, {-(-row['gpus'] // ray_data.WORKERS_PER_FEED)} are started")
    return feeds


def main() -> None:
    args = options(__doc__, rounds=3, seconds=10.0, workers=4, out=str(RESULTS / "feed.json"))
    result, records = provenance("numpy", "pyarrow", "ray", "torch", "torchvision"), list[Record]()
    environment = {"env_vars": {"PYTHONPATH": str(ROOT)}, "worker_process_setup_hook": HOOK}
    how: Any = {"object_store_memory": 4 << 30, "runtime_env": environment, "logging_level": "error"}
    with tempfile.TemporaryDirectory() as folder:
        pack(Path(folder), [draw(number) for number in range(JPEGS)], SHARE * args.workers)
        ray.init(address="local", num_cpus=CORES, include_dashboard=False, log_to_driver=False, **how)
        feed = ray_data.BatchServer.remote()
        for number in range(args.rounds):
            for case, size in CASES.items():
                sharing = max(2 * args.workers, LARGE_WORKERS) if case == LARGE else args.workers
                changes = {"data.batch_size": SHARE * sharing, "model.image_size": size}
                changes |= {"data.path": folder if case == "JPEG" else "", "data.lanes": sharing}
                run = override(RunConfig(), changes | {"train.seed": 10 * number})
                for form in FORMS if case != LARGE else FORMS[:1]:
                    found = measure(form, feed if form == FORMS[0] else None, run, args.workers, args.seconds)
                    records.append({"case": case, "round": number, "load": os.getloadavg()[0]} | found)
                    print(json.dumps(records[-1]), flush=True)
        ray.shutdown()
    result |= {"records": records, "feeds": report(records), "load_average_after": os.getloadavg()}
    Path(args.out).write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    # Tasks import this module, so that their state outlasts them.
    importlib.import_module("bench.feed").main()

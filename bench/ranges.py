"""Images from S3 by byte range against whole shards: time to the first batch, images/s, CPU, bytes.

  python bench/ranges.py [--folder DIR] [--shards 200] [--steps 40] [--rounds 3] [--out FILE]

200 shards of 128 JPEGs of 91 KB, decoded to 224 px, batches of 256 in 32 lanes; `s3_server.py` here
answers after 20 ms with 50 MB/s per connection, on the same cores. Each form runs in a process of its own:

  ranges   a request for each image, as a run of one epoch reads
  runs     the same with data.shuffle_run=8
  both     ranges, and whole shards into the node's cache beside them, as a run of several epochs reads
  whole    whole shards before the first batch, which needs all of them: a lane's window lies over eight
  warm     every shard is in the cache
"""

import argparse
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import psutil

from bench.images import draw
from bench.provenance import provenance
from bench.s3_server import client_environment
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data import packing, shards
from orchestrator.data.cache import CACHE_FOLDER, cached
from orchestrator.data.manifest import locate
from orchestrator.data.packing import Sample, write_shards
from orchestrator.data.stream import in_process, open_stream

ROOT = Path(__file__).parent.parent

ROWS, DISTINCT, BATCH = 128, 1000, 256
FORMS = ("ranges", "runs", "both", "whole", "warm")
SHARDS_AT_ONCE = 16  # fetched by the form `whole`


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--folder", help="keeps the shards for the next time; default: a temporary folder")
    parser.add_argument("--shards", type=int, default=200)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default=str(ROOT / "bench/results/ranges.json"))
    parser.add_argument("--form", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.form:
        print(json.dumps(measure(args.form, args.steps)))
        return
    folder = Path(args.folder or tempfile.mkdtemp())
    pack(folder / "data", args.shards)
    port = free_port()
    server = subprocess.Popen(
        [sys.executable, str(ROOT / "bench/s3_server.py"), str(folder), str(port)], stdout=subprocess.PIPE
    )
    assert server.stdout
    server.stdout.readline()
    results: dict[str, list[dict[str, float]]] = {form: [] for form in FORMS}
    try:
        for _ in range(args.rounds):
            cache = tempfile.TemporaryDirectory()
            for form in FORMS:
                if form != "warm":
                    cache.cleanup()
                    cache = tempfile.TemporaryDirectory()
                results[form].append(run(form, args.steps, port, cache.name))
                print(form, {name: round(value, 2) for name, value in results[form][-1].items()}, flush=True)
            cache.cleanup()
    finally:
        server.kill()
    medians = {
        form: {name: statistics.median(each[name] for each in rounds) for name in rounds[0]}
        for form, rounds in results.items()
    }
    settings = {name: getattr(args, name) for name in ("shards", "steps", "rounds")} | {"rows": ROWS}
    result = provenance("numpy", "obstore", "pyarrow", "torch", "torchvision")
    result |= {"settings": settings, "medians": medians, "rounds": results}
    text = json.dumps(result, indent=1)
    Path(args.out).write_text(text + "\n")


def pack(path: Path, count: int) -> None:
    if (path / "manifest.json").exists():
        return
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        jpegs = list(pool.map(draw, range(DISTINCT), chunksize=50))
    packing.ROWS_PER_SHARD = ROWS
    samples = (Sample(jpegs[i * 7 % DISTINCT], i % 10, f"{i:06d}") for i in range(count * ROWS))
    write_shards(str(path), map(str, range(10)), {"train": samples, "val": [Sample(jpegs[0], 0, "val")]})


def run(form: str, steps: int, port: int, cache: str) -> dict[str, float]:
    statistics_of = partial(urllib.request.urlopen, f"http://127.0.0.1:{port}/statistics")
    env = os.environ | client_environment(port) | {CACHE_FOLDER: cache}
    statistics_of().read()
    command = [sys.executable, __file__, "--form", form, "--steps", str(steps)]
    measured = json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout)
    return measured | {f"S3 {name}": float(n) for name, n in json.loads(statistics_of().read()).items()}


def measure(form: str, steps: int) -> dict[str, float]:
    changes: dict[str, Any] = {"data.path": "s3://bucket/data", "data.batch_size": BATCH, "data.lanes": 32}
    changes |= {"model.image_size": 224, "data.augment": "inception"}
    changes |= {"data.shuffle_run": 8} if form == "runs" else {}
    # The product's rule: with one read of the data, ranges cost no more than whole shards.
    run = override(RunConfig(), changes | {"train.steps": 1 if form in ("ranges", "runs") else 10_000})
    stream = open_stream(run, "train", 0, 1)
    began, cpu = time.perf_counter(), time.process_time()
    if form == "whole":
        fetch_shards(stream.data)
    arrived, images = [], 0
    for batch in in_process(stream, range(steps)):
        arrived.append(time.perf_counter() - began)
        images += len(batch)
    half = len(arrived) // 2
    return {
        "first batch s": arrived[0],
        "images/s": BATCH * (len(arrived) - 1 - half) / (arrived[-1] - arrived[half]),
        "CPU ms/image": 1000 * (time.process_time() - cpu) / images,
        "peak RSS MB": psutil.Process().memory_info().rss / 1e6,
    }


def fetch_shards(data: shards.DataSet) -> None:
    def fetch(shard: Any) -> None:
        location = locate(data.path, shard)
        make = partial(shards._download, location, shard)
        cached(shard.sha256, shard.bytes, make, limit=data.cache_bytes).close()

    with ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
        list(pool.map(fetch, data.manifest.splits["train"]))


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return server.getsockname()[1]


if __name__ == "__main__":
    main()

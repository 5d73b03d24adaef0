"""Time and memory of a node at the size of the largest data sets, without their images.

  python bench/scale.py [--out FILE]

`cache`: seconds to add a file to the node's cache when it holds 100 files, and when it holds 1,000,000.
`index on S3`: ImageNet-21k, 12.8 million images in 25,000 shards, on the S3 of `s3_server.py`. Four processes
start at once on one node and look up the records of batches of 4096 images in 512 lanes, without the images.
`data set`: 4 billion images in 100,000 shards. The manifest is real; the index is a sparse file of 112 GB,
with records where the measured steps read; all shards are one file with one JPEG. A process of its own
measures time and memory of the manifest, the first batch, and the batches around the end of the epoch.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import time
import urllib.request
import zlib
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import psutil

from bench.images import draw
from bench.provenance import provenance
from bench.ranges import free_port
from bench.s3_server import client_environment
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.cache import CACHE_FOLDER, TOTAL, cached
from orchestrator.data.index import RECORD
from orchestrator.data.manifest import Manifest, Shard, save_manifest
from orchestrator.data.stream import Stream, in_process, open_stream

ROOT = Path(__file__).parent.parent

SHARDS, ROWS = 100_000, 40_000
BATCH, LANES = 512, 512
EPOCH_STEPS = SHARDS * ROWS // BATCH
STEPS = (0, 1, EPOCH_STEPS - 1, EPOCH_STEPS)
S3_SHARDS, S3_ROWS, S3_BATCH, S3_STEPS, S3_PROCESSES = 25_000, 512, 4096, 10, 4
BLOCK = 222  # images that are looked up together, as many as a block of Ray Data has at 224 px
ADDED = 300  # files whose adding is timed
Record = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", default=str(ROOT / "bench/results/scale.json"))
    parser.add_argument("--read", help=argparse.SUPPRESS)
    parser.add_argument("--look-up", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.look_up:
        print(json.dumps(measure_look_ups(args.look_up)))
        return
    if args.read:
        print(json.dumps(measure_reading(args.read)))
        return
    result = provenance("numpy", "pyarrow", "torch", "torchvision")
    result["cache"] = {str(n): measure_cache(n) for n in (100, 1_000_000)}
    with tempfile.TemporaryDirectory() as folder:
        make_data_set(folder)
        command = [sys.executable, __file__, "--read", folder]
        answer = subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout
    result["index on S3"] = measure_index()
    result["data set"] = json.loads(answer)
    print(json.dumps(result, indent=1))
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


def measure_cache(files: int) -> Record:
    """Adds files of a byte to a cache that holds `files`: below its limit, and the one that exceeds it."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ[CACHE_FOLDER] = folder
        for number in range(files):
            Path(folder, f"old-{number}").write_bytes(b"x")
        Path(folder, TOTAL).write_text(str(files))
        found = {}
        for what, number in (("below the limit", ADDED), ("tenth freed", 1)):
            began, cpu = time.perf_counter(), time.process_time()
            for n in range(number):
                cached(f"{what}-{n}", 1, write_byte, limit=files + ADDED).close()
            found[f"{what}: ms per file"] = 1000 * (time.perf_counter() - began) / number
            found[f"{what}: CPU ms per file"] = 1000 * (time.process_time() - cpu) / number
        return found


def write_byte(to: BinaryIO) -> None:
    to.write(b"x")


def make_data_set(folder: str) -> None:
    jpeg = draw(0)
    Path(folder, "train").mkdir()
    Path(folder, "shard").write_bytes(jpeg)
    shard = Shard(path="shard", rows=ROWS, bytes=len(jpeg), sha256="0" * 64)
    # As many names as shards, which all lead to one file.
    shards = tuple(replace(shard, path=f"train/..{'/' * (1 + n % 50)}shard") for n in range(SHARDS))
    val = replace(shard, rows=1)
    index = {"train": "0" * 64, "val": "0" * 64}
    splits = {"train": shards, "val": (val,)}
    save_manifest(folder, Manifest(classes=("a", "b"), splits=splits, index=index, val_majority=1))
    with Path(folder, "train.index").open("wb") as file:
        file.truncate(SHARDS * ROWS * RECORD.itemsize)
    stream = open_stream(config(folder), "train", 0, 1)
    records = stream.data.records("train", np.zeros(1, int), np.zeros(1, int))
    records["size"], records["crc32"] = len(jpeg), zlib.crc32(jpeg)
    with Path(folder, "train.index").open("r+b") as file:
        for step in STEPS:
            for place in _positions(stream, step):
                os.pwrite(file.fileno(), records.tobytes(), int(place) * RECORD.itemsize)


def measure_index() -> dict[str, Any]:
    """Runs the processes that look up records, and counts the requests that they make."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        zeros = bytes(S3_ROWS * RECORD.itemsize)
        digest = hashlib.sha256()
        with Path(folder, "train.index").open("wb") as file:
            for _ in range(S3_SHARDS):
                digest.update(zeros)
                file.write(zeros)
        train = tuple(Shard(path=f"{n}", rows=S3_ROWS, bytes=1, sha256=f"{n:064}") for n in range(S3_SHARDS))
        index = {"train": digest.hexdigest(), "val": "0" * 64}
        splits = {"train": train, "val": train[:1]}
        save_manifest(folder, Manifest(classes=("a", "b"), splits=splits, index=index, val_majority=1))
        port = free_port()
        command = [sys.executable, str(ROOT / "bench/s3_server.py"), folder, str(port)]
        server = subprocess.Popen(command, stdout=subprocess.PIPE)
        assert server.stdout
        server.stdout.readline()
        env = os.environ | client_environment(port) | {CACHE_FOLDER: cache}
        command = [sys.executable, __file__, "--look-up", f"http://127.0.0.1:{port}/statistics"]
        try:
            processes = [
                subprocess.Popen(command, env=env, stdout=subprocess.PIPE) for _ in range(S3_PROCESSES)
            ]
            first = [json.loads(process.communicate()[0]) for process in processes]
            requests = _requests_to(command[-1])
            alone = json.loads(subprocess.run(command, env=env, stdout=subprocess.PIPE, check=True).stdout)
        finally:
            server.kill()
        return {
            "index MB": len(zeros) * S3_SHARDS / 1e6,
            f"{S3_PROCESSES} processes at once: requests": requests
            + sum(sum(each["requests"]) for each in first),
            f"{S3_PROCESSES} processes at once: s until all have looked up": max(
                each["first: s"] for each in first
            ),
            "a process after them": alone,
        }


def measure_look_ups(statistics: str) -> dict[str, Any]:
    """Looks up the records of some steps; requests are those to open the data set, then of each step."""
    began = time.perf_counter()
    changes = {"data.path": "s3://bucket", "data.batch_size": S3_BATCH, "data.lanes": LANES}
    stream = open_stream(override(RunConfig(), changes), "train", 0, 1)
    assert stream.plan
    requests, seconds = [_requests_to(statistics)], [0.0]
    for step in range(S3_STEPS):
        lane, within = stream.plan.slots(step, range(LANES))
        for first in range(0, S3_BATCH, BLOCK):
            places = stream.plan.locate(lane[first : first + BLOCK], within[first : first + BLOCK])
            stream.data.records("train", places.shard, places.row)
        requests.append(_requests_to(statistics))
        seconds.append(time.perf_counter() - began)
    return {
        "requests": requests,
        "first: s": seconds[1],
        "a later step: s": (seconds[-1] - seconds[1]) / (S3_STEPS - 1),
    }


def _requests_to(statistics: str) -> int:
    """Returns the requests since the last call."""
    with urllib.request.urlopen(statistics) as answer:
        return json.load(answer)["requests"]


def _positions(stream: Stream, step: int) -> list[int]:
    assert stream.plan
    places = stream.plan.locate(*stream.plan.slots(step, range(LANES)))
    return (places.shard * ROWS + places.row).tolist()


def config(folder: str) -> RunConfig:
    changes = {"data.path": folder, "data.batch_size": BATCH, "data.lanes": LANES, "model.image_size": 224}
    return override(RunConfig(), changes)


def measure_reading(folder: str) -> Record:
    found: Record = {"manifest MB": Path(folder, "manifest.json").stat().st_size / 1e6}
    process = psutil.Process()
    run = config(folder)

    def timed(name: str, step: int | None) -> None:
        before, began, cpu = _anonymous(process), time.perf_counter(), time.process_time()
        stream = open_stream(run, "train", 0, 1)
        if step is not None:
            (batch,) = in_process(stream, range(step, step + 1))
            assert batch.valid.all()
            del batch
        found[f"{name}: s"] = time.perf_counter() - began
        found[f"{name}: CPU s"] = time.process_time() - cpu
        found[f"{name}: MB more"] = (_anonymous(process) - before) / 1e6

    timed("start", None)
    timed("first batch", 0)
    timed("another batch", 1)
    timed("last batch of the epoch", EPOCH_STEPS - 1)
    timed("first batch of the next epoch", EPOCH_STEPS)
    return found


def _anonymous(process: psutil.Process) -> int:
    """Returns the memory of the process that no file backs, in bytes."""
    lines = Path(f"/proc/{process.pid}/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("RssAnon"))


if __name__ == "__main__":
    main()

"""Time and memory of a node at the size of the largest data sets, without their images.

  python bench/scale.py [--out FILE]

`cache`: seconds to add a file to the node's cache when it holds 100 files, and when it holds 1,000,000.
`index on S3`: ImageNet-21k, 12.8 million images in 25,000 shards, on the S3 of `bench/ranges.py`. Four
processes start at once on one node and look up the records of batches of 4096 images in 512 lanes, without
the images. `data set`: 4 billion images in 100,000 shards. The manifest is real; the index is a sparse file
of 112 GB, with records where the measured steps read; all shards are one file with one JPEG. A process of its
own measures time and memory of the manifest, the first batch, and the batches around the end of the epoch.
"""

import hashlib
import json
import os
import tempfile
import time
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO

import numpy as np
import psutil

from bench.harness import RESULTS, Record, options, processes
from bench.images import draw
from bench.provenance import provenance
from bench.ranges import s3
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.cache import CACHE_FOLDER, TOTAL, cached
from orchestrator.data.index import RECORD
from orchestrator.data.manifest import Manifest, Shard, save_manifest
from orchestrator.data.stream import Stream, in_process, open_stream

SHARDS, ROWS = 100_000, 40_000
BATCH, LANES = 512, 512
EPOCH_STEPS = SHARDS * ROWS // BATCH
STEPS = (0, 1, EPOCH_STEPS - 1, EPOCH_STEPS)
S3_SHARDS, S3_ROWS, S3_BATCH, S3_STEPS, S3_PROCESSES = 25_000, 512, 4096, 10, 4
BLOCK = 222  # images that are looked up together, as many as a block of Ray Data has at 224 px
ADDED = 300  # files whose adding is timed


def main() -> None:
    args = options(__doc__, out=str(RESULTS / "scale.json"))
    result = provenance("numpy", "pyarrow", "torch", "torchvision")
    result["cache"] = {str(n): measure_cache(n) for n in (100, 1_000_000)}
    result["index on S3"] = measure_index()
    with tempfile.TemporaryDirectory() as folder, processes() as own:
        make_data_set(folder)
        result["data set"] = own.submit(measure_reading, folder).result()
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
    save(folder, shards, replace(shard, rows=1), "0" * 64)
    with Path(folder, "train.index").open("wb") as file:
        file.truncate(SHARDS * ROWS * RECORD.itemsize)
    stream = open_train(folder, BATCH)
    records = stream.data.records("train", np.zeros(1, int), np.zeros(1, int))
    records["size"], records["crc32"] = len(jpeg), zlib.crc32(jpeg)
    assert stream.plan
    with Path(folder, "train.index").open("r+b") as file:
        for step in STEPS:
            places = stream.plan.locate(*stream.plan.slots(step, range(LANES)))
            for place in places.shard * ROWS + places.row:
                os.pwrite(file.fileno(), records.tobytes(), int(place) * RECORD.itemsize)


def save(folder: str, train: tuple[Shard, ...], val: Shard, digest: str) -> None:
    splits, index = {"train": train, "val": (val,)}, {"train": digest, "val": "0" * 64}
    save_manifest(folder, Manifest(classes=("a", "b"), splits=splits, index=index, val_majority=1))


def open_train(folder: str, batch: int) -> Stream:
    changes = {"data.path": folder, "data.batch_size": batch, "data.lanes": LANES, "model.image_size": 224}
    return open_stream(override(RunConfig(), changes), "train", 0, 1)


def measure_index() -> Record:
    """Runs the processes that look up records, and counts the requests that they make."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as cache:
        index = bytes(S3_SHARDS * S3_ROWS * RECORD.itemsize)
        Path(folder, "train.index").write_bytes(index)
        train = tuple(Shard(path=f"{n}", rows=S3_ROWS, bytes=1, sha256=f"{n:064}") for n in range(S3_SHARDS))
        save(folder, train, train[0], hashlib.sha256(index).hexdigest())
        os.environ[CACHE_FOLDER] = cache
        with s3(folder) as counts:
            with processes(S3_PROCESSES) as pool:
                together = [pool.submit(look_up, counts) for _ in range(S3_PROCESSES)]
                first = [one.result() for one in together]
            requests = sum(sum(each["requests"]) for each in first)
            with processes() as own:
                alone = own.submit(look_up, counts).result()
        return {
            "index MB": len(index) / 1e6,
            f"{S3_PROCESSES} processes at once: requests": requests,
            f"{S3_PROCESSES} processes at once: s until all have looked up": max(
                each["first: s"] for each in first
            ),
            "a process after them": alone,
        }


def look_up(counts: Callable[[], dict[str, int]]) -> Record:
    """Looks up the records of some steps; requests are those to open the data set, then of each step."""
    began = time.perf_counter()
    stream = open_train("s3://bucket", S3_BATCH)
    assert stream.plan
    requests, seconds = [counts()["requests"]], [0.0]
    for step in range(S3_STEPS):
        lane, within = stream.plan.slots(step, range(LANES))
        for first in range(0, S3_BATCH, BLOCK):
            places = stream.plan.locate(lane[first : first + BLOCK], within[first : first + BLOCK])
            stream.data.records("train", places.shard, places.row)
        requests.append(counts()["requests"])
        seconds.append(time.perf_counter() - began)
    return {
        "requests": requests,
        "first: s": seconds[1],
        "a later step: s": (seconds[-1] - seconds[1]) / (S3_STEPS - 1),
    }


def measure_reading(folder: str) -> Record:
    found: Record = {"manifest MB": Path(folder, "manifest.json").stat().st_size / 1e6}

    def timed(name: str, step: int | None) -> None:
        before, began, cpu = anonymous_mb(), time.perf_counter(), time.process_time()
        stream = open_train(folder, BATCH)
        if step is not None:
            (batch,) = in_process(stream, range(step, step + 1))
            assert batch.valid.all()
            del batch
        found[f"{name}: s"] = time.perf_counter() - began
        found[f"{name}: CPU s"] = time.process_time() - cpu
        found[f"{name}: MB more"] = anonymous_mb() - before

    timed("start", None)
    timed("first batch", 0)
    timed("another batch", 1)
    timed("last batch of the epoch", EPOCH_STEPS - 1)
    timed("first batch of the next epoch", EPOCH_STEPS)
    return found


def anonymous_mb() -> float:
    """Returns the memory of this process that no file backs."""
    found = psutil.Process().memory_info()
    return (found.rss - found.shared) / 1e6


if __name__ == "__main__":
    main()

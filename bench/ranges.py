"""Images from S3 by byte range against whole shards: time to the first batch, images/s, CPU, bytes.

  python bench/ranges.py [--folder DIR] [--shards 200] [--steps 40] [--rounds 3] [--out FILE]

200 shards of 128 JPEGs of 91 KB, decoded to 224 px, batches of 256 in 32 lanes; the S3 is a server on
loopback that answers after 20 ms with 50 MB/s per connection, on the same cores. Each form runs in a process
of its own; a folder keeps the shards for the next time.

  ranges   a request for each image, as a run of one epoch reads
  runs     the same with data.shuffle_run=8
  both     ranges, and whole shards into the node's cache beside them, as a run of several epochs reads
  whole    whole shards before the first batch, which needs all of them: a lane's window lies over eight
  warm     every shard is in the cache
"""

import asyncio
import json
import os
import re
import socket
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil

from bench.harness import RESULTS, Record, options, processes
from bench.images import draw
from bench.provenance import provenance
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data import shards
from orchestrator.data.cache import CACHE_FOLDER, cached
from orchestrator.data.manifest import locate
from orchestrator.data.stream import in_process, open_stream
from orchestrator.packing import pack as packing
from orchestrator.packing.pack import Sample, write_shards

ROWS, DISTINCT, BATCH = 128, 1000, 256
FORMS = ("ranges", "runs", "both", "whole", "warm")
SHARDS_AT_ONCE = 16  # fetched by the form `whole`
LATENCY_S, BYTES_PER_S, PIECE = 0.020, 50e6, 256 << 10  # of the S3


def main() -> None:
    args = options(__doc__, folder="", shards=200, steps=40, rounds=3, out=str(RESULTS / "ranges.json"))
    result = provenance("numpy", "obstore", "pyarrow", "torch", "torchvision")
    folder, rounds = Path(args.folder or tempfile.mkdtemp()), {form: list[Record]() for form in FORMS}
    pack(folder / "data", args.shards)
    with s3(str(folder)) as counts:
        for _ in range(args.rounds):
            caches = {form: tempfile.TemporaryDirectory() for form in FORMS[:-1]}
            for form in FORMS:
                counts()
                with processes() as own:
                    # The last form finds what the form before it has cached.
                    found = own.submit(
                        measure, form, args.steps, caches.get(form, caches["whole"]).name
                    ).result()
                found |= {f"S3 {name}": float(n) for name, n in counts().items()}
                rounds[form].append(found)
                print(form, {name: round(value, 2) for name, value in found.items()}, flush=True)
            for cache in caches.values():
                cache.cleanup()
    medians = {
        form: {name: statistics.median(each[name] for each in found) for name in found[0]}
        for form, found in rounds.items()
    }
    settings = {name: getattr(args, name) for name in ("shards", "steps", "rounds")} | {"rows": ROWS}
    result |= {"settings": settings, "medians": medians, "rounds": rounds}
    Path(args.out).write_text(json.dumps(result, indent=1) + "\n")


def pack(path: Path, count: int) -> None:
    if (path / "manifest.json").exists():
        return
    with processes(os.cpu_count() or 1) as pool:
        jpegs = list(pool.map(draw, range(DISTINCT), chunksize=50))
    packing.ROWS_PER_SHARD = ROWS
    samples = (Sample(jpegs[i * 7 % DISTINCT], i % 10, f"{i:06d}") for i in range(count * ROWS))
    write_shards(str(path), map(str, range(10)), {"train": samples, "val": [Sample(jpegs[0], 0, "val")]})


def measure(form: str, steps: int, cache: str) -> Record:
    os.environ[CACHE_FOLDER] = cache
    changes: Record = {"data.path": "s3://bucket/data", "data.batch_size": BATCH, "data.lanes": 32}
    changes |= {"model.image_size": 224, "data.augment": "inception"}
    changes |= {"data.shuffle_run": 8} if form == "runs" else {}
    # The product's rule: with one read of the data, ranges cost no more than whole shards.
    run = override(RunConfig(), changes | {"train.steps": 1 if form in ("ranges", "runs") else 10_000})
    stream = open_stream(run, "train", 0, 1)
    began, cpu = time.perf_counter(), time.process_time()
    if form == "whole":
        with ThreadPoolExecutor(SHARDS_AT_ONCE) as pool:
            list(pool.map(partial(fetch, stream.data), stream.data.manifest.splits["train"]))
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


def fetch(data: shards.DataSet, shard: Any) -> None:
    download = partial(shards._download, locate(data.path, shard), shard)
    cached(shard.sha256, shard.bytes, download, limit=data.cache_bytes).close()


@contextmanager
def s3(folder: str) -> Iterator[Any]:
    """Serves a folder as `s3://bucket` to this process and its children, like a network: 20 ms for each
    request, 50 MB/s for each connection. Yields a function that returns requests and bytes since its last
    call. moto's server answers 50 requests/s, which is too slow to measure against.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    endpoint = f"http://127.0.0.1:{port}"
    os.environ |= {"AWS_ENDPOINT_URL": endpoint, "AWS_REGION": "us-east-1"}
    os.environ |= {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench"}
    server = get_context("spawn").Process(target=serve, args=(folder, port))
    server.start()
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            time.sleep(0.1)
    try:
        yield partial(statistics_of, endpoint)
    finally:
        server.kill()


def statistics_of(endpoint: str) -> dict[str, int]:
    with urllib.request.urlopen(f"{endpoint}/statistics") as answer:
        return json.load(answer)


def serve(folder: str, port: int) -> None:
    counts = {"requests": 0, "bytes": 0}

    async def answer(head: str, writer: asyncio.StreamWriter) -> None:
        """GET and HEAD of ``/bucket/KEY``, with ranges."""
        method, path = head.split(" ", 2)[:2]
        name = path.partition("?")[0].removeprefix("/bucket/")
        if name == "/statistics":
            body = json.dumps(counts).encode()
            counts.update(requests=0, bytes=0)
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n" % len(body) + body)
            return
        counts["requests"] += 1
        began = asyncio.get_running_loop().time()
        await asyncio.sleep(LATENCY_S)
        try:
            file = open(os.path.join(folder, name), "rb")  # noqa: SIM115
        except OSError:
            writer.write(b"HTTP/1.1 404 Not Found\r\nContent-Length: 0\r\n\r\n")
            return
        with file:
            size = os.fstat(file.fileno()).st_size
            wanted = re.search(r"(?i)\r\nrange: bytes=(\d+)-(\d+)", head)
            first, last = (int(wanted[1]), min(int(wanted[2]), size - 1)) if wanted else (0, size - 1)
            writer.write(
                f"HTTP/1.1 {'206 Partial Content' if wanted else '200 OK'}\r\n"
                f"Content-Length: {last - first + 1}\r\nContent-Range: bytes {first}-{last}/{size}\r\n"
                'ETag: "0"\r\nLast-Modified: Wed, 01 Jan 2025 00:00:00 GMT\r\n\r\n'.encode()
            )
            file.seek(first)
            sent = 0
            while method == "GET" and first + sent <= last:
                piece = file.read(min(PIECE, last - first + 1 - sent))
                sent += len(piece)
                late = began + LATENCY_S + sent / BYTES_PER_S - asyncio.get_running_loop().time()
                await asyncio.sleep(max(0, late))
                writer.write(piece)
                await writer.drain()
            counts["bytes"] += sent

    async def connection(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                await answer((await reader.readuntil(b"\r\n\r\n")).decode(), writer)
        except (asyncio.IncompleteReadError, ConnectionError):
            writer.close()

    async def run() -> None:
        server = await asyncio.start_server(connection, "127.0.0.1", port, backlog=1024)
        await server.serve_forever()

    asyncio.run(run())


if __name__ == "__main__":
    main()

"""Images per second from shards to 224 px uint8 batches: ours and others' loaders against a bare decode loop.

  python bench/data.py [--rounds N] [--quick] [--memory] [--s3] [--folder DIR] [--out FILE]

The limit is a process per core that reads a JPEG, decodes it and crops it at random with torchvision; others
use as many workers. It is measured before and after each loader, and figures are ratios to the mean of both;
medians over rounds. An epoch is 3,000 images, start included but imports; Ray Data's own start, which comes
once per run, is apart. `cold` is the first time that a node reads a data set, `warm` every other.

Needs `pip install -e .[dev,bench]`. Every loader runs in a process of its own.
"""

import argparse
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple

import psutil

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from bench.images import jpegs, pack, prepare, small_png  # noqa: E402 - found from now on
from bench.loaders import PEERS, Job  # noqa: E402
from orchestrator import storage  # noqa: E402

CORES = os.cpu_count() or 1
LIMIT_S = 2.0
TARGETS = {"in process": 0.9, "Ray Data": 0.7}  # of the limit, steady, warm
BUCKET = "bench"
AWS = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_REGION": "us-east-1"}
FIGURES = ("steady", "epoch", "cpu", "first_batch_s")
Record = dict[str, Any]


class Case(NamedTuple):
    """Attributes:
    transform: ``usual`` or ``uint8``.
    cache: ``cold`` or ``warm``, of ours.
    """

    loader: str
    transform: str = "uint8"
    cache: str = ""
    on_s3: bool = False

    def __str__(self) -> str:
        words = (self.loader, self.transform, self.cache, "S3" if self.on_s3 else "")
        return ", ".join(word for word in words if word)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="epochs of 300 images; writes only --out")
    parser.add_argument("--memory", action="store_true", help="also peak memory, small sets and large")
    parser.add_argument("--s3", action="store_true", help="also from S3, a server on this machine")
    parser.add_argument("--folder", help="keeps images for the next time; default: a temporary folder")
    parser.add_argument("--out", help="default: bench/results/data-CPU.json")
    args = parser.parse_args()
    folder = Path(args.folder or tempfile.mkdtemp())
    result = provenance()
    try:
        images = 300 if args.quick else 3000
        data = folder / str(images)
        prepare(data, images)
        with on_s3(data / "shards") if args.s3 else local():
            result["records"] = measure(cases(args.s3), data, images, args.rounds)
        if args.memory:
            result["memory"] = list(memory(data, folder / "memory", images // 300))
    finally:
        if not args.folder:
            shutil.rmtree(folder)
    result["load_average_after"] = os.getloadavg()
    out = args.out or (None if args.quick else ROOT / f"bench/results/data-{slug(cpu())}.json")
    if out:
        Path(out).write_text(json.dumps(result, indent=1))


def cases(s3: bool) -> list[Case]:
    peers = [Case(peer, transform) for transform in ("usual", "uint8") for peer in PEERS]
    ours = [Case("in process", cache=cache, on_s3=far) for far in {False, s3} for cache in ("cold", "warm")]
    return [*peers, *ours, Case("Ray Data", cache="warm")]


def measure(cases: list[Case], data: Path, images: int, rounds: int) -> list[Record]:
    """Interleaved, in rotating order."""
    records: list[Record] = []
    limit = Limit(data)
    with cache_folder() as warm:
        for case in cases:
            if case.cache == "warm":
                run_loader(job_of(case, data, images), warm)
        for i in range(rounds):
            before = limit.sample()
            for case in cases[i % len(cases) :] + cases[: i % len(cases)]:
                with cache_folder() as cold:
                    found = run_loader(job_of(case, data, images), cold if case.cache == "cold" else warm)
                after = limit.sample()
                records.append({"case": str(case), "round": i} | found | ratios(found, before, after))
                before = after
    limit.close()
    for case in cases:
        print_case([record for record in records if record["case"] == str(case)])
    return records

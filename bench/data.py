"""Images per second from shards to 224 px uint8 batches: ours and others' loaders against a bare decode loop.

  python bench/data.py [--rounds N] [--quick] [--memory] [--folder DIR] [--out FILE]

The limit is a process per core that reads a JPEG, decodes it and crops it at random with torchvision; other
loaders use as many workers. The limit is measured before and after each loader; figures are ratios to the
mean of both, and medians over rounds. An epoch is 3,000 images, with the loader's start but without imports;
Ray Data's own start, once per run, is given apart. bench/ranges.py reads from S3.

Needs `pip install -e .[dev,bench]`. Every loader runs in a process of its own.
"""

import argparse
import json
import os
import re
import shutil
import statistics
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from bench.images import jpegs, pack, prepare, small_png
from bench.loaders import PEERS, Job
from bench.processes import CORES, Limit, Record, peak_bytes, run_loader, start
from bench.provenance import provenance

ROOT = Path(__file__).parent.parent

TARGETS = {"in process": 0.9, "Ray Data": 0.7}  # of the limit, steady


class Case(NamedTuple):
    """A loader, and its transform: ``usual`` or ``uint8``."""

    loader: str
    transform: str = "uint8"

    def __str__(self) -> str:
        return ", ".join(self)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="0: memory alone")
    parser.add_argument("--quick", action="store_true", help="epochs of 300 images; writes only --out")
    parser.add_argument("--memory", action="store_true", help="also peak memory, small sets and large")
    parser.add_argument("--folder", help="keeps images for the next time; default: a temporary folder")
    parser.add_argument("--out", help="default: bench/results/data-CPU.json")
    args = parser.parse_args()
    folder = Path(args.folder or tempfile.mkdtemp())
    packages = ("litdata", "pillow", "pyarrow", "ray", "torch", "torchvision", "webdataset")
    result = provenance(*packages)
    try:
        images = 300 if args.quick else 3000
        data = folder / str(images)
        prepare(data, images)
        result["records"] = measure(cases(), data, images, args.rounds) if args.rounds else []
        if args.memory:
            result["memory"] = list(memory(data, folder, images // 300))
    finally:
        if not args.folder:
            shutil.rmtree(folder)
    result["load_average_after"] = os.getloadavg()
    machine = re.sub(r"\W+", "-", result["hardware"].rpartition(",")[0].lower())
    if out := args.out or (not args.quick and ROOT / f"bench/results/data-{machine}.json"):
        Path(out).write_text(json.dumps(result, indent=1))


def cases() -> list[Case]:
    peers = [Case(peer, transform) for transform in ("usual", "uint8") for peer in PEERS]
    return [*peers, *map(Case, TARGETS)]


def measure(cases: list[Case], data: Path, images: int, rounds: int) -> list[Record]:
    """Measures all cases in each round, in rotating order."""
    records: list[Record] = []
    limit = Limit(data)
    for i in range(rounds):
        before = limit.sample()
        for case in cases[i % len(cases) :] + cases[: i % len(cases)]:
            found = run_loader(job_of(case, data, images))
            after = limit.sample()
            records.append({"case": str(case), "round": i} | found | ratios(found, before, after))
            before = after
    limit.close()
    for case in map(str, cases):
        print_case(case, [record for record in records if record["case"] == case])
    return records


def job_of(case: Case, data: Path, images: int) -> Job:
    path = str(data if case.loader in PEERS else data / "shards")
    return Job(loader=case.loader, transform=case.transform, path=path, images=images, cores=CORES)


def ratios(found: Record, *limits: Record) -> Record:
    limit, cpu = (statistics.mean(one[key] for one in limits) for key in ("images_per_s", "cpu_ms_per_image"))
    return {
        "limit_images_per_s": limit,
        "limit_cpu_ms_per_image": cpu,
        "steady": found["images_per_s"] / limit,
        "epoch": found["images"] / found["epoch_s"] / limit,
        "cpu": found["cpu_ms_per_image"] / cpu,
    }


def print_case(case: str, records: list[Record]) -> None:
    def of(key: str) -> float:
        return statistics.median(record[key] for record in records)

    low, high = (limit(record["steady"] for record in records) for limit in (min, max))
    line = (
        f"{case:27} steady {of('steady'):.2f} of the limit ({low:.2f} .. {high:.2f}),"
        f" epoch {of('epoch'):.2f}, CPU {of('cpu'):.2f}x, first batch {of('first_batch_s'):.2f} s"
    )
    if "feed_ready_s" in records[0]:
        line += f"; once: ray.init {of('ray_init_s'):.1f} s, feed ready {of('feed_ready_s'):.1f} s"
    print(line)
    for loader, target in TARGETS.items():
        if case == str(Case(loader)):
            print(f"{'met' if of('steady') >= target else 'MISSED'}: {case} at least {target} of the limit")


def memory(data: Path, folder: Path, times: int) -> Iterator[Record]:
    """Yields peak memory of an epoch of a data set, and of one ten times as large."""
    photos = [file.read_bytes() for file in jpegs(data)[: 120 * times]]
    dots = [small_png(number) for number in range(1000)]
    sets = [("in process", photos, 224, 120), ("Ray Data", photos, 224, 120), ("in process", dots, 32, 1000)]
    for loader, images, size, tenth in sets:
        peaks = []
        for count in (tenth * times, 10 * tenth * times):
            with tempfile.TemporaryDirectory(dir=folder) as packed:
                shards = f"{packed}/shards"
                pack(Path(shards), images, count)
                job = Job(loader=loader, path=shards, images=count, cores=CORES, size=size, flow_epochs=1)
                peaks.append(peak_bytes(start(job)))
            yield {"loader": loader, "images": count, "size": size, "peak_bytes": peaks[-1]}
            print(f"{loader}, {count} images of {size} px: {peaks[-1] / 2**20:.0f} MiB", flush=True)
        print(f"  ten times the images: {peaks[1] / peaks[0]:.2f} times the memory")


if __name__ == "__main__":
    main()

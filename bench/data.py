"""Images per second from shards to 224 px uint8 batches: ours and others' loaders against a bare decode loop.

  python bench/data.py [--rounds N] [--quick] [--memory] [--folder DIR] [--out FILE]

The limit is a process per core that reads a JPEG, decodes it and crops it at random with torchvision; other
loaders use as many workers, and batches of 64. The limit is measured before and after each loader; figures
are ratios to the mean of both, and medians over rounds. An epoch is 3,000 images, with the loader's start but
without imports; Ray Data's own start, once per run, is given apart. `--quick` has epochs of 300 images and
writes only `--out`. `--memory` also measures peak memory, of small sets and of large; `--rounds 0` only that.
A folder keeps the images for the next time. bench/ranges.py reads from S3.

Needs `pip install -e .[dev,bench]`. Every loader runs in a process of its own.
"""

import importlib
import io
import itertools
import json
import os
import re
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import psutil
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader
from torchvision import transforms as v1
from torchvision.datasets import ImageFolder
from torchvision.io import ImageReadMode, decode_jpeg
from torchvision.transforms import v2

from bench.harness import RESULTS, Record, options, processes
from bench.images import jpegs, pack, prepare, small_png
from bench.provenance import provenance
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.stream import Reader, in_process, open_stream
from orchestrator.training.worker import keep_freed_memory

CORES = os.cpu_count() or 1
BATCH = 64
SHUFFLED = 1000  # webdataset's buffer
RAY_STORE_BYTES = 2 << 30
LIMIT_S = 2.0
FLOW_EPOCHS = 4  # which Ray Data reads as one, after an epoch by itself
Transform = Callable[[bytes], Tensor]


def main() -> None:
    args = options(__doc__, rounds=3, quick=False, memory=False, folder="", out="")
    folder, images = Path(args.folder or tempfile.mkdtemp()), 300 if args.quick else 3000
    os.environ["OMP_NUM_THREADS"] = "1"  # of the processes that are measured
    result = provenance("litdata", "pillow", "pyarrow", "ray", "torch", "torchvision", "webdataset")
    try:
        data = folder / str(images)
        prepare(data, images)
        result["records"] = measure(data, images, args.rounds) if args.rounds else []
        if args.memory:
            result["memory"] = list(memory(data, folder, images // 300))
    finally:
        if not args.folder:
            shutil.rmtree(folder)
    result["load_average_after"] = os.getloadavg()
    machine = re.sub(r"\W+", "-", result["hardware"].rpartition(",")[0].lower())
    if out := args.out or (not args.quick and RESULTS / f"data-{machine}.json"):
        Path(out).write_text(json.dumps(result, indent=1))


def uint8() -> Transform:
    """The least work of a loader: decode, crop, flip. The model's device does the rest."""
    crop = v2.Compose(
        [v2.RandomResizedCrop(224, scale=(0.05, 1.0), antialias=True), v2.RandomHorizontalFlip()]
    )

    def transform(encoded: bytes) -> Tensor:
        image = decode_jpeg(torch.frombuffer(bytearray(encoded), dtype=torch.uint8), ImageReadMode.RGB)
        assert isinstance(image, Tensor)
        return crop(image)

    return transform


def usual() -> Transform:
    """The transform of most training code."""
    crop: Any = v1.Compose(
        [
            v1.RandomResizedCrop(224, scale=(0.05, 1.0)),
            v1.RandomHorizontalFlip(),
            v1.ToTensor(),
            v1.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
        ]
    )
    return lambda encoded: crop(Image.open(io.BytesIO(encoded)).convert("RGB"))


def image_folder(path: Path, transform: Transform) -> Iterable[Any]:
    read: Any = lambda file: Path(file).read_bytes()  # noqa: E731 - the transform decodes
    data = ImageFolder(str(path / "jpeg"), transform=transform, loader=read)
    return DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=CORES)


def webdataset(path: Path, transform: Transform) -> Iterable[Any]:
    wds = importlib.import_module("webdataset")
    tars = [str(tar) for tar in sorted((path / "tars").iterdir())]
    data = wds.WebDataset(tars, shardshuffle=len(tars), empty_check=False)
    data = data.shuffle(SHUFFLED).to_tuple("jpg", "cls").map_tuple(transform, int).batched(BATCH)
    return wds.WebLoader(data, batch_size=None, num_workers=CORES)


def litdata(path: Path, transform: Transform) -> Iterable[Any]:
    lit = importlib.import_module("litdata")

    def decoded(sample: dict[str, Any]) -> tuple[Tensor, int]:
        return transform(sample["image"]), sample["label"]

    data = lit.StreamingDataset(str(path / "litdata"), shuffle=True, transform=decoded)
    return lit.StreamingDataLoader(data, batch_size=BATCH, num_workers=CORES)


def peer(
    load: Callable[..., Iterable[Any]], transform: Callable[[], Transform], path: Path, n: int
) -> Record:
    with suppress(ImportError):  # `timed` begins after the imports
        importlib.import_module(load.__name__)
    return timed(lambda: (batch[0] for batch in load(path, transform())), n)


def ours(path: Path, images: int, size: int = 224) -> Record:
    torch.set_num_threads(CORES)
    keep_freed_memory()  # as training workers do
    return timed(lambda: images_of(path, size, in_process, images), images)


def ours_by_ray_data(path: Path, images: int, size: int = 224, flow_epochs: int = FLOW_EPOCHS) -> Record:
    """Times the start of a run, then an epoch, then several epochs in one execution."""
    ray: Any = importlib.import_module("ray")
    ray_data = importlib.import_module("orchestrator.data.ray_data")
    began = time.perf_counter()
    quiet: Any = {"include_dashboard": False, "log_to_driver": False, "logging_level": "error"}
    ray.init(address="local", num_cpus=CORES, object_store_memory=RAY_STORE_BYTES, **quiet)
    initialised = time.perf_counter()
    read = ray_data.by_ray_data([ray_data.BatchServer.remote()])
    list(images_of(path, size, read, 1))
    ready = time.perf_counter()
    epoch = timed(lambda: images_of(path, size, read, images), images)
    flow = timed(lambda: images_of(path, size, read, flow_epochs * images), flow_epochs * images)
    ray.shutdown()
    starts = {"ray_init_s": initialised - began, "feed_ready_s": ready - initialised}
    return epoch | {key: flow[key] for key in ("images_per_s", "cpu_ms_per_image")} | starts


def images_of(path: Path, size: int, read: Reader, images: int) -> Iterator[Tensor]:
    changes = {"data.path": f"{path}/shards", "data.batch_size": BATCH, "data.augment": "inception"}
    stream = open_stream(override(RunConfig(), changes | {"model.image_size": size}), "train", 0, 1)
    return (batch["image"] for batch in read(stream, range(-(-images // BATCH))))


def timed(start: Callable[[], Iterator[Tensor]], total: int) -> Record:
    """Times all batches; `images_per_s` is the rate over the last three quarters."""
    cpu, began = cpu_seconds(), time.perf_counter()
    seen, arrivals = 0, []
    for images in start():
        seen += len(images)
        arrivals.append((seen, time.perf_counter() - began))
    first, last = next(entry for entry in arrivals if entry[0] >= total // 4), arrivals[-1]
    return {
        "images": seen,
        "first_batch_s": arrivals[0][1],
        "epoch_s": last[1],
        "images_per_s": (last[0] - first[0]) / (last[1] - first[1]),
        "cpu_ms_per_image": 1000 * (cpu_seconds() - cpu) / seen,
    }


def cpu_seconds() -> float:
    """Returns the CPU seconds of this process and its descendants, including those that have ended."""
    root = psutil.Process()
    return sum(sum(process.cpu_times()[:4]) for process in [root, *root.children(recursive=True)])


PEERS = {"ImageFolder": image_folder, "webdataset": webdataset, "litdata": litdata}
CASES: dict[str, Callable[[Path, int], Record]] = {
    f"{name}, {how.__name__}": partial(peer, load, how)
    for how in (usual, uint8)
    for name, load in PEERS.items()
}
CASES |= {"in process": ours, "Ray Data": ours_by_ray_data}
TARGETS = {"in process": 0.9, "Ray Data": 0.7}  # of the limit, steady


def limit(path: Path, begin: float) -> tuple[int, float]:
    """Returns the images that one core reads in `LIMIT_S` after `begin`, and their CPU seconds."""
    transform, files = uint8(), itertools.cycle(jpegs(path))
    transform(next(files).read_bytes())
    time.sleep(max(0, begin - time.monotonic()))
    images, cpu = 0, time.process_time()
    while time.monotonic() < begin + LIMIT_S:
        transform(next(files).read_bytes())
        images += 1
    return images, time.process_time() - cpu


def measure(data: Path, images: int, rounds: int) -> list[Record]:
    """Measures all cases in each round, in rotating order."""
    records: list[Record] = []
    with processes(CORES) as cores:

        def sample() -> tuple[float, float]:
            """Images/s of the limit, and CPU milliseconds of an image."""
            found = cores.map(partial(limit, data), [time.monotonic() + 0.05] * CORES)
            counts, cpu = map(sum, zip(*found, strict=True))
            return counts / LIMIT_S, 1000 * cpu / counts

        list(cores.map(time.sleep, [1.0] * CORES))  # starts the processes
        before = sample()
        for i in range(rounds):
            names = list(CASES)
            for case in names[i % len(names) :] + names[: i % len(names)]:
                with processes() as own:
                    found = own.submit(CASES[case], data, images).result()
                after = sample()
                rate, cpu = (statistics.mean(pair) for pair in zip(before, after, strict=True))
                ratios = {
                    "limit_images_per_s": rate,
                    "limit_cpu_ms_per_image": cpu,
                    "steady": found["images_per_s"] / rate,
                    "epoch": found["images"] / found["epoch_s"] / rate,
                    "cpu": found["cpu_ms_per_image"] / cpu,
                }
                records.append({"case": case, "round": i} | found | ratios)
                before = after
    for case in CASES:
        print_case(case, [record for record in records if record["case"] == case])
    return records


def print_case(case: str, records: list[Record]) -> None:
    of = {key: statistics.median(r[key] for r in records) for key in records[0] if key != "case"}
    low, high = (end(record["steady"] for record in records) for end in (min, max))
    line = (
        f"{case:22} steady {of['steady']:.2f} of the limit ({low:.2f} .. {high:.2f}),"
        f" epoch {of['epoch']:.2f}, CPU {of['cpu']:.2f}x, first batch {of['first_batch_s']:.2f} s"
    )
    if "feed_ready_s" in of:
        line += f"; once: ray.init {of['ray_init_s']:.1f} s, feed ready {of['feed_ready_s']:.1f} s"
    if target := TARGETS.get(case):
        line += f"; {'met' if of['steady'] >= target else 'MISSED'}: at least {target}"
    print(line)


def memory(data: Path, folder: Path, times: int) -> Iterator[Record]:
    """Yields peak memory of an epoch of a data set, and of one ten times as large."""
    photos = [file.read_bytes() for file in jpegs(data)[: 120 * times]]
    dots = [small_png(number) for number in range(1000)]
    by_ray = partial(ours_by_ray_data, flow_epochs=1)
    sets = [("in process", ours, photos, 224, 120), ("Ray Data", by_ray, photos, 224, 120)]
    for loader, load, images, size, tenth in [*sets, ("in process", ours, dots, 32, 1000)]:
        peaks = []
        for count in (tenth * times, 10 * tenth * times):
            with tempfile.TemporaryDirectory(dir=folder) as packed:
                pack(Path(packed, "shards"), images, count)
                process = get_context("spawn").Process(target=load, args=(Path(packed), count, size))
                process.start()
                peaks.append(peak_bytes(process))
            yield {"loader": loader, "images": count, "size": size, "peak_bytes": peaks[-1]}
            print(f"{loader}, {count} images of {size} px: {peaks[-1] / 2**20:.0f} MiB", flush=True)
        print(f"  ten times the images: {peaks[1] / peaks[0]:.2f} times the memory")


def peak_bytes(process: Any) -> int:
    """Returns the memory of all its processes; pages that several of them share count once (PSS)."""
    peak, root = 0, psutil.Process(process.pid)
    while process.is_alive():
        total = 0
        for one in [root, *root.children(recursive=True)]:
            with suppress(OSError):
                rollup = Path(f"/proc/{one.pid}/smaps_rollup").read_text()
                total += sum(1024 * int(kib) for kib in re.findall(r"^Pss: +(\d+)", rollup, re.MULTILINE))
        peak = max(peak, total)
        time.sleep(0.3)  # looking costs time of the kernel
    return peak


if __name__ == "__main__":
    main()

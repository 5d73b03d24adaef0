"""A loader in a process of its own, which `bench/data.py` starts: `-m bench.loaders JOB`; answers are JSON.

Peers have as many workers as there are cores, and batches of 64. Times begin after the imports.
"""

import importlib
import io
import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
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

from bench.images import jpegs
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.stream import Reader, in_process, open_stream
from orchestrator.training.worker import keep_freed_memory

BATCH = 64
SHUFFLED = 1000  # webdataset's buffer
RAY_STORE_BYTES = 2 << 30
Transform = Callable[[bytes], Tensor]
Times = dict[str, float]


@dataclass(frozen=True, kw_only=True)
class Job:
    """The data of a loader, and its settings.

    transform: of peers: ``usual``, or ``uint8`` as our loaders do.
    path: the folder that `images.prepare` made; for our loaders, the shards.
    images: per epoch.
    cores: how many to use.
    flow_epochs: epochs that Ray Data reads as one, after an epoch by itself.
    """

    loader: str
    path: str
    images: int
    cores: int
    transform: str = "uint8"
    size: int = 224
    flow_epochs: int = 4


class AsUint8:
    """The least work of a loader: decode, crop, flip. The model's device does the rest."""

    def __init__(self) -> None:
        self.crop = v2.Compose(
            [v2.RandomResizedCrop(224, scale=(0.05, 1.0), antialias=True), v2.RandomHorizontalFlip()]
        )

    def __call__(self, encoded: bytes) -> Tensor:
        pixels = torch.frombuffer(bytearray(encoded), dtype=torch.uint8)
        image = decode_jpeg(pixels, ImageReadMode.RGB)
        assert isinstance(image, Tensor)
        return self.crop(image)


class Usual:
    """The transform of most training code."""

    def __init__(self) -> None:
        self.crop: Callable[[Image.Image], Any] = v1.Compose(
            [
                v1.RandomResizedCrop(224, scale=(0.05, 1.0)),
                v1.RandomHorizontalFlip(),
                v1.ToTensor(),
                v1.Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)),
            ]
        )

    def __call__(self, encoded: bytes) -> Tensor:
        return self.crop(Image.open(io.BytesIO(encoded)).convert("RGB"))


TRANSFORMS: dict[str, Callable[[], Transform]] = {"uint8": AsUint8, "usual": Usual}


def image_folder(job: Job) -> Iterable[Any]:
    data = ImageFolder(
        f"{job.path}/jpeg",
        transform=TRANSFORMS[job.transform](),
        loader=read_bytes,  # pyright: ignore[reportArgumentType] # the transform decodes
    )
    return DataLoader(data, batch_size=BATCH, shuffle=True, num_workers=job.cores)


def read_bytes(path: str) -> bytes:
    return Path(path).read_bytes()


def webdataset(job: Job) -> Iterable[Any]:
    wds = importlib.import_module("webdataset")
    tars = [str(tar) for tar in sorted(Path(job.path, "tars").iterdir())]
    data = wds.WebDataset(tars, shardshuffle=len(tars), empty_check=False)
    data = data.shuffle(SHUFFLED).to_tuple("jpg", "cls")
    data = data.map_tuple(TRANSFORMS[job.transform](), int).batched(BATCH)
    return wds.WebLoader(data, batch_size=None, num_workers=job.cores)


def litdata(job: Job) -> Iterable[Any]:
    lit = importlib.import_module("litdata")
    decode = TRANSFORMS[job.transform]()

    def decoded(sample: dict[str, Any]) -> tuple[Tensor, int]:
        return decode(sample["image"]), sample["label"]

    data = lit.StreamingDataset(f"{job.path}/litdata", shuffle=True, transform=decoded)
    return lit.StreamingDataLoader(data, batch_size=BATCH, num_workers=job.cores)


PEERS = {"ImageFolder": image_folder, "webdataset": webdataset, "litdata": litdata}


def peer(job: Job) -> Times:
    importlib.import_module(job.loader.lower() if job.loader != "ImageFolder" else "torchvision")
    return timed(lambda: (batch[0] for batch in PEERS[job.loader](job)), job.images)


def ours_in_process(job: Job) -> Times:
    torch.set_num_threads(job.cores)
    keep_freed_memory()  # as training workers do
    return timed(lambda: images_of(job, in_process, 1), job.images)


def ours_by_ray_data(job: Job) -> Times:
    """Times the start of a run, then an epoch, then several epochs in one execution."""
    ray: Any = importlib.import_module("ray")
    ray_data = importlib.import_module("orchestrator.data.ray_data")
    began = time.perf_counter()
    ray.init(
        address="local",
        num_cpus=job.cores,
        include_dashboard=False,
        object_store_memory=RAY_STORE_BYTES,
        log_to_driver=False,
        logging_level="error",
    )
    initialised = time.perf_counter()
    read = ray_data.by_ray_data([ray_data.BatchServer.remote()])
    for _ in read(open_stream(run_of(job), "train", 0, 1), range(1)):
        pass
    ready = time.perf_counter()
    epoch = timed(lambda: images_of(job, read, 1), job.images)
    flow = timed(lambda: images_of(job, read, job.flow_epochs), job.flow_epochs * job.images)
    ray.shutdown()
    starts = {"ray_init_s": initialised - began, "feed_ready_s": ready - initialised}
    return epoch | {key: flow[key] for key in ("images_per_s", "cpu_ms_per_image")} | starts


def images_of(job: Job, read: Reader, epochs: int) -> Iterator[Tensor]:
    stream = open_stream(run_of(job), "train", 0, 1)
    steps = range(-(-epochs * job.images // BATCH))
    return (batch["image"] for batch in read(stream, steps))


def run_of(job: Job) -> RunConfig:
    changes = {
        "data.path": job.path,
        "data.batch_size": BATCH,
        "data.augment": "inception",
        "model.image_size": job.size,
    }
    return override(RunConfig(), changes)


def timed(start: Callable[[], Iterator[Tensor]], total: int) -> Times:
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


def limit(job: Job) -> None:
    """Measures one core of the limit. For each line ``BEGIN SECONDS`` on stdin, by the monotonic clock, it
    answers how many images it read in that time.
    """
    transform = AsUint8()
    files = cycle(jpegs(Path(job.path)))
    transform(next(files).read_bytes())
    answer("ready")
    for line in sys.stdin:
        begin, seconds = map(float, line.split())
        time.sleep(max(0, begin - time.monotonic()))
        images, cpu = 0, time.process_time()
        while time.monotonic() < begin + seconds:
            transform(next(files).read_bytes())
            images += 1
        answer({"images": images, "cpu_seconds": time.process_time() - cpu})


def answer(what: object) -> None:
    print(json.dumps(what), flush=True)


def main() -> None:
    job = Job(**json.loads(sys.argv[1]))
    if job.loader == "limit":
        return limit(job)
    ours = {"in process": ours_in_process, "Ray Data": ours_by_ray_data}
    answer(ours.get(job.loader, peer)(job))


if __name__ == "__main__":
    main()

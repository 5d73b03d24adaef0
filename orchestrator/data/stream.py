"""The plan executed: one worker's batches, the same whether read by Ray Data or in its own process."""

import logging
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import ray.data
import torch
from torch import Tensor

from orchestrator.config import RunConfig
from orchestrator.data.plan import Ints, Plan
from orchestrator.data.manifest import Manifest
from orchestrator.data.transforms import Augment, prepare

BLOCK_BYTES = 8 << 20  # of decoded images per Ray Data task, in whole steps: it streams, and pays its start


class Batch(NamedTuple):
    """Attributes:
    image: (B, 3, H, W) uint8.
    label: (B,) int64.
    valid: (B,) float, 0 for the padding of the last evaluation batch.
    key: (B,) int64, the image's place in the run (or in the validation set), the same for every number of
        workers: what its router noise depends on.
    """

    image: Tensor
    label: Tensor
    valid: Tensor
    key: Tensor


@dataclass(frozen=True, kw_only=True, eq=False)
class Stream:
    """Which part of every batch this worker reads: images `rank * share` .. `(rank + 1) * share`."""

    path: str
    manifest: Manifest
    plan: Plan
    batch_size: int  # global
    image_size: int
    augment: Augment
    rank: int
    workers: int

    def share(self) -> int:
        return self.batch_size // self.workers

    def positions(self, step: int) -> Ints:
        first = step * self.batch_size + self.rank * self.share()
        return np.arange(first, first + self.share())

    def read(self, steps: range) -> dict[str, np.ndarray]:
        """This worker's images of `steps`, one step after the other: image (n, 3, H, W) uint8, label and key
        (n,).
        """
        shards = self.manifest.splits["train"]
        images, labels = [], []
        positions = np.concatenate([self.positions(s) for s in steps])
        for epoch, shard, row in zip(*self.plan.locate(positions), strict=True):
            table = read_shard(self.path, shards[shard])
            key = f"{self.plan.seed}/{epoch}/{table['key'][row].as_py()}"
            images.append(
                prepare(table["image"][row].as_py(), self.image_size, augment=self.augment, key=key)
            )
            labels.append(table["label"][row].as_py())
        return {"image": torch.stack(images).numpy(), "label": np.array(labels), "key": positions}


def open_stream(run: RunConfig, manifest: Manifest, *, rank: int, workers: int) -> Stream:
    rows = tuple(shard.rows for shard in manifest.splits["train"])
    return Stream(
        path=run.data.path,
        manifest=manifest,
        plan=Plan(rows=rows, seed=run.train.seed, shuffle_shards=run.data.shuffle_shards),
        batch_size=run.data.batch_size,
        image_size=run.model.image_size,
        augment=run.data.augment,
        rank=rank,
        workers=workers,
    )


def in_process(stream: Stream, steps: range) -> Iterator[Batch]:
    """This worker's batches of `steps`, read by itself."""
    for step in steps:
        yield _batch(stream.read(range(step, step + 1)))


def by_ray_data(stream: Stream, steps: range) -> Iterator[Batch]:
    """The same batches, read by Ray Data tasks on any free CPU of the cluster."""
    step_bytes = stream.share() * 3 * stream.image_size**2
    per_task = max(1, BLOCK_BYTES // step_bytes)
    if not steps:
        return
    tasks = [steps[i : i + per_task] for i in range(0, len(steps), per_task)]

    def read(task: Any) -> Any:
        return stream.read(tasks[int(task["id"][0])])

    dataset = ray.data.range(len(tasks), override_num_blocks=len(tasks)).map_batches(read, batch_size=1)
    dataset.context.execution_options.preserve_order = True
    dataset.context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it explains each execution at length
    for rows in dataset.iter_batches(batch_size=stream.share(), prefetch_batches=2):
        yield _batch(rows)


def validation(run: RunConfig, manifest: Manifest, *, rank: int, workers: int) -> Iterator[Batch]:
    """This worker's share of the whole validation set, once, in the order of its shards.

    The last global batch is filled up with invalid images, so that all workers make the same number of steps.
    """
    counts = np.cumsum([0] + [shard.rows for shard in manifest.splits["val"]])
    share = run.data.batch_size // workers
    for first in range(0, int(counts[-1]), run.data.batch_size):
        images = torch.zeros(share, 3, run.model.image_size, run.model.image_size, dtype=torch.uint8)
        labels, valid = torch.zeros(share, dtype=torch.int64), torch.zeros(share)
        start = first + rank * share
        mine = range(start, min(start + share, int(counts[-1])))
        for i, position in enumerate(mine):
            shard = int(np.searchsorted(counts, position, side="right")) - 1
            table = read_shard(run.data.path, manifest.splits["val"][shard])
            row = int(position - counts[shard])
            images[i] = prepare(table["image"][row].as_py(), run.model.image_size)
            labels[i], valid[i] = table["label"][row].as_py(), 1
        yield Batch(images, labels, valid, torch.arange(start, start + share))


def _batch(rows: Any) -> Batch:
    # copied, because Ray Data's arrays are read-only views of its object store
    image, label, key = (torch.tensor(rows[name]) for name in ("image", "label", "key"))
    return Batch(image, label, torch.ones(len(label)), key)

"""Batches of one worker and of several; every image of these data sets shows its own number."""

import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.plan import Plan
from orchestrator.data.manifest import Manifest, open_manifest
from orchestrator.data.packing import Sample, write_shards
from orchestrator.data.stream import Batch, Stream, in_process, open_stream, validation

Pack = Callable[..., tuple[str, Manifest]]


def greys_run(path: str, **changes) -> RunConfig:
    data = {"data.path": path, "data.batch_size": 6, "data.shuffle_shards": 2, "train.seed": 3}
    return override(RunConfig(), data | changes)


def numbers(batch: Batch) -> list[int]:
    """What the images show; every one in a single grey."""
    grey = batch.image[:, 0, 0, 0]
    assert (batch.image == grey.view(-1, 1, 1, 1)).all()
    return grey.tolist()


def joined(parts: list[Batch]) -> Batch:
    return Batch(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


def equal(one: Batch, other: Batch) -> bool:
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(one, other, strict=True))


def open_streams(run: RunConfig, manifest: Manifest, workers: int) -> list[Stream]:
    return [open_stream(run, manifest, rank=rank, workers=workers) for rank in range(workers)]


def test_images_come_in_the_order_of_the_plan_with_their_labels(pack_greys: Pack) -> None:
    """25 samples, batches of 6, 9 steps: over two epoch borders."""
    path, manifest = pack_greys(train=25)
    batches = list(in_process(open_streams(greys_run(path), manifest, 1)[0], range(9)))
    shown = [n for batch in batches for n in numbers(batch)]
    plan = Plan(rows=(4, 4, 4, 4, 4, 4, 1), seed=3, shuffle_shards=2)
    _, shards, rows = plan.locate(np.arange(54))
    assert shown == (4 * shards + rows).tolist()
    assert sorted(shown[:25]) == sorted(shown[25:50]) == list(range(25))
    for batch in batches:
        assert batch.label.tolist() == [n % 10 for n in numbers(batch)]
        assert batch.valid.tolist() == [1] * 6
        assert (batch.image.dtype, batch.label.dtype) == (torch.uint8, torch.int64)
        assert tuple(batch.image.shape) == (6, 3, 8, 8)


@pytest.mark.parametrize("workers", [2, 3])
@pytest.mark.parametrize("augment", ["none", "inception"])
def test_workers_together_read_what_one_reads(workers: int, augment: str, digits: str) -> None:
    run, manifest = greys_run(digits, **{"data.augment": augment}), open_manifest(digits)
    (alone,) = open_streams(run, manifest, 1)
    streams = [in_process(stream, range(5, 9)) for stream in open_streams(run, manifest, workers)]
    for whole, *parts in zip(in_process(alone, range(5, 9)), *streams, strict=True):
        assert equal(joined(parts), whole)


def test_steps_can_be_read_from_anywhere_and_many_at_once(pack_greys: Pack) -> None:
    """As Ray Data tasks do, and a run that is resumed."""
    path, manifest = pack_greys(train=25)
    (stream,) = open_streams(greys_run(path), manifest, 1)
    in_order = list(in_process(stream, range(8)))
    assert equal(next(iter(in_process(stream, range(7, 8)))), in_order[7])
    together = stream.read(range(2, 5))
    np.testing.assert_array_equal(together["image"], torch.cat([b.image for b in in_order[2:5]]).numpy())
    np.testing.assert_array_equal(together["label"], torch.cat([b.label for b in in_order[2:5]]).numpy())
    assert list(in_process(stream, range(4, 4))) == []


def test_augmentation_differs_between_epochs_and_seeds(tmp_path: Path) -> None:
    """One training image, and so one epoch per step."""
    buffer = io.BytesIO()
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    Image.fromarray(noise).save(buffer, format="PNG")
    one = [Sample(buffer.getvalue(), 0, "key")]
    manifest = write_shards(str(tmp_path), ["a"], {"train": one, "val": one})

    def images(seed: int, augment: str) -> set[bytes]:
        changes = {"data.batch_size": 1, "train.seed": seed, "data.augment": augment}
        (stream,) = open_streams(greys_run(str(tmp_path), **changes), manifest, 1)
        return {batch.image.numpy().tobytes() for batch in in_process(stream, range(5))}

    assert len(images(0, "none") | images(1, "none")) == 1
    assert len(images(0, "inception") | images(1, "inception")) == 10


@pytest.mark.parametrize(("val", "workers"), [(12, 1), (13, 1), (17, 2), (12, 2), (1, 3), (5, 1), (7, 6)])
def test_validation_covers_every_image_once_in_order(val: int, workers: int, pack_greys: Pack) -> None:
    """Batches of 6: a whole number of them, one image more, one less than three."""
    path, manifest = pack_greys(train=5, val=val, rows_per_shard=5)
    run = greys_run(path)
    parts = [list(validation(run, manifest, rank=rank, workers=workers)) for rank in range(workers)]
    batches = [joined(list(step)) for step in zip(*parts, strict=True)]
    assert [len(batch.label) for batch in batches] == [6] * -(-val // 6)
    whole = joined(batches)
    assert whole.valid.tolist() == [1] * val + [0] * (6 * len(batches) - val)
    assert numbers(whole)[:val] == list(range(5, 5 + val))
    assert whole.label[:val].tolist() == [n % 10 for n in range(5, 5 + val)]
    assert not whole.image[val:].any()
    assert not whole.label[val:].any()
    assert (whole.image.dtype, whole.label.dtype, whole.valid.dtype) == (
        torch.uint8,
        torch.int64,
        torch.float32,
    )

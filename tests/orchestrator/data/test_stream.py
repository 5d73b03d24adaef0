"""Batches of one worker and of several, read, decoded and fetched ahead. Every image shows its own number."""

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data import stream as streams
from orchestrator.data.batch import Batch, concatenated
from orchestrator.data.index import sample_ids
from orchestrator.data.manifest import Manifest
from orchestrator.data.read_plan import ReadPlan
from orchestrator.data.stream import BATCHES_AHEAD, Split, Stream, in_process, open_stream, prefetched
from orchestrator.errors import UsageError
from orchestrator.packing.pack import Sample, write_shards
from tests.orchestrator.training.batches import make_batch
from tests.parts import png

Pack = Callable[..., tuple[str, Manifest]]


def greys_run(path: str, **changes) -> RunConfig:
    data = {"data.path": path, "data.batch_size": 6, "data.lanes": 6, "data.shuffle_window": 3}
    return override(RunConfig(), data | {"train.seed": 3} | changes)


def numbers(batch: Batch) -> list[int]:
    """Returns the numbers that the images show; each image has a single grey."""
    grey = batch["image"][:, 0, 0, 0]
    assert (batch["image"] == grey.view(-1, 1, 1, 1)).all()
    return grey.tolist()


def equal(one: Batch, other: Batch) -> bool:
    pairs = zip(one.tensors(), other.tensors(), strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs) and one.bad == other.bad


def workers_of(run: RunConfig, workers: int, split: Split = "train") -> list[Stream]:
    return [open_stream(run, split, rank, workers) for rank in range(workers)]


def pack(path: Path, images: list[bytes], labels: list[int] | None = None) -> str:
    """Packs the same images for training and validation, with their number as key."""
    samples = [Sample(image, labels[i] if labels else 0, f"{i}") for i, image in enumerate(images)]
    write_shards(str(path), ["a"], {"train": samples, "val": samples})
    return str(path)


def test_images_come_in_the_order_of_the_plan_with_their_labels(pack_greys: Pack) -> None:
    """25 samples, batches of 6, 9 steps: across two ends of epochs."""
    path, _ = pack_greys(train=25)
    (stream,) = workers_of(greys_run(path), 1)
    assert stream.plan
    batches = list(in_process(stream, range(9)))
    for step, batch in enumerate(batches):
        places = stream.plan.locate(*stream.plan.slots(step, range(6)))
        shown = numbers(batch)
        assert shown == (4 * places.shard + places.row).tolist()
        assert batch["label"][:, 0].tolist() == [n % 10 for n in shown]
        assert batch.sample.tolist() == sample_ids(f"grey-{n}" for n in shown).tolist()
        assert batch.key.tolist() == list(range(6 * step, 6 * step + 6))
        assert batch.valid.tolist() == [1] * 6
        assert "mix" not in batch.fields
        assert batch.bad == ()
        assert (batch["image"].dtype, batch["label"][:, 0].dtype) == (torch.uint8, torch.int64)
        assert tuple(batch["image"].shape) == (6, 3, 8, 8)
        assert batch["image"].is_contiguous(memory_format=torch.channels_last)
    assert len({n for batch in batches[:4] for n in numbers(batch)}) == 24


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_together_read_what_one_reads(workers: int, digits: str) -> None:
    members = "inception,randaugment,three_augment,color_jitter,random_erasing,mixup,cutmix"
    change = {"data.augment": members, "data.repeats": 3}
    run = greys_run(digits, **change, **{"data.batch_size": 12})
    (alone,) = workers_of(run, 1)
    parts = [in_process(stream, range(5, 9)) for stream in workers_of(run, workers)]
    for whole, *shares in zip(in_process(alone, range(5, 9)), *parts, strict=True):
        assert equal(concatenated(shares), whole)
        assert len({tuple(draw) for draw in whole["mix"].tolist()}) == 6
        assert torch.equal(whole["mix"][::2], whole["mix"][1::2])


@pytest.mark.parametrize("size", [40, 8])
def test_views_of_an_image_differ(size: int, tmp_path: Path) -> None:
    """Also where the process keeps decoded images, which are small."""
    noise = np.random.default_rng(0).integers(0, 256, (4, size, size, 3), dtype=np.uint8)
    path = pack(tmp_path, [png(image) for image in noise])
    changes = {"model.image_size": size, "model.patch_size": 4, "data.lanes": 3, "data.repeats": 3}
    run = greys_run(path, **changes, **{"data.augment.color_jitter.strength": 0.5})
    (stream,) = workers_of(run, 1)
    batches = concatenated([*in_process(stream, range(8))])
    of = {sample: batches["image"][batches.sample == sample] for sample in batches.sample.tolist()}
    assert [len(views) for views in of.values()] == [12] * 4
    assert all(len({view.numpy().tobytes() for view in views}) == 12 for views in of.values())
    (once,) = workers_of(override(run, {"data.repeats": 1}), 1)
    seen = {image.numpy().tobytes() for image in concatenated([*in_process(once, range(3))])["image"]}
    first = {image.numpy().tobytes() for image in batches["image"]}
    assert len(seen & first) == 16, "the first view is that of a run without repeats"


def test_steps_can_be_read_from_anywhere(pack_greys: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """A resumed run does so; parts may have any even size."""
    path, _ = pack_greys(train=25)
    (stream,) = workers_of(greys_run(path), 1)
    in_order = list(in_process(stream, range(8)))
    monkeypatch.setattr(streams, "SLOTS", 4)
    assert equal(next(in_process(stream, range(7, 8))), in_order[7])
    assert list(in_process(stream, range(4, 4))) == []
    (dropping,) = workers_of(greys_run(path, **{"data.tail": "drop"}), 1)
    assert stream.plan
    assert dropping.plan
    assert (stream.plan.epoch_size, dropping.plan.epoch_size) == (25, 24)


def test_augmentation_differs_between_epochs_and_seeds(tmp_path: Path) -> None:
    """With one training image, an epoch is one step."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    path = pack(tmp_path, [png(noise)])

    def images(seed: int, augment: str) -> set[bytes]:
        changes = {"data.batch_size": 1, "data.lanes": 1, "train.seed": seed, "data.augment": augment}
        (stream,) = workers_of(greys_run(path, **changes), 1)
        return {batch["image"].numpy().tobytes() for batch in in_process(stream, range(5))}

    assert len(images(0, "none") | images(1, "none")) == 1
    assert len(images(0, "inception") | images(1, "inception")) == 10


@pytest.mark.parametrize(("val", "workers"), [(12, 1), (17, 2), (1, 3), (7, 6)])
def test_validation_covers_every_image_once_in_order(val: int, workers: int, pack_greys: Pack) -> None:
    """Batches of 6: whole, one image less than whole, and nearly empty."""
    path, _ = pack_greys(train=5, val=val, rows_per_shard=5)
    parts = [list(in_process(s, s.steps())) for s in workers_of(greys_run(path), workers, "val")]
    batches = [concatenated(list(step)) for step in zip(*parts, strict=True)]
    assert [len(batch) for batch in batches] == [6] * -(-val // 6)
    whole = concatenated(batches)
    assert whole.valid.tolist() == [1] * val + [0] * (6 * len(batches) - val)
    assert numbers(whole)[:val] == list(range(5, 5 + val))
    assert whole["label"][:val, 0].tolist() == [n % 10 for n in range(5, 5 + val)]
    assert not whole["image"][val:].any()
    assert not whole["label"][val:].any()


class TestBadImages:
    """Of 12 images, the numbers 3, 4 and 10 are damaged."""

    @pytest.fixture
    def path(self, tmp_path: Path) -> str:
        images = [png(np.full((8, 8), n, np.uint8)) for n in range(12)]
        for bad in (3, 4, 10):
            images[bad] = images[bad][:40]
        return pack(tmp_path / "bad", images)

    @pytest.mark.parametrize("workers", [1, 2, 3])
    def test_a_slot_repeats_the_next_valid_sample_of_its_lane(self, path: str, workers: int) -> None:
        run = greys_run(path)
        (alone,) = workers_of(run, 1)
        assert alone.plan
        parts = [in_process(stream, range(8)) for stream in workers_of(run, workers)]
        for step, shares in enumerate(zip(*parts, strict=True)):
            batch = concatenated(list(shares))
            lanes, index = alone.plan.slots(step, range(6))
            for lane, i, shown in zip(lanes, index, numbers(batch), strict=True):
                expected = iter(
                    int(alone.plan.locate(np.array(lane), np.array(j)).row) for j in range(i, i + 9)
                )
                assert shown == next(row for row in expected if row not in (3, 4, 10))
            assert batch.valid.all()

    def test_they_are_named_and_left_out_of_validation(self, path: str) -> None:
        (stream,) = workers_of(greys_run(path), 1)
        bad = {error for batch in in_process(stream, range(2)) for error in batch.bad}
        assert {(error.row, error.key) for error in bad} == {(3, "3"), (4, "4"), (10, "10")}
        assert {error.shard for error in bad} == {f"{path}/train/000000.parquet"}
        assert all("runcated" in error.reason or "image" in error.reason for error in bad)
        (stream,) = workers_of(greys_run(path), 1, "val")
        whole = concatenated(list(in_process(stream, stream.steps())))
        assert whole.valid.tolist() == [float(n not in (3, 4, 10)) for n in range(12)]
        assert sorted(error.row for error in whole.bad) == [3, 4, 10]

    def test_too_many_in_a_row(self, path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Many bad images in one part are not many in a row."""
        monkeypatch.setattr(streams, "MAX_CONSECUTIVE_BAD", 3)
        (stream,) = workers_of(greys_run(path, **{"data.batch_size": 48, "data.lanes": 6}), 1)
        assert len(stream.read(0, range(48)).bad) > 4
        (stream,) = workers_of(greys_run(pack(tmp_path / "none", [b"nothing"] * 12)), 1)
        with pytest.raises(UsageError, match=r"4 images in a row cannot be decoded: .*not an image"):
            next(in_process(stream, range(1)))


CPU = torch.device("cpu")


def numbered(count: int, read: list[int]) -> Iterator[Batch]:
    for number in range(count):
        read.append(number)
        yield make_batch(torch.full((2, 3, 1, 1), number), torch.full((2,), number))


def test_prefetching_reads_a_few_batches_ahead() -> None:
    read: list[int] = []
    batches = prefetched(numbered(20, read), CPU)
    for taken in (1, 2):
        assert int(next(batches)["label"][0]) == taken - 1
        before = -1
        while before != len(read):
            before = len(read)
            time.sleep(0.1)
        assert before == taken + BATCHES_AHEAD
    assert [int(batch["label"][:, 0][0]) for batch in batches] == list(range(2, 20))
    assert list(prefetched(iter([]), CPU)) == []


def test_errors_arrive_after_the_batches_before_them() -> None:
    def fails() -> Iterator[Batch]:
        yield from numbered(3, [])
        raise OSError("the disk is gone")

    batches = prefetched(fails(), CPU)
    assert [int(next(batches)["label"][0]) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(OSError, match="the disk is gone"):
        next(batches)


def test_the_prefetching_thread_ends_with_its_consumer() -> None:
    others = threading.enumerate()  # of an earlier test's training, which ended by an error
    batches = prefetched(numbered(1000, []), CPU)
    next(batches)
    (thread,) = (t for t in threading.enumerate() if t.name.startswith("prefetch") and t not in others)
    batches.close()
    thread.join()


@pytest.mark.gpu
def test_prefetching_to_a_gpu() -> None:
    for number, batch in enumerate(prefetched(numbered(50, []), torch.device("cuda"))):
        assert batch["image"].device.type == "cuda"
        assert (batch["image"].cpu() == number).all()


@pytest.mark.parametrize(("batch_size", "image_size"), [(48, 512), (6, 3000), (2048, 8), (30, 224)])
def test_chunks_of_ray_data_cover_every_slot_in_order(batch_size: int, image_size: int) -> None:
    run = override(RunConfig(), {"data.batch_size": batch_size, "model.image_size": image_size})
    for workers, steps in itertools.product((1, 2, 3), (range(0), range(5, 6), range(3, 50))):
        plan = ReadPlan(run, "train", steps.start, steps.stop, workers, range(workers))
        parts = [part for number in range(plan.chunk_count()) for part in plan.chunk(number)]
        slots = [(step, slot) for step, part in parts for slot in part]
        assert slots == [(step, slot) for step in steps for slot in range(batch_size // workers)]
        assert all(part.start % 2 == 0 for _, part in parts)

"""Batches of one worker and of several; every image of these data sets shows its own number."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data import loader
from orchestrator.data import stream as streams
from orchestrator.data.batch import Batch, sample_id
from orchestrator.data.loader import in_process
from orchestrator.data.manifest import Manifest
from orchestrator.data.packing import Sample, write_shards
from orchestrator.data.stream import Split, Stream, open_stream
from orchestrator.errors import UsageError
from tests.parts import png

Pack = Callable[..., tuple[str, Manifest]]


def greys_run(path: str, **changes) -> RunConfig:
    data = {"data.path": path, "data.batch_size": 6, "data.lanes": 6, "data.shuffle_window": 3}
    return override(RunConfig(), data | {"train.seed": 3} | changes)


def numbers(batch: Batch) -> list[int]:
    """What the images show; every one in a single grey."""
    grey = batch.image[:, 0, 0, 0]
    assert (batch.image == grey.view(-1, 1, 1, 1)).all()
    return grey.tolist()


def joined(parts: list[Batch]) -> Batch:
    tensors = (torch.cat(fields) for fields in zip(*(part[:-1] for part in parts), strict=True))
    return Batch(*tensors, bad=tuple(bad for part in parts for bad in part.bad))


def equal(one: Batch, other: Batch) -> bool:
    pairs = zip(one[:-1], other[:-1], strict=True)
    return all(torch.equal(a, b) and a.dtype == b.dtype for a, b in pairs) and one.bad == other.bad


def workers_of(run: RunConfig, workers: int, split: Split = "train") -> list[Stream]:
    return [open_stream(run, split, rank, workers) for rank in range(workers)]


def pack(path: Path, images: list[bytes], labels: list[int] | None = None) -> str:
    """Training and validation set are the same images, named after their number; 4 to a shard."""
    samples = [Sample(image, labels[i] if labels else 0, f"{i}") for i, image in enumerate(images)]
    write_shards(str(path), ["a"], {"train": samples, "val": samples})
    return str(path)


def test_images_come_in_the_order_of_the_plan_with_their_labels(pack_greys: Pack) -> None:
    """25 samples, batches of 6, 9 steps: over two epoch borders."""
    path, _ = pack_greys(train=25)
    (stream,) = workers_of(greys_run(path), 1)
    assert stream.plan
    batches = list(in_process(stream, range(9)))
    for step, batch in enumerate(batches):
        places = stream.plan.locate(*stream.plan.slots(step, range(6)))
        shown = numbers(batch)
        assert shown == (4 * places.shard + places.row).tolist()
        assert batch.label.tolist() == [n % 10 for n in shown]
        assert batch.sample.tolist() == [sample_id(f"grey-{n}") for n in shown]
        assert batch.key.tolist() == list(range(6 * step, 6 * step + 6))
        assert batch.valid.tolist() == [1] * 6
        assert batch.mix.tolist() == [[1, 0, 0, 0, 0]] * 6
        assert batch.bad == ()
        assert (batch.image.dtype, batch.label.dtype) == (torch.uint8, torch.int64)
        assert tuple(batch.image.shape) == (6, 3, 8, 8)
        assert batch.image.is_contiguous(memory_format=torch.channels_last)
    assert len({n for batch in batches[:4] for n in numbers(batch)}) == 24


@pytest.mark.parametrize(("tail", "size"), [("wrap", 25), ("drop", 24)])
def test_the_tail_of_an_epoch_is_the_configs(tail: str, size: int, pack_greys: Pack) -> None:
    path, _ = pack_greys(train=25)
    (stream,) = workers_of(greys_run(path, **{"data.tail": tail}), 1)
    assert stream.plan
    assert stream.plan.epoch_size() == size


@pytest.mark.parametrize("workers", [2, 3])
def test_workers_together_read_what_one_reads(workers: int, digits: str) -> None:
    change = {"data.augment": "inception", "data.randaugment": 2, "data.mixup": 0.8, "data.cutmix": 1.0}
    run = greys_run(digits, **change, **{"data.batch_size": 12})
    (alone,) = workers_of(run, 1)
    parts = [in_process(stream, range(5, 9)) for stream in workers_of(run, workers)]
    for whole, *shares in zip(in_process(alone, range(5, 9)), *parts, strict=True):
        assert equal(joined(shares), whole)
        assert len({tuple(draw) for draw in whole.mix.tolist()}) == 6
        assert torch.equal(whole.mix[::2], whole.mix[1::2])


def test_steps_can_be_read_from_anywhere(pack_greys: Pack, monkeypatch: pytest.MonkeyPatch) -> None:
    """As a run that is resumed does, and in parts of any even size."""
    path, _ = pack_greys(train=25)
    (stream,) = workers_of(greys_run(path), 1)
    in_order = list(in_process(stream, range(8)))
    monkeypatch.setattr(loader, "SLOTS", 4)
    assert equal(next(in_process(stream, range(7, 8))), in_order[7])
    assert list(in_process(stream, range(4, 4))) == []


def test_augmentation_differs_between_epochs_and_seeds(tmp_path: Path) -> None:
    """One training image, and so one epoch per step."""
    noise = np.random.default_rng(0).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    path = pack(tmp_path, [png(noise)])

    def images(seed: int, augment: str) -> set[bytes]:
        changes = {"data.batch_size": 1, "data.lanes": 1, "train.seed": seed, "data.augment": augment}
        (stream,) = workers_of(greys_run(path, **changes), 1)
        return {batch.image.numpy().tobytes() for batch in in_process(stream, range(5))}

    assert len(images(0, "none") | images(1, "none")) == 1
    assert len(images(0, "inception") | images(1, "inception")) == 10


@pytest.mark.parametrize(("val", "workers"), [(12, 1), (13, 1), (17, 2), (1, 3), (7, 6)])
def test_validation_covers_every_image_once_in_order(val: int, workers: int, pack_greys: Pack) -> None:
    """Batches of 6: a whole number of them, one image more, one less than three."""
    path, _ = pack_greys(train=5, val=val, rows_per_shard=5)
    parts = [list(in_process(s, s.steps())) for s in workers_of(greys_run(path), workers, "val")]
    batches = [joined(list(step)) for step in zip(*parts, strict=True)]
    assert [len(batch.label) for batch in batches] == [6] * -(-val // 6)
    whole = joined(batches)
    assert whole.valid.tolist() == [1] * val + [0] * (6 * len(batches) - val)
    assert numbers(whole)[:val] == list(range(5, 5 + val))
    assert whole.label[:val].tolist() == [n % 10 for n in range(5, 5 + val)]
    assert not whole.image[val:].any()
    assert not whole.label[val:].any()


class TestBadImages:
    """Of 12 images, 3, 4 and 10 are none."""

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
            batch = joined(list(shares))
            lanes, index = alone.plan.slots(step, range(6))
            for lane, i, shown in zip(lanes, index, numbers(batch), strict=True):
                expected = iter(
                    int(alone.plan.locate(np.array(lane), np.array(j)).row) for j in range(i, i + 9)
                )
                assert shown == next(row for row in expected if row not in (3, 4, 10))
            assert batch.valid.all()

    def test_they_are_named(self, path: str) -> None:
        (stream,) = workers_of(greys_run(path), 1)
        bad = {one for batch in in_process(stream, range(2)) for one in batch.bad}
        assert {(one.row, one.key) for one in bad} == {(3, "3"), (4, "4"), (10, "10")}
        assert {one.shard for one in bad} == {f"{path}/train/000000.parquet"}
        assert all("runcated" in one.reason or "image" in one.reason for one in bad)

    def test_validation_leaves_them_out(self, path: str) -> None:
        (stream,) = workers_of(greys_run(path), 1, "val")
        whole = joined(list(in_process(stream, stream.steps())))
        assert whole.valid.tolist() == [float(n not in (3, 4, 10)) for n in range(12)]
        assert sorted(one.row for one in whole.bad) == [3, 4, 10]

    def test_many_in_one_part_are_not_many_in_a_row(self, path: str, monkeypatch: pytest.MonkeyPatch) -> None:
        """Parts are as large as whoever reads likes."""
        monkeypatch.setattr(streams, "MAX_CONSECUTIVE_BAD", 3)
        (stream,) = workers_of(greys_run(path, **{"data.batch_size": 48, "data.lanes": 6}), 1)
        assert len(stream.read(0, range(48)).bad) > 4

    def test_no_end_of_them(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(streams, "MAX_CONSECUTIVE_BAD", 20)
        (stream,) = workers_of(greys_run(pack(tmp_path / "none", [b"nothing"] * 12)), 1)
        with pytest.raises(UsageError, match=r"21 images in a row cannot be decoded: .*not an image"):
            next(in_process(stream, range(1)))

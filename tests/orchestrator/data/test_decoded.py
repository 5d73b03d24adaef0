"""Small images are decoded once per process; what a stream yields is what it would decode."""

from pathlib import Path

import numpy as np
import pytest
import torch

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data import decoded
from orchestrator.data.augment import CropConfig, CropFlipConfig, InceptionConfig
from orchestrator.data.batch import Batch
from orchestrator.data.decoded import decoded_split
from orchestrator.data.images import Transform
from orchestrator.data.shards import DataSet
from orchestrator.data.stream import in_process, open_stream
from orchestrator.packing.pack import Sample, write_shards
from tests.parts import png

ROWS = 12


@pytest.fixture
def noise(tmp_path: Path) -> str:
    """Packs images of noise, of which the fifth is damaged, and as many for validation."""
    rng = np.random.default_rng(0)
    contents = [png(rng.integers(0, 256, (8, 8, 3), dtype=np.uint8)) for _ in range(ROWS)]
    contents[5] = contents[5][:60]
    samples = [Sample(content, i % 3, f"{i}") for i, content in enumerate(contents)]
    write_shards(str(tmp_path), ["a", "b", "c"], {"train": samples, "val": samples})
    return str(tmp_path)


def batches(path: str, **changes) -> list[Batch]:
    """Returns three epochs of training."""
    data = {"data.path": path, "data.batch_size": 4, "data.lanes": 4, "data.max_bad_frac": 1.0}
    run = override(RunConfig(), data | changes)
    return list(in_process(open_stream(run, "train", 0, 1), range(9)))


@pytest.mark.parametrize("augment", ["", "flip", "shift"])
@pytest.mark.parametrize("mixup", ["", "mixup"])
def test_batches_are_those_that_are_decoded_each_time(
    noise: str, augment: str, mixup: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = {"data.augment": [name for name in (augment, mixup) if name]}
    kept = batches(noise, **changes)
    monkeypatch.setattr(decoded, "SPLIT_BYTES", 0)
    decoded_split.cache_clear()
    for one, other in zip(kept, batches(noise, **changes), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))
        assert one.bad == other.bad
    assert any(batch.bad for batch in kept)


@pytest.mark.parametrize("repeats", [1, 2])
def test_a_known_image_is_augmented_as_one_that_is_read(noise: str, repeats: int) -> None:
    data = {"data.path": noise, "data.batch_size": 4, "data.lanes": 4, "data.max_bad_frac": 1.0}
    changes = {"data.augment": ["flip", "shift"], "data.repeats": repeats}
    stream = open_stream(override(RunConfig(), data | changes), "train", 0, 1)
    first, again = (list(in_process(stream, range(9))) for _ in range(2))
    for one, other in zip(first, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one.tensors(), other.tensors(), strict=True))


def test_images_are_read_once(noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Only parts of a batch with the damaged image are read again."""
    read, images = [0], DataSet.images

    def counted(self, split, shard, records, field):
        read[0] += len(records)
        return images(self, split, shard, records, field)

    monkeypatch.setattr(DataSet, "images", counted)
    stream = open_stream(override(RunConfig(), {"data.path": noise, "data.batch_size": 4}), "val", 0, 1)
    for expected in (12, 4, 4):
        read[0] = 0
        list(in_process(stream, stream.steps()))
        assert read[0] == expected


def test_memory_is_bounded(noise: str, monkeypatch: pytest.MonkeyPatch) -> None:
    data = open_stream(override(RunConfig(), {"data.path": noise, "data.batch_size": 4}), "val", 0, 1).data
    assert decoded_split(data, "val", Transform(size=32))
    assert decoded_split(data, "val", Transform(size=33)) is None
    for crop in (InceptionConfig(), CropConfig(), CropFlipConfig()):
        assert decoded_split(data, "val", Transform(size=32, augment=(crop,))) is None
    assert decoded_split.cache_info().maxsize == decoded.SPLITS
    monkeypatch.setattr(decoded, "SPLIT_BYTES", ROWS * 3 * 8 * 8)
    assert decoded_split(data, "val", Transform(size=8, eval_crop=0.5))
    assert decoded_split(data, "val", Transform(size=9)) is None

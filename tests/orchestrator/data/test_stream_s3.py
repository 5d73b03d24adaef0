"""Training from a failing S3: a request in seven is refused, each shard's connection is cut once."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from orchestrator import stores
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch
from orchestrator.data.cache import CACHE_FOLDER
from orchestrator.data.images import encode_png
from orchestrator.data.stream import in_process, open_stream
from orchestrator.packing import open_source, pack as packing
from orchestrator.packing.pack import Sample, write_shards
from tests.orchestrator.buckets import Bucket
from tests.orchestrator.data.test_stream import equal
from tests.orchestrator.faulty_proxy import Kind

STEPS = range(5, 65)  # batches of 48 images: two ends of epochs


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The cache of a node that has read nothing before."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))


def pack_digits(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = open_source("digits")
    with monkeypatch.context() as small:
        small.setattr(packing, "ROWS_PER_SHARD", 120)
        write_shards(path, digits.classes, digits.splits)


@pytest.fixture
def stormy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[Kind]]]:
    """The digits on S3 in 15 shards, and the faults so far."""
    pack_digits(bucket.uri("digits"), monkeypatch)
    monkeypatch.setattr(stores, "ATTEMPTS", 8)
    stores.forget()
    failed: list[Kind] = []
    cut: set[str] = set()
    draws = random.Random(0)

    def fault(request: str) -> Kind | None:
        kind: Kind | None = None
        if draws.random() < 0.15:
            kind = "busy"
        elif request.startswith("GET") and ".parquet" in request and request not in cut:
            cut.add(request)
            kind = "cut download"
        if kind:
            failed.append(kind)
        return kind

    with bucket.proxy.failing_by(fault):
        yield bucket.uri("digits"), failed


def batches(path: str) -> list[Batch]:
    changes = {"data.path": path, "data.batch_size": 48, "data.augment": "inception", "data.lanes": 8}
    return list(in_process(open_stream(override(RunConfig(), changes), "train", 0, 1), STEPS))


def test_the_first_batch_costs_little_more_than_its_images(
    bucket: Bucket, monkeypatch: pytest.MonkeyPatch
) -> None:
    """32 of 240 images of 60 kB in 16 lanes, which lie in all 8 shards."""
    noise = np.random.default_rng(0).integers(0, 256, (240, 142, 142, 3), dtype=np.uint8)
    samples = [Sample(encode_png(image), n % 2, str(n)) for n, image in enumerate(noise)]
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 30)
    manifest = write_shards(bucket.uri("data"), ["a", "b"], {"train": samples, "val": samples[:1]})
    changes = {"data.path": bucket.uri("data"), "data.batch_size": 32, "data.lanes": 16, "train.steps": 5}
    bucket.proxy.sent = 0
    stream = open_stream(override(RunConfig(), changes), "train", 0, 1)
    (batch,) = in_process(stream, range(1))
    images = 32 * len(samples[0].image)
    assert batch.valid.all()
    assert batch.traffic.requests == 32
    assert images * 0.99 < batch.traffic.bytes <= bucket.proxy.sent < 1.1 * images
    assert sum(shard.bytes for shard in manifest.splits["train"]) > 7 * images


@pytest.mark.smoke
def test_a_failing_s3(
    tmp_path: Path, stormy: tuple[str, list[Kind]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The batches are the same as those from a local disk."""
    pack_digits(str(tmp_path / "local"), monkeypatch)
    path, failed = stormy
    expected = batches(str(tmp_path / "local"))
    assert all(equal(a, b) for a, b in zip(batches(path), expected, strict=True))
    kinds = Counter(failed)
    assert kinds["cut download"] >= 12
    assert kinds["busy"] >= 1

"""Training from S3 through a storm: one request in seven refused, every shard's connection cut once."""

import random
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data import packing
from orchestrator.data.batch import Batch
from orchestrator.data.loader import in_process
from orchestrator.data.packing import write_shards
from orchestrator.data.ray_data import BatchServer, by_ray_data
from orchestrator.data.shards import CACHE_FOLDER
from orchestrator.data.sources import open_source
from orchestrator.data.stream import Reader, open_stream
from tests.orchestrator.buckets import Bucket, connect_anew
from tests.orchestrator.data.test_stream import equal
from tests.orchestrator.faulty_proxy import Kind
from tests.parts import start_ray

STEPS = range(5, 65)  # of 48 images: two ends of epochs


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a node that has read nothing before."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))


def pack_digits(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    digits = open_source("digits")
    with monkeypatch.context() as small:
        small.setattr(packing, "ROWS_PER_SHARD", 120)
        write_shards(path, digits.classes, digits.splits)


@pytest.fixture
def stormy(bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[str, list[Kind]]]:
    """The digits on S3 in 15 shards, and what has failed."""
    pack_digits(bucket.uri("digits"), monkeypatch)
    monkeypatch.setattr(storage, "ATTEMPTS", 8)
    connect_anew()
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


def batches(path: str, read: Reader) -> list[Batch]:
    changes = {"data.path": path, "data.batch_size": 48, "data.augment": "inception", "data.lanes": 8}
    return list(read(open_stream(override(RunConfig(), changes), "train", 0, 1), STEPS))


@pytest.fixture
def expected(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Batch]:
    pack_digits(str(tmp_path / "local"), monkeypatch)
    return batches(str(tmp_path / "local"), in_process)


def assert_same(found: list[Batch], expected: list[Batch], failed: list[Kind]) -> None:
    assert all(equal(a, b) for a, b in zip(found, expected, strict=True))
    kinds = Counter(failed)
    assert kinds["cut download"] >= 12
    assert kinds["busy"] >= 1


@pytest.mark.smoke
def test_in_process(expected: list[Batch], stormy: tuple[str, list[Kind]]) -> None:
    path, failed = stormy
    assert_same(batches(path, in_process), expected, failed)


@pytest.mark.slow  # a Ray of its own
def test_by_ray_data(no_cluster: None, expected: list[Batch], stormy: tuple[str, list[Kind]]) -> None:
    """Its processes inherit where S3 is."""
    path, failed = stormy
    start_ray()
    assert_same(batches(path, by_ray_data(BatchServer.remote())), expected, failed)

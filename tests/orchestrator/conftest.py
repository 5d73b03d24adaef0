"""Servers of object storages on this machine, behind proxies that fail on demand."""

from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path

import pytest

from orchestrator import stores
from tests.orchestrator import clouds
from tests.orchestrator.buckets import Bucket
from tests.orchestrator.clouds import Make
from tests.orchestrator.faulty_proxy import FaultyProxy

NUMBERS = count(1)


@pytest.fixture(scope="session")
def amazon() -> Iterator[tuple[FaultyProxy, Make]]:
    with clouds.amazon() as server:
        yield server


@pytest.fixture(scope="session")
def google() -> Iterator[tuple[FaultyProxy, Make]]:
    with clouds.google() as server:
        yield server


@pytest.fixture(scope="session")
def azure() -> Iterator[tuple[FaultyProxy, Make]]:
    with clouds.azure() as server:
        yield server


@pytest.fixture
def bucket_of(
    request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[str], Bucket]]:
    """Makes an empty bucket of the storage with a scheme. A request is tried three times."""

    def make(scheme: str) -> Bucket:
        proxy, make_bucket = request.getfixturevalue({"s3": "amazon", "gs": "google", "az": "azure"}[scheme])
        bucket = Bucket(f"bucket-{next(NUMBERS)}", proxy, clouds.environment(scheme, proxy.url), scheme)
        for name, value in bucket.environment.items():
            monkeypatch.setenv(name, value)
        stores.forget()
        make_bucket(bucket.name)
        proxy.requests.clear()
        return bucket

    monkeypatch.setattr(stores, "ATTEMPTS", 3)
    yield make
    stores.forget()


@pytest.fixture
def bucket(request: pytest.FixtureRequest, bucket_of: Callable[[str], Bucket]) -> Bucket:
    """Of S3, unless the parameter is another scheme."""
    return bucket_of(getattr(request, "param", "s3"))


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder that does not exist yet, on a disk or in the object storage that the parameter names."""
    if request.param == "local":
        return str(tmp_path / "root")
    return request.getfixturevalue("bucket_of")(request.param).uri("root")

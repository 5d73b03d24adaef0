"""An S3 server on this machine, behind a proxy that fails on demand."""

import logging
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import pytest
from moto.server import ThreadedMotoServer

from orchestrator import storage
from tests.orchestrator.buckets import Bucket, connect_anew
from tests.orchestrator.faulty_proxy import FaultyProxy

NUMBERS = count(1)


@pytest.fixture(scope="session")
def s3_proxy() -> Iterator[FaultyProxy]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    proxy = FaultyProxy(*server.get_host_and_port())
    yield proxy
    proxy.close()
    server.stop()


@pytest.fixture
def bucket(s3_proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Bucket]:
    """An empty one. A request is tried three times."""
    environment = {
        "AWS_ENDPOINT_URL": s3_proxy.url,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": "us-east-1",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(storage, "ATTEMPTS", 3)
    connect_anew()
    bucket = Bucket(f"bucket-{next(NUMBERS)}", s3_proxy, environment)
    storage._s3().create_bucket(Bucket=bucket.name)
    s3_proxy.requests.clear()
    yield bucket
    connect_anew()


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """A folder that does not exist yet."""
    return request.getfixturevalue("bucket").uri("root") if request.param == "s3" else str(tmp_path / "root")

"""Stores are made once: their tables take seconds. Every test has runs of its own."""

import os

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.tracking import Tracking, open_tracking
from tests.orchestrator.tracking.stores import Postgres, Server, Sqlite, Store

Open = Callable[..., Tracking]


@pytest.fixture(scope="session")
def sqlite(tmp_path_factory: pytest.TempPathFactory) -> Sqlite:
    return Sqlite(tmp_path_factory.mktemp("sqlite"))


@pytest.fixture(scope="session")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = Server(tmp_path_factory.mktemp("server"))
    yield server
    server.stop()


@pytest.fixture(scope="session")
def postgres() -> Iterator[Postgres]:
    postgres = Postgres()
    yield postgres
    postgres.remove()


SERVER = pytest.param("server", marks=pytest.mark.smoke)
POSTGRES = pytest.param("postgres", marks=pytest.mark.slow)


@pytest.fixture(params=["sqlite", SERVER, POSTGRES])
def store(request: pytest.FixtureRequest) -> Store:
    """Each kind in turn."""
    return request.getfixturevalue(request.param)


@pytest.fixture
def reopen(tmp_path: Path) -> Iterator[Open]:
    """``reopen(store)``: as the next process of the same run would, when the earlier one has ended."""
    opened: list[Tracking] = []

    def open_again(store: Store, *, spool: str = "outbox") -> Tracking:
        for tracking in opened:
            tracking.close(timeout_s=60)
        artifacts = f"{store.uri.removeprefix('sqlite:///')}-artifacts"
        opened.append(open_tracking(store.uri, artifacts=artifacts, spool=str(tmp_path / spool)))
        return opened[-1]

    yield open_again
    for tracking in opened:
        tracking.close(timeout_s=60)


@pytest.fixture
def tracking(reopen: Open, store: Store) -> Tracking:
    return reopen(store)

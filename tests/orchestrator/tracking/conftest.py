"""Stores are made once: their tables take seconds. Every test has runs of its own."""

import os

os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from orchestrator.tracking.store import Tracking, open_tracking
from tests.orchestrator.tracking.stores import Postgres, Server, Sqlite, Store


@pytest.fixture(scope="session")
def sqlite(tmp_path_factory: pytest.TempPathFactory, empty_store: Callable[[Path], str]) -> Sqlite:
    empty_store(folder := tmp_path_factory.mktemp("sqlite"))
    return Sqlite(folder)


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
def tracking(store: Store) -> Tracking:
    return open_store(store)


def open_store(store: Store) -> Tracking:
    return open_tracking(store.uri, artifacts=f"{store.uri.removeprefix('sqlite:///')}-artifacts")

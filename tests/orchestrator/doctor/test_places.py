"""Stores and storages with real faults, seen from this process."""

import http.server
import json
import os
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.doctor import places
from orchestrator.errors import UsageError
from orchestrator.tracking import open_tracking
from orchestrator.tracking.health import look
from tests.orchestrator.buckets import Bucket
from tests.orchestrator.tracking.stores import Postgres
from tests.parts import free_port


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A store that MLflow made."""
    folder = tmp_path_factory.mktemp("made")
    uri = f"sqlite:///{folder}/mlflow.db"
    with open_tracking(uri, artifacts=str(folder / "artifacts"), spool=str(folder / "outbox")):
        pass
    return folder / "mlflow.db"


@pytest.fixture
def store(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copy(made, tmp_path / "mlflow.db"))


def found_of(path: Path, nodes: int = 1) -> tuple[str, str, str]:
    found = places.check_tracking(f"sqlite:///{path}", nodes=nodes)
    return found.status, found.found, found.way_out


def change(path: Path, *statements: str) -> None:
    with sqlite3.connect(path) as database:
        for statement in statements:
            database.execute(statement)


def test_a_store_that_is_ready(store: Path) -> None:
    before = store.read_bytes()
    assert found_of(store)[0] == "ok"
    assert store.read_bytes() == before


def test_a_store_that_is_not_there_is_made_by_the_sweep(tmp_path: Path) -> None:
    assert found_of(tmp_path / "mlflow.db")[0] == "ok"
    assert not (tmp_path / "mlflow.db").exists()


def test_an_uninitialised_store(tmp_path: Path) -> None:
    (tmp_path / "mlflow.db").touch()
    status, found, way_out = found_of(tmp_path / "mlflow.db")
    assert (status, "is empty" in found, "mlflow db upgrade" in way_out) == ("warn", True, True)
    assert (tmp_path / "mlflow.db").stat().st_size == 0  # as it was


def test_a_store_of_an_older_schema(store: Path) -> None:
    """451aebb31d03 is the first of MLflow's revisions."""
    change(store, "UPDATE alembic_version SET version_num = '451aebb31d03'")
    status, found, way_out = found_of(store)
    assert (status, "is older: schema 451aebb31d03" in found) == ("fail", True)
    assert way_out.startswith("back it up, then: mlflow db upgrade sqlite:///")


def test_a_store_of_a_newer_mlflow(store: Path) -> None:
    change(store, "UPDATE alembic_version SET version_num = 'feedfacecafe'")
    assert (found_of(store)[0], "is newer" in found_of(store)[1]) == ("fail", True)


def test_a_store_whose_making_was_cut_short(store: Path) -> None:
    change(store, "DROP TABLE registered_model_aliases")
    assert (found_of(store)[0], "is half-made" in found_of(store)[1]) == ("fail", True)


def test_a_database_of_something_else(tmp_path: Path) -> None:
    change(tmp_path / "other.db", "CREATE TABLE cats (name)")
    assert (
        found_of(tmp_path / "other.db")[0],
        "none of MLflow's" in found_of(tmp_path / "other.db")[1],
    ) == ("fail", True)
    (tmp_path / "text").write_text("not a database at all, but long enough to be looked at as one" * 9)
    assert (found_of(tmp_path / "text")[0], "is foreign" in found_of(tmp_path / "text")[1]) == ("fail", True)


def test_sqlite_with_several_nodes(store: Path) -> None:
    status, found, way_out = found_of(store, nodes=3)
    assert (status, "3 nodes" in found, "mlflow server" in way_out) == ("warn", True, True)


class Answer(http.server.BaseHTTPRequestHandler):
    """As MLflow's server refuses: `status` and `body` for all but /health."""

    status, body = 200, "{}"

    def do_GET(self) -> None:
        self._say(200 if self.path == "/health" else self.status)

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self._say(self.status)

    def _say(self, status: int) -> None:
        body = "3.17.2" if self.path == "/version" else self.body
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body.encode())

    def log_message(self, *_: object) -> None: ...


@pytest.fixture
def server() -> Iterator[str]:
    answering = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=answering.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{answering.server_port}"
    answering.shutdown()


@pytest.mark.parametrize(
    ("status", "body", "state", "way_out"),
    [
        (200, "{}", "ready", ""),
        (401, "You are not authenticated.", "login", "MLFLOW_TRACKING_USERNAME"),
        (403, "Permission denied", "login", "MLFLOW_TRACKING_USERNAME"),
        (403, "Invalid Host header - possible DNS rebinding attack detected", "host", "--allowed-hosts"),
        (404, "Not Found", "path", "path and port"),
        (500, "Detected out-of-date database schema", "broken", "mlflow db upgrade"),
    ],
)
def test_what_a_server_refuses_is_told_apart(
    server: str, monkeypatch: pytest.MonkeyPatch, status: int, body: str, state: str, way_out: str
) -> None:
    monkeypatch.setattr(Answer, "status", status)
    monkeypatch.setattr(Answer, "body", body)
    assert look(server).state == state
    found = places.check_tracking(server, nodes=3)
    assert found.status == ("ok" if state == "ready" else "fail")
    assert way_out in found.way_out


def test_a_server_that_is_down_or_called_with_a_password(server: str) -> None:
    assert look(f"http://127.0.0.1:{free_port()}").state == "down"
    named = server.replace("://", "://me:s3cret@")
    assert look(named).state == "user"
    assert "s3cret" not in json.dumps(places.check_tracking(named, nodes=1).found)


@pytest.mark.slow
def test_postgres_is_empty_refuses_lacks_a_database_and_is_down() -> None:
    postgres = Postgres()
    try:
        assert look(postgres.uri).state == "empty"
        assert places.check_tracking(postgres.uri, nodes=3).status == "warn"
        assert look(postgres.uri.replace("secret", "wrong")).state == "login"
        assert look(postgres.uri.removesuffix("/postgres") + "/other").state == "path"
    finally:
        postgres.remove()
    assert look(postgres.uri).state == "down"


def test_a_storage_that_can_be_used_is_left_as_it_was(tmp_path: Path) -> None:
    found = places.check_storage(str(tmp_path / "runs"))
    assert found.status == "ok", found
    assert os.listdir(tmp_path / "runs") == []


def test_a_storage_below_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    found = places.check_storage(str(tmp_path / "file/runs"))
    assert found.status == "fail"
    assert "--storage" in found.way_out


def test_a_bucket_and_one_that_is_not_there(bucket: Bucket) -> None:
    assert places.check_storage(bucket.uri("runs")).status == "ok"
    assert bucket.all_keys() == []
    found = places.check_storage("s3://nobody-made-this/runs")
    assert found.status == "fail"
    assert "NoSuchBucket" in found.found
    assert "AWS_ENDPOINT_URL" in found.way_out


def test_data_that_is_not_there() -> None:
    with pytest.raises(UsageError, match="no data set at /nowhere"):
        places.digest_of("/nowhere")

"""Stores that can be opened, and the errors for stores that cannot."""

import fcntl
import json
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest
from mlflow import MlflowClient

from orchestrator.errors import UsageError
from orchestrator.output import redact_uri
from orchestrator.tracking import store as store_file
from orchestrator.tracking.store import links, open_reader, open_tracking
from tests.orchestrator.tracking.conftest import open_store
from tests.orchestrator.tracking.stores import Postgres, Sqlite
from tests.parts import free_port


@pytest.fixture
def port_of_no_web_server():
    """Answers as sshd does."""
    with socket.create_server(("127.0.0.1", 0)) as server:

        def answer() -> None:
            with suppress(OSError):  # of the socket that the fixture closes
                while True:
                    connection, _ = server.accept()
                    with connection:
                        connection.recv(100)
                        connection.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

        threading.Thread(target=answer, daemon=True).start()
        yield server.getsockname()[1]


@pytest.mark.parametrize(
    "uri",
    [
        "http://127.0.0.1:9",
        "http://127.0.0.1:{port}",
        "http://127.0.0.1:port",
        "http://",
        "ftp://somewhere/x",
        "/some/folder",
        "sqlite:////proc/nowhere/mlflow.db",
        "sqlite:///{folder}",
    ],
)
def test_refused_uris(
    uri: str, port_of_no_web_server: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """At once, where MLflow itself tries for minutes."""
    uri = uri.format(port=port_of_no_web_server, folder=tmp_path)
    monkeypatch.setattr(time, "sleep", lambda s: pytest.fail(f"it waits {s} s to try again"))
    for attempt in (
        lambda: open_tracking(uri, artifacts="/nowhere"),
        lambda: open_reader(uri),
    ):
        with pytest.raises(UsageError) as caught:
            attempt()
        assert uri in str(caught.value)
        assert len(str(caught.value).splitlines()) == 1


@pytest.mark.slow
def test_a_database_that_does_not_answer(postgres: Postgres, tmp_path: Path) -> None:
    """No server answers, or the password is wrong; the error never repeats it."""
    uris = (
        f"postgresql://tester:secret@127.0.0.1:{free_port()}/postgres",
        postgres.uri.replace("secret", "wrong"),
    )
    for uri in uris:
        with pytest.raises(UsageError) as caught:
            open_tracking(uri, artifacts="/nowhere")
        assert "postgresql://tester:***@127.0.0.1" in str(caught.value)
        assert not any(word in str(caught.value) for word in ("secret", "wrong"))


@pytest.mark.parametrize(
    ("uri", "shown"),
    [
        ("postgresql://me:pass@host:5432/db", "postgresql://me:***@host:5432/db"),
        ("postgresql://mlflow:ab/cd+ef=@db/mlflow", "postgresql://mlflow:***@db/mlflow"),
        ("postgresql://me:pa@ss@host/db", "postgresql://me:***@host/db"),
        ("postgresql://db/mlflow?user=mlflow&password=s3cret", "postgresql://db/mlflow"),
        ("postgresql://mlflow:ab?cd@db/mlflow", "postgresql://***"),
        ("postgresql://db/mlflow?password=ab@cd", "postgresql://***"),
        ("http://me:secret@host:5000/x?token=secret", "http://me:***@host:5000/x"),
        ("--tracking-uri=http://me:secret@host:5000", "--tracking-uri=http://me:***@host:5000"),
        ("http://host:5000", "http://host:5000"),
        ("sqlite:////home/me/mlflow.db", "sqlite:////home/me/mlflow.db"),
        ("/some/folder", "/some/folder"),
    ],
)
def test_passwords_are_not_shown(uri: str, shown: str) -> None:
    assert redact_uri(uri) == shown


def test_looking_makes_no_store(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="there is no MLflow store at sqlite:"):
        open_reader(f"sqlite:///{tmp_path}/none/mlflow.db")
    assert not list(tmp_path.iterdir())
    empty = tmp_path / "empty.db"
    empty.touch()
    with pytest.raises(UsageError, match="there is no MLflow store at sqlite:"):
        open_reader(f"sqlite:///{empty}")
    assert empty.stat().st_size == 0


def test_a_process_that_never_finishes_creating_a_store_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_file, "CREATION_S", 0.2)
    with (tmp_path / "mlflow.db.lock").open("w") as stuck:
        fcntl.flock(stuck, fcntl.LOCK_EX)
        with pytest.raises(UsageError, match=r"another process has held .*/mlflow.db.lock"):
            open_store(Sqlite(tmp_path))


def test_files_lie_where_they_should(sqlite: Sqlite) -> None:
    """Beside the database that was opened first, whoever opens it again."""
    tracking = open_store(sqlite)
    run = tracking.client.create_run(tracking.experiment_id).info
    tracking.client.log_text(run.run_id, "hello", "notes/a.txt")
    again = open_tracking(sqlite.uri, artifacts="/elsewhere")
    assert again == tracking
    location = MlflowClient(sqlite.uri).get_experiment(tracking.experiment_id).artifact_location
    assert location == f"{sqlite.uri.removeprefix('sqlite:///')}-artifacts"
    assert Path(location, run.run_id, "artifacts", "notes", "a.txt").read_text() == "hello"


def test_a_deleted_experiment(tmp_path: Path, empty_store: Callable[[Path], str]) -> None:
    empty_store(tmp_path)
    tracking = open_store(store := Sqlite(tmp_path))
    tracking.client.delete_experiment(tracking.experiment_id)
    with pytest.raises(UsageError, match="is deleted: mlflow experiments restore -x 1"):
        open_store(store)


def test_links_open_the_pages_of_training(sqlite: Sqlite, tmp_path: Path) -> None:
    """The view that the second one names is in the experiment, also in one of an older version."""
    tracking = open_store(sqlite)
    view = "mlflow.sharedViewState.trials"
    tracking.client.delete_experiment_tag(tracking.experiment_id, view)
    tracking = open_store(sqlite)
    tracking.client.create_registered_model(f"50% of {tmp_path.name}")
    pages = links(tracking, "http://127.0.0.1:5000")
    runs = "http://127.0.0.1:5000/#/experiments/1/runs?workflowType=machine_learning"
    assert pages[:2] == [("sweeps", runs), ("trials", f"{runs}&viewStateShareKey=trials")]
    model = f"http://127.0.0.1:5000/#/models/50%25%20of%20{tmp_path.name}?workflowType=machine_learning"
    assert ("model", model) in pages
    columns = json.loads(tracking.client.get_experiment("1").tags[view])["selectedColumns"]
    assert "metrics.`val/acc1`" in columns

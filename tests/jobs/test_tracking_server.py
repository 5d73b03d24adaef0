"""The quickstart against the tracking server of a team."""

import logging
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import psutil
import psycopg
import pytest
from mlflow import MlflowClient
from moto.server import ThreadedMotoServer

from orchestrator.errors import UsageError
from orchestrator.tracking.store import open_reader
from tests.jobs.team_server import ADMIN, ADMIN_PASSWORD, READER, TEAM, TeamServer, login
from tests.orchestrator.tracking.stores import Postgres

pytestmark = pytest.mark.slow  # some minutes: the quickstart's 36 trials, and a server that starts twice

TRIALS = 36
SWEEP = ("jobs/pareto_sweep.py", "--set", "train.steps=20", "--confirm", "0", "--measure", "never")
TRAIN = ("jobs/train.py", "--name", "one", "--set", "train.steps=2")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TeamServer]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    postgres, s3 = Postgres(), ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    s3.start()
    server = TeamServer(tmp_path_factory.mktemp("team"), postgres, s3)
    server.bucket().create()
    server.start()
    for name, password in (TEAM, READER):
        user = {"username": name, "password": password}
        assert server.ask(ADMIN, ADMIN_PASSWORD, "users/create", user) == 200
    yield server
    server.kill()
    s3.stop()
    postgres.remove()


@pytest.fixture(scope="module")
def sweep(server: TeamServer) -> str:
    """What the quickstart printed."""
    done = server.job(*SWEEP, **login(TEAM))
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return done.stdout + done.stderr


@pytest.fixture
def client(server: TeamServer, monkeypatch: pytest.MonkeyPatch) -> MlflowClient:
    for name, value in (login(TEAM) | server.aws).items():
        monkeypatch.setenv(name, value)
    return MlflowClient(server.uri)


def test_nobody_is_let_in_without_a_password(server: TeamServer) -> None:
    """A job ends before it trains, with a line that names what to set, and repeats no password."""
    way_out = "set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    for env, reason in (
        ({}, "authentication is required"),
        (login((TEAM[0], "not the password")), "it knows no user 'team' with that password"),
    ):
        done = server.job(*TRAIN, **env)
        assert done.returncode == 1
        last = done.stderr.splitlines()[-1]
        assert last == f"error: MLflow refuses the tracking URI {server.uri}: {reason}: {way_out}"
        assert "Traceback" not in done.stderr
        assert "not the password" not in done.stdout + done.stderr
    assert server.ask(ADMIN, "password1234", "experiments/search?max_results=1") == 401
    assert server.ask(ADMIN, ADMIN_PASSWORD, "experiments/search?max_results=1") == 200


def test_a_password_in_the_uri_is_refused() -> None:
    """Pages and logs repeat the URI. No server is asked."""
    with pytest.raises(UsageError, match=r"http://team:\*\*\*@127.0.0.1:9 holds a user: .*USERNAME"):
        open_reader("http://team:secret@127.0.0.1:9")


def test_the_default_password_is_refused(server: TeamServer, tmp_path: Path) -> None:
    """Also by a server that has no users yet."""
    (tmp_path / "default").write_text("password1234")
    started = server.command(
        MLFLOW_AUTH_DATABASE_URI=f"sqlite:///{tmp_path}/users.db",
        MLFLOW_AUTH_ADMIN_PASSWORD_FILE=str(tmp_path / "default"),
        MLFLOW_PORT="0",
    )
    assert started.wait(120) != 0
    assert "Refusing to use the insecure default password" in server.log.read_text()


def test_all_of_the_sweep_is_there(server: TeamServer, sweep: str, client: MlflowClient) -> None:
    """Artifacts go through the server to its bucket: jobs need no right to it."""
    experiment = client.get_experiment_by_name("moe-frontier")
    assert experiment is not None
    assert experiment.artifact_location == f"mlflow-artifacts:/{experiment.experiment_id}"
    parent = client.search_runs([experiment.experiment_id], "tags.role = 'sweep'")[0]
    assert (parent.info.run_name, parent.info.status) == ("quickstart", "FINISHED")
    of_parent = f"tags.`mlflow.parentRunId` = '{parent.info.run_id}'"
    children = client.search_runs([experiment.experiment_id], of_parent)
    assert [run.info.status for run in children] == ["FINISHED"] * TRIALS
    page = Path(client.download_artifacts(parent.info.run_id, "frontier.html")).read_bytes()
    written = server.bucket().Object("runs/quickstart/frontier.html").get()["Body"].read()
    key = f"mlflow/{experiment.experiment_id}/{parent.info.run_id}/artifacts/frontier.html"
    assert page == written == server.bucket().Object(key).get()["Body"].read()
    model = client.get_registered_model("quickstart")
    assert set(model.aliases) == {"pareto-fast", "pareto-knee", "pareto-best"}
    assert not any(secret in sweep for secret in server.secrets)


def test_who_may_only_read_learns_it_at_the_start(server: TeamServer, sweep: str, tmp_path: Path) -> None:
    """READ is what users may do with what others made: they see the frontier, and add nothing to it."""
    done = server.job(*TRAIN, **login(READER))
    assert done.returncode == 1
    assert "error: MLflow refuses" in done.stderr
    assert "may not write to it, unless its administrator lets 'reader' EDIT" in done.stderr
    looked = server.job("jobs/report.py", "--out", str(tmp_path), **login(READER))
    assert looked.returncode == 0, looked.stderr
    assert (tmp_path / "frontier.html").exists()


def test_secrets_stay_where_they_are(server: TeamServer) -> None:
    """In no process's arguments; in one file, for the server's user alone."""
    family = [
        psutil.Process(server.process.pid),
        *psutil.Process(server.process.pid).children(recursive=True),
    ]
    arguments = " ".join(word for one in family for word in one.cmdline())
    assert not any(secret in arguments for secret in server.secrets)
    (folder,) = server.temporary.glob("tmp.*")
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / "auth.ini").stat().st_mode) == 0o600


def test_stopped_upgraded_started_it_is_as_before(server: TeamServer, client: MlflowClient) -> None:
    """The upgrade of tables that are current changes nothing; a stop leaves no file with passwords."""
    before = {run.info.run_id for run in client.search_runs(["0", "1"])}
    assert server.stop() == 0
    assert not list(server.temporary.glob("tmp.*"))
    assert server.command("upgrade").wait(120) == 0
    server.start()
    assert {run.info.run_id for run in client.search_runs(["0", "1"])} == before
    assert not any(secret in server.log.read_text() for secret in server.secrets)


def test_a_backup_is_the_whole_of_it(
    server: TeamServer, sweep: str, client: MlflowClient, tmp_path: Path
) -> None:
    """Dumped as docs/tracking.md says, and restored into an empty database: runs, models, users."""
    dump, copy = tmp_path / "mlflow.dump", server.database.replace("/postgres", "/restored")
    subprocess.run(["pg_dump", "--format", "custom", "--file", dump, server.database], check=True)
    with psycopg.connect(server.database, autocommit=True) as connection:
        connection.execute("CREATE DATABASE restored")
    subprocess.run(["pg_restore", "--no-owner", "--dbname", copy, dump], check=True)
    again = MlflowClient(copy)
    assert len(again.search_runs(["1"])) == len(client.search_runs(["1"])) >= TRIALS + 1
    versions = again.get_registered_model("quickstart").aliases  # numbers here, text by way of a server
    assert {alias: str(version) for alias, version in versions.items()} == client.get_registered_model(
        "quickstart"
    ).aliases
    with psycopg.connect(copy) as connection:
        names = [name for (name,) in connection.execute("SELECT username FROM users ORDER BY username")]
    assert names == [ADMIN, READER[0], TEAM[0]]

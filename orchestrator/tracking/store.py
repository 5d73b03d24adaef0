"""The connection to an MLflow store, opened once on the driver: processes that race to create it break it."""

import fcntl
import hashlib
import http.client
import logging
import os
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from types import TracebackType
from typing import Self

# Before mlflow is imported. A request is sent once, for of two both may arrive, and may last longer than the
# 20 s that MLflow waits for a lock of SQLite.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # a line, and a request, per run
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # one bar per file otherwise

import sqlalchemy
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException

from orchestrator.errors import UsageError
from orchestrator.tracking.delivery import Delivery
from orchestrator.tracking.direct import Direct
from orchestrator.tracking.outbox import Outbox

EXPERIMENT = "moe-frontier"
ANSWER_S = 5  # until a server is taken for dead, at the start
PATIENCE_S = 30  # until it is, at the end

logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # a traceback for every attempt


class Tracking:
    """A store: what is written goes to `outbox`, what is read comes through `client`. Attributes:
    experiment_id: empty where there is none of ours.
    """

    def __init__(self, uri: str, experiment_id: str, outbox: Outbox | Direct) -> None:
        self.uri = uri
        self.experiment_id = experiment_id
        self.client = client_of(uri)
        self.outbox = outbox

    def flush(self, timeout_s: float | None) -> int:
        """Waits until all is delivered; entries that are not when the time is over."""
        return self.outbox.flush(timeout_s)

    def close(self, timeout_s: float | None) -> int:
        """Waits as long as something arrives within `timeout_s`; what is left stays on disk, for the next
        process with the same spool.
        """
        return self.outbox.close(timeout_s)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close(timeout_s=ANSWER_S if error else PATIENCE_S)


def open_tracking(uri: str, *, artifacts: str, spool: str) -> Tracking:
    """Creates what the store lacks, and delivers first what an earlier process left in `spool`.

    `artifacts`: where files go when the store is a local database. `spool`: a local folder for what is not
    delivered; stores do not share it.

    Raises:
        UsageError: if MLflow refuses the URI, nobody answers there, or another process has the spool.
    """
    with _opening(uri, create=True), _alone(uri):
        client = client_of(uri)
        known = client.get_experiment_by_name(EXPERIMENT)
        if known and known.lifecycle_stage != "active":
            raise UsageError(
                f"experiment {EXPERIMENT} at {shown(uri)} is deleted:"
                f" mlflow experiments restore -x {known.experiment_id}"
            )
        location = artifacts if uri.startswith("sqlite:") else None
        found = known.experiment_id if known else client.create_experiment(EXPERIMENT, location)
        if known and uri.startswith("http"):
            client.rename_experiment(found, EXPERIMENT)  # changes nothing: who may only read learns it now
    outbox = Outbox(Path(spool, hashlib.sha256(uri.encode()).hexdigest()[:8]))
    outbox.start(Delivery(client, found, process=outbox.process, folder=outbox.folder), shown(uri))
    return Tracking(uri, found, outbox)


def open_reader(uri: str) -> Tracking:
    """To look at what is there; what is written all the same is written at once.

    Raises:
        UsageError: as `open_tracking`, and if there is no store.
    """
    with _opening(uri, create=False):
        client = client_of(uri)
        known = client.get_experiment_by_name(EXPERIMENT)
    found = known.experiment_id if known else ""
    delivery = Delivery(client, found, process="", folder=Path())
    return Tracking(uri, found, Direct(delivery, shown(uri)))


@lru_cache(maxsize=8)
def client_of(uri: str) -> MlflowClient:
    return MlflowClient(uri)


def shown(uri: str) -> str:
    """Without its password."""
    return re.sub(r"(://[^:/@]*):[^/@]*@", r"\1:***@", uri)


@contextmanager
def _opening(uri: str, *, create: bool) -> Iterator[None]:
    """Says what is wrong, and soon: MLflow itself takes minutes to find that nobody answers."""
    try:
        if uri.startswith(("http://", "https://")):
            _check_server(uri)
        elif "://" in uri and not uri.startswith("file:"):  # MLflow says itself what is wrong with that
            _check_database(uri, create=create)
        yield
    except UsageError:
        raise
    except Exception as error:  # whatever the many back ends raise
        reason = _refusal(error) or (str(error).strip() or repr(error)).splitlines()[0]
        raise UsageError(f"MLflow refuses the tracking URI {shown(uri)}: {reason}") from None


def _refusal(error: Exception) -> str | None:
    """What to do about a server that wants another user, or another name for itself."""
    code = error.error_code if isinstance(error, MlflowException) else ""
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    if code == "UNAUTHENTICATED":
        wrong = f"it knows no user {user!r} with that password" if user else "it wants a user"
        return f"{wrong}: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    if "Invalid Host" in str(error):
        return "the server does not go by that name: add it to MLFLOW_SERVER_ALLOWED_HOSTS there"
    if code == "PERMISSION_DENIED":
        may = f"its administrator lets {user!r} EDIT the experiment and the model {EXPERIMENT}"
        return f"this user may not write to it, unless {may}"
    return None


def _check_server(uri: str) -> None:
    if urllib.parse.urlsplit(uri).username is not None:  # pages and logs repeat the URI
        raise UsageError(
            f"tracking URI {shown(uri)} holds a user: give it by MLFLOW_TRACKING_USERNAME and"
            " MLFLOW_TRACKING_PASSWORD instead"
        )
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=ANSWER_S)
    except urllib.error.HTTPError:
        return  # somebody answers; MLflow will say what is wrong
    except (OSError, ValueError, http.client.HTTPException) as error:
        raise UsageError(f"no MLflow server answers at {shown(uri)}: {error}") from None


def _check_database(uri: str, *, create: bool) -> None:
    """`create`: MLflow may make its tables there, as it does wherever it looks."""
    url = sqlalchemy.make_url(uri)
    if local := url.get_backend_name() == "sqlite" and bool(url.database):
        file = Path(str(url.database))
        if create:
            file.parent.mkdir(parents=True, exist_ok=True)
        elif not file.exists():
            raise UsageError(f"there is no MLflow store at {uri}")
    engine = sqlalchemy.create_engine(url, connect_args={} if local else {"connect_timeout": ANSWER_S})
    try:
        if not sqlalchemy.inspect(engine).has_table("experiments") and not create:
            raise UsageError(f"there is no MLflow store at {shown(uri)}")
    finally:
        engine.dispose()


@contextmanager
def _alone(uri: str) -> Iterator[None]:
    """Of the processes of this machine, one at a time creates the tables of a SQLite file."""
    url = sqlalchemy.make_url(uri) if uri.startswith("sqlite:") else None
    if url is None or not url.database:
        yield
        return
    with open(f"{url.database}.lock", "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

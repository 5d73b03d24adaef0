"""The connection to an MLflow store, opened once, by the driver: processes that race for it break it."""

import fcntl
import json
import logging
import os
import re
import time
import urllib.parse
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

# Set before mlflow is imported. A request is sent only once, because a repeated one may arrive twice, and may
# take longer than the 20 s that MLflow waits for a lock of SQLite.
os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
os.environ.setdefault("MLFLOW_HTTP_REQUEST_TIMEOUT", "30")
os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")  # a line and a request per run
os.environ.setdefault("MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR", "false")  # a bar per file

import sqlalchemy
from mlflow import MlflowClient
from mlflow.exceptions import MlflowException
from mlflow.store.db.db_types import DATABASE_ENGINES
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from sqlalchemy.exc import ArgumentError

from orchestrator import storage
from orchestrator.errors import UsageError, reason_of
from orchestrator.output import redact_uri
from orchestrator.tasks import ClassificationConfig

EXPERIMENT = "moe-frontier"
ANSWER_S = 5  # a server that is silent for longer counts as down
CREATION_S = 120.0  # creating the tables takes some seconds; a process that holds their lock longer is stuck
QUALITY = ClassificationConfig().quality
TRIALS = "trials"  # name of the shared view below
TAGS = {  # of the experiment; tried with MLflow 3.17
    "mlflow.experimentKind": "custom_model_development",
    # A view of the table of runs, in the format of the pages' own shared views: trials, the best first.
    f"mlflow.sharedViewState.{TRIALS}": json.dumps(
        {
            "searchFilter": "tags.role != 'sweep'",
            "orderByKey": f"metrics.`{QUALITY}`",
            "orderByAsc": False,
            "selectedColumns": [
                "attributes.`Duration`",
                f"metrics.`{QUALITY}`",
                "metrics.`val/loss`",
                "metrics.`cost/train_flops_6mac`",
                "metrics.`cost/device_s`",
                "tags.`pareto`",
            ],
        }
    ),
}

log = logging.getLogger(__name__)
logging.getLogger("mlflow").setLevel(logging.WARNING)
logging.getLogger("mlflow.store.db.utils").setLevel(logging.CRITICAL)  # a traceback per attempt


@dataclass(frozen=True)
class Tracking:
    """An MLflow store.

    Attributes:
        experiment_id: empty if the experiment does not exist there.
        experiment: its name.
        has_models: whether the server knows logged models, without which no model is registered: MLflow 2 and
            Azure ML do not.
    """

    uri: str
    experiment_id: str
    experiment: str = EXPERIMENT
    has_models: bool = True

    @property
    def client(self) -> MlflowClient:
        """A client, because the fluent API's active run is per thread and creates stray runs."""
        return _client_of(self.uri)

    def lies_with(self, directory: str) -> bool:
        """Whether the store is a SQLite file in a folder around `directory`."""
        file = sqlalchemy.make_url(self.uri).database if self.uri.startswith("sqlite:") else None
        return bool(file) and Path(directory).is_relative_to(Path(file).parent)


def store_uri(root: str, uri: str | None = None) -> str:
    """`uri`, or MLFLOW_TRACKING_URI, or a database below the storage `root`. A relative path to a database is
    made absolute.

    Raises:
        UsageError: if none is given and the storage cannot hold a database; or for a database in Ray's copy
            of the code, which is deleted with the job.
    """
    if found := uri or os.environ.get("MLFLOW_TRACKING_URI"):
        return _absolute(found)
    if not storage.is_local(root):
        raise UsageError(f"`storage` {root} holds no MLflow store: name one with `tracking_uri`")
    return database_uri(f"{root}/mlflow.db")


def _absolute(uri: str) -> str:
    if not uri.startswith("sqlite:"):
        return uri
    try:
        path = sqlalchemy.make_url(uri).database
    except ArgumentError:
        return uri  # it is refused when it is opened
    if not path or path == ":memory:":
        raise UsageError(f"the tracking URI {uri} is a database in memory: name a file, sqlite:////PATH")
    found = os.path.abspath(path)
    if "working_dir_files" in found.split("/"):
        raise UsageError(
            f"the tracking URI {uri} means {found}, which is deleted with the submitted job: name an absolute"
            " path, as sqlite:////PATH"
        )
    return uri if found == path else database_uri(found)


def open_tracking(uri: str, *, artifacts: str, experiment: str | None = None) -> Tracking:
    """Opens a store, and creates its tables and the experiment if they are missing.

    Args:
        artifacts: the location of artifacts if the store is a local database.
        experiment: a name; by default MLFLOW_EXPERIMENT_NAME, else ours.

    Raises:
        UsageError: if MLflow refuses the URI, or no server answers there.
    """
    experiment = experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    with _opening(uri, create=True), _creating_alone(uri):
        client = _client_of(uri)
        known = client.get_experiment_by_name(experiment)
        if known and known.lifecycle_stage != "active":
            raise UsageError(
                f"experiment {experiment} at {redact_uri(uri)} is deleted:"
                f" mlflow experiments restore -x {known.experiment_id}"
            )
        location = artifacts if uri.startswith("sqlite:") else None
        found = known.experiment_id if known else client.create_experiment(experiment, location)
        missing = {name: value for name, value in TAGS.items() if not known or name not in known.tags}
        for name, value in missing.items():
            client.set_experiment_tag(found, name, value)
        if not missing and uri.startswith("http"):
            # This changes nothing, but fails now for a user who may only read.
            client.rename_experiment(found, experiment)
        return Tracking(uri, found, experiment, _has_models(client, uri, found))


def open_reader(uri: str) -> Tracking:
    """Opens an existing store. Raises UsageError as `open_tracking`, and if there is no store."""
    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME") or EXPERIMENT
    with _opening(uri, create=False):
        known = _client_of(uri).get_experiment_by_name(experiment)
    return Tracking(uri, known.experiment_id if known else "", experiment)


def _has_models(client: MlflowClient, uri: str, experiment_id: str) -> bool:
    """Asks a server, once, for its logged models, and warns if it does not know them."""
    if not uri.startswith(("http://", "https://", "azureml", "databricks")):
        return True
    try:
        client.search_logged_models([experiment_id], max_results=1)
    except MlflowException as error:
        if error.error_code in ("PERMISSION_DENIED", "UNAUTHENTICATED"):
            raise
        version = _version(uri)
        log.warning(
            "MLflow at %s%s has no logged models, which MLflow 3 has: figures and files of all runs are sent"
            " there, but no model is registered",
            redact_uri(uri),
            f" ({version})" if version else "",
        )
        return False
    return True


def _version(uri: str) -> str:
    """Returns the version of a server; empty if it does not tell."""
    try:
        answer = http_request(get_default_host_creds(uri), "/version", "GET", max_retries=0, timeout=ANSWER_S)
    except Exception:  # of any type; the version is only shown
        return ""
    return answer.text.strip() if answer is not None and answer.ok else ""


def database_uri(path: str) -> str:
    """Returns the URI of a SQLite file. Raises UsageError for a path that reads differently in a URI."""
    uri = f"sqlite:///{path}"
    if sqlalchemy.make_url(uri).database != path:
        raise UsageError(
            f"{path} cannot be an MLflow store, because '?' and '%' have another meaning in a URI: rename the"
            " folder, or name another store with `tracking_uri`"
        )
    return uri


def links(tracking: Tracking, address: str) -> list[tuple[str, str]]:
    """Returns (what it shows, link) of the pages of a server at `address` for this store."""
    training = "workflowType=machine_learning"  # the pages open with those about GenAI otherwise
    runs = f"{address}/#/experiments/{tracking.experiment_id}/runs?{training}"
    models = tracking.client.search_registered_models(max_results=20)
    names = [urllib.parse.quote(model.name, safe="") for model in models]
    return [
        ("sweeps", runs),
        ("trials", f"{runs}&viewStateShareKey={TRIALS}"),
        *(("model", f"{address}/#/models/{name}?{training}") for name in names),
    ]


@lru_cache(maxsize=8)
def _client_of(uri: str) -> MlflowClient:
    return MlflowClient(uri)


@contextmanager
def _opening(uri: str, *, create: bool) -> Iterator[None]:
    """Raises UsageError within seconds; MLflow itself takes minutes to find that no server answers."""
    try:
        if uri.startswith(("http://", "https://")):
            _check_server(uri)
        elif _scheme(uri) in DATABASE_ENGINES:
            _check_database(uri, create=create)
        elif re.match(r"[\w.-]+:\d+(/|$)", uri):
            raise UsageError(f"the tracking URI {uri} has no scheme: write http://{uri}, or https://")
        yield
    except UsageError:
        raise
    except Exception as error:  # MLflow's back ends raise many types
        reason = _refusal(error) or (str(error).strip() or repr(error)).splitlines()[0]
        raise UsageError(f"MLflow refuses the tracking URI {redact_uri(uri)}: {reason}") from None


def _refusal(error: Exception) -> str | None:
    """Returns what to do about a server that requires another user, or another host name."""
    code = error.error_code if isinstance(error, MlflowException) else ""
    user = os.environ.get("MLFLOW_TRACKING_USERNAME")
    if code == "UNAUTHENTICATED":
        wrong = f"it knows no user {user!r} with that password" if user else "authentication is required"
        return f"{wrong}: set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD"
    if "Invalid Host" in str(error):
        return "the server rejects this host name: add it to MLFLOW_SERVER_ALLOWED_HOSTS there"
    if code == "PERMISSION_DENIED":
        may = f"its administrator lets {user!r} EDIT the experiment and the model {EXPERIMENT}"
        return f"this user may not write to it, unless {may}"
    return None


def _check_server(uri: str) -> None:
    if urllib.parse.urlsplit(uri).username is not None:  # pages and logs repeat the URI
        raise UsageError(
            f"tracking URI {redact_uri(uri)} holds a user: give it by MLFLOW_TRACKING_USERNAME and"
            " MLFLOW_TRACKING_PASSWORD instead"
        )
    try:
        http_request(
            get_default_host_creds(uri),
            "/health",
            "GET",
            max_retries=0,
            timeout=ANSWER_S,
            raise_on_status=False,
        )
    except (MlflowException, OSError, ValueError) as error:
        reason = error.__cause__ or error.__context__ or error
        raise UsageError(f"no MLflow server answers at {redact_uri(uri)}: {reason_of(reason)}") from None


def _scheme(uri: str) -> str:
    """Returns the scheme of a URI without a driver, as in postgresql+psycopg2://; empty if it has none."""
    scheme, separator, _ = uri.partition("://")
    return scheme.partition("+")[0] if separator else ""


def _check_database(uri: str, *, create: bool) -> None:
    """`create`: MLflow may create its tables there, which it does in every database that it opens."""
    url = sqlalchemy.make_url(uri)
    if local := url.get_backend_name() == "sqlite" and bool(url.database):
        file = Path(str(url.database))
        if create:
            file.parent.mkdir(parents=True, exist_ok=True)
        elif not file.exists():
            raise UsageError(
                f"there is no MLflow store at {uri}: set MLFLOW_TRACKING_URI to another one, or"
                " MOE_FRONTIER_HOME to the storage that has it"
            )
    engine = sqlalchemy.create_engine(url, connect_args={} if local else {"connect_timeout": ANSWER_S})
    try:
        if not sqlalchemy.inspect(engine).has_table("experiments") and not create:
            raise UsageError(f"there is no MLflow store at {redact_uri(uri)}")
    finally:
        engine.dispose()


@contextmanager
def _creating_alone(uri: str) -> Iterator[None]:
    """Lets only one process of this machine at a time create the tables of a SQLite file."""
    url = sqlalchemy.make_url(uri) if uri.startswith("sqlite:") else None
    if url is None or not url.database:
        yield
        return
    path, deadline = f"{url.database}.lock", time.monotonic() + CREATION_S
    with open(path, "w") as file:
        while True:
            try:
                storage.lock_file(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(
                        f"another process has held {path} for {CREATION_S:.0f} s: end it (`lsof {path}`)"
                    ) from None
                time.sleep(0.05)
        yield

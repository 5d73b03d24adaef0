"""How an MLflow store is, without changing it: MLflow's own clients make its tables where they look."""

import http.client
import urllib.error
import urllib.parse
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import mlflow
import sqlalchemy
from alembic.script import ScriptDirectory
from alembic.util.exc import CommandError
from mlflow.store.db import utils
from mlflow.utils.credentials import get_default_host_creds
from mlflow.utils.rest_utils import http_request
from sqlalchemy.exc import DatabaseError, OperationalError

from orchestrator.tracking.store import ANSWER_S, shown

State = Literal[
    "ready",
    "absent",
    "empty",
    "half-made",
    "foreign",
    "older",
    "newer",
    "down",
    "user",
    "login",
    "host",
    "path",
    "broken",
]
SEARCH = "/api/2.0/mlflow/experiments/search"


@dataclass(frozen=True, kw_only=True)
class Health:
    """Attributes:
    state: of a database ``absent``: no file yet; ``empty``: no tables; ``half-made``: some are missing;
        ``foreign``: tables of something else; ``older``, ``newer``: than this MLflow. Of a server ``user``:
        its URI holds one; ``login``: it refuses who asks; ``host``: the name it is called by; ``path``: no
        MLflow at that URL.
    """

    state: State
    detail: str


def look(uri: str) -> Health:
    """Asks a server, or reads the schema of a database."""
    if uri.startswith(("http://", "https://")):
        return _server(uri.rstrip("/"))
    return _database(uri)


def has_user(uri: str) -> bool:
    return urllib.parse.urlsplit(uri).username is not None


def answers(uri: str) -> bool:
    """Whether a server answers at all, if only to refuse. Raises OSError, which says why not."""
    try:
        urllib.request.urlopen(f"{uri.rstrip('/')}/health", timeout=ANSWER_S).close()
    except urllib.error.HTTPError:
        return True
    except http.client.HTTPException as error:
        raise OSError(f"{shown(uri)} does not speak HTTP: {error!r}") from None
    return True


def _server(uri: str) -> Health:
    if has_user(uri):
        return Health(state="user", detail="pages and logs would repeat it")
    try:
        answers(uri)
    except OSError as error:
        return Health(state="down", detail=str(error))
    asked = _ask(uri, SEARCH, "POST", json={"max_results": 1})
    said = f"HTTP {asked.status_code}: {asked.text.strip()[:200]}"
    if asked.status_code == 200:
        return _version(uri)
    if asked.status_code == 403 and "host header" in asked.text.lower():
        return Health(state="host", detail=said)
    if asked.status_code in (401, 403):
        return Health(state="login", detail=said)
    return Health(state="path" if asked.status_code in (404, 405) else "broken", detail=said)


def _version(uri: str) -> Health:
    """Ready, if the server is of this MLflow's major version."""
    asked = _ask(uri, "/version", "GET")
    theirs, ours = asked.text.strip()[:20], mlflow.__version__
    if asked.status_code == 200 and theirs.partition(".")[0] != ours.partition(".")[0]:
        newer = int(theirs.partition(".")[0]) > int(ours.partition(".")[0])
        return Health(
            state="newer" if newer else "older", detail=f"the server's MLflow is {theirs}, here {ours}"
        )
    return Health(state="ready", detail=f"MLflow {theirs}" if asked.status_code == 200 else "it answers")


def _ask(uri: str, endpoint: str, method: str, **how: Any) -> Any:
    """With the user and password, or the token, that MLflow itself would send; once."""
    credentials = get_default_host_creds(uri)
    return http_request(
        credentials, endpoint, method, max_retries=0, timeout=ANSWER_S, raise_on_status=False, **how
    )


def _database(uri: str) -> Health:
    url = sqlalchemy.make_url(uri)
    local = url.get_backend_name() == "sqlite"
    if local and not Path(url.database or "").exists():
        return Health(state="absent", detail=f"{url.database} is not there yet")
    engine = sqlalchemy.create_engine(url, connect_args={} if local else {"connect_timeout": ANSWER_S})
    try:
        return _schema(engine)
    except OperationalError as error:
        reason = str(error.orig).strip().splitlines()[0]
        refused = any(word in reason.lower() for word in ("password", "authentication", "role"))
        missing = "database" in reason and "does not exist" in reason
        return Health(state="login" if refused else "path" if missing else "down", detail=reason)
    except DatabaseError as error:
        return Health(state="foreign", detail=str(error.orig))
    finally:
        engine.dispose()


def _schema(engine: sqlalchemy.Engine) -> Health:
    if utils._is_empty_database(engine):
        return Health(state="empty", detail="the database has no tables")
    if not sqlalchemy.inspect(engine).has_table("experiments"):
        return Health(state="foreign", detail="the database has tables, but none of MLflow's")
    have, want = utils._get_schema_version(engine), utils._get_latest_schema_revision()
    if have == want:
        whole = utils._all_tables_exist(engine)
        return Health(
            state="ready" if whole else "half-made", detail=f"schema {have}, of MLflow {mlflow.__version__}"
        )
    detail = f"schema {have}, MLflow {mlflow.__version__} has {want}"
    try:
        ScriptDirectory.from_config(utils._get_alembic_config(db_url="")).get_revision(have or "base")
    except CommandError:
        return Health(state="newer", detail=detail)
    return Health(state="older", detail=detail)

"""What cluster/mlflow/serve.sh refuses to start without. `tests/jobs/test_tracking_server.py` starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

SERVE = Path(__file__).parents[2] / "cluster/mlflow/serve.sh"
NEEDED = {
    "MLFLOW_BACKEND_STORE_URI": "postgresql://me:secret@127.0.0.1:9/none",
    "MLFLOW_ARTIFACTS_DESTINATION": "s3://bucket/prefix",
    "MLFLOW_AUTH_ADMIN_PASSWORD": "a long enough password",
    "MLFLOW_FLASK_SERVER_SECRET_KEY": "a long enough key",
}


def serve(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Without any variable that MLflow or AWS reads, but `env`."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "AWS_"))}
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return subprocess.run(
        [SERVE, *arguments], env=kept | env, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.mark.parametrize("missing", NEEDED)
def test_what_is_missing_is_named(missing: str) -> None:
    """In one line; an empty value is missing too."""
    for env in ({k: v for k, v in NEEDED.items() if k != missing}, NEEDED | {missing: ""}):
        done = serve(**env)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: {missing} is not set: ")
        assert f"(or set {missing}_FILE to a file with it)" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_file_in_place_of_a_variable(tmp_path: Path) -> None:
    """It is read: the next one is missing. A file that is not there is named."""
    for name, value in list(NEEDED.items())[:-1]:
        (tmp_path / name).write_text(f"{value}\n")
    files = {f"{name}_FILE": str(tmp_path / name) for name in list(NEEDED)[:-1]}
    assert "MLFLOW_FLASK_SERVER_SECRET_KEY is not set" in serve(**files).stderr
    (tmp_path / "MLFLOW_AUTH_ADMIN_PASSWORD").unlink()
    gone = serve(**files)
    assert gone.returncode == 1
    assert (
        gone.stderr
        == f"error: MLFLOW_AUTH_ADMIN_PASSWORD_FILE={tmp_path}/MLFLOW_AUTH_ADMIN_PASSWORD cannot be read\n"
    )


def test_an_open_address_needs_names() -> None:
    done = serve(**NEEDED, MLFLOW_HOST="0.0.0.0")
    assert done.returncode == 1
    assert "set MLFLOW_SERVER_ALLOWED_HOSTS" in done.stderr


def test_an_unknown_command() -> None:
    assert serve("start", **NEEDED).stderr == "error: unknown command start: serve or upgrade\n"


@pytest.mark.parametrize(
    ("name", "value", "least"),
    [("MLFLOW_AUTH_ADMIN_PASSWORD", "short", 12), ("MLFLOW_FLASK_SERVER_SECRET_KEY", "abc", 16)],
)
def test_what_anybody_could_guess_is_refused(name: str, value: str, least: int) -> None:
    done = serve(**NEEDED | {name: value})
    assert done.returncode == 1
    assert done.stderr.startswith(f"error: {name} is shorter than {least} characters")
    assert value not in done.stderr.replace("shorter", "")

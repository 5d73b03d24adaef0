"""Settings that cluster/mlflow/serve.sh refuses. `tests/jobs/test_tracking_server.py` starts it."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cluster.commented import CLUSTER

SERVE = CLUSTER / "mlflow/serve.sh"
NEEDED = {
    "MLFLOW_BACKEND_STORE_URI": "postgresql://me:secret@127.0.0.1:9/none",
    "MLFLOW_ARTIFACTS_DESTINATION": "s3://bucket/prefix",
    "MLFLOW_AUTH_ADMIN_PASSWORD": "a long enough password",
    "MLFLOW_FLASK_SERVER_SECRET_KEY": "a long enough key",
}


def serve(*arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs the script; of the variables that MLflow and AWS read, only `env` is set."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MLFLOW_", "AWS_"))}
    kept["PATH"] = f"{Path(sys.executable).parent}:{kept['PATH']}"
    return subprocess.run(
        [SERVE, *arguments], env=kept | env, capture_output=True, text=True, timeout=60, check=False
    )


def test_a_missing_variable_is_named() -> None:
    """The message is one line; an empty value is missing too."""
    missing = "MLFLOW_ARTIFACTS_DESTINATION"
    for env in ({k: v for k, v in NEEDED.items() if k != missing}, NEEDED | {missing: ""}):
        done = serve(**env)
        assert done.returncode == 1
        assert done.stderr.startswith(f"error: {missing} is not set: ")
        assert f"(or set {missing}_FILE to a file with it)" in done.stderr
        assert len(done.stderr.splitlines()) == 1


def test_a_file_in_place_of_a_variable(tmp_path: Path) -> None:
    """The file is read, so the next variable is missing; a file that does not exist is named."""
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


@pytest.mark.parametrize(
    ("arguments", "env", "message"),
    [
        (("start",), {}, "error: unknown command start: serve or upgrade"),
        ((), {"MLFLOW_HOST": "0.0.0.0"}, "set MLFLOW_SERVER_ALLOWED_HOSTS"),
        ((), {"MLFLOW_AUTH_ADMIN_PASSWORD": "hunter"}, "PASSWORD is shorter than 12 characters"),
        ((), {"MLFLOW_FLASK_SERVER_SECRET_KEY": "abc"}, "SECRET_KEY is shorter than 16 characters"),
    ],
)
def test_what_is_refused(arguments: tuple[str, ...], env: dict[str, str], message: str) -> None:
    """The message does not repeat the secret."""
    done = serve(*arguments, **NEEDED | env)
    assert done.returncode == 1
    assert message in done.stderr
    assert "hunter" not in done.stderr

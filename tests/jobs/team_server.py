"""The tracking server as a team has it: serve.sh before a real Postgres and an S3 endpoint, with users."""

import base64
import json
import os
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import boto3
from moto.server import ThreadedMotoServer

from tests.orchestrator.tracking.stores import Postgres, wait_until
from tests.parts import free_port

ROOT = Path(__file__).parents[2]
ADMIN, ADMIN_PASSWORD = "admin", "of the admin, long"
TEAM, READER = ("team", "of the team, long"), ("reader", "of a reader, long")


class TeamServer:
    """`cluster/mlflow/serve.sh` on Postgres and S3.

    aws: environment variables of the S3 endpoint.
    database: its URI.
    secrets: texts that no output may contain.
    """

    def __init__(self, folder: Path, postgres: Postgres, s3: ThreadedMotoServer) -> None:
        host, port = s3.get_host_and_port()
        self.aws = {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "testing",
            "AWS_SECRET_ACCESS_KEY": "testing",
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_REGION": "us-east-1",
        }
        self.database = postgres.uri
        self._port = free_port()
        self.uri = f"http://127.0.0.1:{self._port}"
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.log = folder / "server.log"
        password = folder / "admin_password"
        password.write_text(f"{ADMIN_PASSWORD}\n")
        # as for passwords with signs of URIs: s%65cret is secret, and % is special to the file of users too
        self._env = {
            "MLFLOW_BACKEND_STORE_URI": postgres.uri.replace(":secret@", ":s%65cret@"),
            "MLFLOW_ARTIFACTS_DESTINATION": "s3://team/mlflow",
            "MLFLOW_AUTH_ADMIN_PASSWORD_FILE": str(password),
            "MLFLOW_FLASK_SERVER_SECRET_KEY": "of the pages, long",
            "MLFLOW_PORT": str(self._port),
            "MLFLOW_WORKERS": "1",
            "TMPDIR": str(self.temporary),
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
        }
        self.secrets = ("s%65cret", ADMIN_PASSWORD, "of the pages, long", TEAM[1], READER[1])

    def command(self, *arguments: str, **env: str) -> subprocess.Popen[bytes]:
        """serve.sh, its output in `log`."""
        with self.log.open("a") as log:
            return subprocess.Popen(
                [ROOT / "cluster/mlflow/serve.sh", *arguments],
                env=os.environ | self.aws | self._env | env,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def start(self) -> None:
        self.process = self.command()
        wait_until(self._answers, 180)

    def stop(self) -> int:
        """As a service manager does; its exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(60)

    def kill(self) -> None:
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()

    def _answers(self) -> bool:
        assert self.process.poll() is None, self.log.read_text()[-3000:]
        try:
            return urllib.request.urlopen(f"{self.uri}/health", timeout=5).status == 200
        except OSError:
            return False

    def ask(self, user: str, password: str, path: str, content: object = None) -> int:
        """The status of the answer; with `content` a POST."""
        token = base64.b64encode(f"{user}:{password}".encode()).decode()
        request = urllib.request.Request(
            f"{self.uri}/api/2.0/mlflow/{path}",
            data=None if content is None else json.dumps(content).encode(),
            headers={"Authorization": f"Basic {token}", "Content-Type": "application/json"},
        )
        try:
            return urllib.request.urlopen(request, timeout=30).status
        except urllib.error.HTTPError as error:
            return error.code

    def job(self, *command: str, **env: str) -> subprocess.CompletedProcess[str]:
        """One of ours that knows the server, with nobody's name and password but those in `env`."""
        inherited = {name: value for name, value in os.environ.items() if not name.startswith("MLFLOW_TR")}
        ours = {"PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local", "MOE_FRONTIER_HOME": "s3://team/runs"}
        return subprocess.run(
            [sys.executable, *command],
            cwd=ROOT,
            env=inherited | self.aws | ours | {"MLFLOW_TRACKING_URI": self.uri} | env,
            capture_output=True,
            text=True,
            timeout=900,
            check=False,
        )

    def bucket(self) -> Any:
        s3 = boto3.resource(
            "s3",
            endpoint_url=self.aws["AWS_ENDPOINT_URL"],
            aws_access_key_id="testing",
            aws_secret_access_key="testing",
            region_name="us-east-1",
        )
        return s3.Bucket("team")


def login(user: tuple[str, str]) -> dict[str, str]:
    return {"MLFLOW_TRACKING_USERNAME": user[0], "MLFLOW_TRACKING_PASSWORD": user[1]}

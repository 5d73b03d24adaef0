"""Real MLflow stores: a SQLite file, a server over HTTP, and Postgres."""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from tests.parts import free_port, system_program


class Sqlite:
    def __init__(self, folder: Path) -> None:
        self.uri = f"sqlite:///{folder}/mlflow.db"


class Server:
    """`mlflow server` on loopback before a SQLite file, with the artifacts behind it."""

    def __init__(self, folder: Path) -> None:
        port = free_port()
        self.uri = f"http://127.0.0.1:{port}"
        self._log = folder / "server.log"
        store = ["--backend-store-uri", f"sqlite:///{folder}/server.db"]
        files = ["--artifacts-destination", f"{folder}/artifacts"]
        where = ["--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "mlflow", "server", *store, *files, *where],
            stdout=subprocess.DEVNULL,
            stderr=self._log.open("a"),
            start_new_session=True,
        )
        wait_until(self._answers, 120)

    def stop(self) -> None:
        os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()

    def _answers(self) -> bool:
        assert self._process.poll() is None, self._log.read_text()
        with suppress(OSError):
            return urllib.request.urlopen(f"{self.uri}/health", timeout=5).status == 200
        return False


class Postgres:
    """On loopback. `enter` comes before each command, so that it runs on another machine."""

    def __init__(self, enter: Sequence[str] = ()) -> None:
        self._enter = enter
        self._bin = Path(system_program("initdb", "postgresql")).parent
        self.port = free_port()
        self.uri = f"postgresql://tester:secret@127.0.0.1:{self.port}/postgres"
        self.folder = Path(tempfile.mkdtemp(prefix="postgres"))  # other users cannot read pytest's own
        if os.getuid() == 0:
            shutil.chown(self.folder, "postgres")
        password = self.folder / "password"
        password.write_text("secret")
        password.chmod(0o644)
        self._run("initdb", "-D", f"{self.folder}/data", "-U", "tester", "-A", "md5", f"--pwfile={password}")
        self.start()

    def start(self) -> None:
        options = f"-p {self.port} -c listen_addresses=127.0.0.1 -c unix_socket_directories="
        self._control("start", "-o", options, "-l", f"{self.folder}/log")

    def ask(self, query: str) -> str:
        return self._run("psql", self.uri, "--tuples-only", "--no-align", "--command", query)

    def remove(self) -> None:
        self._control("stop", "-m", "immediate")
        shutil.rmtree(self.folder)

    def _control(self, *arguments: str) -> None:
        self._run("pg_ctl", "-w", "-D", f"{self.folder}/data", *arguments)

    def _run(self, program: str, *arguments: str) -> str:
        """Runs as another user than root, which Postgres refuses. Returns what it prints."""
        other = ["runuser", "-u", "postgres", "--"] if os.getuid() == 0 else []
        command = [*self._enter, *other, str(self._bin / program), *arguments]
        # A file, not a pipe: a server that it starts would keep the pipe open.
        with tempfile.TemporaryFile("w+") as said:
            subprocess.run(command, check=True, stdout=said, cwd=self.folder)
            said.seek(0)
            return said.read().strip()


Store = Sqlite | Server | Postgres


def wait_until(done, seconds: float) -> None:
    until = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < until, f"not after {seconds} s"
        time.sleep(0.1)

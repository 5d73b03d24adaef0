"""Serve MLflow's pages of a storage on this machine, until Ctrl-C.

python jobs/ui.py
python jobs/ui.py --storage /data/moe-frontier --port 5001
"""

from __future__ import annotations

import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from jobs._cli import Storage, command
from jobs._flags import flag, parse
from orchestrator.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class UiFlags:
    port: int = flag(5000, "port of 127.0.0.1", least=1)
    places: Storage


def main() -> None:
    flags = parse(UiFlags, __doc__)
    root, address = flags.places.root(), f"http://127.0.0.1:{flags.port}"
    with command(f"opening the MLflow store of {root}"):
        from orchestrator.tracking.lost import set_right
        from orchestrator.tracking.store import database_uri, links, open_reader, open_tracking

        try:
            socket.create_server(("127.0.0.1", flags.port)).close()
        except (OSError, OverflowError):
            raise UsageError(
                f"port {flags.port} is in use or above 65535: choose another --port, as in make ui PORT=5001"
            ) from None
        uri = database_uri(f"{root}/mlflow.db")
        open_reader(uri)
        store = open_tracking(uri, artifacts=Path(root, "mlartifacts").as_uri())
        set_right(store)
        for name, link in links(store, address):
            print(f"{name:<8} {link}", flush=True)
    # One process is enough for one person; MLflow's default is four.
    where = ["--host", "127.0.0.1", "--port", str(flags.port), "--workers", "1"]
    where += ["--uvicorn-opts", "--log-level warning"]  # a line per request would push the links away
    os.execv(sys.executable, [sys.executable, "-m", "mlflow", "server", "--backend-store-uri", uri, *where])


if __name__ == "__main__":
    main()

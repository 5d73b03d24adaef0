"""What tests take from the machine: free ports, and programs of system packages."""

import os
import shutil
import socket
from pathlib import Path

import pytest


def free_port() -> int:
    """On loopback; from the kernel's own range, above the one that Ray gives to its workers."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def system_program(name: str, package: str, *, beside: str = "") -> str:
    """Its path.

    Without it a test skips, and fails where all tests are to run (`MOE_FRONTIER_ALL_PARTS`, set by
    `make test-smoke` and `make test-all`).

    Args:
        package: the Debian package that has it.
        beside: a pattern of further places, the last match wins: ``/usr/lib/postgresql/*/bin``.
    """
    places = [str(path) for path in sorted(Path("/").glob(beside.lstrip("/")))] if beside else []
    found = shutil.which(name, path=os.pathsep.join([*reversed(places), os.environ["PATH"]]))
    if not found:
        missing = f"no {name}: install the package {package}"
        (pytest.fail if os.environ.get("MOE_FRONTIER_ALL_PARTS") else pytest.skip)(missing)
    return found

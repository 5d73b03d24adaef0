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


def system_program(name: str, package: str) -> str:
    """The path of a program that the Debian package has.

    Without it a test skips, and fails where all tests are to run (`MOE_FRONTIER_ALL_PARTS`, set by
    `make test-smoke` and `make test-all`).
    """
    postgres = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)  # not on anybody's PATH
    found = shutil.which(name, path=os.pathsep.join([*map(str, postgres), os.environ["PATH"]]))
    if not found:
        missing = f"no {name}: install the package {package}"
        (pytest.fail if os.environ.get("MOE_FRONTIER_ALL_PARTS") else pytest.skip)(missing)
    return found

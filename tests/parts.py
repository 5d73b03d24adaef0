"""Parts that tests are made of: free ports, system programs, processes, a Ray of their own, images."""

import importlib
import io
import os
import shutil
import socket
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import psutil
import pytest

if TYPE_CHECKING:
    import numpy as np


def free_port() -> int:
    """On loopback; from the kernel's own range, above the one that Ray gives to its workers."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return probe.getsockname()[1]


def without(missing: str) -> NoReturn:
    """Ends a test that lacks a part: it skips, and fails where `make test-smoke` or `make test-all` have set
    `MOE_FRONTIER_ALL_PARTS`.
    """
    (pytest.fail if os.environ.get("MOE_FRONTIER_ALL_PARTS") else pytest.skip)(missing)


def system_program(name: str, package: str) -> str:
    """The path of a program that the package has; a test is nothing `without` it."""
    postgres = sorted(Path("/usr/lib/postgresql").glob("*/bin"), reverse=True)  # not on anybody's PATH
    found = shutil.which(name, path=os.pathsep.join([*map(str, postgres), os.environ["PATH"]]))
    if not found:
        without(f"no {name}: install the package {package}")
    return found


def library(name: str) -> Any:
    """A library that only tests of exports need."""
    try:
        return importlib.import_module(name)
    except ImportError:
        without(f"no {name}: pip install {name}")


def to_each(act: Callable[[psutil.Process], None], processes: Iterable[psutil.Process]) -> None:
    """Acts on each process that is still there: some end with others."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            act(process)


def command_of(process: psutil.Process) -> str:
    """Its command line, which is empty once it has ended."""
    with suppress(psutil.Error):
        return " ".join(process.cmdline())
    return ""


def poison_memory() -> None:
    """Lets torch fill memory that it allocates with NaN or the largest integer: fresh memory is often 0,
    which hides what is read before it is set."""
    import torch

    torch.use_deterministic_algorithms(True, warn_only=True)  # else it fills nothing
    torch.utils.deterministic.fill_uninitialized_memory = True  # pyright: ignore[reportAttributeAccessIssue]


def png(pixels: "np.ndarray") -> bytes:
    from PIL import Image

    buffer = io.BytesIO()
    Image.fromarray(pixels.astype("uint8")).save(buffer, format="PNG")
    return buffer.getvalue()


def start_ray(num_cpus: int = 2, *, dashboard: bool = False) -> None:
    """On this machine, whatever else runs here. A dashboard is four more processes."""
    import ray

    ray.init(
        address="local",
        num_cpus=num_cpus,
        include_dashboard=dashboard,
        logging_level="error",
        log_to_driver=False,
    )

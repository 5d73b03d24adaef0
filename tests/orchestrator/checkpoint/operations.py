"""Hooks that are called before and after every operation that changes storage."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any
from unittest.mock import patch

from torch.distributed.checkpoint.filesystem import FileSystem

from orchestrator import storage

CHANGING = (
    "make_folder",
    "rename_folder",
    "flush",
    "delete",
    "delete_empty_folder",
    "write_bytes",
    "write_new",
    "abort_uploads",
)


@contextmanager
def before_opening(meet: Callable[[str], object]) -> Iterator[None]:
    """Calls `meet` (location) before a file is opened to be written, by torch.distributed.checkpoint too."""
    create_stream, open_to_write = FileSystem.create_stream, storage.open_to_write

    def create(system: FileSystem, path: Any, mode: str) -> Any:
        meet(str(path))
        return create_stream(system, path, mode)

    def write(location: str) -> Any:
        meet(location)
        return open_to_write(location)

    with patch.object(FileSystem, "create_stream", create), patch.object(storage, "open_to_write", write):
        yield


@contextmanager
def counting(meet: Callable[[int, str], object]) -> Iterator[None]:
    """Calls `meet` (number from 1, what) before and after every operation, and before a file is opened."""
    numbers = count(1)

    def point(what: str) -> None:
        meet(next(numbers), what)

    def watched(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(location: Any, *args: Any, **kwargs: Any) -> Any:
            point(f"before {name} {location}")
            result = function(location, *args, **kwargs)
            point(f"after {name} {location}")
            return result

        return call

    functions = {name: watched(name, getattr(storage, name)) for name in CHANGING}
    rename = patch.object(Path, "rename", watched("rename", Path.rename))
    opening = before_opening(lambda location: point(f"opening {location}"))
    with opening, rename, patch.multiple(storage, **functions):
        yield

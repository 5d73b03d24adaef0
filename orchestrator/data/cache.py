"""A folder on this node's disk that holds files by name, up to a size: the least recently used go first.

Safe for any number of processes: a file is made by one of them while the others wait for it, appears whole or
not at all, and may be read on by those who have it open when it goes.
"""

import fcntl
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

FOLDER = "MOE_FRONTIER_CACHE"  # environment variable; default: a folder of this user below /tmp


def cached(name: str, make: Callable[[Path], None], *, limit: int) -> BinaryIO:
    """The file `name`, open to be read; if it is not there, `make` writes it to the path that it is given.

    `limit`: bytes that all files may take together; one that is larger stays alone.

    Raises:
        OSError: if the disk is full or the folder belongs to somebody else.
    """
    path = _folder() / name
    if file := _used_now(path):
        return file
    with _locked(f"{name}.lock"):
        if file := _used_now(path):
            return file
        temporary = path.with_name(f"{name}.{uuid.uuid4().hex}.tmp")
        try:
            make(temporary)
            file = temporary.open("rb")
            with _locked("lock"):
                _make_room(limit - temporary.stat().st_size)
                temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)
    return file


def _folder() -> Path:
    folder = Path(os.environ.get(FOLDER) or f"{tempfile.gettempdir()}/moe-frontier-{os.getuid()}")
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user: set ${FOLDER} to a folder of your own")
    return folder


def _used_now(path: Path) -> BinaryIO | None:
    """None if there is no such file."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return None
    os.utime(file.fileno())
    return file


def _make_room(limit: int) -> None:
    files = []
    for path in _folder().iterdir():
        with suppress(FileNotFoundError):
            if path.suffix not in (".lock", ".tmp") and path.name != "lock":
                stat = path.stat()
                files.append((stat.st_mtime_ns, stat.st_size, path))
    taken = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if taken <= limit:
            return
        path.unlink(missing_ok=True)
        taken -= size


@contextmanager
def _locked(name: str) -> Iterator[None]:
    """Held by one process of this node at a time; freed by its death."""
    with open(_folder() / name, "w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield

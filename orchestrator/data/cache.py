"""Files on a node's disk that are made once and shared by any number of processes, up to a total size.

A file is made by one process under the name ``NAME.part``, which the process locks, while others wait for the
lock; it appears under its name as a whole. The least recently used files are removed, but none that a process
has open, so that the limit bounds what the disk holds. Adding a file does not list the folder: the total is
kept in a file, and removals free a tenth of the limit at once. A killed process leaves only a ``.part`` file
without a lock, which is made again or removed.
"""

import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from orchestrator.errors import UsageError
from orchestrator.storage import lock_file

CACHE_FOLDER = "MOE_FRONTIER_CACHE"  # environment variable; default: a folder of this user below /tmp
TOTAL = "total"  # the file that holds the bytes of all files
FREED = 0.1  # of the limit


def cached(name: str, size: int, make: Callable[[BinaryIO], None], *, limit: int) -> BinaryIO:
    """Opens a file for reading; if it is missing, `make(file)` writes its `size` bytes. A file that is open,
    or mapped from the open file, is not removed.

    Raises:
        UsageError: if the file does not fit into `limit` bytes beside the files that are in use.
        OSError: if the disk is full or the folder belongs to another user.
    """
    path = _folder() / name
    part = path.with_name(f"{name}.part")
    while (file := open_cached(name)) is None:
        with part.open("ab") as mine:
            try:
                lock_file(mine, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                # Waits until the file is made, or its process killed. An exclusive lock would also wait for
                # the readers of the file.
                lock_file(mine, fcntl.LOCK_SH)
                continue
            if not _is_at(mine, part):
                continue  # the process that had the lock has made or removed the file
            try:
                if not path.exists():
                    _reserve(mine, size, limit)
                    with part.open("r+b") as content:
                        make(content)
                        if content.tell() != size:
                            raise OSError(f"{path} has {content.tell()} bytes rather than {size}")
                    part.rename(path)
            finally:
                if _is_at(mine, part):
                    part.unlink()
    return file


def open_cached(name: str) -> BinaryIO | None:
    """Opens a file for reading, if it is there."""
    try:
        file = (_folder() / name).open("rb")
    except FileNotFoundError:
        return None
    lock_file(file, fcntl.LOCK_SH)
    os.utime(file.fileno())
    if os.fstat(file.fileno()).st_nlink:
        return file
    file.close()  # it was removed before the lock was taken
    return None


def _reserve(part: BinaryIO, size: int, limit: int) -> None:
    """Gives `part` its size, after removing other files if they exceed the limit together."""
    with _total() as total:
        before = total.read()
        taken = int(before) if before else _recount()
        if taken + size > limit:
            taken = _make_room(limit - size - int(FREED * limit))
        if taken + size > limit:
            raise UsageError(
                f"a file of {size / 1e9:.3g} GB does not fit into data.cache_gb={limit / 1e9:g}, of which"
                f" {taken / 1e9:.3g} GB are in use: raise data.cache_gb"
            )
        os.truncate(part.fileno(), size)
        total.seek(0)
        total.truncate()
        total.write(str(taken + size).encode())


def _recount() -> int:
    return sum(entry.stat().st_size for entry in os.scandir(_folder()) if entry.name != TOTAL)


def _make_room(limit: int) -> int:
    """Removes files that no process has open, the least recently used first, until all take at most `limit`
    bytes; returns what they take.
    """
    files = []
    for entry in os.scandir(_folder()):
        with suppress(FileNotFoundError):
            if entry.name != TOTAL:
                stat = entry.stat()
                files.append((stat.st_mtime_ns, stat.st_size, entry.path))
    taken = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if taken <= limit:
            break
        with suppress(FileNotFoundError, BlockingIOError), open(path, "rb") as file:
            lock_file(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(file, Path(path)):
                os.unlink(path)
            taken -= size
    return taken


@contextmanager
def _total() -> Iterator[BinaryIO]:
    """Opens and locks the file that holds the total."""
    with (_folder() / TOTAL).open("a+b") as file:
        lock_file(file, fcntl.LOCK_EX)
        file.seek(0)
        yield file


def _is_at(file: BinaryIO, path: Path) -> bool:
    """Returns whether `path` is still the name of an open file."""
    with suppress(FileNotFoundError):
        return os.path.samestat(os.fstat(file.fileno()), path.stat())
    return False


def _folder() -> Path:
    folder = Path(os.environ.get(CACHE_FOLDER) or f"{tempfile.gettempdir()}/moe-frontier-{os.getuid()}")
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise UsageError(
            f"the cache of shards and indexes cannot be at {folder} ({error.strerror}): set"
            f" ${CACHE_FOLDER} to another folder"
        ) from None
    if folder.stat().st_uid != os.getuid():
        hint = f"set ${CACHE_FOLDER} to a folder of your own"
        raise PermissionError(f"{folder} belongs to another user: {hint}")
    return folder

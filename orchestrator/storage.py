"""Reading and writing bytes on local paths and in object storages alike.

A location is a local path, or ``s3://bucket/key``, ``gs://bucket/key`` or ``az://container/key``, or, for
reading alone, ``https://host/path`` or ``hf://datasets/OWNER/NAME@REVISION/path``; it is taken as it is
written: nothing in it is quoted. Endpoints and credentials come from the variables of each cloud. Every
function raises OSError if storage fails, and UsageError for any other URI.
"""

import fcntl
import os
import re
import shutil
import tempfile
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, Any, BinaryIO, NamedTuple

from orchestrator.errors import UsageError

PIECE_BYTES = 16 << 20  # read at once

Version = dict[str, str]  # of an object: what its storage needs to know it again

_refused = set[str]()  # folders in object storages that belong to another process now


class Range(NamedTuple):
    """A part of a file, the size of the whole file, and in an object storage its ETag, if it has any."""

    content: bytes
    whole_bytes: int
    etag: str | None


def _stores():
    """The clients of object storages, which load for a second: who names local paths alone never does."""
    import orchestrator.stores

    return orchestrator.stores


def absolute(location: str) -> str:
    """Makes a local path absolute, so that no process depends on its working directory; keeps another URI.

    Raises:
        UsageError: for a path that does not exist, and that no shell has read: in quotes, with a variable or
            with the home of a user who is not there.
    """
    if is_local(location):
        path = os.path.expanduser(_path(location))
        if re.match(r"['\"~]|.*\$[{A-Za-z_]", path) and not os.path.exists(path):
            raise UsageError(
                f"{location}: a path is taken as it is written, and here are quotes, a variable or an unknown"
                " user in it; write the path itself"
            )
        return str(Path(path).resolve())
    _stores().parse(location)
    return location


def home(location: str | None = None) -> str:
    """The root of all files of this user: `location`, else $MOE_FRONTIER_HOME, else ``~/moe-frontier``."""
    return absolute(location or os.environ.get("MOE_FRONTIER_HOME") or "~/moe-frontier").rstrip("/")


def is_local(location: str) -> bool:
    return "://" not in _path(location)


def can_list(location: str) -> bool:
    """Whether files there can be listed, and written; web servers and the hub only give them by name."""
    return is_local(location) or not _stores().is_read_only(location)


def join(location: str, *names: str) -> str:
    return "/".join([location.rstrip("/"), *names])


def read_bytes(location: str) -> bytes:
    """Reads a whole file. Raises FileNotFoundError if there is none."""
    return b"".join(pieces(location))


def read_range(location: str, offset: int, size: int) -> Range:
    """Reads `size` bytes of a file from `offset` on, by one request to an object storage.

    Raises:
        FileNotFoundError: if there is no such file.
        OSError: if the file ends before.
    """
    if is_local(location):
        with open(_path(location), "rb") as file:
            content = os.pread(file.fileno(), size, offset)
            found = Range(content, os.fstat(file.fileno()).st_size, None)
    else:
        found = Range(*_stores().get_range(location, offset, size))
    if len(found.content) != size:
        raise OSError(f"{location} has {found.whole_bytes} bytes, not {offset + size}")
    return found


def pieces(location: str) -> Iterator[bytes]:
    """Yields a file's content in pieces of `PIECE_BYTES`. Raises FileNotFoundError if there is none."""
    if is_local(location):
        with open_to_read(location) as file:
            while piece := file.read(PIECE_BYTES):
                yield piece
        return
    yield from _stores().stream(location)


def write_bytes(location: str, content: bytes) -> None:
    """Writes or replaces a file: readers see the old content or the whole new content, never a part."""
    if not is_local(location):
        _check_allowed(location)
        return _stores().put_whole(location, content)
    temporary = f"{location}.{uuid.uuid4().hex}.tmp"
    make_folder(os.path.dirname(location))
    try:
        with open_to_write(temporary) as stream:
            stream.write(content)
        os.replace(_path(temporary), _path(location))
    finally:
        Path(_path(temporary)).unlink(missing_ok=True)


def write_new(location: str, content: bytes) -> None:
    """Writes a file as `write_bytes` does, but only if there is none; of several writers one succeeds.

    Raises:
        FileExistsError: if the file exists.
    """
    if not is_local(location):
        _check_allowed(location)
        return _stores().put_whole(location, content, new=True)
    temporary = f"{location}.{uuid.uuid4().hex}.tmp"
    write_bytes(temporary, content)
    try:
        os.link(_path(temporary), _path(location))
    finally:
        os.unlink(_path(temporary))


def read_with_version(location: str) -> tuple[bytes, Version]:
    """Reads an object and its version. Raises FileNotFoundError if there is none."""
    return _stores().get(location)


def write_if(location: str, content: bytes, version: Version | None) -> Version:
    """Writes an object if the one there has this version, or if there is none and `version` is None. Of
    several writers one succeeds. Returns the new version.

    Raises:
        FileExistsError: if another process wrote or deleted the object meanwhile.
    """
    return _stores().put(location, content, version or "create")


def refuse_writes(folder: str) -> None:
    """Makes all later writes of this process below a folder in an object storage fail: another process has
    taken it over.
    """
    _refused.add(f"{folder}/")


def allow_writes(folder: str) -> None:
    _refused.discard(f"{folder}/")


@contextmanager
def open_to_write(location: str) -> Iterator[IO[bytes]]:
    """Opens a new file in an existing folder (see `make_folder`); it is durable when the block ends. An
    object is put together in a temporary file, so that a block that fails leaves none.
    """
    if not is_local(location):
        _check_allowed(location)
        with tempfile.NamedTemporaryFile(prefix="object-") as file:
            yield file.file
            file.flush()
            return upload(file.name, location)
    with open(_path(location), "wb") as file:
        yield file
    flush(location)


def upload(path: str, location: str) -> None:
    """Copies a local file to an object storage, in parts if it is large."""
    _check_allowed(location)
    _stores().put(location, Path(path))


def open_to_read(location: str) -> BinaryIO:
    """Opens a file that can be read at any offset. Raises FileNotFoundError."""
    if is_local(location):
        return open(_path(location), "rb")
    return _stores().open_object(location)


def make_folder(location: str) -> None:
    """Makes a local folder; object storages have no folders, so nothing is made there."""
    if is_local(location):
        os.makedirs(_path(location), exist_ok=True)


def rename_folder(location: str, target: str) -> None:
    """Renames a local folder; the new name is durable when the function returns.

    Raises:
        FileExistsError: if `target` exists, unless it is an empty folder.
    """
    flush(location)
    try:
        os.rename(_path(location), _path(target))
    except OSError as error:
        if os.path.isdir(_path(location)) and os.path.lexists(_path(target)):
            raise FileExistsError(f"{target} exists already") from error
        raise
    flush(os.path.dirname(target))


def flush(location: str) -> None:
    """Flushes a local file or folder to the disk; an object is durable when it appears."""
    if is_local(location):
        descriptor = os.open(_path(location), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def size(location: str) -> int | None:
    """Returns the size of a file in bytes; None if there is no such file."""
    if is_local(location):
        return os.path.getsize(_path(location)) if os.path.isfile(_path(location)) else None
    return _stores().head(location)


def age_s(location: str) -> float:
    """Returns for how many seconds a file was not written, as far as two clocks agree.

    Raises:
        FileNotFoundError: if there is no such file.
    """
    written_s = os.path.getmtime(_path(location)) if is_local(location) else _stores().written_s(location)
    return time.time() - written_s


def lock_file(file: IO[Any], operation: int) -> None:
    """Locks an open local file, as `fcntl.flock` does with this operation.

    Raises:
        BlockingIOError: if another process has locked it, and `operation` does not wait for that.
        UsageError: if no lock can be had on its file system.
    """
    try:
        fcntl.flock(file, operation)
    except BlockingIOError:
        raise
    except OSError as error:
        raise UsageError(
            f"the file system of {file.name} gives no locks ({error.strerror or error}), and two processes"
            " would destroy each other's files there: use a local disk or an object storage, or mount it with"
            " locks (NFS with lockd and without nolock, Lustre with flock)"
        ) from None


def names(location: str) -> list[str]:
    """Lists the names directly in a folder, sorted; an empty list if there is no folder."""
    if is_local(location):
        try:
            return sorted(os.listdir(_path(location)))
        except (FileNotFoundError, NotADirectoryError):
            return []
    return _stores().list_names(location)


def files(location: str) -> dict[str, int]:
    """Lists every file below a folder, at any depth: path below the folder -> bytes, sorted.

    Local links are followed, but not in a circle; a broken link counts as an empty file.
    """
    if is_local(location):
        return dict(sorted(_walk(_path(location))))
    return _stores().list_files(location)


def delete(location: str) -> None:
    """Deletes a file, or a folder with its content; does nothing if there is none."""
    if is_local(location):
        path = Path(_path(location))
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        return
    _check_allowed(location)
    _stores().delete_objects(location)


def delete_empty_folder(location: str) -> None:
    """Deletes a local folder if it is empty."""
    if is_local(location):
        with suppress(OSError):
            os.rmdir(_path(location))


def abort_uploads(location: str, containing: str = "") -> None:
    """Aborts the unfinished uploads to S3 below `location` whose keys hold the text `containing`. Other
    storages do not list theirs: Azure forgets them after a week, and for Google's a bucket needs a rule.
    """
    if not is_local(location):
        _stores().abort_multiparts(location, containing)


def _walk(folder: str) -> Iterator[tuple[str, int]]:
    for here, below, names in os.walk(folder, followlinks=True):
        inside = f"{os.path.realpath(here)}/"
        below[:] = [
            name for name in below if not inside.startswith(f"{os.path.realpath(os.path.join(here, name))}/")
        ]
        for path in (os.path.join(here, name) for name in names):
            yield os.path.relpath(path, folder), os.path.getsize(path) if os.path.exists(path) else 0


def _path(location: str) -> str:
    return location.removeprefix("file://")


def _check_allowed(location: str) -> None:
    if not is_local(location):
        _stores().refuse_read_only(location)
    if location.startswith(tuple(_refused)):
        raise PermissionError(f"{location} is not written: another process has taken over its folder")

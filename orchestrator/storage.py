"""Bytes on local paths and on S3 alike, through `pyarrow.fs`."""

import os
import uuid
from pathlib import Path

from pyarrow import fs


def absolute(location: str) -> str:
    """A URI as it is; a local path made absolute, so that no process depends on its working directory."""
    return location if "://" in location else str(Path(location).expanduser().resolve())


def is_local(location: str) -> bool:
    return "://" not in location


def read_bytes(location: str) -> bytes:
    """Raises FileNotFoundError if there is nothing."""
    system, path = _resolve(location)
    with system.open_input_stream(path) as stream:
        return stream.read()


def write_bytes(location: str, content: bytes) -> None:
    """Whole or not at all: locally through a temporary name; an S3 object appears when it is complete."""
    system, path = _resolve(location)
    system.create_dir(os.path.dirname(path), recursive=True)
    temporary = f"{path}.{uuid.uuid4().hex}.tmp" if is_local(location) else path
    try:
        with system.open_output_stream(temporary) as stream:
            stream.write(content)
        if temporary != path:
            os.replace(temporary, path)
    except OSError:
        if temporary != path:
            Path(temporary).unlink(missing_ok=True)
        raise


def size(location: str) -> int | None:
    """Bytes of a file; None if there is none."""
    system, path = _resolve(location)
    info = system.get_file_info(path)
    return info.size if info.type == fs.FileType.File else None


def join(location: str, *names: str) -> str:
    return "/".join([location.rstrip("/"), *names])


def _resolve(location: str) -> tuple[fs.FileSystem, str]:
    if is_local(location):
        return fs.LocalFileSystem(), location
    return fs.FileSystem.from_uri(location)

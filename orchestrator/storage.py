"""Reading and writing bytes on local paths and on S3 alike.

A location is a local path or ``s3://bucket/key``, taken as it is written: nothing in it is quoted. Endpoint,
region and credentials come from the usual AWS variables. Every function raises OSError if storage fails, and
UsageError for any other URI.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import boto3
import obstore
import pyarrow as pa
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from obstore.auth.boto3 import Boto3CredentialProvider
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import S3Store
from pyarrow import fs

from orchestrator.errors import UsageError

# Attempts for each request to S3, with pauses that double: an outage of about half a minute is survived.
ATTEMPTS = 8
TIMEOUT_S = 60  # without a byte
PIECE_BYTES = 16 << 20  # read at once

_refused = set[str]()  # folders on S3 that belong to another process now


class Range(NamedTuple):
    """A part of a file, the size of the whole file, and on S3 its ETag."""

    content: bytes
    whole_bytes: int
    etag: str | None


def absolute(location: str) -> str:
    """Makes a local path absolute, so that no process depends on its working directory; keeps a URI of S3."""
    if is_local(location):
        return str(Path(_path(location)).expanduser().resolve())
    _bucket_and_key(location)
    return location


def home(location: str | None = None) -> str:
    """The root of all files of this user: `location`, else $MOE_FRONTIER_HOME, else ``~/moe-frontier``."""
    return absolute(location or os.environ.get("MOE_FRONTIER_HOME") or "~/moe-frontier").rstrip("/")


def is_local(location: str) -> bool:
    return "://" not in _path(location)


def join(location: str, *names: str) -> str:
    return "/".join([location.rstrip("/"), *names])


def read_bytes(location: str) -> bytes:
    """Reads a whole file. Raises FileNotFoundError if there is none."""
    return b"".join(pieces(location))


def read_range(location: str, offset: int, size: int) -> Range:
    """Reads `size` bytes of a file from `offset` on, by one request on S3.

    Raises:
        FileNotFoundError: if there is no such file.
        OSError: if the file ends before.
    """
    if is_local(location):
        with open(_path(location), "rb") as file:
            content = os.pread(file.fileno(), size, offset)
            found = Range(content, os.fstat(file.fileno()).st_size, None)
    else:
        bucket, key = _bucket_and_key(location)
        with _s3_errors(location):
            if size:
                answer = obstore.get(_store(bucket), key, options={"range": (offset, offset + size)})
                content, meta = bytes(answer.bytes()), answer.meta
            else:
                # HTTP has no empty range.
                content, meta = b"", obstore.head(_store(bucket), key)
            found = Range(content, meta["size"], meta["e_tag"])
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
    bucket, key = _bucket_and_key(location)
    with _s3_errors(location):
        yield from map(bytes, obstore.get(_store(bucket), key).stream(min_chunk_size=PIECE_BYTES))


def write_bytes(location: str, content: bytes) -> None:
    """Writes or replaces a file: readers see the old content or the whole new content, never a part."""
    if not is_local(location):
        return _put(location, content)
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
        return _put(location, content, IfNoneMatch="*")
    temporary = f"{location}.{uuid.uuid4().hex}.tmp"
    write_bytes(temporary, content)
    try:
        os.link(_path(temporary), _path(location))
    finally:
        os.unlink(_path(temporary))


def read_with_etag(location: str) -> tuple[bytes, str]:
    """Reads a whole file on S3, and its ETag. Raises FileNotFoundError if there is none."""
    bucket, key = _bucket_and_key(location)
    with _s3_errors(location):
        answer = obstore.get(_store(bucket), key)
        return bytes(answer.bytes()), answer.meta["e_tag"] or ""


def write_if(location: str, content: bytes, etag: str | None) -> str:
    """Writes a file on S3 if the file there has this ETag, or if there is none and `etag` is None. Of several
    writers one succeeds. Returns the new ETag.

    Raises:
        FileExistsError: if another file is there.
        FileNotFoundError: if the file is gone.
    """
    bucket, key = _bucket_and_key(location)
    with _s3_errors(location):
        try:
            mode: Any = "create" if etag is None else {"e_tag": etag}
            return obstore.put(_store(bucket), key, content, mode=mode)["e_tag"] or ""
        except (AlreadyExistsError, PreconditionError):
            raise FileExistsError(f"{location} was written by another process") from None


def refuse_writes(folder: str) -> None:
    """Makes all later writes of this process below a folder on S3 fail: another process has taken it over."""
    _refused.add(f"{folder}/")


def allow_writes(folder: str) -> None:
    _refused.discard(f"{folder}/")


@contextmanager
def open_to_write(location: str) -> Iterator[pa.NativeFile]:
    """Opens a new file in an existing folder (see `make_folder`); it is durable when the block ends."""
    _check_allowed(location)
    system, path = _resolve(location)
    with system.open_output_stream(path) as stream:
        yield stream
    flush(location)


def open_to_read(location: str) -> pa.NativeFile:
    """Opens a file that can be read at any offset. Raises FileNotFoundError."""
    system, path = _resolve(location)
    return system.open_input_file(path)


def make_folder(location: str) -> None:
    """Makes a local folder; S3 has no folders, so nothing is made there."""
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
    """Flushes a local file or folder to the disk; an S3 object is durable when it appears."""
    if is_local(location):
        descriptor = os.open(_path(location), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def size(location: str) -> int | None:
    """Returns the size of a file in bytes; None if there is no such file."""
    system, path = _resolve(location)
    info = system.get_file_info(path)
    return info.size if info.type == fs.FileType.File else None


def names(location: str) -> list[str]:
    """Lists the names directly in a folder, sorted; an empty list if there is no folder."""
    system, path = _resolve(location)
    try:
        found = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    except NotADirectoryError:
        found = []
    return sorted(info.base_name for info in found)


def files(location: str) -> dict[str, int]:
    """Lists every file below a folder, at any depth: path below the folder -> bytes, sorted.

    Local links are followed, but not in a circle; a broken link counts as an empty file.
    """
    if is_local(location):
        return dict(sorted(_walk(_path(location))))
    system, path = _resolve(location)
    found = system.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
    below = len(path) + 1
    return dict(sorted((info.path[below:], info.size) for info in found if info.type == fs.FileType.File))


def delete(location: str) -> None:
    """Deletes a file, or a folder with its content; does nothing if there is none."""
    if is_local(location):
        path = Path(_path(location))
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        return
    _check_allowed(location)
    bucket, key = _bucket_and_key(location)
    with _s3_errors(location):
        for page in _s3().get_paginator("list_objects_v2").paginate(Bucket=bucket, Prefix=key):
            found = [{"Key": o["Key"]} for o in page.get("Contents", ())]
            mine = [o for o in found if o["Key"] == key or o["Key"].startswith(f"{key}/")]
            if mine:
                answer = _s3().delete_objects(Bucket=bucket, Delete={"Objects": mine, "Quiet": True})
                for error in answer.get("Errors", ()):
                    raise OSError(f"deleting s3://{bucket}/{error['Key']}: {error['Code']}")


def delete_empty_folder(location: str) -> None:
    """Deletes a local folder if it is empty."""
    if is_local(location):
        with suppress(OSError):
            os.rmdir(_path(location))


def abort_uploads(location: str, containing: str = "") -> None:
    """Aborts the unfinished S3 uploads below `location` whose keys hold the text `containing`."""
    if is_local(location):
        return
    bucket, prefix = _bucket_and_key(location)
    with _s3_errors(location):
        pages = _s3().get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        for upload in (upload for page in pages for upload in page.get("Uploads", ())):
            if containing in upload["Key"]:
                _s3().abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])


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


def _resolve(location: str) -> tuple[fs.FileSystem, str]:
    if is_local(location):
        return fs.LocalFileSystem(), _path(location)
    bucket, key = _bucket_and_key(location)
    return _file_system(bucket), f"{bucket}/{key}".rstrip("/")


@cache
def _file_system(bucket: str) -> fs.FileSystem:
    return fs.S3FileSystem(
        # Without a variable that names the region, this asks S3.
        region=fs.FileSystem.from_uri(f"s3://{bucket}")[0].region,
        endpoint_override=os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL")),
        request_timeout=TIMEOUT_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        allow_delayed_open=True,  # one request for a small file
    )


@cache
def _store(bucket: str) -> S3Store:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL"))
    where: dict[str, Any] = {} if endpoint is None else {"endpoint": endpoint}
    pauses: Any = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=10), "base": 2}
    return S3Store(
        bucket,
        **where,
        region=_file_system(bucket).region,
        credential_provider=Boto3CredentialProvider(),
        virtual_hosted_style_request=endpoint is None,
        client_options={"allow_http": True, "timeout": timedelta(seconds=TIMEOUT_S)},
        retry_config={
            "max_retries": ATTEMPTS,
            "retry_timeout": timedelta(seconds=2 * TIMEOUT_S),
            "backoff": pauses,
        },
    )


@cache
def _s3() -> Any:
    retries: Any = {"mode": "standard", "total_max_attempts": ATTEMPTS}
    return boto3.client("s3", config=Config(read_timeout=TIMEOUT_S, retries=retries))


def _check_allowed(location: str) -> None:
    if location.startswith(tuple(_refused)):
        raise PermissionError(f"{location} is not written: another process has taken over its folder")


def _put(location: str, content: bytes, **condition: str) -> None:
    _check_allowed(location)
    bucket, key = _bucket_and_key(location)
    with _s3_errors(location):
        try:
            _s3().put_object(Bucket=bucket, Key=key, Body=content, **condition)
        except ClientError as error:
            if error.response["Error"]["Code"] != "PreconditionFailed":
                raise
            # Equal content means that a retry met what its first attempt had written.
            if read_bytes(location) != content:
                raise FileExistsError(f"{location} exists already") from None
    if (found := size(location)) != len(content):
        if content.startswith(read_bytes(location)):  # cut off, and not of another writer
            delete(location)
        raise OSError(f"{location} has {found} bytes after {len(content)} were written")


def _bucket_and_key(location: str) -> tuple[str, str]:
    scheme, _, rest = location.partition("://")
    if scheme != "s3":
        raise UsageError(f"{location}: {scheme}:// is not supported: name a local path or s3://bucket/key")
    bucket, _, key = rest.partition("/")
    if not bucket:
        raise UsageError(f"{location} names no bucket: name a local path or s3://bucket/key")
    return bucket, key


@contextmanager
def _s3_errors(location: str) -> Iterator[None]:
    try:
        yield
    except NotFoundError as error:
        raise FileNotFoundError(f"no such file: {location}") from error
    except (BaseError, BotoCoreError, ClientError) as error:
        raise OSError(f"{location}: {error}") from error

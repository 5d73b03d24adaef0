"""Bytes on local paths and on S3 alike.

A location is a local path or ``s3://bucket/key``, taken as it is written: nothing in it is quoted. Endpoint,
region and credentials come from the usual AWS variables. Every function raises OSError if storage fails.
"""

import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import pyarrow as pa
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from pyarrow import fs

ATTEMPTS = 8  # of a request to S3, with pauses that double: a storm of errors may last about half a minute
TIMEOUT_S = 60  # without a byte


def absolute(location: str) -> str:
    """A URI as it is; a local path made absolute, so that no process depends on its working directory."""
    return str(Path(_path(location)).expanduser().resolve()) if is_local(location) else location


def is_local(location: str) -> bool:
    return "://" not in _path(location)


def join(location: str, *names: str) -> str:
    return "/".join([location.rstrip("/"), *names])


def read_bytes(location: str) -> bytes:
    """Raises FileNotFoundError if there is nothing."""
    with open_to_read(location) as file:
        return file.read()


def write_bytes(location: str, content: bytes) -> None:
    """Whole or not at all, whatever was there before."""
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
    """As `write_bytes`, but only where nothing is yet, whoever else writes at the same moment.

    Raises:
        FileExistsError: if there is something.
    """
    if not is_local(location):
        return _put(location, content, IfNoneMatch="*")
    temporary = f"{location}.{uuid.uuid4().hex}.tmp"
    write_bytes(temporary, content)
    try:
        os.link(_path(temporary), _path(location))
    finally:
        os.unlink(_path(temporary))


@contextmanager
def open_to_write(location: str) -> Iterator[pa.NativeFile]:
    """A stream of bytes into a folder that is there (see `make_folder`); durable when the block ends."""
    system, path = _resolve(location)
    with system.open_output_stream(path) as stream:
        yield stream
    flush(location)


def open_to_read(location: str) -> pa.NativeFile:
    """A file that can be read at any offset. Raises FileNotFoundError."""
    system, path = _resolve(location)
    return system.open_input_file(path)


def make_folder(location: str) -> None:
    """S3 has no folders: there is nothing to make."""
    if is_local(location):
        os.makedirs(_path(location), exist_ok=True)


def rename_folder(location: str, target: str) -> None:
    """A local folder, with all that is in it; durable when it returns.

    Raises:
        FileExistsError: if `target` is there, unless it is an empty folder.
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
    """A local file or folder onto the disk itself; an S3 object is durable when it appears."""
    if is_local(location):
        descriptor = os.open(_path(location), os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def size(location: str) -> int | None:
    """Bytes of a file; None if there is none."""
    system, path = _resolve(location)
    info = system.get_file_info(path)
    return info.size if info.type == fs.FileType.File else None


def names(location: str) -> list[str]:
    """What lies directly in a folder, sorted; nothing if there is no folder."""
    system, path = _resolve(location)
    try:
        found = system.get_file_info(fs.FileSelector(path, allow_not_found=True))
    except NotADirectoryError:
        found = []
    return sorted(info.base_name for info in found)


def files(location: str) -> dict[str, int]:
    """Every file below a folder, at any depth: path below it -> bytes, sorted; nothing without a folder."""
    system, path = _resolve(location)
    found = system.get_file_info(fs.FileSelector(path, allow_not_found=True, recursive=True))
    below = len(path.rstrip("/")) + 1
    return dict(sorted((info.path[below:], info.size) for info in found if info.type == fs.FileType.File))


def delete(location: str) -> None:
    """A file, or a folder with all that is in it; nothing if there is none."""
    if is_local(location):
        path = Path(_path(location))
        shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink(missing_ok=True)
        return
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
    """Leaves one that is not empty; on S3 there is none."""
    if is_local(location):
        with suppress(OSError):
            os.rmdir(_path(location))


def abort_uploads(location: str, containing: str = "") -> None:
    """Drops parts of S3 uploads below `location` that nobody will complete, of keys with such a text."""
    if is_local(location):
        return
    bucket, prefix = _bucket_and_key(location)
    with _s3_errors(location):
        pages = _s3().get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=f"{prefix}/")
        for upload in (upload for page in pages for upload in page.get("Uploads", ())):
            if containing in upload["Key"]:
                _s3().abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])


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
        region=fs.FileSystem.from_uri(f"s3://{bucket}")[0].region,  # asks S3 if no variable says it
        endpoint_override=os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL")),
        request_timeout=TIMEOUT_S,
        retry_strategy=fs.AwsStandardS3RetryStrategy(max_attempts=ATTEMPTS),
        allow_delayed_open=True,  # one request for a small file
    )


@cache
def _s3() -> Any:
    retries: Any = {"mode": "standard", "total_max_attempts": ATTEMPTS}
    return boto3.client("s3", config=Config(read_timeout=TIMEOUT_S, retries=retries))


def _put(location: str, content: bytes, **condition: str) -> None:
    bucket, key = _bucket_and_key(location)
    with _s3_errors(location):
        try:
            _s3().put_object(Bucket=bucket, Key=key, Body=content, **condition)
        except ClientError as error:
            if error.response["Error"]["Code"] != "PreconditionFailed":
                raise
            if read_bytes(location) != content:  # else a retry met what the first attempt had written
                raise FileExistsError(f"{location} exists already") from None
    if (found := size(location)) != len(content):
        delete(location)
        raise OSError(f"{location} has {found} bytes after {len(content)} were written")


def _bucket_and_key(location: str) -> tuple[str, str]:
    scheme, _, rest = location.partition("://")
    if scheme != "s3":
        raise ValueError(f"{location}: a location is a local path or s3://bucket/key")
    bucket, _, key = rest.partition("/")
    return bucket, key


@contextmanager
def _s3_errors(location: str) -> Iterator[None]:
    try:
        yield
    except (BotoCoreError, ClientError) as error:
        raise OSError(f"{location}: {error}") from error

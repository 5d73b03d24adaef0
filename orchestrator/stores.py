"""Object storages: S3, Google Cloud Storage and Azure, and, for reading alone, web servers and the Hugging
Face hub. Callers use `orchestrator.storage`, whose functions on other than local paths are here.
"""

import io
import os
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any, BinaryIO, Literal

import boto3
import obstore
from botocore import UNSIGNED
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from obstore.exceptions import AlreadyExistsError, BaseError, NotFoundError, PreconditionError
from obstore.store import AzureStore, GCSStore, HTTPStore, S3Store

from orchestrator.credentials import PUBLIC, how_to_sign, is_public, signing
from orchestrator.errors import UsageError

# Attempts for each request. The pauses between them are drawn, and soon up to 3 s: what fails at once is
# tried again for 45 s.
ATTEMPTS, PAUSE_S = 24, 3.0
TIMEOUT_S = 60  # without a byte
WRITTEN = "name a local path, s3://bucket/key, gs://bucket/key or az://container/key"
PIECE_BYTES = 16 << 20  # read or written at once
HUB = re.compile(r"(datasets/[^/@]+/[^/@]+(?:@[^/]+)?)(?:/(.*))?")
NOT_FOUND = (FileNotFoundError, NotFoundError)  # obstore raises either
NO_BUCKET = re.compile(r"<Code>(NoSuchBucket|ContainerNotFound)</Code>|\(NoSuchBucket\)")
ANSWER = re.compile(r"<\?xml.*|<Error>.*", re.DOTALL)  # of a storage that refuses a request
HEADS = 16  # requests in flight for empty objects

Version = dict[str, str]  # of an object: what its storage needs to know it again


def parse(location: str) -> tuple[str, str, str]:
    """Returns the scheme of a URI, the bucket (or container, host, data set), and the key in it.

    Raises:
        UsageError: for a URI of another kind.
    """
    scheme, _, rest = location.partition("://")
    if scheme not in STORES:
        raise UsageError(f"{location}: {scheme}:// is not supported: {WRITTEN}")
    bucket, _, key = rest.partition("/")
    if scheme == "hf":
        if not (match := HUB.fullmatch(rest)):
            raise UsageError(f"{location} names no data set: hf://datasets/OWNER/NAME@REVISION/path")
        bucket, key = match[1], match[2] or ""
    if not bucket:
        raise UsageError(f"{location} names no bucket: {WRITTEN}")
    return scheme, bucket, key.strip("/")


def is_read_only(location: str) -> bool:
    return location.partition("://")[0] in READ_ONLY


def refuse_read_only(location: str) -> None:
    """Raises UsageError where files can neither be written nor listed."""
    if is_read_only(location):
        raise UsageError(f"{location} can be read file by file, but neither listed nor written: {WRITTEN}")


def get_range(location: str, offset: int, size: int) -> tuple[bytes, int, str | None]:
    """Returns a part of an object, or what there is of it, the size of the whole, and its ETag."""
    with _opened(location) as place:
        if size:
            answer = obstore.get(*place, options={"range": (offset, offset + size)})
            content, meta = bytes(answer.bytes()), answer.meta
        else:
            # HTTP has no empty range.
            content, meta = b"", obstore.head(*place)
    return content, meta["size"], meta["e_tag"]


def stream(location: str) -> Iterator[bytes]:
    with _opened(location) as place:
        yield from map(bytes, obstore.get(*place).stream(min_chunk_size=PIECE_BYTES))


def get(location: str) -> tuple[bytes, Version]:
    with _opened(location) as place:
        answer = obstore.get(*place)
        return bytes(answer.bytes()), _version(answer.meta)


def open_object(location: str) -> BinaryIO:
    return io.BufferedReader(_Object(location), buffer_size=1 << 20)


def put(
    location: str, content: bytes | Path, mode: Literal["overwrite", "create"] | Version = "overwrite"
) -> Version:
    """Writes bytes or a local file. A conditional write is not repeated if its connection broke, because then
    it is not known whether it was done.

    Raises:
        FileExistsError: if there is an object already (``create``), or another one or none (a version).
    """
    how: Any = mode
    with _changed(location) as place:
        try:
            return _version(obstore.put(*place, content, mode=how, chunk_size=PIECE_BYTES))
        except (AlreadyExistsError, PreconditionError, *NOT_FOUND) as error:
            # Who replaces an object may find none; else it is the bucket that is missing.
            unexpected = isinstance(error, NOT_FOUND) and isinstance(mode, str)
            if unexpected or NO_BUCKET.search(str(error)):
                raise _failure(location, error) from error
    raise FileExistsError(f"{location} exists already, or was written by another process")


def put_whole(location: str, content: bytes, *, new: bool = False) -> None:
    """Writes an object, and looks whether it has arrived whole.

    Raises:
        FileExistsError: if it is to be `new`, and there is another one.
    """
    began = time.monotonic()
    for attempt in range(ATTEMPTS):
        try:
            put(location, content, "create" if new else "overwrite")
            break
        except FileExistsError:
            # Equal content means that an attempt met what the one before had written.
            if get(location)[0] != content:
                raise FileExistsError(f"{location} exists already") from None
            break
        except OSError:
            if not new or attempt == ATTEMPTS - 1 or time.monotonic() - began > TIMEOUT_S:
                raise
            time.sleep(min(PAUSE_S, 0.1 * 2**attempt))
    if (found := head(location)) != len(content):
        if content.startswith(get(location)[0]):  # cut off, and not of another writer
            delete_objects(location)
        raise OSError(f"{location} has {found} bytes after {len(content)} were written")


def head(location: str) -> int | None:
    with suppress(FileNotFoundError), _opened(location) as (store, key):
        return obstore.head(store, key)["size"] if key else None


def written_s(location: str) -> float:
    """Returns when an object was written, in seconds since the epoch by the clock of its storage."""
    with _opened(location) as (store, key):
        return obstore.head(store, key)["last_modified"].timestamp()


def list_names(location: str) -> list[str]:
    with _changed(location) as (store, key):
        found = obstore.list_with_delimiter(store, key or None)
    paths = [*found["common_prefixes"], *(each["path"] for each in found["objects"])]
    return sorted({path.rpartition("/")[2] for path in paths if path != key})


def list_files(location: str) -> dict[str, int]:
    with _changed(location) as (store, key):
        found = {each["path"]: each["size"] for each in obstore.list(store, key or None).collect()}
        # A console makes an empty object for a folder.
        folders = {key, *(path.rpartition("/")[0] for path in found)}
        folders |= _folders(store, (path for path, size in found.items() if not size and path not in folders))
    below = len(key) + 1 if key else 0
    return dict(sorted((path[below:], size) for path, size in found.items() if path not in folders))


def _folders(store: Any, empty: Iterable[str]) -> set[str]:
    """Returns which of these empty objects stand for a folder: their keys end with a slash, which listings
    of obstore do not show.
    """

    def is_folder(path: str) -> bool:
        with suppress(BaseError):  # who may list objects may not read all of them
            try:
                obstore.head(store, path)
            except NOT_FOUND:
                return True
        return False

    paths = list(empty)
    with ThreadPoolExecutor(HEADS) as pool:
        return {path for path, found in zip(paths, pool.map(is_folder, paths), strict=True) if found}


def delete_objects(location: str) -> None:
    """Deletes an object, and those below it; none of them may be there."""
    with _changed(location) as (store, key):
        if not key:
            raise UsageError(f"{location} is a whole bucket, which is not deleted")
        found = [each["path"] for each in obstore.list(store, key).collect()]
        try:
            obstore.delete(store, found)
        except NOT_FOUND:  # another process deletes there, too
            for path in found:
                with suppress(*NOT_FOUND):
                    obstore.delete(store, path)
        with suppress(*NOT_FOUND):
            obstore.delete(store, key)


def abort_multiparts(location: str, containing: str) -> None:
    """Aborts unfinished uploads to S3. Other storages do not list theirs."""
    scheme, bucket, key = parse(location)
    if scheme == "s3":
        with _opened(location):
            pages = s3().get_paginator("list_multipart_uploads").paginate(Bucket=bucket, Prefix=f"{key}/")
            for upload in (upload for page in pages for upload in page.get("Uploads", ())):
                if containing in upload["Key"]:
                    s3().abort_multipart_upload(Bucket=bucket, Key=upload["Key"], UploadId=upload["UploadId"])


class _Object(io.RawIOBase):
    """An object that is read by ranges."""

    def __init__(self, location: str) -> None:
        self._location, self._at = location, 0
        self._size = get_range(location, 0, 0)[1]

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + (0, self._at, self._size)[whence]
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(len(buffer), self._size - self._at))
        content = get_range(self._location, self._at, length)[0] if length else b""
        buffer[: len(content)] = content
        self._at += len(content)
        return len(content)


@contextmanager
def _opened(location: str) -> Iterator[tuple[Any, str]]:
    """Yields the store of an object, and its key. All errors of libraries within the block are raised as
    OSError, with the location; of a missing file FileNotFoundError, of a missing bucket UsageError.
    """
    scheme, bucket, key = parse(location)
    try:
        yield _open(scheme, bucket), key
    except NOT_FOUND as error:
        if NO_BUCKET.search(str(error)):
            raise _failure(location, error) from error
        raise FileNotFoundError(f"no such file: {location}") from error
    except UsageError:
        raise
    except ValueError as error:  # of a key that no storage has
        raise UsageError(f"{location}: {_said(error)}") from error
    except (BaseError, BotoCoreError, ClientError) as error:
        raise _failure(location, error) from error


@contextmanager
def _changed(location: str) -> Iterator[tuple[Any, str]]:
    """As `_opened`, for what needs a storage that is more than a web server."""
    refuse_read_only(location)
    with _opened(location) as place:
        yield place


def _failure(location: str, error: Exception) -> Exception:
    """Returns what a request that failed is raised as."""
    scheme, bucket, _ = parse(location)
    if NO_BUCKET.search(str(error)):
        return UsageError(
            f"{scheme}://{bucket}: there is no such {'container' if scheme == 'az' else 'bucket'}"
        )
    # Without credentials, obstore asks a server beside the machine for those of its account.
    hint = f"; {how_to_sign(scheme)}" if "token request" in str(error) and scheme in PUBLIC else ""
    return OSError(f"{location}: {_said(error)}{hint}")


def _said(error: Exception) -> str:
    """Returns an error's message in one line, without the debug output of obstore, and with a storage's
    answer in words rather than in XML.
    """

    def words(answer: re.Match[str]) -> str:
        found = (re.search(f"<{tag}>(.*?)</{tag}>", answer[0], re.DOTALL) for tag in ("Code", "Message"))
        return ": ".join(match[1].strip().partition("\n")[0] for match in found if match)

    return " ".join(ANSWER.sub(words, str(error).partition("Debug source:")[0]).split())


def _version(meta: Mapping[str, Any]) -> Version:
    return {name: meta[name] for name in ("e_tag", "version") if meta[name] is not None}


@cache
def s3() -> Any:
    """The client of S3 for what obstore cannot do."""
    # Its own pauses double up to 20 s.
    retries: Any = {"mode": "standard", "total_max_attempts": min(8, ATTEMPTS)}
    signed = {"signature_version": UNSIGNED} if is_public("s3") else {}
    return boto3.client("s3", config=Config(read_timeout=TIMEOUT_S, retries=retries, **signed))


def forget() -> None:
    """Forgets all connections: the next ones see the environment and the limits as they are then."""
    s3.cache_clear()
    _open.cache_clear()


@cache
def _open(scheme: str, bucket: str) -> Any:
    return STORES[scheme](bucket)


def _options(**headers: str) -> Any:
    # Up to `base` times the pause before: at 2 they would not grow, on average.
    pauses = {"init_backoff": timedelta(seconds=0.1), "max_backoff": timedelta(seconds=PAUSE_S), "base": 8}
    return {
        "client_options": {
            "allow_http": True,
            "read_timeout": timedelta(seconds=TIMEOUT_S),
            "timeout": timedelta(hours=1),  # of a whole request
            "default_headers": headers,
        },
        "retry_config": {
            "max_retries": ATTEMPTS,
            "retry_timeout": timedelta(seconds=2 * TIMEOUT_S),
            "backoff": pauses,
        },
    }


def _s3_store(bucket: str) -> S3Store:
    endpoint = os.environ.get("AWS_ENDPOINT_URL_S3", os.environ.get("AWS_ENDPOINT_URL"))
    where: dict[str, Any] = {} if endpoint is None else {"endpoint": endpoint}
    return S3Store(
        bucket,
        **where,
        **signing("s3", bucket),
        region=_region(bucket, endpoint),
        virtual_hosted_style_request=endpoint is None,
        **_options(),
    )


def _region(bucket: str, endpoint: str | None) -> str:
    """Asks S3, which answers even who may not list the bucket. Other servers take what the variables say."""
    if endpoint:
        return os.environ.get("AWS_REGION") or boto3.Session().region_name or "us-east-1"
    try:
        answer = s3().head_bucket(Bucket=bucket)
    except ClientError as error:
        answer = error.response
    return answer["ResponseMetadata"]["HTTPHeaders"].get("x-amz-bucket-region", "us-east-1")


def _hub(data_set: str) -> HTTPStore:
    """A revision of a data set on the hub. Its token goes to no other host that the hub redirects to."""
    name, _, revision = data_set.partition("@")
    host = os.environ.get("HF_ENDPOINT") or "https://huggingface.co"
    token = os.environ.get("HF_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return HTTPStore(f"{host.rstrip('/')}/{name}/resolve/{revision or 'main'}", **_options(**headers))


STORES: Mapping[str, Callable[[str], Any]] = {
    "s3": _s3_store,
    "gs": lambda bucket: GCSStore(bucket, **signing("gs", bucket), **_options()),
    "az": lambda container: AzureStore(container, **signing("az", container), **_options()),
    "https": lambda host: HTTPStore(f"https://{host}", **_options()),
    "http": lambda host: HTTPStore(f"http://{host}", **_options()),
    "hf": _hub,
}
READ_ONLY = ("https", "http", "hf")

"""A bucket of an S3 server that fails on demand."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from orchestrator import storage
from tests.orchestrator.faulty_proxy import FaultyProxy, Kind


@dataclass(frozen=True)
class Bucket:
    name: str
    proxy: FaultyProxy
    environment: dict[str, str]

    def uri(self, *names: str) -> str:
        return storage.join(f"s3://{self.name}", *names)

    def all_keys(self) -> list[str]:
        return [found["Key"] for found in storage._s3().list_objects_v2(Bucket=self.name).get("Contents", [])]

    @contextmanager
    def failing(self, kind: Kind, *what: Any, attempts: int = 1, **when: float) -> Iterator[None]:
        """As the proxy does; meanwhile a request is tried once, for pauses between attempts take seconds."""
        storage.ATTEMPTS = attempts
        connect_anew()
        with self.proxy.failing(kind, *what, **when):
            yield
        storage.ATTEMPTS = 3
        connect_anew()

    def uploads(self) -> list[str]:
        """Keys of those that were begun and not completed."""
        found = storage._s3().list_multipart_uploads(Bucket=self.name)
        return [upload["Key"] for upload in found.get("Uploads", [])]


def connect_anew() -> None:
    storage._s3.cache_clear()
    storage._file_system.cache_clear()
    storage._store.cache_clear()

"""Buckets of object storages that fail on demand."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from orchestrator import storage, stores
from tests.orchestrator.faulty_proxy import FaultyProxy, Kind


@dataclass(frozen=True)
class Bucket:
    name: str
    proxy: FaultyProxy
    environment: dict[str, str]
    scheme: str = "s3"

    def uri(self, *names: str) -> str:
        return storage.join(f"{self.scheme}://{self.name}", *names)

    def all_keys(self) -> list[str]:
        return [*storage.files(self.uri())]

    @contextmanager
    def failing(self, kind: Kind, *what: Any, attempts: int = 1, **when: float) -> Iterator[None]:
        """As the proxy does; meanwhile a request is tried once, for pauses between attempts take seconds."""
        stores.ATTEMPTS = attempts
        stores.forget()
        with self.proxy.failing(kind, *what, **when):
            yield
        stores.ATTEMPTS = 3
        stores.forget()

    def uploads(self) -> list[str]:
        """Keys of those that were begun and not completed."""
        found = stores.s3().list_multipart_uploads(Bucket=self.name)
        return [upload["Key"] for upload in found.get("Uploads", [])]

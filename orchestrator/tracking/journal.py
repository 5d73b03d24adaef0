"""Entries on local disk, in the order of their making, until they are delivered.

An entry survives the death of the process as soon as `append` returns, and is read again by the next one.
"""

import json
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

Entry = dict[str, Any]
KEPT = 1 << 20  # bytes of delivered entries; beyond, the file starts anew as soon as all are


class Journal:
    """For one process at a time, of which one thread reads. Attributes:
    waiting: entries that are not delivered.
    """

    def __init__(self, folder: Path) -> None:
        self._path, self._position = folder / "journal.jsonl", folder / "position"
        self._file = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600)
        self._guard = threading.Lock()
        self._size = self._mend()
        delivered = int(self._position.read_text()) if self._position.exists() else 0
        # killed after the file started anew, before the position did
        self._delivered = delivered if delivered <= self._size else 0
        self._read = self._delivered
        with self._path.open("rb") as file:
            file.seek(self._delivered)
            self.waiting = sum(1 for _ in file)

    def append(self, entry: Mapping[str, Any]) -> None:
        """Raises OSError, and leaves no trace, if the disk is full."""
        line = json.dumps(entry).encode() + b"\n"
        with self._guard:
            if os.write(self._file, line) < len(line):
                os.ftruncate(self._file, self._size)
                raise OSError(f"no space for {self._path}")
            self._size += len(line)
            self.waiting += 1

    def read(self, most: int) -> list[Entry]:
        """The first entries that are not delivered."""
        with self._guard, self._path.open("rb") as file:
            file.seek(self._delivered)
            lines = [line for line, _ in zip(file, range(most), strict=False)]
        self._read = self._delivered + sum(map(len, lines))
        return [json.loads(line) for line in lines]

    def advance(self, count: int) -> None:
        """All `count` entries of the last `read` are delivered."""
        with self._guard:
            self._delivered = self._read
            self.waiting -= count
            if self._delivered == self._size > KEPT:
                os.ftruncate(self._file, 0)
                self._size = self._delivered = 0
            temporary = self._position.with_suffix(".tmp")
            temporary.write_text(str(self._delivered))
            temporary.replace(self._position)

    def close(self) -> None:
        os.close(self._file)

    def _mend(self) -> int:
        """Cuts off the end of a line that was never whole; bytes that stay."""
        content = self._path.read_bytes()
        size = content.rfind(b"\n") + 1
        os.ftruncate(self._file, size)
        return size

"""The outbox of tools that look, and now and then write a tag or a page: at once, or not at all."""

import tempfile
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

from orchestrator.errors import UsageError
from orchestrator.tracking.delivery import Delivery


class Direct:
    def __init__(self, delivery: Delivery, server: str) -> None:
        """`server`: as messages call it."""
        self.process = uuid.uuid4().hex
        self._delivery = delivery
        self._server = server

    def put(self, op: str, run: str, **content: Any) -> None:
        """Raises UsageError if the server does not answer, or refuses."""
        try:
            self._delivery.deliver({run: deque([{"op": op, "run": run, **content}])}, _refuse)
        except UsageError:
            raise
        except Exception as error:  # whatever the many back ends raise
            raise UsageError(f"MLflow at {self._server} does not answer: {error}") from error

    def put_file(self, op: str, run: str, name: str, fill: Callable[[Path], object]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder, Path(name).name)
            fill(file)
            self.put(op, run, name=name, file=str(file))

    def run_id(self, run: str) -> str:
        return self._delivery.ids[run]

    def flush(self, timeout_s: float | None) -> int:
        return 0

    def close(self, timeout_s: float | None) -> int:
        return 0


def _refuse(what: dict[str, Any], reason: str) -> None:
    raise UsageError(f"MLflow refuses {what['op']}: {reason}")

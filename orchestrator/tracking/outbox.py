"""What the driver tells MLflow, kept on disk and delivered in order by one thread, whatever the server does.

An entry may be delivered again after a failure or a restart: `delivery.py` sees that this changes nothing.
"""

import fcntl
import json
import logging
import shutil
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

from orchestrator.errors import UsageError
from orchestrator.tracking.delivery import Delivery, Pending
from orchestrator.tracking.journal import Journal

logger = logging.getLogger(__name__)

LINGER_S = 1.0  # entries of one second share requests
WINDOW = 2000  # entries that are looked at together
FIRST_PAUSE_S, LONGEST_PAUSE_S = 0.1, 10.0
FILES, REFUSED = "files", "refused.jsonl"


class Outbox:
    """Attributes:
    folder: where entries, files and refusals lie.
    process: of this object alone; tells its entries from those of an earlier process.
    changed: guards and announces what has been delivered.
    """

    def __init__(self, folder: Path) -> None:
        """Raises UsageError if another process has the folder."""
        (folder / FILES).mkdir(parents=True, exist_ok=True)
        self.folder = folder
        self.process = uuid.uuid4().hex
        self._lock = _locked(folder)
        self._journal = Journal(folder)
        self._stop = threading.Event()
        self._hurry = 0
        self.changed = threading.Condition()
        self._refused: set[str] = set()
        if self._journal.waiting:
            logger.info("%d entries for MLflow of an earlier process go first", self._journal.waiting)
        else:
            for left in (folder / FILES).iterdir():  # killed before their entries were written
                shutil.rmtree(left)

    def start(self, delivery: Delivery, server: str) -> None:
        """`server`: as messages call it."""
        self._delivery, self._server = delivery, server
        self._thread = threading.Thread(target=self._run, daemon=True, name="outbox")
        self._thread.start()

    def put(self, op: str, run: str, **content: Any) -> None:
        with self.changed:
            self._journal.append({"op": op, "run": run, **content})
            self.changed.notify_all()

    def put_file(self, op: str, run: str, name: str, fill: Callable[[Path], object]) -> None:
        """`fill` writes the file to the path that it is given; it stays there until it is delivered."""
        file = self.folder / FILES / uuid.uuid4().hex / Path(name).name
        file.parent.mkdir()
        fill(file)
        self.put(op, run, name=name, file=str(file.relative_to(self.folder)))

    def run_id(self, run: str) -> str:
        """Waits until the run is there. Raises UsageError if MLflow refuses it, or nobody waits any more."""
        ids, refused = self._delivery.ids, self._delivery.refused
        self._wait_for(lambda: run in ids or run in refused or self._stop.is_set(), None)
        if run in refused:
            raise UsageError(f"MLflow refuses the run: see {self.folder}/{REFUSED}")
        if run not in ids:
            raise UsageError(f"MLflow at {self._server} has not heard of the run yet: see {self.folder}")
        return ids[run]

    def _wait_for(self, what: Callable[[], bool], timeout_s: float | None) -> bool:
        """Hurries until `what` is true of what has been delivered; False after the timeout."""
        with self.changed:
            self._hurry += 1
            self.changed.notify_all()
            try:
                return self.changed.wait_for(what, timeout_s)
            finally:
                self._hurry -= 1

    def flush(self, timeout_s: float | None) -> int:
        self._wait_for(lambda: not self._journal.waiting or self._stop.is_set(), timeout_s)
        return self._journal.waiting

    def close(self, timeout_s: float | None) -> int:
        """Waits as long as something arrives within `timeout_s`; entries that stay on disk."""
        if self._stop.is_set():
            return self._journal.waiting
        before = self._journal.waiting
        left = self.flush(timeout_s)
        while 0 < left < before:
            left, before = self.flush(timeout_s), left
        if left:
            logger.warning(
                "MLflow at %s does not answer: %d entries wait in %s, and the same command delivers them",
                self._server,
                left,
                self.folder,
            )
        self._stop.set()
        with self.changed:
            self.changed.notify_all()
        self._thread.join(timeout=1)  # it may hang in a request; it gives the folder back when it ends
        return left

    def _refuse(self, what: dict[str, Any], reason: str) -> None:
        with (self.folder / REFUSED).open("a") as file:
            file.write(json.dumps(what | {"reason": reason}) + "\n")
        if what["run"] not in self._refused:
            self._refused.add(what["run"])
            logger.error("MLflow refuses %s: %s; kept in %s", what["op"], reason, file.name)

    def _run(self) -> None:
        try:
            while self._wait_for_entries():
                entries = self._journal.read(WINDOW)
                pending: Pending = {}
                for entry in entries:
                    pending.setdefault(entry["run"], deque()).append(entry)
                if not self._deliver(pending):
                    return
                with self.changed:
                    self._journal.advance(len(entries))
                    self.changed.notify_all()
                for entry in entries:
                    if "file" in entry:
                        shutil.rmtree((self.folder / entry["file"]).parent, ignore_errors=True)
        finally:
            with self.changed:
                self._stop.set()
                self.changed.notify_all()
            self._journal.close()
            self._lock.close()

    def _wait_for_entries(self) -> bool:
        """False when it is time to end."""
        with self.changed:
            self.changed.wait_for(lambda: self._journal.waiting or self._stop.is_set())
            self.changed.wait_for(lambda: self._hurry or self._stop.is_set(), LINGER_S)
        return not self._stop.is_set()

    def _deliver(self, pending: Pending) -> bool:
        """Until all is; False when it is time to end."""
        pause_s, failures, since = FIRST_PAUSE_S, 0, time.monotonic()
        while not self._stop.is_set():
            try:
                self._delivery.deliver(pending, self._refuse)
            except Exception as error:  # whatever the many back ends raise
                failures += 1
                if failures == 2:  # the first may be a connection that was idle for too long
                    logger.warning(
                        "MLflow at %s does not answer (%s); what it is told waits in %s",
                        self._server,
                        (str(error).strip() or repr(error)).splitlines()[0][:300],
                        self.folder,
                    )
                self._stop.wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
            else:
                if failures > 1:
                    away, waited = time.monotonic() - since, self._journal.waiting
                    logger.warning(
                        "MLflow at %s is back after %.0f s; %d entries waited", self._server, away, waited
                    )
                return True
        return False


def _locked(folder: Path) -> TextIO:
    """Held until it is closed, or its process dies."""
    file = (folder / "lock").open("w")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.close()
        raise UsageError(
            f"another process is running with {folder.parent}: stop it, or wait for it"
        ) from None
    return file

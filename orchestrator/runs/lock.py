"""Keeps two processes from working in the directory of one run or sweep.

On a local path the lock is one of the file system, which ends with the process. In an object storage it is
an object that its holder renews: a lease. Each write is conditional on the version of the one before, so of
two processes one succeeds, and no two clocks are compared: a holder counts as dead if another process sees no
new version for `LEASE_S` seconds of its own clock.

Either way the file says who holds the lock, and is touched or written again as a sign of life; who releases
it empties it. So `holder_of` tells at once who works in a directory, and who was killed there.
"""

import fcntl
import json
import logging
import os
import signal
import socket
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import IO, Any, NamedTuple

from orchestrator import storage
from orchestrator.errors import UsageError
from orchestrator.runs import notice
from orchestrator.runs.run_directory import LOCK
from orchestrator.storage import Version

IN_USE = "another process works in {}{}: wait for it, or end it"
TRIES = 20  # conditional writes that fail, although nobody else has written
LEASE_S = 90.0  # a lease is renewed nine times in this time
RELEASED = b"{}"
REPORT = "report"  # below a sweep: whoever draws and sends it holds the lock of this folder too
REPORT_S = 600.0  # that a command waits for a report

log = logging.getLogger(__name__)


class InUse(UsageError):
    """Another process works in the directory."""


class Holder(NamedTuple):
    """Who holds the lock of a directory, or held it when it was killed."""

    host: str
    pid: int
    lives: bool


def holder_of(directory: str) -> Holder | None:
    """Returns whose the lock of a directory is, without waiting for it or disturbing its holder; None if it
    was released or never taken.

    In an object storage a holder lives if it has renewed its lease within `LEASE_S`, as far as two clocks
    agree. So it is on a local path for a holder on another machine whose lock this one does not see.
    """
    path = storage.join(directory, LOCK)
    try:
        content = storage.read_bytes(path)
        recent = storage.age_s(path) < LEASE_S
    except FileNotFoundError:
        return None
    said = _parsed(content)
    lives = recent and "host" in said
    if storage.is_local(directory):
        lives = _is_locked(path) or (lives and said["host"] != socket.gethostname())
    if not lives and "host" not in said:
        return None
    return Holder(said.get("host", ""), said.get("pid", 0), lives)


def _is_locked(path: str) -> bool:
    with storage.open_to_read(path) as file:
        try:
            storage.lock_file(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except UsageError:  # nothing can be locked, and so nobody works there
            return False
    return False


def _parsed(content: bytes) -> dict[str, Any]:
    with suppress(ValueError):
        return json.loads(content)
    return {}


@contextmanager
def locked(directory: str, *, fresh: bool = False) -> Iterator[str | None]:
    """Keeps other processes out of the directory of a run or a sweep while the block lasts.

    With `fresh`, a directory that is there is moved aside first, and its new name is yielded.

    If a holder was away for longer than its lease, another process may have taken over: then the block is
    interrupted, as by Ctrl-C, and this process writes nothing in the directory any more.

    Raises:
        InUse: if another process works there, which takes up to `LEASE_S` / 9 to see in an
            object storage; or if another process has taken over.
    """
    aside = None
    if fresh:
        with locked(directory):
            aside = move_aside(directory)
    lock = _file_lock if storage.is_local(directory) else _lease
    with lock(directory, storage.join(directory, LOCK)):
        yield aside


def move_aside(directory: str) -> str | None:
    """Renames the directory to a free name, and returns that name; None if it is empty.

    Raises:
        UsageError: in an object storage, which has no rename.
    """
    if set(storage.names(directory)) <= {LOCK}:
        return None
    if not storage.is_local(directory):
        raise UsageError(
            f"`mode=fresh` cannot move {directory} aside: an object storage has no rename; use another `name`"
        )
    aside = next(path for n in range(1, 1_000_000) if not os.path.exists(path := f"{directory}.old-{n}"))
    os.rename(directory, aside)
    return aside


def wait_for_report(directory: str) -> None:
    """Waits while another command draws the sweep and sends it: it needs the directory for some seconds.

    Raises:
        InUse: if it needs more than `REPORT_S`.
    """
    folder, began_s, waiting = storage.join(directory, REPORT), time.monotonic(), False
    while LOCK in storage.names(folder):
        try:
            with locked(folder):
                return
        except InUse:
            if time.monotonic() - began_s > REPORT_S:
                raise
            if not waiting:
                log.info("waiting for a report that is drawn in %s", directory)
            waiting = True
            time.sleep(0.5)


@contextmanager
def _file_lock(directory: str, path: str) -> Iterator[None]:
    """A lock of the file system, which ends with the process."""
    path, is_ours = path.removeprefix("file://"), False
    while not is_ours:
        storage.make_folder(directory)
        with open(path, "a") as file:
            _take(file, directory)
            # Another process may have moved the directory aside after this one had opened the file.
            with suppress(FileNotFoundError):
                is_ours = os.path.samestat(os.fstat(file.fileno()), os.stat(path))
            if is_ours:
                with _signs_of_life(file):
                    yield


def _take(file: IO[str], directory: str) -> None:
    """Locks the file. Raises InUse if another process has; one that only looks has it for no time."""
    for patience_s in (0.05, 0.2, 0.0):
        try:
            return storage.lock_file(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(patience_s)
    holder = holder_of(directory)
    who = f" (process {holder.pid} on {holder.host})" if holder and holder.host else ""
    raise InUse(IN_USE.format(directory, who))


@contextmanager
def _signs_of_life(file: IO[str]) -> Iterator[None]:
    """Says in the locked file who has it, touches it from a thread, and empties it when the block ends."""
    ended = threading.Event()

    def touch() -> None:
        while not ended.wait(LEASE_S / 9):
            with suppress(OSError):
                os.utime(file.fileno())

    with suppress(OSError):  # of a full disk
        file.truncate(0)
        file.write(json.dumps({"host": socket.gethostname(), "pid": os.getpid()}))
        file.flush()
    thread = threading.Thread(target=touch, daemon=True, name="lock")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        with suppress(OSError):
            file.truncate(0)


@contextmanager
def _lease(directory: str, path: str) -> Iterator[None]:
    """A lease in an object storage, which a thread renews."""
    lease = _Lease(directory, path)
    lease.take()
    storage.allow_writes(directory)
    ended, worker = threading.Event(), threading.current_thread()
    lost: list[InUse] = []

    def renew() -> None:
        while not ended.wait(LEASE_S / 9):
            try:
                lease.renew()
            except InUse as error:
                storage.refuse_writes(directory)
                lost.append(error)
                log.error("%s", error)
                notice.refuse()
                if worker is threading.main_thread() and worker.ident:
                    # Unlike `_thread.interrupt_main` this also ends a system call that the thread waits in.
                    signal.pthread_kill(worker.ident, signal.SIGINT)
                return
            except OSError as error:  # the next attempt may succeed
                log.warning("the lock of %s could not be renewed: %s", directory, error)

    thread = threading.Thread(target=renew, daemon=True, name="lease")
    thread.start()
    try:
        try:
            yield
        finally:
            ended.set()
            thread.join()
            if not lost:
                with suppress(InUse, OSError):
                    lease.release()
    except BaseException:
        if lost:
            raise lost[0] from None
        raise
    if lost:
        raise lost[0]


class _Lease:
    def __init__(self, directory: str, path: str) -> None:
        self._directory, self._path = directory, path
        self._holder = uuid.uuid4().hex
        self._renewals = 0
        self._version: Version | None = None  # of what this process wrote, or may replace

    def take(self) -> None:
        """Makes this process the holder. Raises InUse if another process is, and lives."""
        for _ in range(TRIES):
            try:
                self._version = storage.write_if(self._path, self._content(), self._version)
                return
            except FileExistsError:
                self._version = self._free()
        raise UsageError(self._unwritable())

    def renew(self) -> None:
        """Raises InUse if another process has taken over."""
        self._write(self._content())

    def release(self) -> None:
        self._write(RELEASED)

    def _unwritable(self) -> str:
        return (
            f"{self._path} could not be written {TRIES} times, though nobody else writes it: the storage has"
            " no conditional writes, use another `storage`"
        )

    def _write(self, content: bytes) -> None:
        for _ in range(TRIES):
            try:
                self._version = storage.write_if(self._path, content, self._version)
                return
            except FileExistsError:
                pass
            try:
                there, self._version = storage.read_with_version(self._path)
            except FileNotFoundError:  # deleted by hand
                self._version = None
                continue
            # Of this process: an attempt that came late, or whose answer was lost.
            if _parsed(there).get("holder") != self._holder:
                raise InUse(
                    f"another process has taken over {self._directory}, because this one was away for more"
                    f" than {LEASE_S:.0f} s: it stops, and writes nothing there any more"
                )
        raise OSError(self._unwritable())

    def _free(self) -> Version | None:
        """Waits until the lock can be taken, and returns its version; None if it is gone.

        Raises:
            InUse: as soon as the holder renews the lock.
        """
        seen, since = Version(), 0.0
        while True:
            try:
                content, version = storage.read_with_version(self._path)
            except FileNotFoundError:
                return None
            other = _parsed(content)  # empty: of a directory that lay on a disk
            if other.get("holder") in (None, self._holder):
                return version
            if not seen:
                seen, since = version, time.monotonic()
                log.warning(
                    "%s is locked by a process on %s, which may have been killed: waiting up to %.0f s for a"
                    " sign of life of it",
                    self._directory,
                    other["host"],
                    LEASE_S,
                )
            elif version != seen:
                raise InUse(
                    f"a process on {other.get('host')} works in {self._directory}: wait for it, or end it"
                )
            elif time.monotonic() - since > LEASE_S:
                log.warning("no sign of life for %.0f s: taking over %s", LEASE_S, self._directory)
                return version
            time.sleep(LEASE_S / 45)

    def _content(self) -> bytes:
        """Returns other bytes at each call, so that the version changes."""
        self._renewals += 1
        return json.dumps(
            {
                "holder": self._holder,
                "host": socket.gethostname(),
                "pid": os.getpid(),
                "renewals": self._renewals,
            }
        ).encode()

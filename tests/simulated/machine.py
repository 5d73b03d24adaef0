"""A machine whose processes, disk, tracker and clock fail at chosen operations, in this process.

An operation is a write to the disk below `home`, or a request to the tracker. A killed process raises
`Killed` there, which nothing catches, and from then on at each further operation, so that what it does while
it unwinds reaches nothing.
"""

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal
from unittest.mock import patch

from mlflow.exceptions import MlflowException
from mlflow.protos.databricks_pb2 import INTERNAL_ERROR, PERMISSION_DENIED

from orchestrator import storage
from orchestrator.runs import notice
from orchestrator.runs.lock import InUse, locked
from orchestrator.tracking import base

Component = Literal["driver", "trial", "tracker", "storage", "lock", "signal", "clock"]
WAYS: dict[Component, tuple[str, ...]] = {
    "driver": ("killed before", "killed after", "power"),
    "trial": ("killed before", "killed after"),
    "tracker": ("refuses", "is away", "fails", "loses its answer"),
    "storage": ("full", "denied", "error", "late error"),
    "lock": ("held", "wanted"),
    "signal": ("term", "interrupt"),
    "clock": ("ahead", "back"),
}
OPERATION_S = 0.01


class Killed(BaseException):
    """The driver's process is gone."""


class TrialKilled(BaseException):
    """The trial's process is gone, which the driver sees."""


@dataclass(frozen=True)
class Fault:
    """Comes `after` so many operations since the fault before, of the kind that it disturbs; a lock is held
    when the next command starts. `times`: operations in a row, where it lasts.
    """

    component: Component
    way: str
    after: int
    times: int = 1


class Machine:
    """Has one directory whose commands are disturbed.

    Attributes:
        was_refused: such a request came.
        fired: operations that went wrong so far, and the times that a process was told or killed.
        in_trial: what runs now is the process of a trial.
    """

    def __init__(self, home: Path, directory: str, faults: Sequence[Fault], refused: str = "") -> None:
        self.home, self.directory = f"{os.path.realpath(home)}/", directory
        self.refused = refused  # a request that the tracker refuses for ever
        self.faults = list(faults)
        self.fired = self.operations = self.steps = 0
        self.in_trial = self.was_refused = False
        self._count = 0
        self._now_s, self._skew_s = 1_000_000.0, 0.0
        self._dead = self._trial_dead = False
        self._lasting: Fault | None = None
        self._left = 0
        self._appended: dict[str, int] = {}  # path -> bytes on the disk
        self._descriptors: dict[int, str] = {}
        self._locks: dict[str, bytes] = {}

    @property
    def idle(self) -> bool:
        return self._lasting is None

    def calm(self) -> None:
        """Ends all faults but what is refused for ever."""
        self.faults.clear()
        self._lasting = None

    def wait(self, seconds: float) -> None:
        self._now_s += seconds

    def live(self, command: Callable[[], None]) -> BaseException | None:
        """Runs a command as a process; returns how it was ended, None if it came to its end."""
        self._dead = self._trial_dead = self.in_trial = False
        self._locks.clear()
        base._unsent.clear()
        held = ExitStack()
        with patch.object(notice, "_given", False), patch.object(notice, "_training", 0), held:
            if self.faults and self.faults[0].way == "held":
                self._next()
                held.enter_context(locked(self.directory))
            try:
                command()
                ended = None
            except (Exception, Killed, SystemExit, KeyboardInterrupt) as error:
                ended = error
        for descriptor in list(self._descriptors):
            with suppress(OSError):
                os.close(descriptor)
        self._descriptors.clear()
        for path, content in self._locks.items():  # which a killed process does not empty
            Path(path).write_bytes(content)
        return ended

    def act(self, kind: Literal["storage", "tracker"], name: str, effect: Callable[[], Any]) -> Any:
        """Does an operation, unless something else happens there."""
        if self._dead:
            raise Killed
        if self._trial_dead and self.in_trial and kind == "storage":
            raise TrialKilled
        self._now_s += OPERATION_S
        self.operations += 1
        if kind == "tracker" and name == self.refused:
            self.was_refused = True
            raise MlflowException("no right", PERMISSION_DENIED)
        if not self._lasting and self.faults and self.faults[0].way != "held":
            fault = self.faults[0]
            fits = {"storage": kind == "storage", "tracker": kind == "tracker"}
            fits["trial"] = self.in_trial and kind == "storage"
            self._count += fits.get(fault.component, True)
            if self._count > fault.after:
                self._next()
                if fault.component in ("storage", "tracker"):
                    self._lasting, self._left = fault, fault.times
                else:
                    return self._happens(fault, effect)
        if self._lasting and self._lasting.component == kind:
            return self._fails(self._lasting, effect)
        return effect()

    def _next(self) -> None:
        self.faults.pop(0)
        self._count = 0
        self.fired += 1

    def _happens(self, fault: Fault, effect: Callable[[], Any]) -> Any:
        if fault.way == "killed before" or fault.component in ("driver", "trial"):
            if fault.way != "killed before":
                effect()
            if fault.component == "trial":
                self._trial_dead = True
                raise TrialKilled
            self._die(power=fault.way == "power")
        done = effect()
        if fault.component == "clock":
            self._skew_s += 5000.0 if fault.way == "ahead" else -5000.0
        elif fault.way == "term":  # as commands answer SIGTERM
            if not notice.give():
                raise SystemExit(143)
        elif fault.way == "interrupt":
            signal.raise_signal(signal.SIGINT)
        else:
            self._want_lock()
        return done

    def _want_lock(self) -> None:
        """Another command tries to work here: it is refused, if one does."""
        path = storage.join(self.directory, "lock")
        works = bool(storage.size(path))
        self._dead, was = False, self._dead
        try:
            if works:
                with suppress(InUse), locked(self.directory):
                    raise AssertionError("two commands work in one directory")
        finally:
            self._dead = was

    def _die(self, *, power: bool) -> None:
        self._dead = True
        for folder in (self.directory, storage.join(self.directory, "report")):
            path = Path(folder, "lock")
            if path.exists():
                self._locks[str(path)] = path.read_bytes()
        if power:
            for path, size in self._appended.items():
                if os.path.exists(path) and os.path.getsize(path) > size:
                    os.truncate(path, size)
        raise Killed

    def _fails(self, fault: Fault, effect: Callable[[], Any]) -> Any:
        self.fired += 1
        self._left -= 1
        if not self._left:
            self._lasting = None
        if fault.way in ("late error", "loses its answer"):
            effect()
        raise {
            "refuses": MlflowException("not now", PERMISSION_DENIED),
            "is away": MlflowException("API request failed with exception", INTERNAL_ERROR),
            "fails": ConnectionError("reset by peer"),
            "loses its answer": MlflowException("API request timed out", INTERNAL_ERROR),
            "full": OSError(errno.ENOSPC, "No space left on device"),
            "denied": PermissionError(errno.EACCES, "Permission denied"),
            "error": OSError(errno.EIO, "Input/output error"),
            "late error": OSError(errno.EIO, "Input/output error"),
        }[fault.way]

    def trial_ended(self) -> None:
        """The driver has seen that the process of the trial is gone."""
        self._trial_dead = self.in_trial = False

    @contextmanager
    def in_place(self) -> Iterator[None]:
        """While the block lasts, this machine is the one that Python sees."""
        real_open, real_write, real_truncate, real_fsync = os.open, os.write, os.ftruncate, os.fsync

        def path_of(name: Any, folder: int | None = None) -> str:
            path = os.fspath(name)
            path = path.decode() if isinstance(path, bytes) else path
            return path if folder is None else f"{os.readlink(f'/proc/self/fd/{folder}')}/{path}"

        def ours(path: str) -> bool:
            return f"{path}/".startswith(self.home)

        def writes(name: str) -> Any:
            real = getattr(os, name)

            def changed(path: Any, *args: Any, dir_fd: int | None = None, **options: Any) -> Any:
                given = options if dir_fd is None else {**options, "dir_fd": dir_fd}
                if not ours(path_of(path, dir_fd)):
                    return real(path, *args, **given)
                if name == "mkdir" and os.path.isdir(path):
                    raise FileExistsError(errno.EEXIST, "File exists")
                return self.act("storage", name, lambda: real(path, *args, **given))

            return patch.object(os, name, changed)

        def opened(path: Any, flags: int, *args: Any, **options: Any) -> int:
            if not flags & os.O_CREAT or not ours(path_of(path)):
                return real_open(path, flags, *args, **options)
            found = self.act("storage", "open", lambda: real_open(path, flags, *args, **options))
            self._descriptors[found] = path_of(path)
            self._appended.setdefault(path_of(path), 0)
            return found

        def written(descriptor: int, content: bytes) -> int:
            if descriptor not in self._descriptors:
                return real_write(descriptor, content)
            return self.act("storage", "write", lambda: real_write(descriptor, content))

        def truncated(descriptor: int, size: int) -> None:
            if descriptor not in self._descriptors:
                return real_truncate(descriptor, size)
            return self.act("storage", "truncate", lambda: real_truncate(descriptor, size))

        def flushed(descriptor: int) -> None:
            path = os.readlink(f"/proc/self/fd/{descriptor}")
            if not ours(path):
                return real_fsync(descriptor)

            def flush() -> None:
                if path in self._appended:
                    self._appended[path] = os.path.getsize(path)

            return self.act("storage", "fsync", flush)

        def closed(descriptor: int, real: Callable[[int], None] = os.close) -> None:
            self._descriptors.pop(descriptor, None)
            real(descriptor)

        def open_file(path: Any, mode: str = "r", *args: Any, **options: Any) -> Any:
            if "w" not in mode or not ours(path_of(path)):
                return open(path, mode, *args, **options)
            return self.act("storage", "open", lambda: open(path, mode, *args, **options))

        with ExitStack() as stack:
            for each in (
                *map(writes, ("replace", "rename", "link", "unlink", "rmdir", "mkdir")),
                patch.object(os, "open", opened),
                patch.object(os, "write", written),
                patch.object(os, "ftruncate", truncated),
                patch.object(os, "fsync", flushed),
                patch.object(os, "close", closed),
                patch.object(storage, "open", open_file, create=True),
                patch.object(time, "time", lambda: 1.8e9 + self._now_s + self._skew_s),
                patch.object(time, "monotonic", lambda: self._now_s),
                patch.object(time, "sleep", self.wait),
            ):
                stack.enter_context(each)
            yield


class Requests:
    """The client of a store, each of whose requests is an operation of a machine."""

    def __init__(self, machine: Machine, client: Any) -> None:
        self._machine, self._client = machine, client

    def __getattr__(self, name: str) -> Callable[..., Any]:
        request = getattr(self._client, name)
        return lambda *args, **options: self._machine.act("tracker", name, lambda: request(*args, **options))

"""Trackers: what follows the directories of runs and sweeps, and shows them elsewhere.

A tracker is a kind of `TrackerConfig`, in a file of its own or in a plugin of the user's. Its `Follower` gets
a `Projection` of everything that a directory has, again and again while a command trains there and once more
at its end. It sends what is new, so that any process may follow a directory at any time, and repeatedly.
"""

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, NamedTuple, Self

from moe.config import Family
from orchestrator import storage
from orchestrator.errors import reason_of
from orchestrator.runs import notice
from orchestrator.runs.measurements import measurement_ids
from orchestrator.runs.run_directory import RunDir
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.tracking.projection import (
    Projection,
    Unreadable,
    project_run,
    project_study,
    project_sweep,
    project_trials,
    reading,
)

log = logging.getLogger(__name__)

EVERY_S = 5.0  # between updates
LOOK_S = 0.2  # between looks for a notice
PATIENCE_S = 30.0  # without progress of the last update, at the end of a command; for failures of one kind
AGAIN_S = 60.0  # until what was refused is tried again


class _Missing(NamedTuple):
    """A part of the run `of` that the tracker did not take at `time_s` of the monotonic clock."""

    of: str
    reason: str
    time_s: float


class Follower(ABC):
    """Keeps what a tracker shows of one directory up to date. Not thread-safe.

    A tracker defines `send`, and `is_away` where it may be away.

    Attributes:
        where: the tracker in messages, such as ``MLflow at http://..``, without passwords.
        sent: how many runs were sent: rises while the tracker answers.
    """

    where: str

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.sent = 0
        self._live = False
        self._complete: dict[str, tuple[bool, int]] = {}  # trial -> member, number of measurements
        self._missing: dict[tuple[str, str], _Missing] = {}  # directory and part
        self._failing_s: dict[str, float] = {}  # what failures of a part took in this update

    @abstractmethod
    def send(self, shown: Projection) -> None:
        """Sends what the tracker lacks of a run or a sweep. What may fail alone goes through `part`.

        Raises:
            Exception: of any type, if the tracker does not answer.
        """

    def is_away(self, error: Exception) -> bool:
        """Whether the tracker does not answer; else the error is one of what was sent."""
        return False

    def publish(self, sweep: Projection) -> None:
        """Sends what follows from a sweep and its trials at its end, such as registered models."""
        return

    def update(self, *, live: bool = False, only: Collection[str] | None = None) -> list[str]:
        """Sends what the tracker lacks, and returns what it did not take, a line for each reason.

        Args:
            live: the command that trains there is running.
            only: directories of trials, of which it may lack something.

        Raises:
            Exception: of any type, if the tracker does not answer.
        """
        self._live = live
        self._failing_s.clear()
        if (record := SweepDir(self.directory).record()) is None:
            self._send_alone(live)
            return self._lines()
        sweep = project_sweep(self.directory, record, live=live)
        self._send(sweep)

        def wanted(trial: str, member: bool) -> bool:
            if only is not None and trial not in only:
                return False
            member_was, measured = self._complete.get(trial, (None, -1))
            if member_was != member:
                return True
            lacks = any(directory == trial for directory, _ in self._missing)
            return not live and (lacks or measured != len(measurement_ids(trial)))

        for trial in project_trials(self.directory, record, live=live, wanted=wanted):
            if isinstance(trial, Unreadable):
                self._note(str(trial), "", "", trial)
            else:
                self._send(trial)
        if not live and only is None:
            self.part(sweep, "registered models", self.publish, sweep)
        return self._lines()

    def _send_alone(self, live: bool) -> None:
        """Sends a run outside any sweep, or a study."""
        shown = None
        try:
            with reading(self.directory):
                if record := RunDir(self.directory).record():
                    labels = {"role": "train", **record.labels}
                    shown = project_run(self.directory, record, labels=labels, live=live)
                else:
                    shown = project_study(self.directory)
        except Unreadable as error:
            self._note(self.directory, "", "", error)
        if shown:
            self._send(shown)

    def _send(self, shown: Projection) -> None:
        self.send(shown)
        self.sent += 1
        if shown.result is not None:
            self._complete[shown.directory] = "pareto" in shown.tags, len(shown.measured)

    def part(self, shown: Projection, name: str, send: Callable[..., None], *args: Any) -> bool:
        """Sends one part of a run, and returns whether it was taken. What the tracker refuses is noted, and
        keeps nothing else back. It is tried again after a while, and at the end; not if the same part of
        other runs failed for long in this update, as on a disk that hangs.

        Raises:
            Exception: of any type, if the tracker does not answer.
        """
        key, began = (shown.directory, name), time.monotonic()
        refused = self._missing.get(key)
        if refused and self._live and began - refused.time_s < AGAIN_S:
            return False
        try:
            if self._failing_s.get(name, 0.0) > PATIENCE_S:
                raise TimeoutError(f"not tried, because others failed for {self._failing_s[name]:.0f} s")
            send(*args)
        except Exception as error:
            if not isinstance(error, Unreadable) and self.is_away(error):
                raise
            self._failing_s[name] = self._failing_s.get(name, 0.0) + time.monotonic() - began
            self._note(shown.directory, name, shown.name, error)
            return False
        self._missing.pop(key, None)
        return True

    def write_file(self, shown: Projection, name: str, content: bytes) -> None:
        """Writes a file into the directory of a run, on any storage, whole or not at all."""
        storage.write_bytes(storage.join(shown.directory, name), content)

    def _note(self, directory: str, part: str, name: str, error: Exception) -> None:
        """Notes a part that was not taken; an empty part: the directory could not be read."""
        if (directory, part) not in self._missing:
            log.warning("%s%s", f"{part} of {name}: " if part else "", reason_of(error))
        self._missing[directory, part] = _Missing(name, reason_of(error), time.monotonic())

    def _lines(self) -> list[str]:
        """Returns a line for each part and reason, with the names of the runs."""
        grouped: dict[tuple[str, str], list[str]] = {}
        for (_, part), missing in self._missing.items():
            grouped.setdefault((part, missing.reason), []).append(missing.of)
        return [
            f"{part} of {', '.join(names[:3])}{f' and {len(names) - 3} more' * (len(names) > 3)}: {reason}"
            if part
            else reason
            for (part, reason), names in grouped.items()
        ]


@dataclass(frozen=True, kw_only=True)
class TrackerConfig(Family, ABC, default="tensorboard"):
    """A tracker beside MLflow."""

    @abstractmethod
    def follow(self, directory: str) -> Follower:
        """Returns what keeps the tracker's view of a run or a sweep up to date."""


_unsent: dict[str, list[str]] = {}


def unsent(directory: str) -> list[str]:
    """Returns what trackers did not take by the end of this process's last work in a directory, a line for
    each tracker.
    """
    return _unsent.get(directory, [])


class Following:
    """Updates a tracker every few seconds while the block lasts, and a last time at its end.

    A tracker that does not answer delays the end by `PATIENCE_S` at most: what it lacks is sent when it is
    back, or by the next command that works on the directory.
    """

    def __init__(self, follower: Follower, say: Callable[[str], None] = log.warning) -> None:
        self._follower = follower
        self._say = say
        self._end = threading.Event()
        self._down = ""  # why the tracker did not answer the newest update
        self._lacks: list[str] = []
        self._thread = threading.Thread(target=self._work, daemon=True, name="tracker")

    def __enter__(self) -> Self:
        _unsent.pop(self._follower.directory, None)
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end.set()
        sent = -1
        while self._thread.is_alive() and self._follower.sent > sent:
            sent = self._follower.sent
            self._thread.join(PATIENCE_S)
        if self._thread.is_alive() or self._down or self._lacks:
            line = _did_not_take(self._follower, [self._down] if self._down else self._lacks)
            _unsent.setdefault(self._follower.directory, []).append(line)
            self._say(line)

    def _work(self) -> None:
        told, due_s = False, time.monotonic() + EVERY_S
        while not self._end.wait(min(LOOK_S, EVERY_S)):
            # After a notice the tracker hears first that this command ends: there may be no time for saving.
            if (given := notice.given()) > told or time.monotonic() > due_s:
                self._update(live=not given)
                told, due_s = given, time.monotonic() + EVERY_S
        self._update(live=False)

    def _update(self, *, live: bool) -> None:
        try:
            self._lacks = self._follower.update(live=live)
        except Exception as error:  # trackers raise many types
            if not self._down:
                log.warning("%s does not answer: %s", self._follower.where, reason_of(error))
            self._down = reason_of(error)
        else:
            if self._down:
                log.warning("%s answers again", self._follower.where)
            self._down = ""


@contextmanager
def following(followers: Iterable[Follower], say: Callable[[str], None] = log.warning) -> Iterator[None]:
    """Keeps trackers up to date while the block lasts. None waits for another."""
    with ExitStack() as stack:
        for follower in followers:
            stack.enter_context(Following(follower, say))
        yield


def update_now(follower: Follower, only: Collection[str] | None = None, *, live: bool = False) -> str:
    """Brings a tracker up to date; returns what it did not take in a line, empty if it has all."""
    try:
        lacks = follower.update(only=only, live=live)
    except Exception as error:  # trackers raise many types
        lacks = [f"it does not answer: {reason_of(error)}"]
    return _did_not_take(follower, lacks) if lacks else ""


def _did_not_take(follower: Follower, lacks: Sequence[str]) -> str:
    why = f": {'; '.join(lacks)}" if lacks else ""
    return (
        f"{follower.where} did not take all results{why}. They are in {follower.directory}; the same command,"
        " or jobs/report.py, sends them."
    )

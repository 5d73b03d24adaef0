"""Heartbeats of a run's workers, by which the driver says why a run stands still, and which machine is gone
when it fails. Their store is a process of its own, which loads this file and no torch.
"""

import logging
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any, NamedTuple

import ray
from ray.exceptions import RayError

log = logging.getLogger(__name__)

BEAT_S = 5.0
SILENT_S = 3 * BEAT_S  # after which a worker counts as not heard
STILL_S = 30.0  # without a step, until the driver says so for the first time
ANSWER_S = 1.0  # for a machine to take a connection


class Heartbeat(NamedTuple):
    """The last heartbeat of a worker.

    Attributes:
        node, address: id and address of its node.
        steps: taken since it began.
        phase: of its step (`profile.phase`); empty while it waits for images.
        heard_s: seconds since it was heard.
    """

    node: str
    address: str
    steps: int
    phase: str
    heard_s: float = 0.0


Heartbeats = Mapping[int, Heartbeat]  # by rank


class HeartbeatStore:
    """The last heartbeat of each worker of one attempt; runs as an actor."""

    def __init__(self) -> None:
        self._heard: dict[int, tuple[float, Heartbeat]] = {}

    def put(self, rank: int, beat: Heartbeat) -> None:
        self._heard[rank] = time.monotonic(), beat

    def read(self) -> Heartbeats:
        now = time.monotonic()
        return {rank: beat._replace(heard_s=now - at) for rank, (at, beat) in sorted(self._heard.items())}


class HeartbeatSender:
    """Sends this worker's heartbeats from a thread: they go on while the worker waits for others, and stop
    with its process or machine.
    """

    def __init__(self, store: Any, rank: int, phase: Callable[[], str]) -> None:
        """`phase` returns what the worker does (`profile.current_phase`)."""
        self._store, self._rank, self._phase, self._steps = store, rank, phase, 0
        self._place = ray.get_runtime_context().get_node_id(), ray.util.get_node_ip_address()
        threading.Thread(target=self._send, daemon=True, name="heartbeat").start()

    def counting(self, should_stop: Callable[[], bool]) -> Callable[[], bool]:
        """Returns the same function, which is called after each step, and counts the calls."""

        def counted() -> bool:
            self._steps += 1
            return should_stop()

        return counted

    def _send(self) -> None:
        with suppress(Exception):  # of Ray, whose calls fail once this process ends
            while True:
                self._store.put.remote(self._rank, Heartbeat(*self._place, self._steps, self._phase()))
                time.sleep(BEAT_S)


class HeartbeatMonitor:
    """Watches the heartbeats of a run's workers for the driver, attempt by attempt.

    Attributes:
        step: the last that was reported.
    """

    def __init__(self, name: str) -> None:
        self.name, self.step = name, 0
        self.store: Any = None
        self._beats: Heartbeats = {}
        self._workers = 0
        self._began_s = self._due_s = self._next_s = 0.0

    def begin(self, workers: int) -> Any:
        """Begins an attempt of so many workers; returns the store of their heartbeats."""
        self._beats, self._workers = {}, workers
        self.store = ray.remote(num_cpus=0)(HeartbeatStore).remote()
        return self.store

    def end(self) -> None:
        """Ends an attempt. What was heard last is kept."""
        if self.store is not None:
            ray.kill(self.store)
        self.store = None

    def look(self) -> None:
        """Logs where the workers are when all were heard, and later why they stand still, if they do."""
        now = time.monotonic()
        if now < self._next_s or (beats := self._read()) is None:
            return
        self._next_s = now + BEAT_S
        before, self._beats = self._beats, beats
        if len(beats) == self._workers > len(before):
            log.info("%s: %d workers on %s", self.name, self._workers, places(beats))
        if steps_of(beats) != steps_of(before) or not beats:
            if before and self._due_s > self._began_s + STILL_S:  # it was said
                log.info("%s goes on after %.0f s", self.name, now - self._began_s)
            self._began_s, self._due_s = now, now + STILL_S
        elif now > self._due_s and (why := standstill(beats)):
            log.warning("%s: no step for %.0f s: %s", self.name, now - self._began_s, why)
            self._due_s = now + (now - self._began_s)  # after twice the time

    def _read(self) -> Heartbeats | None:
        store = self.store
        with suppress(RayError):  # of a store that has ended, or does not answer
            return ray.get(store.read.remote(), timeout=BEAT_S) if store else None
        return None

    def gone(self) -> str:
        """Names the machines of the last attempt that are dead, or take no connection, with their ranks;
        empty if all answer.
        """
        with suppress(RayError):
            nodes = {node["NodeID"]: node for node in ray.nodes()}
            lost = {id for id in {beat.node for beat in self._beats.values()} if not _answers(nodes.get(id))}
            return places({rank: beat for rank, beat in self._beats.items() if beat.node in lost})
        return ""


def steps_of(beats: Heartbeats) -> int:
    return sum(beat.steps for beat in beats.values())


def standstill(beats: Heartbeats) -> str:
    """Says who keeps the others waiting: those that were not heard, else what each does. Empty while all
    evaluate, which takes no steps.
    """
    silent = {rank: beat for rank, beat in beats.items() if beat.heard_s > SILENT_S}
    if silent:
        since = max(beat.heard_s for beat in silent.values())
        return f"nothing was heard for {since:.0f} s from {places(silent)}"
    doing: dict[str, list[int]] = {}
    for rank, beat in beats.items():
        doing.setdefault(beat.phase, []).append(rank)
    if set(doing) == {"evaluate"}:
        return ""
    parts = (
        f"{_ranks(ranks)} in {phase}" if phase else f"{_ranks(ranks)} without images"
        for phase, ranks in sorted(doing.items(), key=lambda each: len(each[1]))
    )
    return "; ".join(parts)


def places(beats: Heartbeats) -> str:
    """Names the machines of workers: ``10.0.0.1 (rank 0), 10.0.0.2 (ranks 1, 2)``."""
    found: dict[str, list[int]] = {}
    for rank, beat in beats.items():
        found.setdefault(beat.address, []).append(rank)
    return ", ".join(f"{address} ({_ranks(ranks)})" for address, ranks in found.items())


def _ranks(ranks: list[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _answers(node: Mapping[str, Any] | None) -> bool:
    """Returns whether Ray counts a node as alive and its port is open."""
    if node is None or not node["Alive"]:
        return False
    with suppress(OSError):
        socket.create_connection((node["NodeManagerAddress"], node["NodeManagerPort"]), ANSWER_S).close()
        return True
    return False

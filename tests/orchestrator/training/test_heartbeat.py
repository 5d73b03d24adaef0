"""What the driver says of a run that stands still, from what its workers said of themselves."""

import logging
import socket
from typing import Any

import pytest
import ray

from orchestrator.training import heartbeat
from orchestrator.training.heartbeat import SILENT_S, STILL_S, Heartbeat, HeartbeatMonitor, places, standstill

A, B = ("a", "10.0.0.1"), ("b", "10.0.0.2")


def test_a_worker_that_is_not_heard_is_named_before_those_that_wait():
    beats = {
        0: Heartbeat(*A, 7, "backward", 2),
        1: Heartbeat(*B, 7, "backward", 40),
        2: Heartbeat(*B, 7, "", SILENT_S + 1),
    }
    assert standstill(beats) == "nothing was heard for 40 s from 10.0.0.2 (ranks 1, 2)"


@pytest.mark.parametrize(
    ("phases", "said"),
    [
        (("", "forward", "forward"), "rank 0 without images; ranks 1, 2 in forward"),
        (("backward", "backward", "checkpoint"), "rank 2 in checkpoint; ranks 0, 1 in backward"),
        (("evaluate", "evaluate", "evaluate"), ""),  # no steps are due
        (("report", "evaluate", "evaluate"), "rank 0 in report; ranks 1, 2 in evaluate"),
    ],
)
def test_else_what_each_rank_does_the_odd_one_first(phases, said):
    assert standstill({rank: Heartbeat(*A, 7, phase) for rank, phase in enumerate(phases)}) == said


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(heartbeat.time, "monotonic", lambda: now[0])
    return now


def test_it_is_said_after_half_a_minute_and_then_ever_more_rarely(clock, monkeypatch, caplog):
    caplog.set_level(logging.INFO, "orchestrator")
    monitor, heard = HeartbeatMonitor("run"), {}
    monitor.store, monitor._workers = object(), 2  # an attempt
    monkeypatch.setattr(monitor, "_read", lambda: dict(heard))

    def look(seconds: float) -> list[str]:
        caplog.clear()
        for _ in range(int(seconds / 5)):
            clock[0] += 5
            monitor.look()
        return [record.getMessage() for record in caplog.records]

    assert look(60) == []  # workers start
    heard |= {0: Heartbeat(*A, 0, "forward"), 1: Heartbeat(*B, 0, "forward")}
    assert look(5) == ["run: 2 workers on 10.0.0.1 (rank 0), 10.0.0.2 (rank 1)"]
    heard[1] = Heartbeat(*B, 1, "backward")
    assert look(30) == []
    (said,) = look(15)
    assert said == f"run: no step for {STILL_S + 5:.0f} s: rank 0 in forward; rank 1 in backward"
    assert [len(look(seconds)) for seconds in (30, 5, 75, 5)] == [0, 1, 0, 1]
    heard[0] = Heartbeat(*A, 1, "forward")
    assert look(20) == ["run goes on after 160 s"]


def test_a_machine_is_gone_if_ray_says_so_or_its_port_is_closed(monkeypatch):
    monitor = HeartbeatMonitor("run")
    monitor._beats = {0: Heartbeat(*A, 1, ""), 1: Heartbeat(*B, 1, ""), 2: Heartbeat(*B, 1, "")}
    with socket.create_server(("127.0.0.1", 0)) as server:
        open_port = server.getsockname()[1]

        def node(name: str, **fields: Any) -> dict[str, Any]:
            place = {"NodeManagerAddress": "127.0.0.1", "NodeManagerPort": open_port}
            return {"NodeID": name, "Alive": True, **place, **fields}

        def gone(**fields: Any) -> str:
            monkeypatch.setattr(ray, "nodes", lambda: [node("a"), node("b", **fields)])
            return monitor.gone()

        assert gone() == ""
        assert gone(Alive=False) == "10.0.0.2 (ranks 1, 2)"
        assert gone(NodeManagerPort=1) == "10.0.0.2 (ranks 1, 2)"


def test_places_of_one_machine():
    assert places({0: Heartbeat(*A, 1, ""), 1: Heartbeat(*A, 1, "")}) == "10.0.0.1 (ranks 0, 1)"

"""Sending returns when what was sent is recorded, and fails when it cannot be."""

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import ray
import ray.train
from ray.exceptions import RayActorError

from orchestrator.training import reports as reports_file
from orchestrator.training.reports import LogLines, Reports, Sender, hand_on

pytestmark = pytest.mark.usefixtures("cluster")


def test_sending_waits_for_the_record():
    reports = Reports.remote()
    may_record, recorded = threading.Event(), []

    def record(step, metrics):
        may_record.wait()
        recorded.append((step, metrics))

    with ThreadPoolExecutor(1) as beside:
        recording = beside.submit(hand_on, reports, record, lambda: len(recorded) == 2)
        sent = reports.send.remote(1, {"train/loss": 2.5})
        ready, _ = ray.wait([sent], timeout=0.5)
        assert not ready, "nothing is recorded yet"
        may_record.set()
        assert ray.get(sent) is False
        assert recorded == [(1, {"train/loss": 2.5})]
        assert ray.get(reports.send.remote(2, {})) is True, "the second answer says: leave"
        reports.close.remote()
        assert recording.result(timeout=10) is None
    assert [step for step, _ in recorded] == [1, 2]


def test_lines_of_a_worker_reach_the_log_in_their_place(caplog):
    """Between the reports, as lines of the process that asked for the run; Ray prints none of them."""
    caplog.set_level(logging.INFO, logger="orchestrator")
    reports, order = Reports.remote(), list[str]()
    worker = logging.Logger("a worker's")
    worker.addHandler(LogLines(reports, "soft rank 0"))
    with ThreadPoolExecutor(1) as beside:
        recording = beside.submit(hand_on, reports, lambda step, metrics: order.append(str(step)), bool)
        ray.get(reports.send.remote(1, {}))
        worker.warning("checkpoint %s is damaged", "step-1")
        ray.get(reports.send.remote(2, {}))
        reports.close.remote()
        recording.result(timeout=10)
    assert order == ["1", "2"]
    assert [record.getMessage() for record in caplog.records] == ["soft rank 0: checkpoint step-1 is damaged"]


def test_what_cannot_be_recorded_fails_its_sender():
    reports = Reports.remote()

    def full(step, metrics):
        raise OSError("no space left")

    with ThreadPoolExecutor(1) as beside:
        recording = beside.submit(hand_on, reports, full, lambda: False)
        with pytest.raises(RayActorError):
            ray.get(reports.send.remote(1, {}), timeout=20)
        with pytest.raises(OSError, match="no space left"):
            recording.result(timeout=10)


def test_reports_come_one_by_one():
    reports = Reports.remote()
    inside, most = 0, 0

    def slow(step, metrics):
        nonlocal inside, most
        inside += 1
        most = max(most, inside)
        time.sleep(0.02)
        inside -= 1

    with ThreadPoolExecutor(1) as beside:
        recording = beside.submit(hand_on, reports, slow, lambda: False)
        ray.get([reports.send.remote(step, {}) for step in range(5)])
        reports.close.remote()
        recording.result(timeout=10)
    assert most == 1


@pytest.mark.parametrize("asked", [True, False])
def test_a_worker_leaves_when_any_was_asked_to(asked, monkeypatch):
    monkeypatch.setattr(reports_file, "sum_over_ranks", lambda mine: mine + asked)
    monkeypatch.setattr(ray.train, "get_preemption_info", lambda: None)
    assert Sender(None).leave() == asked

"""What runs beside a training: the load of the machine, and sending to a server that may be slow or away."""

import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.tracking import base, system
from orchestrator.tracking.base import Following
from orchestrator.tracking.sync import Sync
from orchestrator.tracking.system import SystemMetrics
from tests.made_directories import begin, end, run_at
from tests.mlflow_reader import find_run
from tests.orchestrator.tracking.conftest import open_store
from tests.orchestrator.tracking.stores import Sqlite
from tests.orchestrator.tracking.test_sync import found, shown


def test_system_metrics_share_an_axis_over_restarts(sqlite: Sqlite, tmp_path: Path) -> None:
    tracking, run = open_store(sqlite), run_at(tmp_path, "busy")
    directory = begin(run)
    for _ in range(2):
        with SystemMetrics(directory, every_s=0.3):
            time.sleep(0.7)
    info = shown(tracking, run, directory)
    names = ("cpu_utilization_percentage", "system_memory_usage_megabytes", "disk_usage_percentage")
    assert {f"system/{name}" for name in (*names, "network_receive_megabytes")} <= set(info.metrics)
    places = [place for place, _ in info.history("system/cpu_utilization_percentage")]
    assert len(set(places)) == len(places) >= 1


def test_a_disk_that_does_not_answer_delays_no_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, never = threading.Event(), threading.Event()
    monkeypatch.setattr(system, "PATIENCE_S", 0.1)
    monkeypatch.setattr(system.DiskMonitor, "collect_metrics", lambda _: asked.set() or never.wait())
    with SystemMetrics(str(tmp_path), every_s=0.01):
        assert asked.wait(30)
    never.set()


def test_the_end_waits_while_runs_arrive(
    sqlite: Sqlite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update(self: Sync, *, live: bool = False) -> list[str]:
        for _ in range(0 if live else 4):
            time.sleep(0.3)
            self.sent += 1
        return []

    lines = list[str]()
    monkeypatch.setattr(Sync, "update", update)
    monkeypatch.setattr(base, "PATIENCE_S", 0.8)
    with Following(Sync(open_store(sqlite), str(tmp_path)), lines.append):
        pass
    assert lines == []


def test_a_lost_server_delays_nothing(
    sqlite: Sqlite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is named at the end, with what to do; what it lacks is sent by the next one."""
    run, lines = run_at(tmp_path, "away"), list[str]()
    directory, tracking = begin(run), open_store(sqlite)
    gone = replace(tracking, uri="http://127.0.0.1:9")
    monkeypatch.setattr(base, "EVERY_S", 0.05)
    with Following(Sync(gone, directory), lines.append):
        end(run, 10, val__acc1=0.5)
        time.sleep(0.3)
    (line,) = lines
    assert "MLflow at http://127.0.0.1:9 did not take all results" in line
    assert f"They are in {directory}" in line
    with Following(Sync(tracking, directory), lines.append):
        pass
    assert find_run(tracking, found(tracking, directory).run_id).metrics["val/acc1"] == 0.5
    assert len(lines) == 1

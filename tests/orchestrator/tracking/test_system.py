"""Samples of this very machine."""

import time
from pathlib import Path

from orchestrator.tracking import SystemMetrics, track
from orchestrator.tracking.find import found_run
from tests.orchestrator.tracking.conftest import Open
from tests.orchestrator.tracking.stores import Sqlite


def test_samples_go_on_after_a_restart(reopen: Open, sqlite: Sqlite, tmp_path: Path) -> None:
    """Seconds since the run began: two processes share an axis, and no second is there twice."""
    for _ in range(2):
        tracking = reopen(sqlite)
        run = track(tracking, str(tmp_path), "busy", tags={})
        with SystemMetrics(run, every_s=0.3):
            time.sleep(1.5)
    assert tracking.flush(60) == 0
    found = found_run(tracking, run.run_id())
    names = ("cpu_utilization_percentage", "system_memory_usage_megabytes", "disk_usage_percentage")
    assert {f"system/{name}" for name in (*names, "network_receive_megabytes")} <= set(found.metrics)
    places = [place for place, _ in found.history("system/cpu_utilization_percentage")]
    assert len(places) >= 2
    assert len(set(places)) == len(places)
    assert 0 <= places[0] <= places[-1] <= time.time() - run.began_s
    assert 0 < found.metrics["system/system_memory_usage_percentage"] <= 100

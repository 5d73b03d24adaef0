"""A run that was killed is not shown as running any more."""

from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.runs import notice
from orchestrator.runs.lock import locked
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking.base import Following
from orchestrator.tracking.lost import set_right
from orchestrator.tracking.store import Tracking
from orchestrator.tracking.sync import Sync
from tests.made_directories import begin, begin_sweep, end, run_at
from tests.orchestrator.runs.test_state import killed_in
from tests.orchestrator.tracking.conftest import open_store
from tests.orchestrator.tracking.stores import Sqlite


def statuses(tracking: Tracking, *directories: str) -> list[str]:
    runs = tracking.client.search_runs([tracking.experiment_id])
    found = {run.data.tags.get("directory"): run.info.status for run in runs}
    return [found[directory] for directory in directories]


def test_a_lost_sweep_and_its_trials_are_killed(
    sqlite: Sqlite, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tracking = open_store(sqlite)
    sweep = Sweep(base=run_at(tmp_path, "s"), arms={"a": {}, "b": {}})
    directory = begin_sweep(sweep, status="running")
    a, b = (begin(sweep.trials()[name].run) for name in "ab")
    run = run_at(tmp_path, "one")
    gone, kept = begin(run), begin(run_at(tmp_path, "kept"))
    shown = (directory, a, b, gone, kept)
    for place in (directory, gone, kept):
        Sync(tracking, place).update(live=True)
    with locked(directory), locked(gone), locked(kept):
        set_right(tracking)
        assert statuses(tracking, *shown) == ["RUNNING"] * 5
    for place in (directory, gone):
        killed_in(place)
    storage.delete(f"{kept}/config.json")  # as on a machine that does not see the directory
    end(sweep.trials()["b"].run, 10, val__acc1=0.5)
    set_right(tracking)
    assert [f"{place} is lost" in caplog.text for place in (directory, gone, kept)] == [True, True, False]
    # A trial that had finished is not killed with its sweep.
    assert statuses(tracking, *shown) == ["KILLED", "KILLED", "FINISHED", "KILLED", "RUNNING"]
    Sync(tracking, directory).update()  # the next command there sends the rest
    assert statuses(tracking, directory, a, b) == ["KILLED", "KILLED", "FINISHED"]


def test_after_a_notice_mlflow_hears_first(
    sqlite: Sqlite, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before anything is saved: there may be no time for both."""
    # A simulated process that was killed leaves its block when its generator is collected, in any later test.
    monkeypatch.setattr(notice, "_training", 0)
    tracking, directory = open_store(sqlite), begin(run_at(tmp_path, "noticed"))
    Sync(tracking, directory).update(live=True)
    assert statuses(tracking, directory) == ["RUNNING"]
    with notice.on_interrupt(), notice.saving(), Following(Sync(tracking, directory)):
        assert notice.give()
        while statuses(tracking, directory) == ["RUNNING"]:
            pass
    notice._given = False
    assert statuses(tracking, directory) == ["KILLED"]

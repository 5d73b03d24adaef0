"""Commands as a user runs them, on a storage that is empty or has a trained sweep."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from orchestrator.sweeps.engine import Hooks
    from orchestrator.sweeps.queue import TrialQueue
    from tests.jobs.test_killed_sweep import State


@pytest.fixture(scope="session")
def undisturbed(
    digits: str, empty_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> "State":
    """Trains the arms of `small_sweep.py` one after the other in this process, without Ray and without a
    fault, and returns their state in MLflow.
    """
    from tests.jobs.small_sweep import ARMS, make
    from tests.jobs.test_killed_sweep import state
    from tests.trained_sweep import train_arms

    home = tmp_path_factory.mktemp("undisturbed")
    uri = empty_store(home)
    train_arms(make(), home, digits)
    found = state(uri)
    assert [status for status, *_ in found.values()] == ["FINISHED"] * ARMS
    return found


@pytest.fixture
def home(trained_home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_FRONTIER_HOME", str(trained_home))
    return trained_home


@pytest.fixture
def empty_home(tmp_path: Path, empty_store: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch) -> Path:
    """The storage of jobs, with an MLflow database and nothing else."""
    home = tmp_path / "home"
    empty_store(home)
    monkeypatch.setenv("MOE_FRONTIER_HOME", str(home))
    return home


@pytest.fixture
def trials_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trials of a sweep train in this process, one after the other: Tune is not what the test is about."""
    from orchestrator.training.fit import fit

    def run_jobs(queue: "TrialQueue", hooks: "Hooks") -> None:
        while job := queue.next():
            hooks.began(job)
            queue.done(job.trial.name, fit(job.trial.run, until=job.until))

    monkeypatch.setattr("orchestrator.sweeps.run.run_jobs", run_jobs)


@pytest.fixture
def call(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[str, str]]:
    """``call(main, "tiny/trials/soft")``: what it exits with, and what it prints."""

    def run_here(main: Callable[[], None], *args: str) -> tuple[str, str]:
        monkeypatch.setattr(sys, "argv", ["job", *args])
        stopped = ""
        try:
            main()
        except SystemExit as stop:
            stopped = str(stop.code or "")
        return stopped, capsys.readouterr().out

    return run_here

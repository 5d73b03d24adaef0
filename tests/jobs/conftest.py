"""A sweep that is trained, and jobs as a user runs them on it."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from tests.jobs.test_killed_sweep import State


@pytest.fixture(scope="session")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> "State":
    """Runs the sweep of `small_sweep.py` without a fault, and returns its state in MLflow."""
    from tests.jobs.small_sweep import ARMS
    from tests.jobs.test_killed_sweep import start, state

    home = tmp_path_factory.mktemp("undisturbed")
    assert start(home).wait(timeout=900) == 0
    found = state(f"sqlite:///{home}/mlflow.db")
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

"""`jobs/report.py` as a user runs it, on a sweep that is trained."""

import os
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path

import pytest

from jobs import report
from jobs._cli import UNSENT
from orchestrator.runs import lock
from orchestrator.runs.lock import InUse, locked
from orchestrator.sweeps.publish import FILES, REPORT
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.train import working_in
from tests.made_directories import begin, change_record, end_sweep, run_at
from tests.trained_sweep import open_store

Call = Callable[..., tuple[str, str]]


def test_the_page_is_drawn_again_and_mlflow_gets_what_it_lacks(
    home: Path, call: Call, empty_store: Callable[[Path], str], tmp_path: Path
) -> None:
    for name in FILES:
        (home / "tiny" / name).unlink(missing_ok=True)
    empty = empty_store(tmp_path)
    stopped, printed = call(report.main, "--name", "tiny", "--tracking-uri", empty)
    assert stopped == ""
    assert f"{home}/tiny/{{{','.join(FILES)}}}: 3 points of tiny" in printed
    assert all((home / "tiny" / name).exists() for name in FILES)
    assert f"MLflow at {empty} has all of {home}/tiny" in printed


@pytest.mark.usefixtures("no_pictures")
def test_a_sweep_whose_driver_was_killed_is_sent_and_one_that_trains_is_not(
    home: Path, call: Call, empty_store: Callable[[Path], str], tmp_path: Path
) -> None:
    """Both say that they run; the lock tells them apart."""
    directory = f"{home}/tiny"
    change_record(directory, status="running")
    store = empty_store(tmp_path)
    with locked(directory):
        _, printed = call(report.main, "--name", "tiny", "--tracking-uri", store)
    assert f"a command trains in {directory}" in printed
    assert "This sweep is lost" not in printed
    _, printed = call(report.main, "--name", "tiny", "--tracking-uri", store)
    assert f"MLflow at {store} has all of {directory}" in printed
    assert "This sweep is lost: its process was killed." in printed
    assert "This sweep is lost" in (home / "tiny" / FILES[0]).read_text()


@pytest.mark.usefixtures("no_pictures")
def test_a_page_elsewhere_says_what_trains(call: Call, tmp_path: Path) -> None:
    """An arm that has begun runs only while a command trains it."""
    sweep = Sweep(base=run_at(tmp_path, "s"), arms={"a": {}, "b": {}})
    directory = end_sweep(sweep, {"a": 0.8}, status="running")
    begin(sweep.runs()["b"])

    flags = ("--name", "s", "--storage", str(tmp_path), "--out", f"{tmp_path}/page")
    for says, trains in (("running", locked(directory)), ("interrupted", nullcontext())):
        with trains:
            assert call(report.main, *flags)[0] == ""
        assert f"<b>1</b> {says}" in (tmp_path / "page/frontier.html").read_text()


def test_a_command_that_trains_waits_for_a_report(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not for ever."""
    directory = f"{home}/tiny"

    def begin() -> None:
        with working_in(directory, "auto", open_store(home)):
            pass

    with ThreadPoolExecutor() as pool:
        with locked(f"{directory}/{REPORT}"), locked(directory):
            waiting = pool.submit(begin)
            time.sleep(0.3)
            assert not waiting.done()
        waiting.result()
    with locked(directory), pytest.raises(InUse):
        begin()
    monkeypatch.setattr(lock, "REPORT_S", 0.0)
    with (
        locked(f"{directory}/{REPORT}"),
        pytest.raises(InUse, match=f"works in .*{REPORT} .process {os.getpid()} on"),
    ):
        begin()


@pytest.mark.usefixtures("no_pictures")
def test_a_page_elsewhere(home: Path, call: Call, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    stopped, printed = call(report.main, "--name", "tiny", "--out", "page")
    assert stopped == ""
    assert "3 points of tiny" in printed
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == sorted(FILES)
    assert call(report.main, "--name", "nosuch")[0] == f"error: no sweep in {home}/nosuch"


@pytest.mark.usefixtures("no_pictures")
def test_what_mlflow_does_not_take_is_a_line(home: Path, call: Call) -> None:
    stopped, printed = call(report.main, "--name", "tiny", "--tracking-uri", "http://127.0.0.1:9")
    assert stopped == str(UNSENT)
    assert "no MLflow server answers at http://127.0.0.1:9" in printed
    assert "3 points of tiny" in printed


def test_mistakes_are_one_line(home: Path, call: Call) -> None:
    stopped, _ = call(report.main, "--name", "tiny", "--out", "/proc/nope")
    assert stopped == "error: --out /proc/nope cannot be written to: No such file or directory"

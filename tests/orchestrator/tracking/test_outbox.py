"""Servers that go away, answer no more, or refuse: training goes on, and nothing is lost or said twice."""

import json
import logging
import random
import time
from pathlib import Path
from typing import Any, cast

import pytest

from orchestrator.errors import UsageError
from orchestrator.tracking import TrackedRun, Tracking, open_tracking, track
from orchestrator.tracking.find import Found, found_run
from orchestrator.tracking.outbox import Outbox
from tests.orchestrator.faulty_proxy import FaultyProxy
from tests.orchestrator.tracking.conftest import POSTGRES, SERVER, Open
from tests.orchestrator.tracking.stores import Server, Sqlite, Store


def found(tracking: Tracking, run: TrackedRun) -> Found:
    assert tracking.flush(120) == 0
    return found_run(tracking, run.run_id())


def runs_named(tracking: Tracking, name: str) -> int:
    return len(tracking.client.search_runs([tracking.experiment_id], f"attributes.run_name = '{name}'"))


@pytest.fixture(params=[SERVER, POSTGRES])
def stopping(request: pytest.FixtureRequest) -> Store:
    return request.getfixturevalue(request.param)


def test_a_server_that_goes_away_and_comes_back(
    stopping: Store, reopen: Open, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A run goes on, another begins and ends; one process gives up, and the next delivers all."""
    caplog.set_level(logging.INFO)
    tracking = reopen(stopping)
    first = track(tracking, str(tmp_path / "first"), "first", tags={})
    first.log(0, {"loss": 0.0})
    first_id = first.run_id()
    stopping.stop()
    try:
        began = time.monotonic()
        second = track(tracking, str(tmp_path / "second"), "second", tags={})
        for step in range(1, 1500):
            first.log(step, {"loss": float(step)})
            second.log(step, {"loss": -float(step)})
        second.write_text("end.txt", "over")
        second.finish("FINISHED")
        assert time.monotonic() - began < 20
        left = tracking.flush(3)
        assert left >= 3000
        assert "does not answer" in caplog.text
        assert tracking.close(0.1) == left
    finally:
        stopping.start()
    tracking = reopen(stopping)
    first = track(tracking, str(tmp_path / "first"), "first", tags={})
    first.log(1499, {"loss": 99.0})
    first.finish("FINISHED")
    one = found(tracking, first)
    assert (one.run_id, one.status) == (first_id, "FINISHED")
    assert one.history("loss") == [(step, float(step)) for step in range(1500)]
    other = found(tracking, track(tracking, str(tmp_path / "second"), "second", tags={}))
    assert other.history("loss") == [(step, -float(step)) for step in range(1, 1500)]
    assert other.read_text("end.txt") == "over"
    assert runs_named(tracking, "second") == 1


@pytest.mark.smoke
@pytest.mark.parametrize("fault", ["cut download", "busy", "cut upload"])
def test_requests_that_fail_one_by_one(
    fault: str, server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A third of them, whatever they are. Those without an answer may have been obeyed."""
    caplog.set_level(logging.INFO)
    proxy = FaultyProxy("127.0.0.1", server.port)
    spool = str(tmp_path / "outbox")
    with open_tracking(proxy.url, artifacts="/nowhere", spool=spool) as tracking:
        dice = random.Random(2)
        with proxy.failing_by(lambda request: fault if dice.random() < 1 / 3 else None):
            run = track(tracking, str(tmp_path), f"some {fault}", tags={"a": "1"})
            for step in range(5):
                run.log(step, {"loss": float(step)})
                tracking.flush(60)
            run.write_text("a.txt", "all of it")
            run.untag("a")
            run.finish("FINISHED")
            assert tracking.flush(60) == 0
        one = found(tracking, run)
        assert one.history("loss") == [(step, float(step)) for step in range(5)]
        assert (one.status, one.read_text("a.txt"), "a" in one.tags) == ("FINISHED", "all of it", False)
        assert runs_named(tracking, f"some {fault}") == 1
    proxy.close()
    assert "refuses" not in caplog.text


@pytest.mark.smoke
def test_one_line_when_it_goes_and_one_when_it_is_back(
    server: Server, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    proxy = FaultyProxy("127.0.0.1", server.port)
    with open_tracking(proxy.url, artifacts="/nowhere", spool=str(tmp_path / "outbox")) as tracking:
        run = track(tracking, str(tmp_path), "lines", tags={})
        assert tracking.flush(60) == 0
        with proxy.failing("busy"):
            run.log(1, {"loss": 1.0})
            assert tracking.flush(2) == 1
            run.log(2, {"loss": 2.0})
            run.log(3, {"loss": 3.0})
            assert tracking.flush(1) == 3
        assert tracking.flush(60) == 0
    proxy.close()
    away, back = (r.getMessage() for r in caplog.records if r.name.startswith("orchestrator"))
    assert away.startswith(f"MLflow at {proxy.url} does not answer (")
    assert str(tmp_path) in away
    assert back.startswith(f"MLflow at {proxy.url} is back after ")
    assert back.endswith("; 3 entries waited")


def test_what_is_refused_stays_out_alone(
    reopen: Open, store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Of a batch, the one metric with a name that MLflow does not take; the rest is written."""
    tracking = reopen(store)
    run = track(tracking, str(tmp_path), "refused", tags={})
    for step in range(20):
        run.log(step, {"loss": float(step), **({"100%": 1.0} if step == 7 else {})})
    run.tag(**{"fine": "yes", "x" * 300: "too long a name"})
    run.finish("FINISHED")
    one = found(tracking, run)
    assert one.history("loss") == [(step, float(step)) for step in range(20)]
    assert (one.status, one.tags["fine"], set(one.metrics)) == ("FINISHED", "yes", {"loss"})
    (file,) = tmp_path.rglob("refused.jsonl")
    kept = [json.loads(line) for line in file.read_text().splitlines()]
    assert [(what["op"], what["key"][:4]) for what in kept] == [("Metric", "100%"), ("RunTag", "xxxx")]
    assert len([r for r in caplog.records if "MLflow refuses" in r.getMessage()]) == 1


def test_a_run_that_somebody_deletes_stops_nobody(reopen: Open, store: Store, tmp_path: Path) -> None:
    tracking = reopen(store)
    gone = track(tracking, str(tmp_path / "gone"), "gone", tags={})
    gone.log(0, {"loss": 0.0})
    tracking.flush(60)
    tracking.client.delete_run(gone.run_id())
    other = track(tracking, str(tmp_path / "other"), "other", tags={})
    for step in range(1, 30):
        gone.log(step, {"loss": 1.0})
        other.log(step, {"loss": 1.0})
    gone.finish("FINISHED")
    assert len(found(tracking, other).history("loss")) == 29
    (file,) = tmp_path.rglob("refused.jsonl")
    assert len(file.read_text().splitlines()) == 30


def test_a_spool_has_one_process(reopen: Open, sqlite: Sqlite, tmp_path: Path) -> None:
    reopen(sqlite)
    with pytest.raises(UsageError, match=f"another process is running with {tmp_path}/outbox"):
        open_tracking(sqlite.uri, artifacts="/nowhere", spool=str(tmp_path / "outbox"))


def test_a_run_that_mlflow_refuses_says_so(reopen: Open, tmp_path: Path) -> None:
    """Somebody deletes the experiment."""
    tracking = reopen(Sqlite(tmp_path))
    tracking.client.delete_experiment(tracking.experiment_id)
    run = track(tracking, str(tmp_path), "too late", tags={})
    with pytest.raises(UsageError, match=r"MLflow refuses the run: see .*refused.jsonl"):
        run.run_id()
    run.log(1, {"loss": 1.0})
    assert tracking.flush(60) == 0


def test_files_go_when_they_are_delivered(reopen: Open, sqlite: Sqlite, tmp_path: Path) -> None:
    tracking = reopen(sqlite)
    run = track(tracking, str(tmp_path), "files", tags={})
    run.write_text("a/b.txt", "text")
    assert found(tracking, run).read_text("a/b.txt") == "text"
    tracking.close(10)
    (folder,) = tmp_path.glob("outbox/*/files")
    assert not list(folder.iterdir())
    (folder / "of a process that was killed").mkdir()
    reopen(sqlite)
    assert not list(folder.iterdir())


def test_closing_waits_while_something_arrives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It flushes again as long as fewer entries are left than before."""
    outbox, left, nobody = Outbox(tmp_path), iter([2, 1, 1]), cast(Any, None)
    for step in range(3):
        outbox.put("log", "run", step=step)
    monkeypatch.setattr(outbox, "flush", lambda _: next(left))
    outbox.start(nobody, "a server")
    assert outbox.close(0.1) == 1
    assert not list(left)

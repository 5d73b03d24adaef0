"""Progress of runs and trials as it is printed."""

from types import SimpleNamespace
from typing import Any

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.runs.run_directory import Result
from orchestrator.sweeps import progress
from orchestrator.sweeps.progress import SweepProgress, ended_line
from orchestrator.sweeps.run import SweepRun
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.console import RunProgress, StepLines


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])
    return now


def test_pace_is_that_since_the_first_report(clock):
    """Starting took 50 s, which say nothing about steps: 20 steps in 10 s, 60 to go."""
    pace = RunProgress(100)
    assert str(pace) == "training, no report yet"
    clock[0] = 50
    pace.report(20, {"perf/images_per_s": 80.0})
    assert str(pace) == "step 20/100, 80 images/s"
    clock[0] = 60
    pace.report(40, {"perf/images_per_s": 1234.6})
    assert str(pace) == "step 40/100, 1235 images/s, about 30 s left"
    clock[0] = 1000  # an outage, and workers that begin again at step 30
    pace.report(40, {"resumed/step": 30.0})
    clock[0] = 1010
    pace.report(60, {})
    assert pace.left() == "about 20 s left"
    pace.report(100, {})
    assert pace.left() == ""


def test_a_trial_that_stands_still_is_named(clock):
    """After 90 s, then after twice the time; later than usual where reports take long."""
    pace = RunProgress(100)
    said = {}
    for clock[0] in range(0, 400, 10):
        if still := pace.still():
            said[clock[0]] = still
    assert said == {
        90: "training, no report yet, for 90 s",
        180: "training, no report yet, for 3 min",
        360: "training, no report yet, for 6 min",
    }
    pace.report(20, {"perf/images_per_s": 80.0})
    for clock[0] in (600, 900, 1200):
        pace.report(20, {})
        clock[0] += 290
        assert pace.still() == ""


def test_a_line_for_every_report_of_a_run(clock, capsys):
    lines = StepLines(override(RunConfig(), {"train.steps": 30}))
    for step in (10, 20, 30):
        clock[0] += 5
        lines.show(step, {"train/loss": 2.5, "cost/params": 1.0})
    assert capsys.readouterr().out.splitlines() == [
        "step 10/30  train/loss 2.5",
        "step 20/30  train/loss 2.5  about 5 s left",
        "step 30/30  train/loss 2.5",
    ]


class Work(SweepRun):
    """A sweep of named trials whose ends the test decides."""

    def __init__(self, *names: str) -> None:
        self.ends: dict[str, Any] = {}
        self.retrained = {}
        self.search = None
        self.queue: Any = SimpleNamespace(states=dict.fromkeys(names))

    def outcomes(self) -> dict[str, Any]:
        return self.ends


def begun(shown: SweepProgress, name: str, until: int) -> None:
    job: Any = SimpleNamespace(trial=SimpleNamespace(name=name), until=until)
    shown.began(job)


def test_running_trials_tell_their_steps_now_and_then(clock, capsys):
    """Without a terminal a line each, at most every 20 s; and one when a trial ends."""
    work = Work("a", "b")
    shown = SweepProgress(Sweep(base=RunConfig(), arms={}))
    with shown:
        shown.start(work)
        begun(shown, "a", 100)
        for step in range(10, 60, 10):
            clock[0] += 9
            shown.report("a", step, {"perf/images_per_s": 100.0})
        work.ends["a"] = Result(status="diverged", step=50, metrics={}, reason="train/loss is nan at step 50")
        shown.ended("a", work.ends["a"])
        work.ends["b"] = "no place"  # it fails before it begins
        shown.ended("b", "no place")
    assert capsys.readouterr().out.splitlines() == [
        "        a                  step 30/100, 100 images/s, about 63 s left",
        "[ 1/2] a                  diverged: train/loss is nan at step 50",
        "[ 2/2] b                  failed: no place",
    ]


def test_the_cost_of_an_ended_trial_has_its_unit():
    sweep = Sweep(base=RunConfig(), arms={})
    metrics = {"val/acc1": 0.922, "cost/train_flops_6mac": 1.89e10, "cost/device_s": 21.26}
    ended = Result(status="finished", step=150, metrics=metrics)
    assert ended_line(sweep, ended) == "val/acc1 0.9220  cost/train_flops_6mac 18.9 GFLOP  21.3 s"


def test_a_search_counts_the_seeds_of_its_arms(capsys):
    """And those of the arms that the sweep names."""
    sweep = Sweep(base=RunConfig(), arms={"named": {}}, seeds=(0, 1, 2))
    work, shown = Work("tpe-0001-seed0"), SweepProgress(sweep)
    work.search = SimpleNamespace(count=20)
    with shown:
        shown.start(work)
        shown.ended("tpe-0001-seed0", "out of memory")
    assert capsys.readouterr().out.startswith("[ 0/63] tpe-0001-seed0")
    assert shown.trials() == 63


def test_a_trial_that_goes_on_after_a_pause_begins_anew(clock, capsys):
    sweep = Sweep(base=RunConfig(), arms={})
    paused = Result(status="paused", step=50, metrics={"val/acc1": 0.5, "cost/train_flops_6mac": 1.0})
    shown = SweepProgress(sweep)
    with shown:
        shown.start(Work("a"))
        for until in (50, 100):
            begun(shown, "a", until)
            clock[0] += 21
            shown.report("a", until - 20, {"perf/images_per_s": 100.0})
            shown.ended("a", paused)
    assert capsys.readouterr().out.splitlines()[::2] == [
        "        a                  step 30/50, 100 images/s",
        "        a                  step 80/100, 100 images/s",
    ]


def test_a_retrained_arm_is_not_counted(capsys):
    shown = SweepProgress(Sweep(base=RunConfig(), arms={}))
    with shown:
        shown.ended("confirm/a", "no place")
    assert capsys.readouterr().out == "        confirm/a          failed: no place\n"

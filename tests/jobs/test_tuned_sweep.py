"""`jobs/pareto_sweep.py --tune` as a user runs it: it ends in its first round, and goes on."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import pareto_sweep
from jobs._flags import parse
from orchestrator.packing import pack as packing
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.sweeps import tuning
from orchestrator.sweeps.driver import acquire_sweep_dir
from orchestrator.training.fit import fit
from tests.jobs.test_killed_sweep import kill_driver, until

ROOT = Path(__file__).parents[2]
SWEEP = """
from dataclasses import replace
from orchestrator import Scale, Sweep
from orchestrator.sweeps.catalog import quickstart

def make(scale: Scale) -> Sweep:
    sweep = quickstart(scale)
    names = ("w16-dense", "w16-soft", "w24-dense", "w24-soft")
    arms = {name: sweep.changes[name] for name in names}
    return replace(sweep, base=replace(sweep.base, name="four"), arms=arms, seeds=())
"""
WORDS = "--set train.steps=16 train.report_every=8 train.schedule.warmup_steps=2 --confirm 0 --measure never"
WORDS += " --max-concurrent 1 --tune train.lr=3e-3,1e-2 --tune-seeds 1 --tune-at width=16 --budget-hours 1"


def start(home: Path, data: str) -> subprocess.Popen[bytes]:
    command = ["jobs/pareto_sweep.py", "--sweep", f"{home}/four.py:make", "--data", data, *WORDS.split()]
    env = {"MOE_FRONTIER_HOME": str(home), "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    with (home / "log.txt").open("wb") as log:
        return subprocess.Popen(
            [sys.executable, *command],
            cwd=ROOT,
            env=os.environ | env,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )


def results(home: Path) -> dict[str, int]:
    """Trial -> when its result was written."""
    found = home.glob("four*/trials/*/result.json")
    return {path.parent.name: path.stat().st_mtime_ns for path in found}


@pytest.mark.slow
def test_a_sweep_that_tunes_is_killed_in_its_first_round(empty_home: Path) -> None:
    home, data = empty_home, packing.digits(str(empty_home), "cluttered-digits")
    (home / "four.py").write_text(SWEEP)
    driver = start(home, data)
    until(lambda: bool(results(home)), driver, home)
    kill_driver(driver)
    before = results(home)
    assert all("@lr" in name for name in before)
    assert len(before) < 4

    driver = start(home, data)
    assert driver.wait(timeout=600) == 0, (home / "log.txt").read_text()[-3000:]
    check(home, before, (home / "log.txt").read_text())


@pytest.mark.smoke
@pytest.mark.usefixtures("trials_here")
def test_a_first_round_that_was_cut_short_goes_on(
    cluster: None,
    empty_home: Path,
    digits: str,
    call: Callable[..., tuple[str, str]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One of its trials is complete. The grid, which does not grow here, does so in
    tests/orchestrator/sweeps/test_tuning.py.
    """
    monkeypatch.setattr(tuning, "GROWTHS", 0)
    home = empty_home
    (home / "four.py").write_text(SWEEP)
    words = ["--sweep", f"{home}/four.py:make", "--data", digits, *WORDS.split()]
    monkeypatch.setattr("sys.argv", ["job", *words])
    flags = parse(pareto_sweep.SweepFlags, "")
    grid = flags.tuning()
    assert grid
    first = grid.first_round(flags.make())
    acquire_sweep_dir(first, resume=False, labels={})
    fit(first.runs()["w16-dense@lr0.003-seed1000"])
    before = results(home)
    assert len(before) == 1
    stopped, said = call(pareto_sweep.main, *words)
    assert not stopped
    check(home, before, said)


def check(home: Path, before: dict[str, int], said: str) -> None:
    """Fails unless both rounds are complete: each arm has the best of its first round, and no trial that was
    complete `before` was trained again.
    """
    done = results(home)
    assert before.items() <= done.items(), "what was complete is not trained again"
    own, first = SweepDir(f"{home}/four"), SweepDir(f"{home}/four-tune").record()
    record = own.record()
    assert record
    assert first
    assert set(done) == {*record.trials, *first.trials}
    assert first.seeds == [1000]
    assert {"w16-dense@lr0.003", "w16-dense@lr0.01", "w16-soft@lr0.003", "w16-soft@lr0.01"} <= {*first.arms}
    chosen = {arm: changes["train.lr"] for arm, changes in record.arms.items()}
    assert chosen["w24-dense"] == chosen["w16-dense"]
    assert chosen["w24-soft"] == chosen["w16-soft"]
    for arm in ("w16-dense", "w16-soft"):
        quality = {
            changes["train.lr"]: json.loads(
                Path(home, f"four-tune/trials/{name}-seed1000/result.json").read_text()
            )
            for name, changes in first.arms.items()
            if name.startswith(f"{arm}@")
        }
        best = max(result["metrics"]["val/acc1"] for result in quality.values())
        found = [value for value, result in quality.items() if result["metrics"]["val/acc1"] == best]
        assert chosen[arm] == min(found)
    tuned = re.search(r"^Tuned train.lr on 1 seed at width=16, of .+$", said, re.MULTILINE)
    assert tuned
    assert own.summary()["note"].count(tuned[0]) == 1
    assert tuned[0] in Path(home, "four/frontier.html").read_text()

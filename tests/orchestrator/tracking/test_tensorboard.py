"""Event files have every number once, in order, after any kill; they are those that TensorBoard reads."""

import random
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import pytest
from tensorboardX.record_writer import RecordWriter

from orchestrator import storage
from orchestrator.runs.measurements import write_measurement
from orchestrator.runs.metrics_file import MetricsWriter
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking import tensorboard
from orchestrator.tracking.base import TrackerConfig
from orchestrator.tracking.projection import Scalar
from orchestrator.tracking.tensorboard import FOLDER, EventFiles, TensorBoardConfig, events, read_events
from tests.made_directories import begin, end, end_sweep, report, run_at


def written(directory: str) -> dict[str, list[tuple[int, float]]]:
    found = defaultdict(list)
    for name in sorted(storage.names(storage.join(directory, FOLDER))):
        for scalar in read_events(storage.read_bytes(storage.join(directory, FOLDER, name))):
            found[scalar.name].append((scalar.at, scalar.value))
    return dict(found)


def test_a_file_is_that_of_another_writer(tmp_path: Path) -> None:
    """Length, checksums and events as tensorboardX writes them."""
    ours = events([Scalar("train/loss", 0.5, 80, 1.8e9), Scalar("val/acc1", 0.25, 160, 1.8e9)])
    theirs, at = RecordWriter(str(tmp_path / "theirs")), 0
    while at < len(ours):
        size = int.from_bytes(ours[at : at + 8], "little")
        theirs.write(ours[at + 12 : at + 12 + size])
        at += size + 16
    theirs.close()
    assert (tmp_path / "theirs").read_bytes() == ours
    assert [scalar[:3] for scalar in read_events(ours)] == [("train/loss", 0.5, 80), ("val/acc1", 0.25, 160)]


def test_a_run_that_was_killed_and_resumed(root: str, tmp_path: Path) -> None:
    """On a disk and on S3. Kills come between any two reports, and also between reading and writing."""
    run = run_at(tmp_path, "killed", storage=root)
    directory, dice = begin(run), random.Random(1)
    wanted, step, follower = list[tuple[int, float]](), 0, EventFiles(directory)
    for _ in range(12):
        writer = MetricsWriter(run)
        writer.resumed(step := max(0, step - dice.randrange(3)))
        for _ in range(dice.randrange(1, 6)):
            step += 1
            writer.report(step, {"train/loss": step / 4})
            if dice.random() < 0.4:
                writer.flush()
                assert follower.update(live=True) == []
        writer.close()
        if dice.random() < 0.7:
            follower = EventFiles(directory)  # the command was killed
    end(run, step + 1, train__loss=9.0, val__acc1=0.5)
    for _ in range(2):
        assert EventFiles(directory).update() == []
    wanted = [(8 * n, n / 4) for n in range(1, step + 1)] + [(8 * (step + 1), 9.0)]
    assert written(directory) == {"train/loss": wanted, "val/acc1": [(8 * (step + 1), 0.5)]}


def test_a_sweep_with_what_was_measured(tmp_path: Path) -> None:
    sweep = Sweep(base=run_at(tmp_path, "s"), arms={"a": {}, "b": {"train.lr": 0.5}})
    directory = end_sweep(sweep, {"a": 0.5, "b": 0.6})
    write_measurement(f"{directory}/trials/a", {"eval/x/acc1": 0.25, "eval/x/loss": float("nan")})
    follower = TensorBoardConfig().follow(directory)
    for _ in range(2):
        assert follower.update() == []
    found = written(f"{directory}/trials/a")
    assert [value for _, value in found["eval/x/acc1"]] == [0.25]
    assert found["val/acc1"][-1][1] == 0.5
    assert "eval/x/loss" not in found


def test_a_disk_that_is_full_for_a_moment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The line says what is missing; the last update has all."""

    def full(location: str, content: bytes) -> None:
        raise OSError("no space left")

    run = run_at(tmp_path, "full")
    directory = begin(run)
    follower = EventFiles(directory)
    report(run, {1: {"train/loss": 1.0}})
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_bytes", full)
        (line,) = follower.update(live=True)
    assert line == "event files of full: no space left"
    report(run, {2: {"train/loss": 2.0}})
    assert follower.update() == []
    assert written(directory) == {"train/loss": [(8, 1.0), (16, 2.0)]}


def test_it_is_a_kind() -> None:
    assert TrackerConfig.kinds["tensorboard"] is TensorBoardConfig


@pytest.mark.smoke
def test_a_new_process_knows_it() -> None:
    program = "from orchestrator import TrackerConfig; print(*TrackerConfig.kinds)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["tensorboard"]


def test_a_clock_that_was_set_back_repeats_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = run_at(tmp_path, "back")
    directory = begin(run)
    for step, now in ((1, 2 * 10**18), (2, 10**18), (3, 3 * 10**18)):
        monkeypatch.setattr(tensorboard.time, "time_ns", lambda now=now: now)
        report(run, {step: {"train/loss": float(step)}})
        assert EventFiles(directory).update(live=True) == []
    assert sorted(written(directory)["train/loss"]) == [(8, 1.0), (16, 2.0), (24, 3.0)]

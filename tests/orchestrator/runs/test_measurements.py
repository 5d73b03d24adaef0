"""What commands find out lies in the directories of runs."""

import json
import math
from pathlib import Path

import numpy as np
import pytest

from orchestrator.runs import measurements as records
from orchestrator.runs.measurements import (
    HOST,
    JOB,
    USER,
    data_names,
    made_by,
    measurements,
    read_measurement,
    rows_of,
    write_measurement,
)
from orchestrator.runs.sweep_directory import owner_of
from orchestrator.sweeps.sweep import Sweep
from tests.made_directories import begin_sweep, run_at


def test_what_was_written_is_read_back(tmp_path: Path) -> None:
    written = write_measurement(
        str(tmp_path),
        {"eval/x/acc1": np.float64(0.5), "eval/x/loss": math.nan},
        tables={"eval/x/classes.json": {"class": ["a", "b"], "accuracy": np.array([0.5, math.nan])}},
        files={"pages/page.html": b"<p>", "picture.png": b"\x89"},
        data={"x": {"path": "/data/x", "digest": "d"}},
        labels={"eval.latency": "batch 8"},
        by={"command": "evaluate"},
    )
    (found,) = measurements(str(tmp_path))
    assert str(found) == str(written)
    assert found.metrics["eval/x/acc1"] == 0.5
    first, second = rows_of(found.tables["eval/x/classes.json"])
    assert first == {"class": "a", "accuracy": 0.5}
    assert math.isnan(second["accuracy"])
    folder = tmp_path / "measurements" / found.id
    assert (folder / "pages/page.html").read_bytes() == b"<p>"
    assert found.by.keys() >= {USER, HOST, "command"}


def test_none_is_replaced_and_a_broken_one_is_none(tmp_path: Path) -> None:
    """Two in the same second are two; a folder whose record is missing was never finished."""
    for value in (0.1, 0.2, 0.3):
        write_measurement(str(tmp_path), {"a": value})
    (tmp_path / "measurements" / "29990101T000000Z-aaaaaaaa").mkdir()
    assert sorted(each.metrics["a"] for each in measurements(str(tmp_path))) == [0.1, 0.2, 0.3]
    assert read_measurement(str(tmp_path), "29990101T000000Z-aaaaaaaa") is None


def test_they_come_in_the_order_of_their_times(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They do so within a second, too."""
    times = [1e9 + 0.000005, 1e9 + 0.5]
    for now in times:
        monkeypatch.setattr(records.time, "time", lambda now=now: now)
        write_measurement(str(tmp_path), {"a": now})
    assert [each.metrics["a"] for each in measurements(str(tmp_path))] == times


def test_a_write_that_fails_leaves_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(location: str, content: bytes) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(records.storage, "write_bytes", full)
    with pytest.raises(OSError, match="no space"):
        write_measurement(str(tmp_path), {"a": 1.0}, files={"x": b"x"})
    monkeypatch.undo()
    assert measurements(str(tmp_path)) == []


def test_names_of_data(tmp_path: Path) -> None:
    """The last part of a path, or more where it is taken; moved data keep their name."""
    own = str(tmp_path)

    def measured(*paths: tuple[str, str]) -> list[str]:
        names = data_names(own, dict(paths))
        write_measurement(own, {}, data=names)
        return list(names)

    assert measured(("/a/flowers", "1")) == ["flowers"]
    assert measured(("/b/flowers", "2")) == ["b-flowers"]
    assert measured(("/moved/elsewhere", "1")) == ["flowers"]
    assert measured(("s3://x/pets", "3"), ("/b/flowers", "2")) == ["pets", "b-flowers"]
    assert measured(("/copy/pets", "3"), ("s3://x/pets", "3")) == ["pets", "x-pets"]
    assert measured(("/pets", "changed-since")) == ["pets-changed-"]
    assert measured(("/with space/ü", "4")) == ["-"]


def test_who(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("USER", "ada")
    monkeypatch.setenv("LOGNAME", "ada")
    monkeypatch.delenv("RAY_JOB_CONFIG_JSON_ENV_VAR", raising=False)
    assert made_by()[USER] == "ada"
    assert JOB not in made_by()
    job = json.dumps({"metadata": {"job_submission_id": "raysubmit_1"}})
    monkeypatch.setenv("RAY_JOB_CONFIG_JSON_ENV_VAR", job)
    assert made_by()[JOB] == "raysubmit_1"


def test_a_trial_belongs_to_its_sweep(tmp_path: Path) -> None:
    directory = begin_sweep(Sweep(base=run_at(tmp_path, "group/s"), arms={"a": {}}))
    assert owner_of(f"{directory}/trials/a") == directory
    assert owner_of(f"{directory}/trials/other") == f"{directory}/trials/other"
    assert owner_of(directory) == directory

"""`jobs/answer.py` on a trained sweep: it measures once, answers in words and JSON, and writes a model."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from jobs import answer
from moe import load_signature
from orchestrator.inference import timing
from orchestrator.inference.measure import ONE_IMAGE, ROUNDS_TABLE, machine, measured_rows
from orchestrator.runs.measurements import measurements, rows_of
from orchestrator.sweeps.build import sweep_frontier

pytestmark = pytest.mark.smoke

Call = Callable[..., tuple[str, str]]


def test_a_sweep_answers_and_hands_over_its_model(home: Path, call: Call, tmp_path: Path) -> None:
    out, directory = tmp_path / "best", f"{home}/tiny"
    stopped, printed = call(answer.main, "tiny", "--max-ms", "1000", "--out", str(out))
    assert stopped == ""
    assert "Best within 1000 ms (95th percentile of a call): " in printed
    rows = measured_rows(directory, ONE_IMAGE, on=machine())
    assert {row["arm"] for row in rows} == {"dense", "token", "soft"}
    assert all(0 < row["q25"] <= row["p50"] <= row["q75"] <= row["p95"] <= row["p95_high"] for row in rows)
    assert all(row["memory_mib"] > 10 and row["file_mb"] > 0.01 for row in rows)
    assert measured_rows(directory, ONE_IMAGE, on="another machine") == []
    rounds = rows_of(measurements(directory)[-1].tables[ROUNDS_TABLE])
    assert timing.FEWEST_ROUNDS <= len(rounds) <= 2 * timing.ROUNDS
    assert all(each["reference_ms"] > 0 for each in rounds)

    frontier = sweep_frontier(directory)[0]
    assert frontier.points[0].costs["infer/ms"] == next(
        r["p50"] for r in rows if r["arm"] == frontier.points[0].arm
    )
    assert "infer/ms" in frontier.panels
    assert "perf/ms_per_image" not in frontier.panels
    assert "measured alone and in turns" in frontier.note

    before = len(measurements(directory))
    stopped, printed = call(answer.main, "tiny", "--max-ms", "1000", "--max-gflops", "1e9", "--json")
    assert stopped == ""
    found = json.loads(printed)
    assert len(measurements(directory)) == before, "it is measured once"
    assert found["best"]["arm"] == frontier.answer(max_ms=1000).best.arm  # pyright: ignore[reportOptionalMemberAccess]
    assert "standard_error" in found["best"]

    pixels = np.random.default_rng(0).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    done = subprocess.run(
        [sys.executable, "-I", out / "read.py", tmp_path / "a.png"],
        capture_output=True,
        text=True,
        check=True,
    )
    _, name, share = done.stdout.split()
    assert name in (load_signature(out / "moe").classes or ())
    assert 0 < float(share) <= 1


def test_a_bound_that_nothing_keeps(home: Path, call: Call) -> None:
    stopped, printed = call(answer.main, "tiny", "--max-gflops", "1e-9")
    assert stopped == "1"
    assert "No arm is within 1 FLOP" in printed
    assert "The nearest is " in printed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["tiny"], "give a bound: --max-ms"),
        (["tiny", "--max-ms", "0"], "must be above 0"),
        (["gone", "--max-ms", "1"], "no sweep in "),
    ],
)
def test_what_is_refused(home: Path, call: Call, args: list[str], message: str, capsys: object) -> None:
    stopped, _ = call(answer.main, *args)
    assert message in stopped or stopped == "2"

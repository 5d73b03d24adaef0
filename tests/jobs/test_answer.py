"""`jobs/answer.py` on a trained sweep: it measures once, answers in words and JSON, and writes a model."""

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from threading import Event, Thread

import numpy as np
import pytest
from PIL import Image

from jobs import answer
from jobs.pareto_sweep import SweepFlags
from moe import load_signature
from orchestrator.costs import FORWARD
from orchestrator.inference import energy, timing
from orchestrator.inference.measure import ONE_IMAGE, ROUNDS_TABLE, machine, measured_rows
from orchestrator.runs.measurements import measurements, rows_of, write_measurement
from orchestrator.sweeps.build import sweep_frontier
from orchestrator.sweeps.operating import OPERATING, QUARTILES, TIME, table_of
from orchestrator.sweeps.sweep import Sweep
from tests.orchestrator.frontier.test_page import without_error
from tests.orchestrator.inference.test_energy import shown

Call = Callable[..., tuple[str, str]]


@pytest.mark.smoke
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
    assert without_error((home / "tiny/frontier.html").read_text()) == []
    assert "perf/ms_per_image" not in frontier.panels
    assert "measured alone and in turns" in frontier.note

    before = len(measurements(directory))
    stopped, printed = call(answer.main, "tiny", "--max-ms", "1000", "--max-gflops", "1e9", "--json")
    assert stopped == ""
    found = json.loads(printed)
    assert found["quiet"] == all(row["quiet"] for row in measured_rows(str(directory), ONE_IMAGE))
    assert len(measurements(directory)) == before, "it is measured once"
    assert found["best"]["arm"] == frontier.answer(max_ms=1000).best.arm  # pyright: ignore[reportOptionalMemberAccess]
    assert "standard_error" in found["best"]

    pixels = np.random.default_rng(0).integers(0, 256, (28, 28, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(tmp_path / "a.png")
    (tmp_path / "b.png").write_text("no picture")
    pictures = [tmp_path / name for name in ("gone.png", "b.png", "a.png")]
    read = [sys.executable, "-I", out / "read.py", *pictures]
    done = subprocess.run(read, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr.count("error: "), "Traceback" in done.stderr) == (1, 2, False)
    _, name, share = done.stdout.split()
    assert name in (load_signature(out / "weights").classes or ())
    assert 0 < float(share) <= 1


@pytest.mark.smoke
def test_a_bound_that_nothing_keeps(home: Path, call: Call) -> None:
    stopped, printed = call(answer.main, "tiny", "--max-gflops", "1e-9")
    assert stopped == "1"
    assert "No arm is within 1 FLOP" in printed
    assert "The nearest is " in printed


def test_a_sweep_is_named_after_its_folder() -> None:
    names = {
        "/a/flowers": "flowers",
        "/a/my pics": "my-pics",
        "/data": "images-data",
        "s3://b/.x": "images-x",
    }
    assert {folder: answer.name_of(folder) for folder in names} == names


@pytest.mark.smoke
def test_money_and_energy_are_bounds_of_operating_points_too(
    home: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Energy by a counter that a thread raises, as Linux does: 50 W. Before there is one, it is refused. Of
    two operating points one is measured to be the best and to cost the least, and one is held by no file.
    """
    stopped, printed = call(answer.main, "tiny", "--max-usd", "1000", "--json")
    assert stopped == ""
    found = json.loads(printed)
    assert found["best"]["costs"]["infer/usd_per_million"][0] == found["best"]["usd_per_million_images"] > 0
    monkeypatch.setattr(energy, "POWERCAP", str(tmp_path))
    stopped, _ = call(answer.main, "tiny", "--max-mj", "1000")
    assert stopped.startswith("error: the energy of processors cannot be read: there is no")
    counter, over = shown(tmp_path, "intel-rapl:0", "package-0", uj=0), Event()

    def rise() -> None:
        began = time.monotonic()
        while not over.wait(0.001):
            (tmp_path / "new").write_text(f"{int((time.monotonic() - began) * 50e6)}")
            (tmp_path / "new").replace(counter)

    directory, out = f"{home}/tiny", tmp_path / "point"
    row = {"run": "token", "val/acc1": 0.99, FORWARD: 1e-9, TIME: 0.1, QUARTILES[0]: 0.1, QUARTILES[1]: 0.1}
    more = {"batch": 64, "device": "cpu", "rounds": 1, "repeats": 1}
    rows = [{**row, **more, "point": name} for name in ("k=1 capacity=0.5", "experts=1")]
    write_measurement(directory, {}, tables={OPERATING: table_of(rows)})
    thread = Thread(target=rise)
    thread.start()
    try:
        stopped, printed = call(
            answer.main, "tiny", "--max-mj", "1e5", "--runtime", "torch", "--out", str(out)
        )
    finally:
        over.set()
        thread.join()
    assert stopped == ""
    assert "Best within 1.00" in printed
    assert "token: k=1 capacity=0.5 is an operating point" in printed
    (router,) = {json.loads((out / "weights/config.json").read_text())["model"]["moe"]["router"]["kind"]}
    assert router == "token_choice"
    of_torch = replace(ONE_IMAGE, runtime="torch")
    measured = {row["arm"]: row for row in measured_rows(directory, of_torch)}
    assert measured.keys() == {"dense", "token", "soft", "token: k=1 capacity=0.5"}
    each = measured["dense"]
    assert 25 * each["p50"] < each["mj"] < 1000 * each["p50"], "50 W; beside other work calls take longer"


def test_a_folder_of_pictures_is_packed_and_trained_on(
    call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sweep is not trained here: the test reads its flags, and the arms that they make."""
    rng = np.random.default_rng(0)
    for name in ("left", "right"):
        (tmp_path / "arrows" / name).mkdir(parents=True)
        for number in range(30):
            pixels = rng.integers(0, 256, (40, 90, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / "arrows" / name / f"{number}.png")
    made = list[tuple[SweepFlags, Sweep]]()
    monkeypatch.setattr(answer, "sweep", lambda flags: made.append((flags, flags.make())))
    monkeypatch.setenv("MOE_FRONTIER_HOME", str(tmp_path / "home"))
    args = (f"{tmp_path}/arrows", "--max-ms", "5", "--set", "train.steps=7", "--budget-hours", "0.5")
    stopped, printed = call(answer.main, *args)
    assert stopped == f"error: no sweep in {tmp_path}/home/arrows"
    flags, sweep = made[0]
    assert (flags.max_ms, flags.budget_hours, flags.measure) == (5.0, 0.5, "never")
    base = sweep.base
    assert (base.name, base.data.batch_size, base.train.steps) == ("arrows", 32, 7)
    assert (base.model.image_side(), base.model.tokens(), base.model.num_outputs()) == (32, 64, 2)
    assert "settings model.image_size=32 model.patch_size=4 data.batch_size=32 train.steps=7" in printed
    _, printed = call(answer.main, *args)
    assert f"images   {base.data.path}, packed before" in printed
    Image.fromarray(pixels).save(tmp_path / "arrows" / "left" / "new.png")  # pyright: ignore
    stopped, _ = call(answer.main, *args)
    assert f"{base.data.path} was packed from other pictures of this folder: remove it" in stopped
    (tmp_path / "other").mkdir()
    (tmp_path / "arrows").rename(tmp_path / "other/arrows")
    stopped, _ = call(answer.main, f"{tmp_path}/other/arrows", "--max-ms", "5")
    assert f"{base.data.path} was packed from {tmp_path}/arrows: remove it" in stopped
    stopped, _ = call(answer.main, *args, "--out", f"{tmp_path}/other/arrows")
    assert stopped.startswith("error: --out "), "before anything is trained"
    made.pop()
    _, printed = call(answer.main, base.data.path, "--max-gflops", "1", "--budget-hours", "1")
    assert f"images   {base.data.path}, as they were packed" in printed
    assert made[1][1].base.data.path == base.data.path
    assert made[1][0].max_ms is None
    stopped, _ = call(answer.main, "arrows", "--max-ms", "5", "--set", "train.steps=7")
    assert stopped == "2", "a sweep is trained already"


@pytest.mark.smoke
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

"""The bench of a GPU runs on a CPU with tiny sizes."""

import json
import subprocess
import sys
import time
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from bench import gpu, gpu_checks, gpu_speed
from bench.gpu import run_part
from bench.gpu_checks import ROUTERS, Bench, correct, launched
from bench.gpu_speed import train, training_runs
from moe.routers import RouterConfig

ROOT = Path(__file__).parents[2]
PARTS = ["correct", "launches", "training", "layers", "inference", "tf32"]


@pytest.fixture
def tiny() -> Bench:
    return Bench(torch.device("cpu"), tiny=True)


def bench(out: Path, *options: str) -> dict[str, Any]:
    """Runs the bench, which must succeed, and returns the parts in its file."""
    command = [sys.executable, "bench/gpu.py", "--device", "cpu", "--tiny", "--out", str(out), *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(out.read_text())["parts"]


@pytest.mark.smoke
def test_every_case_runs_once(tmp_path):
    out = tmp_path / "results" / "gpu.json"
    parts = bench(out, "--parts", *PARTS)
    check_all_passed(parts, PARTS)
    correct = parts["correct"]["rows"]
    assert correct["token choice, float32"]["gradient_error"] < 1e-5
    repeated = [row for case, row in correct.items() if "repeated" in case]
    assert {row["by_default"] for row in repeated} == {"equal"}
    assert all("attention" in row["attention"] for row in repeated)
    launches = parts["launches"]["rows"]
    plain, counted = launches["token choice"], launches["token choice, with statistics"]
    assert 0 < plain["block_forward_operators"] < counted["block_forward_operators"]
    layers = parts["layers"]["rows"]
    assert all(row["train_tflops"] > 0 for case, row in layers.items() if "D=32" in case)
    kept = json.loads(out.read_text())
    kept["parts"] |= {"inference": {"rows": {}}, "training": {"rows": {}}}
    out.write_text(json.dumps(kept))
    again = bench(out, "--parts", "correct", "inference", "--minutes", "0")
    assert again["correct"] == parts["correct"]
    assert again["training"] == {"rows": {}}, "it was not asked for"
    assert (again["inference"]["rows"], again["inference"]["left_out"]) == (
        {},
        [*parts["inference"]["rows"]],
    )


@pytest.mark.slow
def test_compiled_cases(tmp_path):
    assert {*PARTS, "compiled"} == {*gpu.PARTS}
    parts = bench(tmp_path / "gpu.json", "--parts", "compiled")
    check_all_passed(parts, ["compiled"])
    assert parts["compiled"]["rows"]["correct: token choice"]["gradient_error"] < 0.05


def check_all_passed(parts: dict[str, Any], names: list[str]) -> None:
    assert [*parts] == names
    for name, part in parts.items():
        assert (part["error"], part["failed"], part["left_out"]) == ("", [], []), name


def test_a_rerun_repeats_only_what_failed_or_is_missing(tiny, tmp_path):
    ran, works, out = list[str](), False, tmp_path / "gpu.json"

    def case(name: str, passed: bool) -> dict[str, Any]:
        ran.append(name)
        if name == "raises" and not works:
            raise ValueError("no")
        return {"passed": passed}

    def run(*names: str, seconds: float = 60) -> dict[str, Any]:
        ran.clear()
        cases = [(name, partial(case, name, works or name != "misses")) for name in names]
        result = json.loads(out.read_text()) if out.exists() else {"runs": [], "parts": {}}
        run_part("part", lambda *_: iter(cases), tiny, time.monotonic() + seconds, result, out)
        return json.loads(out.read_text())["parts"]["part"]

    part = run("right", "misses", "raises")
    assert ran == ["right", "misses", "raises"]
    assert part["failed"] == ["misses", "raises"]
    part = run("right", "misses", "new", seconds=-1)
    assert (ran, part["left_out"], len(part["rows"])) == ([], ["misses", "new"], 3)
    works = True
    part = run("right", "misses", "raises", "new")
    assert ran == ["misses", "raises", "new"]
    assert (part["failed"], part["left_out"]) == ([], [])


def test_every_kind_of_router_is_checked(tiny):
    cases = {label.rsplit(", ", 1)[0] for label, _ in correct(tiny, {})}
    checked = {router.kind for name, router in ROUTERS.items() if router and name in cases}
    assert checked == {*RouterConfig.kinds}
    assert getattr(ROUTERS["dropless"], "capacity_factor", None) == "dropless"


def test_the_reference_takes_the_decisions_of_the_device(tiny, monkeypatch):
    """Rounded to bfloat16, this router seats other tokens; a reference with its own would hide errors."""
    expected = gpu_checks.compare(tiny, "token choice", torch.bfloat16)
    assert expected["passed"]
    assert expected["moved"] > 0
    monkeypatch.setattr(gpu_checks, "decided", lambda _: gpu_checks.ExitStack())
    alone = gpu_checks.compare(tiny, "token choice", torch.bfloat16)
    assert alone["gradient_error"] > 2 * expected["gradient_error"]


def test_a_profiler_that_sees_nothing_fails(tiny, monkeypatch):
    assert launched(tiny, "dense", {}, "dense")["passed"]
    monkeypatch.setattr(gpu_checks, "queued", lambda *_: {"launches": 0, "kernels": 0})
    assert not launched(tiny, "dense", {}, "dense")["passed"]


def test_what_cannot_fit_is_said_before_it_is_tried(tiny, monkeypatch):
    tiny.tiny, tiny.memory = False, 80e9
    monkeypatch.setattr(gpu_speed, "model_of", gpu_speed.lru_cache(lambda *_: pytest.fail("tried")))
    run = next(run for run in training_runs(tiny) if run.label == "4096 slots of 4096 experts")
    assert train(tiny, run, {})["skipped"].startswith("does not fit: a step needs 92 GB")


def test_a_split_batch_is_compared_at_equal_images(tiny, monkeypatch):
    run = next(training_runs(tiny))
    base = train(tiny, run, {})
    assert (base["images"], base["microbatches"]) == (4, 1)
    phases, too_large = gpu_speed.phases, [torch.OutOfMemoryError]

    def once(*args: Any) -> dict[str, float]:
        if too_large:
            raise too_large.pop()
        return phases(*args)

    monkeypatch.setattr(gpu_speed, "phases", once)
    row = train(tiny, replace(run, label="other", base="base"), {"base": base})
    assert (row["images"], row["microbatches"]) == (4, 2)
    assert row["of_base"] == row["images_per_s"] / base["images_per_s"]

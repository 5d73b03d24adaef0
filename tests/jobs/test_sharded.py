"""Models that workers hold together, as a user evaluates them: the figures are those of a whole model."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pandas
import pytest

from jobs import evaluate, predict
from orchestrator.checkpoint.models import ModelRef
from orchestrator.codec import override
from orchestrator.evaluation import sharded
from orchestrator.evaluation.sharded import Sharding
from tests.moe.parity import one_rank

Call = Callable[..., tuple[str, str]]
TOGETHER = ("--workers", "2", "--ep", "2")
SOFT, TOKEN = "tiny/trials/soft", "tiny/trials/token"


def report(call: Call, out: Path, *flags: str) -> dict:
    """The figures that an evaluation of `SOFT` writes."""
    assert call(evaluate.main, SOFT, "--repeats", "1", "--out", str(out), *flags)[0] == ""
    (found,) = json.loads(out.read_text())
    return found


def test_rounded_figures(home: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """In bfloat16, on one worker and without Ray, which `test_predictions` starts. Figures that are not
    rounded equal those of a whole model in tests/orchestrator/evaluation/test_sharded.py.
    """
    asked = []

    def answers(self: Sharding, model: ModelRef, function: Any, *, batch_size: int) -> list[Any]:
        asked.append((self.workers, self.ep, self.root))
        found = list[Any]()
        alone = override(self.check(model, batch_size), {"scale.workers": 1, "scale.ep": 1})
        given = {"run": alone, "model": model, "function": function, "dtype": self.dtype}
        with one_rank("cpu"):
            sharded._work({**given, "queue": SimpleNamespace(put=found.append)})
        return found

    monkeypatch.setattr(Sharding, "answers", answers)
    for needs_ray in ("jobs._sharded.connect", "orchestrator.training.resources.check_shared"):
        monkeypatch.setattr(needs_ray, lambda *_: None)
    one = report(call, tmp_path / "one.json")
    many = report(call, tmp_path / "many.json", *TOGETHER, "--dtype", "bfloat16")
    assert asked == [(2, 2, str(home))]
    assert many["dtype"] == "bfloat16"
    assert many["latency"]["batch"] == 64
    loss = many["metrics"]["loss"]
    assert loss != one["metrics"]["loss"] == pytest.approx(loss, rel=0.02)


@pytest.mark.slow
def test_every_figure(cluster: None, home: Path, call: Call, tmp_path: Path):
    one, many = report(call, tmp_path / "one.json"), report(call, tmp_path / "many.json", *TOGETHER)
    assert one["metrics"]["acc1"] == many["metrics"]["acc1"]
    assert one["metrics"]["loss"] == pytest.approx(many["metrics"]["loss"], rel=1e-5)
    assert many["classes"]["acc1"] == one["classes"]["acc1"]
    assert many["latency"]["device"] == "CPU, 1 thread, 2 workers"
    assert not list((home / "evaluation").iterdir())


@pytest.mark.slow
def test_points_and_shots(cluster: None, home: Path, digits: str, call: Call, tmp_path: Path):
    grid = (SOFT, "--grid", "routing.experts=2,4", "--repeats", "1", "--out", str(tmp_path / "page"))
    assert call(evaluate.main, *grid)[0] == ""
    (whole,) = (home / "evaluation").glob("*.json")
    rows = json.loads(whole.read_text())
    whole.unlink()
    assert call(evaluate.main, *grid, *TOGETHER)[0] == ""
    assert json.loads(whole.read_text()) == [
        {**row, "val/loss": pytest.approx(row["val/loss"], rel=1e-5)} for row in rows
    ]
    shots = (SOFT, "--shots", "1,5", "--seeds", "1", "--data", digits)
    printed = [call(evaluate.main, *shots, *flags)[1].partition("accuracy on")[2] for flags in ((), TOGETHER)]
    assert printed[0] == printed[1] != ""


@pytest.mark.smoke
def test_predictions(cluster: None, home: Path, digits: str, call: Call, tmp_path: Path):
    found = []
    for name, flags in (("whole", ()), ("together", ("--ep", "2"))):
        args = (TOKEN, "--images", digits, "--split", "val", "--out", str(tmp_path / name))
        assert call(predict.main, *args, *flags)[0] == ""
        found.append(pandas.read_parquet(tmp_path / name).sort_values("key", ignore_index=True))
    pandas.testing.assert_frame_equal(*found, rtol=1e-4)
    stopped, _ = call(predict.main, *args, "--ep", "2", "--dtype", "bfloat16")
    assert "with another dtype (was None, now bfloat16)" in stopped


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (
            ("--workers", "3", "--ep", "2"),
            "--workers 3, --ep 2, --batch-size 64: ep=2 does not divide workers=3",
        ),
        (("--workers", "3"), "data.batch_size=64 does not divide over workers=3"),
        (
            ("--workers", "16", "--ep", "16"),
            "num_experts=8 does not divide over ep=16; use one of [1, 2, 4, 8]",
        ),
    ],
)
def test_workers_that_cannot_hold_it(flags: tuple[str, ...], error: str, home: Path, call: Call):
    assert error in call(evaluate.main, SOFT, *flags)[0]

"""A wish: an evaluation of one's own, a confusion matrix. One file outside of the tree, and `--plugin`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import evaluate, train
from orchestrator.runs.measurements import FOLDER, measurements

WISH = '''
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch

from moe.config import PositiveInt
from orchestrator.data.batch import normalize
from orchestrator.data.manifest import open_manifest
from orchestrator.evaluation.base import EvaluationConfig, EvaluationRequest, EvaluationResult, setting
from orchestrator.evaluation.evaluate import images_of


@torch.no_grad()
def confused(model, read, classes):
    """Returns how often an image of each class (row) is taken for each (column)."""
    counts = torch.zeros(classes, classes, dtype=torch.long)
    for batch in read():
        answer = model(normalize(batch["image"]), batch.valid).logits.argmax(-1)
        real = batch.valid.bool()
        for true, said in zip(batch["label"][real, 0], answer[real]):
            counts[true, said] += 1
    return counts


@dataclass(frozen=True, kw_only=True)
class ConfusionConfig(EvaluationConfig):
    """which classes are taken for which"""

    kind: Literal["confusion"] = "confusion"
    worst: PositiveInt = setting(3, "how many pairs of classes are listed")

    def evaluate(self, on: EvaluationRequest) -> Iterator[EvaluationResult]:
        for model in on.models:
            path = on.path(model)
            classes = open_manifest(path).classes
            read = partial(images_of, model, path=path, split=on.split, batch_size=on.batch_size)
            counts = on.measure(model, partial(confused, read=read, classes=len(classes)))
            rows = list(enumerate(counts.tolist()))
            every = [(n, classes[i], classes[j]) for i, row in rows for j, n in enumerate(row)]
            pairs = sorted((pair for pair in every if pair[1] != pair[2]), reverse=True)[: self.worst]
            cells = ["".join(f"<td>{int(n)}" for n in row) for row in counts]
            on.table(("images", "are", "taken for"), pairs, title=model.name)
            metrics = {"acc1": float(counts.trace() / counts.sum()), "worst": pairs[0][0]}
            yield EvaluationResult(
                model=model,
                paths=(path,),
                metrics=metrics,
                tables={"pairs.json": dict(zip(("images", "is", "said"), zip(*pairs)))},
                files={"confusion.html": ("<table><tr>" + "<tr>".join(cells) + "</table>").encode()},
                report={"model": model.name, "metrics": metrics},
            )
'''
SHORT = ("--name", "small", "--set", "train.steps=4", "--set", "train.report_every=2")
Call = Callable[..., tuple[str, str]]


@pytest.fixture
def wish(tmp_path: Path, new_process: Callable[[], None]) -> str:
    (tmp_path / "confusion.py").write_text(WISH)
    return str(tmp_path / "confusion.py")


def test_it_is_a_kind_with_flags_of_its_own(
    wish: str,
    empty_home: Path,
    call: Call,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Its figures, its table and its page are in the record of the run, and beside --out."""
    assert call(train.main, *SHORT)[0] == ""
    monkeypatch.setattr(sys, "argv", ["evaluate", "small", "--confusion"])
    with pytest.raises(SystemExit, match="2"):
        evaluate.main()  # without the file there is no such flag
    asked, out = ("small", "--plugin", wish, "--worst", "2"), tmp_path / "figures.json"
    stopped, printed = call(evaluate.main, *asked, "--confusion", "--out", str(out))
    assert stopped == "", printed
    assert "taken for" in printed
    directory = f"{empty_home}/small"
    (found,) = measurements(directory)
    metrics = {name.removeprefix("eval/digits/confusion/val/step-4/"): v for name, v in found.metrics.items()}
    result = json.loads(Path(directory, "result.json").read_text())
    assert metrics["acc1"] == pytest.approx(result["metrics"]["val/acc1"])
    (table,) = found.tables.values()
    assert table["columns"] == ["images", "is", "said"]
    assert table["data"][0][0] == metrics["worst"]
    assert len(table["data"]) == 2
    (page,) = found.files
    written = Path(directory, FOLDER, found.id, page).read_text()
    cells = [int(cell.partition("<")[0]) for cell in written.split("<td>")[1:]]
    assert (len(cells), sum(cells)) == (100, 367)
    (report,) = json.loads(out.read_text())
    assert Path(report["confusion"]).read_text() == written
    for words, says in (
        ([], "--worst does nothing without --confusion"),
        (["--grid"], "--worst does nothing with --grid"),
        (["--confusion", "--per-class"], "--per-class does nothing with --confusion"),
    ):
        monkeypatch.setattr(sys, "argv", ["evaluate", *asked, *words])
        with pytest.raises(SystemExit, match="2"):
            evaluate.main()
        assert says in capsys.readouterr().err

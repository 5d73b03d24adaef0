"""Images whose classes are not those that a model learned, or stand in another order."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs import evaluate, inspect_routing, operating_points
from orchestrator.checkpoint.weights import export
from orchestrator.data.packing import write_shards
from orchestrator.data.sources import open_source

Call = Callable[..., tuple[str, str]]


def test_other_classes_are_named(home: Path, call: Call, pack_greys: Callable[..., Any]):
    """The greys' classes are called as the digits are; of the copy, the first is called otherwise."""
    path, _ = pack_greys(train=20, val=7)
    run = ("tiny/trials/soft", "--repeats", "1", "--data", path)
    assert "other classes" not in call(evaluate.main, *run)[1]
    manifest = Path(path, "manifest.json")
    manifest.write_text(manifest.read_text().replace('"0"', '"zero"', 1))
    warning = (
        f"note: {path} has other classes (zero, 1, 2, .. 10) than tiny/trials/soft learned (0, 1, 2, .. 10):"
        " labels are compared by number"
    )
    assert warning in call(evaluate.main, *run)[1]


def test_names_that_fit_in_part_are_refused(home: Path, call: Call, pack_greys: Callable[..., Any]):
    """As are labels for which the model has no output, where accuracy would be nonsense."""
    path, _ = pack_greys(train=20, val=7)
    manifest = Path(path, "manifest.json")
    names = json.loads(manifest.read_text())["classes"]
    for main in (evaluate.main, operating_points.main, inspect_routing.main):
        relabel(manifest, ["cat", *names[:-1]])
        stopped, _ = call(main, "tiny/trials/soft", "--data", path)
        assert "learned class '0' under another number, and did not learn 'cat'" in stopped
    relabel(manifest, [*names, "cat"])
    for main in (evaluate.main, operating_points.main, inspect_routing.main):
        stopped, _ = call(main, "tiny/trials/soft", "--data", path)
        assert stopped == (
            f"error: {path} has 11 classes (0, 1, 2, .. 11), but tiny/trials/soft has 10 outputs; their names"
            " do not match those that it learned, so labels are compared by number. Evaluate on data with the"
            " same classes, or fine-tune the model on this data: jobs/finetune.py"
        )


def test_classes_of_a_model_are_unknown(
    home: Path, call: Call, pack_greys: Callable[..., Any], tmp_path: Path
):
    """Its shards are gone: a checkpoint is judged by number, with a line; an export knows by itself."""
    path, _ = pack_greys(train=20, val=7)
    exported = tmp_path / "soft.safetensors"
    export(f"{home}/tiny/trials/soft/checkpoints", str(exported))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("orchestrator.evaluation.trained.class_names", lambda run: None)
        run = ("--repeats", "1", "--data", path)
        warning = "note: the classes of tiny/trials/soft are unknown: "
        assert warning in call(evaluate.main, "tiny/trials/soft", *run)[1]
        assert warning not in call(evaluate.main, str(exported), *run)[1]


def relabel(manifest: Path, names: list[str]) -> None:
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"classes": names}))


def test_labels_go_by_name_where_the_model_learned_them(home: Path, call: Call, digits: str, tmp_path: Path):
    """Of some classes that stand in another order; each class does as well as among all."""
    names, source, out = ("7", "3", "9"), open_source("digits"), tmp_path / "figures.json"
    splits = {
        split: [one._replace(label=names.index(str(one.label))) for one in samples if str(one.label) in names]
        for split, samples in source.splits.items()
    }
    write_shards(str(tmp_path / "some"), names, splits)
    run = ("tiny/trials/soft", "--repeats", "1", "--out", str(out), "--data")
    by_name = []
    for data in (digits, str(tmp_path / "some")):
        stopped, printed = call(evaluate.main, *run, data)
        assert stopped == ""
        (report,) = json.loads(out.read_text())
        table = report["classes"]
        by_name.append(
            dict(zip(table["class"], zip(table["images"], table["acc1"], strict=True), strict=True))
        )
    assert (
        "other classes (7, 3, 9) than tiny/trials/soft learned (0, 1, 2, .. 10): labels are compared by name"
        in printed
    )
    every, some = by_name
    assert some == {name: every[name] if name in names else (0, None) for name in every}

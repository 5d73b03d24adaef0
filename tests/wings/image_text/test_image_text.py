"""Images and texts as a user trains and evaluates them: from scratch, beside a frozen tower, by names."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pandas
import pytest

from jobs import evaluate, pareto_sweep, predict, train as train_job
from orchestrator.codec import flat, override
from orchestrator.config import RunConfig
from orchestrator.packing.pack import digits
from orchestrator.sweeps.catalog import make_sweep
from orchestrator.training.train import train
from wings.image_text import evaluations

pytestmark = pytest.mark.smoke
Call = Callable[..., tuple[str, str]]
WORDS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]


@pytest.fixture(scope="module")
def homes(
    captioned: str, empty_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A storage with a classifier, and a text tower beside it."""
    home = tmp_path_factory.mktemp("image-text")
    empty_store(home)
    base = override(
        make_sweep("laion", "tiny").base,
        {
            "storage": str(home),
            "data.path": captioned,
            "train.steps": 140,
            "train.eval_every": 140,
            "task.loss": "softmax",
        },
    )
    small = {f"model.{n}": v for n, v in flat(base.model).items() if n.startswith("image.")}
    image = {n.replace("image.", ""): v for n, v in small.items()}
    classes = override(
        RunConfig(storage=str(home), name="classes", train=base.train),
        image | {"model.num_classes": 10, "data.path": captioned},
    )
    train(classes, progress=False)
    tower = {"train.init_from": f"{home}/classes/checkpoints", "train.freeze": ("image.",)}
    result = train(override(base, tower | {"name": "beside"}), progress=False)
    assert result.metrics["val/zero_shot_acc1"] > 0.6
    assert result.metrics["train/loss"] < result.metrics["train/loss_of_chance"]
    return home


@pytest.fixture
def home(homes: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("MOE_FRONTIER_HOME", str(homes))
    return homes


@pytest.fixture
def names(tmp_path: Path) -> str:
    file = tmp_path / "words.toml"
    file.write_text(f'classes = {json.dumps(WORDS)}\ntemplates = ["a photo of the number {{}}", "{{}}"]\n')
    return str(file)


def test_classes_by_their_names(
    home: Path, names: str, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "figures.json"
    stopped, printed = call(evaluate.main, "beside", "--zero-shot", names, "--per-class", "--out", str(out))
    assert stopped == ""
    assert "beside by template" in printed
    assert "beside by class" in printed
    reports = {report["model"]: report for report in json.loads(out.read_text())}
    for report in reports.values():
        assert report["metrics"]["acc1"] > 0.6
        assert report["images"] == 367
        assert report["baselines"]["chance"] == 0.1
        assert report["baselines"]["nearest_pixels"] > 0.9
        assert len(report["templates"]) == 2
        assert report["classes"]["class"] == WORDS
    _, printed = call(evaluate.main, "beside", "--zero-shot", names, "--split", "train")
    assert "nearest image of val by pixels" in printed  # not itself
    monkeypatch.setattr(evaluations, "MOST_PIXELS", 1000)
    _, printed = call(evaluate.main, "beside", "--zero-shot", names)
    assert "nearest image" not in printed
    stopped, _ = call(evaluate.main, "beside", "--repeats", "1", "--out", str(out))
    assert stopped == ""
    (report,) = json.loads(out.read_text())
    assert report["metrics"]["zero_shot_acc1"] > 0.6


def test_retrieval_with_a_page(home: Path, call: Call, tmp_path: Path) -> None:
    page, out = tmp_path / "found.html", tmp_path / "figures.json"
    stopped, printed = call(evaluate.main, "beside", "--retrieval", "--page", str(page), "--out", str(out))
    assert stopped == ""
    assert str(page) in printed
    (report,) = json.loads(out.read_text())
    assert (report["images"], report["captions"], report["distinct_captions"]) == (367, 1835, 100)
    for name, chance in report["baselines"]["chance"].items():
        assert report["metrics"][name] > chance or name.startswith("i2t_r10")
    assert page.read_text().startswith("<!doctype html>")


def test_pictures_get_names_from_the_command_line(
    home: Path, captioned: str, call: Call, tmp_path: Path, cluster: None
) -> None:
    out = str(tmp_path / "said")
    asked: Any = ["beside", "--images", captioned, "--split", "val", "--out", out, "--workers", "1"]
    stopped, _ = call(predict.main, *asked, "--classes", *WORDS, "--template", "the digit {}")
    assert stopped == ""
    table = pandas.read_parquet(out)
    assert len(table) == 367
    assert {*table["top5_class"].str[0]} <= {*WORDS}
    stopped, _ = call(predict.main, *asked, "--classes", "zero", "one", "--template", "the digit {}")
    assert "with another names" in stopped
    for wrong, says in (
        (["--classes", "one", "one"], "two classes are called 'one'"),
        (["--classes", "one", "two", "--template", "digit"], "in the place of a class's name"),
    ):
        stopped, _ = call(predict.main, *asked, "--fresh", *wrong)
        assert says in stopped
    stopped, _ = call(predict.main, "classes", *asked[1:], "--fresh", "--classes", "one", "two")
    assert "reads no text" in stopped


@pytest.mark.usefixtures("trials_here")
def test_a_sweep_over_trained_towers(home: Path, call: Call, cluster: None) -> None:
    stopped, printed = call(
        pareto_sweep.main,
        *("--sweep", "lit", "--models", "classes,beside", "--data", digits(str(home), "digits-captions")),
    )
    assert "an image tower has a linear head" in stopped
    words = [
        "--sweep",
        "lit",
        "--models",
        "classes",
        "--confirm",
        "0",
        "--measure",
        "never",
        "--max-concurrent",
        "1",
    ]
    words += ["--set", "train.steps=20"]
    stopped, printed = call(pareto_sweep.main, *words)
    assert stopped == ""
    assert "val/zero_shot_acc1" in printed


def test_what_is_missing_is_named(home: Path, names: str, call: Call, digits: str) -> None:
    for main, words, says in (
        (
            pareto_sweep.main,
            ["--sweep", "lit"],
            "--sweep lit makes its arms of trained models: give --models",
        ),
        (pareto_sweep.main, ["--sweep", "lit", "--scale", "cifar", "--data", digits], "has no recipe at the"),
        (evaluate.main, ["classes", "--zero-shot", names], "reads no text"),
        (evaluate.main, ["beside", "--retrieval", "--data", digits], "has no field 'text'"),
        (
            train_job.main,
            ["--data", digits, "--set", "model.kind=two_towers", "task.kind=contrastive"],
            "has no tokenizer",
        ),
    ):
        stopped, _ = call(main, *words)
        assert says in stopped, words

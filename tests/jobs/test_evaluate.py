"""`jobs/evaluate.py` as a user runs it, on a sweep that is trained."""

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from jobs import evaluate
from jobs.report import main as report_again
from moe.cost import forward_gflops_2mac
from moe.overrides import RoutingOverrides
from orchestrator.checkpoint.models import read_model
from orchestrator.data.batch import normalize
from orchestrator.evaluation.evaluate import EvalTask, images_of
from orchestrator.evaluation.kinds import grid
from orchestrator.packing import open_source
from orchestrator.packing.pack import write_shards
from orchestrator.runs.measurements import measurements
from orchestrator.tracking.store import open_reader
from tests.mlflow_reader import RunInfo, children, find_sweep

Call = Callable[..., tuple[str, str]]


def trial(home: Path, arm: str) -> RunInfo:
    reader = open_reader(f"sqlite:///{home}/mlflow.db")
    return next(run for run in children(reader, find_sweep(reader, "tiny").run_id) if run.tags["arm"] == arm)


def test_as_trained_it_is_what_training_said(home: Path, call: Call, tmp_path: Path):
    out = tmp_path / "figures.json"
    stopped, printed = call(evaluate.main, "sweep:tiny", "--per-class", "--repeats", "1", "--out", str(out))
    assert stopped == ""
    assert "soft by class" in printed
    reports = json.loads(out.read_text())
    assert [report["model"] for report in reports] == ["dense", "token", "soft"]
    for report in reports:
        run = trial(home, report["model"])
        assert report["run"] == run.tags["directory"]
        assert report["metrics"]["acc1"] == run.metrics["val/acc1"]
        assert report["metrics"]["loss"] == pytest.approx(run.metrics["val/loss"], rel=1e-5)
        assert run.metrics["eval/shards/val/step-20/as_trained/acc1"] == run.metrics["val/acc1"]
        assert run.metrics["eval/shards/val/step-20/as_trained/ms_per_image"] > 0
        classes = report["classes"]
        hits = sum(n * acc for n, acc in zip(classes["images"], classes["acc1"], strict=True))
        assert hits / 367 == pytest.approx(report["metrics"]["acc1"])
        table = json.loads(run.read_text("eval/shards/val/step-20/as_trained/classes.json"))
        assert table["columns"] == ["class", "images", "acc1", "acc5", "precision", "loss", "f1"]
        confusion = run.read_text("eval/shards/val/step-20/as_trained/confusion.csv")
        rows = [line.split(",") for line in confusion.splitlines()]
        assert [sum(map(int, row[1:])) for row in rows[1:]] == classes["images"]
        right = sum(int(row[1 + label]) for label, row in enumerate(rows[1:]))
        assert right / 367 == report["metrics"]["acc1"]
        assert Path(report["confusion"]).read_text().splitlines() == confusion.splitlines()
        assert f"{report['model']}: ece: 15 bins of confidence" in printed
        assert report["calibration"]["fitted_on"] + report["calibration"]["judged_on"] == 367
        assert [row[0] for row in table["data"]] == [str(digit) for digit in range(10)]


def test_one_image_alone(home: Path, call: Call, tmp_path: Path):
    """A model that routes images together is named and left out, and the others have their results; so have
    the models before one that fails.
    """
    out, pairs = tmp_path / "figures.json", str(tmp_path / "pairs.safetensors")
    with safe_open(home / "token.safetensors", "pt") as file:
        metadata, tensors = file.metadata(), load_file(home / "token.safetensors")
    config = json.loads(metadata["config"])
    config["model"]["moe"]["images_per_group"] = 2
    save_file(tensors, pairs, metadata | {"config": json.dumps(config)})
    models = ("tiny/trials/dense", pairs, "tiny/trials/soft")
    stopped, printed = call(evaluate.main, *models, "--batch-size", "1", "--repeats", "1", "--out", str(out))
    assert stopped == "", printed
    refused = "--batch-size 1: it routes 2 images together, and needs a multiple of 2"
    assert f": {refused}" in next(line for line in printed.splitlines() if "left out" in line)
    reports = json.loads(out.read_text())
    assert len(reports) == 2
    one = ("--batch-size", "1", "--repeats", "1", "--set", "routing.images_per_group=1", "--out", str(out))
    stopped, printed = call(evaluate.main, "tiny/trials/dense", pairs, *one)
    assert stopped == "", printed
    assert "dense: a dense model has no routing to override" in printed
    (alone,) = json.loads(out.read_text())
    assert alone["metrics"]["acc1"] == trial(home, "token").metrics["val/acc1"]  # trained by itself
    assert alone["point"] == "images_per_group=1"
    for report, arm in zip(reports, ("dense", "soft"), strict=True):
        assert report["metrics"]["acc1"] == trial(home, arm).metrics["val/acc1"]
    for mode in ((), ("--grid",)):
        assert refused in call(evaluate.main, pairs, "--batch-size", "1", *mode)[0]
    assert "must hold a multiple of 2" in call(evaluate.main, pairs, "--batch-size", "1", "--shots", "1")[0]


def test_names_in_other_spellings(home: Path, digits: str, call: Call, tmp_path: Path):
    """Data with other names, in another order, find the model's outputs by a file; without it they are
    refused, and the models before keep their results.
    """
    words = ["nine", "eight", "seven", "six", "five", "four", "three", "two", "one", "zero"]
    source, other = open_source("digits"), str(tmp_path / "words")
    splits = {name: [s._replace(label=9 - s.label) for s in some] for name, some in source.splits.items()}
    write_shards(other, words, splits)
    file, out = tmp_path / "names.csv", tmp_path / "figures.json"
    file.write_text("".join(f"{word},{9 - place}\n" for place, word in enumerate(words)))
    args = ("tiny/trials/soft", "--repeats", "1", "--data", other, "--out", str(out))
    assert "do not compare with these labels" in call(evaluate.main, *args)[0]
    stopped, printed = call(evaluate.main, *args, "--classes", str(file))
    assert stopped == "", printed
    (report,) = json.loads(out.read_text())
    assert report["metrics"]["acc1"] == trial(home, "soft").metrics["val/acc1"]
    assert report["classes"]["class"] == [str(digit) for digit in range(10)]


def test_label_sets_of_the_same_classes(home: Path, digits: str, call: Call, tmp_path: Path):
    """The validation images have their class and the two that follow it, and an answer that names one of the
    three is right, as in ReaL accuracy.
    """
    source = open_source("digits")
    val = [
        s._replace(label=(s.label + 2) % 10, others=(s.label, (s.label + 1) % 10))
        for s in source.splits["val"]
    ]
    real = str(tmp_path / "real")
    write_shards(real, source.classes, {"train": source.splits["train"], "val": val})
    out = tmp_path / "figures.json"
    args = ("tiny/trials/soft", "--repeats", "1", "--data", real, "--out", str(out))
    assert call(evaluate.main, *args)[0] == ""
    (report,) = json.loads(out.read_text())
    model = read_model(f"{home}/tiny/trials/soft/checkpoints")
    vit, right = model.load(), 0
    for batch in images_of(model, path=digits, split="val", batch_size=64, device=torch.device("cpu")):
        with torch.no_grad():
            answer = vit(normalize(batch["image"]), batch.valid).logits.argmax(-1)
        right += int((((answer - batch["label"][:, 0]) % 10 <= 2) * batch.valid).sum())
    assert report["metrics"]["acc1"] == report["metrics"]["prec1"] == right / 367
    assert 0.1 < report["metrics"]["mean_ap"] < 1
    assert "no F1" in report["notes"][0]
    assert "confusion" not in report
    assert report["metrics"]["acc1"] > trial(home, "soft").metrics["val/acc1"]


def test_an_operating_point_has_its_own_key_and_its_own_cost(home: Path, call: Call):
    settings = ("routing.k=1", "routing.capacity=0.5", "routing.priority=max")
    stopped, printed = call(evaluate.main, "tiny/trials/token", "--repeats", "1", "--set", *settings)
    assert stopped == ""
    assert "k=1 capacity=0.5 priority=max on" in printed
    run = trial(home, "token")
    point = RoutingOverrides(k=1, capacity_factor=0.5, priority="max")
    found = run.metrics["eval/shards/val/step-20/k-1_capacity-0.5_priority-max/forward_gflops_2mac"]
    assert found == forward_gflops_2mac(run.config().model, point)
    assert found < forward_gflops_2mac(run.config().model)


def test_random_subsets_stand_beside_the_models_own(home: Path, call: Call, tmp_path: Path):
    out = tmp_path / "figures.json"
    point = ("--set", "routing.experts=1", "--random-subsets", "5", "--repeats", "1")
    error, text = call(evaluate.main, "tiny/trials/soft", *point, "--out", str(out))
    assert not error, text
    metrics = json.loads(out.read_text())[0]["metrics"]
    assert f"5 random subsets of 1 experts: mean {metrics['random_acc1']:.4f}" in text
    off, deviation = metrics["acc1"] - metrics["random_acc1"], metrics["random_acc1_std"]
    assert metrics.get("random_z", 0) * deviation == pytest.approx(off if deviation else 0)
    assert ("random_z" in metrics) == (deviation > 0)


def test_a_second_look_is_recorded_too(home: Path, call: Call, monkeypatch: pytest.MonkeyPatch):
    """Its place is the time of day, which goes on."""
    for now in (2_000_000_000, 2_000_000_060):
        monkeypatch.setattr("orchestrator.runs.measurements.time.time", lambda now=now: now)
        assert call(evaluate.main, "tiny/trials/dense", "--repeats", "1")[0] == ""
    history = trial(home, "dense").history("eval/shards/val/step-20/as_trained/ms_per_image")
    assert [place for place, _ in history][-2:] == [2_000_000_000, 2_000_000_060]


def test_mlflow_is_away(home: Path, call: Call):
    """Figures are printed and recorded all the same; they arrive when it is back."""
    away = ("--tracking-uri", "http://127.0.0.1:9")
    before = len(measurements(f"{home}/tiny/trials/soft"))
    stopped, printed = call(evaluate.main, "tiny/trials/soft", "--repeats", "1", *away)
    assert stopped == ""
    assert "not in MLflow yet: no MLflow server answers at http://127.0.0.1:9" in printed
    found = measurements(f"{home}/tiny/trials/soft")
    assert len(found) == before + 1
    assert (
        found[-1].metrics["eval/shards/val/step-20/as_trained/acc1"]
        == trial(home, "soft").metrics["val/acc1"]
    )
    assert found[-1].by["mlflow.source.name"].endswith("--tracking-uri http://127.0.0.1:9")
    assert call(report_again, "--name", "tiny")[0] == ""
    (name,) = (tag for tag in trial(home, "soft").tags if tag.endswith(found[-1].id))
    assert name.startswith("moe_frontier.measured.")


def test_a_model_whose_run_is_not_there(home: Path, call: Call):
    (home / "tiny").rename(home / "gone")
    try:
        stopped, printed = call(evaluate.main, f"{home}/soft.safetensors", "--repeats", "1")
    finally:
        (home / "gone").rename(home / "tiny")
    assert stopped == ""
    assert "not recorded, because the run is not there: tiny/trials/soft" in printed


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["nothing"], "error: no trained model 'nothing'"),
        (["sweep:tiny", "--data", "/nowhere", "--grid"], "/nowhere"),
        (["sweep:tiny", "--data", "a", "--data", "b"], "2 times --data: this takes one data set"),
        (
            ["tiny/trials/soft", "--set", "routing.k=1"],
            "soft: a router of kind 'soft' has no k",
        ),
        (["tiny/trials/token", "--set", "k=9"], "an operating point has routing.k, "),
        (
            ["tiny/trials/soft", "tiny/trials/dense", "--grid", "routing.k=1,2"],
            "error: --grid routing.k=1,2: none of the models can run at these points: tiny/trials/soft: a"
            " router of kind 'soft' has no k to override; tiny/trials/dense: a dense model has no routing",
        ),
    ],
)
def test_mistakes_are_one_line(args: list[str], message: str, home: Path, call: Call):
    assert message in call(evaluate.main, *args)[0]


def test_of_several_models_those_without_the_setting_are_left_out(home: Path, call: Call):
    stopped, printed = call(evaluate.main, "sweep:tiny", "--repeats", "1", "--set", "routing.experts=2")
    assert stopped == ""
    assert "dense: a dense model has no routing to override" in printed
    assert "eval/shards/val/step-20/experts-2/acc1" in trial(home, "soft").metrics
    assert "eval/shards/val/step-20/experts-2/acc1" not in trial(home, "dense").metrics


def test_two_steps_of_a_run_have_a_key_each(home: Path, call: Call):
    folder = f"{home}/tiny/trials/token/checkpoints"
    steps = [f"{folder}/step-000000{step}" for step in (10, 20)]
    stopped, printed = call(evaluate.main, *steps, "--repeats", "1")
    assert stopped == ""
    found = trial(home, "token").metrics
    assert found["eval/shards/val/step-20/as_trained/acc1"] == found["val/acc1"]
    assert found["eval/shards/val/step-10/as_trained/acc1"] != found["val/acc1"]
    assert "tiny/trials/token@10" in printed


def test_names_of_data_that_mlflow_would_refuse(home: Path, call: Call, few_digits: str, tmp_path: Path):
    shutil.copytree(few_digits, tmp_path / "my 'se:t'! %")
    data = str(tmp_path / "my 'se:t'! %")
    stopped, printed = call(evaluate.main, "tiny/trials/soft", "--repeats", "1", "--data", data)
    assert stopped == ""
    assert "refuses" not in printed
    assert "eval/my-se-t-/val/step-20/as_trained/acc1" in trial(home, "soft").metrics


def test_data_of_the_same_folder_name_has_a_key_of_its_own(
    home: Path, call: Call, pack_greys: Callable[..., Any], tmp_path: Path
):
    path, _ = pack_greys(train=20, val=7)
    shutil.copytree(path, tmp_path / "others" / "shards")
    for data in ([], ["--data", str(tmp_path / "others" / "shards")]) * 2:
        assert call(evaluate.main, "tiny/trials/dense", "--repeats", "1", *data)[0] == ""
    run = trial(home, "dense")
    assert run.metrics["eval/shards/val/step-20/as_trained/acc1"] == run.metrics["val/acc1"]
    keys = {name.split("/")[1] for name in run.metrics if "others-shards" in name}
    assert keys == {"others-shards"}, "the second look too"
    assert run.tags["eval.data.others-shards"] == f"{tmp_path}/others/shards"


def test_which_images_a_sweep_is_judged_by(
    home: Path, digits: str, pack_greys: Callable[..., Any], tmp_path: Path
):
    """Its own validation split, wherever it lies; a data set that changed since the training is another."""
    model = read_model(f"{home}/tiny/trials/soft/checkpoints")
    own = EvalTask(model=model, points=(), path=digits, split="val", batch_size=8, results="")
    copy, others = str(shutil.copytree(digits, tmp_path / "copy")), pack_greys(train=4)[0]
    judged = grid.on_images_of_training
    assert judged([own, replace(own, path=copy)])
    assert not judged([own, replace(own, split="train")])
    assert not judged([own, replace(own, path=others)])
    manifest = Path(copy, "manifest.json")
    manifest.write_text(manifest.read_text().replace('"sha256": "', '"sha256": "0', 1))
    assert not judged([replace(own, path=copy)])

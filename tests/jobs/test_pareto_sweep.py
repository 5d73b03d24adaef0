"""`jobs/pareto_sweep.py` as a user runs it: trained, published, the same again."""

import json
import re
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from mlflow import MlflowClient

from jobs import pareto_sweep, report
from jobs._cli import OUT_OF_BUDGET
from jobs._flags import parse
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.evaluation.models import load_model
from orchestrator.planning.preflight import check_metrics
from orchestrator.sweeps.driver import make_search
from orchestrator.sweeps.run import QUIET
from orchestrator.sweeps.scales import TINY
from orchestrator.tracking.store import EXPERIMENT

ROOT = Path(__file__).parents[2]

SWEEP = """
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.sweep import Sweep

def make():
    base = override(RunConfig(), {"name": "small", "train.steps": 6, "train.report_every": 3})
    soft = {"model.moe.router.kind": "soft", "model.moe.num_experts": 4}
    return Sweep(base=base, arms={"soft": soft, "hot": soft | {"train.lr": 1e9}})
"""
Call = Callable[..., tuple[str, str]]


@pytest.fixture
def command(cluster: None, empty_home: Path, tmp_path: Path) -> list[str]:
    (tmp_path / "small.py").write_text(SWEEP)
    return [
        "--sweep",
        f"{tmp_path}/small.py:make",
        "--confirm",
        "0",
        "--measure",
        "never",
        "--max-concurrent",
        "1",
    ]


@pytest.mark.smoke
@pytest.mark.usefixtures("trials_here")
def test_ended_by_its_budget_then_trained_and_published_once(
    command: list[str], call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An exhausted budget has an exit code of its own. The first trial is admitted, because nothing is known
    of its duration; it spends more than there is.
    """
    home = tmp_path / "home"
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    monkeypatch.setenv("LOGNAME", "ada")
    for flag, why in (
        ("--budget-hours", "Run again with a larger --budget-hours or --budget-usd to continue"),
        (
            "--owner-hours",
            r"ada has spent \S+ of 1e-06 device-hours in 20\d\d-\d\d \(UTC\) below \S+, and \S+"
            r" more are needed. Run again with a larger --owner-hours, or next month, to continue",
        ),
    ):
        stopped, said = call(pareto_sweep.main, *command, flag, "1e-6")
        assert stopped == str(OUT_OF_BUDGET)
        assert re.search(rf"Budget exhausted: 1 trials not finished\. {why}\.", said)
        assert "This sweep was stopped before its end." in said
    stopped, said = call(pareto_sweep.main, *command)
    assert stopped == ""
    assert "2/2]" in said
    assert "Hypervolume" in said
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert Counter(run.data.tags["role"] for run in runs.values()) == {"sweep": 1, "trial": 2}
    assert {name: run.info.status for name, run in runs.items() if run.info.status != "FINISHED"} == {
        "hot": "FAILED"  # it diverged, which is an outcome: the sweep is fine
    }
    assert re.fullmatch(r"diverged at step \d", runs["hot"].data.tags["error"])
    table = json.loads(next(home.rglob("frontier.json")).read_text())
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["data"]]
    assert [row["arm"] for row in rows if row["status"] == "diverged"] == ["hot"]
    (soft,) = [row for row in rows if row["arm"] == "soft"]
    # 41 of 367 images are of the largest class.
    assert ("no better than always guessing the largest class, 0.1117: soft" in said) == (
        soft["val/acc1"] <= 41 / 367
    )
    parent = runs["small"].info.run_id
    assert all(run.data.tags["mlflow.parentRunId"] == parent for name, run in runs.items() if name != "small")
    version = client.get_model_version_by_alias("small", "pareto-best")
    assert version.run_id in {run.info.run_id for run in runs.values()}

    page = (home / "small/frontier.html").read_text()
    assert call(report.main, "--name", "small", "--out", str(tmp_path / "page"))[0] == ""
    assert (tmp_path / "page/frontier.html").read_text() == page
    tags = runs["small"].data.tags
    assert tags["mlflow.note.content"].startswith("# Sweep small")
    assert "small.py:make" in tags["mlflow.source.name"]

    versions = len(client.search_model_versions("name = 'small'"))
    trained = {path: path.stat().st_mtime_ns for path in home.glob("small/*/*/result.json")}
    assert len(trained) == 2
    stopped, said = call(pareto_sweep.main, *command)
    assert stopped == ""
    assert "2 of 2 trials are complete already" in said
    assert not re.search(r"step \d", said)
    assert trained == {path: path.stat().st_mtime_ns for path in trained}
    assert len(client.search_runs([experiment.experiment_id])) == len(runs)
    assert len(client.search_model_versions("name = 'small'")) == versions


def test_a_sweep_may_judge_frozen_features(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every trial then measures them; other numbers of shots are not among the sweep's metrics."""
    for shots, known in ((10, True), (7, False)):
        monkeypatch.setattr(sys, "argv", ["job", "--quality", f"fewshot/acc_{shots}shot"])
        sweep = parse(pareto_sweep.SweepFlags, "").make()
        assert all(run.train.fewshot for run in sweep.runs().values())
        with nullcontext() if known else pytest.raises(UsageError, match="acc_7shot' of a sweep is none of"):
            check_metrics(sweep)


def test_a_search_learns_from_its_own_data_alone(
    trained_home: Path, digits: str, pack_greys: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    greys, _ = pack_greys(train=64)
    for data, refused in ((digits, False), (greys, True)):
        flags = ["--sweep", "quickstart", "--search", "random", "--warm-start", "tiny"]
        monkeypatch.setattr(sys, "argv", ["job", *flags, "--storage", str(trained_home), "--data", data])
        asked = parse(pareto_sweep.SweepFlags, "")
        with pytest.raises(UsageError, match="tiny was trained on other data") if refused else nullcontext():
            options = asked.drawing()
            assert options
            make_search(asked.make(), options, QUIET)


@pytest.mark.smoke  # four trials, and a confirmation
@pytest.mark.usefixtures("trials_here")
def test_the_quickstart_confirms_its_knee(
    cluster: None, empty_home: Path, call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`make sweep` with fewer steps, one of its widths, one seed and one trial at a time; two workers train
    the knee again.
    """
    sizes = TINY.sizes_of["quickstart"]
    assert len(sizes) == 3
    monkeypatch.setitem(TINY.sizes_of, "quickstart", {"w24": sizes["w24"]})
    words = ["--seeds", "1", "--max-concurrent", "1", "--set", "train.steps=12", "train.report_every=6"]
    stopped, said = call(pareto_sweep.main, *words)
    assert not stopped
    assert "[ 4/4]" in said
    assert "retraining" in said
    assert "timing 4 models in turns: one image, onnxruntime, 1 thread" in said
    assert "Times of inference are of ONNX files" in (empty_home / "quickstart/frontier.html").read_text()
    spent = json.loads((empty_home / "quickstart/spent.json").read_text())
    assert (len(spent["jobs"]), spent["running"]) == (5, []), "the confirmation is paid for too"

    uri = f"sqlite:///{empty_home}/mlflow.db"
    client = MlflowClient(uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    assert experiment
    runs = client.search_runs([experiment.experiment_id])
    assert Counter(run.data.tags["role"] for run in runs) == {"sweep": 1, "trial": 4, "confirm": 1}
    assert {run.info.status for run in runs} == {"FINISHED"}
    assert any(run.data.tags.get("pareto") == "true" for run in runs)
    confirmed = next(run for run in runs if run.data.tags["role"] == "confirm")
    assert "pareto" not in confirmed.data.tags
    assert confirmed.data.params["train.steps"] == "24"
    knee = client.get_model_version_by_alias("quickstart", "pareto-knee")
    assert client.get_run(str(knee.run_id)).data.tags["arm"] == confirmed.data.tags["arm"]
    assert "linear classifier on pixels: val/acc1 0.1" in said

    model = load_model("models:/quickstart@confirmed", tracking_uri=uri)
    version = client.get_model_version_by_alias("quickstart", "confirmed")
    assert version.run_id == confirmed.info.run_id
    same = load_model(f"models:/quickstart/{version.version}", tracking_uri=uri)
    images = torch.rand(4, 3, 16, 16)
    assert torch.equal(model(images).logits, same(images).logits)
    assert model(images).logits.abs().sum() > 0
    manifest = open_manifest(f"{empty_home}/data/cluttered-digits")
    assert (manifest.rows("train"), manifest.rows("val")) == (11_440, 2_202)

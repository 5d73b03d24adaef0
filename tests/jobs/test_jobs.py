"""The commands as a user runs them: what they print and how they exit."""

import os
import re
import subprocess
import sys
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from mlflow import MlflowClient

from jobs import pack_shards, pareto_sweep, sweep_flags, train
from jobs.usage import assignment
from orchestrator.codec import flat
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.evaluation.models import load_model
from orchestrator.sweeps.preflight import check_metrics
from orchestrator.tracking.find import find_run
from orchestrator.tracking.store import EXPERIMENT, open_reader

ROOT = Path(__file__).parents[2]


def call(main: Callable[[], None], monkeypatch: pytest.MonkeyPatch, *args: str) -> str:
    """What `main` exits with: the message of its error, empty if there is none."""
    monkeypatch.setattr(sys, "argv", ["job", *args])
    try:
        main()
    except SystemExit as stop:
        return str(stop.code)
    return ""


def run_job(home: Path, *command: str) -> subprocess.CompletedProcess[str]:
    env = os.environ | {"MOE_FRONTIER_HOME": str(home), "PYTHONPATH": str(ROOT), "RAY_ADDRESS": "local"}
    return subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=400,
        check=False,
    )


@pytest.mark.parametrize("main", [train.main, pareto_sweep.main], ids=["train", "pareto_sweep"])
@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--data", "/nowhere"], "no data set at /nowhere"),
        (["--set", "train.stepz=1"], r"unknown field train.stepz; train has: steps, lr"),
        (
            ["--set", "model.moe.router.kind=magic"],
            "unknown model.moe.router.kind 'magic'; known: expert_choice",
        ),
        (["--set", "train.steps=many"], "train.steps='many'"),
        (["--set", "train.steps"], "write FIELD=VALUE"),
        (["--name", "../up"], "'../up': begin with a letter or digit"),
        (["--workers", "3"], "data.batch_size=64 does not divide over workers=3"),
        (
            ["--workers", "2", "--ep", "2", "--set", "model.moe.num_experts=3"],
            r"num_experts=3 does not divide over ep=2; use one of \[1, 3\]",
        ),
        (
            ["--set", "model.moe.images_per_group=5"],
            "images_per_group=5 does not divide the 64 images of one",
        ),
        (
            ["--storage", "s3://bucket/runs"],
            "s3://bucket/runs holds no MLflow store",
        ),
        (["--storage", str(ROOT / "README.md")], "--storage .*/README.md cannot be written to: "),
        (["--storage", "/proc/x"], "--storage /proc/x cannot be written to: No such file"),
        (["--set", "data.batch_size=2000"], "batch_size=2000 is more than the 1430 training images of"),
        (["--init-from", "nosuch"], "--init-from nosuch: no trained model 'nosuch'"),
        (["--set", "name=elsewhere"], "use --name"),
        (["--set", "data.path=/x"], "use --data"),
        (["--name", "data"], "'data' is reserved, as are data, evaluation, mlartifacts, mlflow.db"),
        (["--name", "mlflow.db.lock"], "'mlflow.db.lock' is reserved"),
        (["--init-from", ""], "--init-from : no trained model ''"),
    ],
)
def test_bad_input_is_one_clear_line(main, flags, message, empty_home, monkeypatch, capsys):
    said = call(main, monkeypatch, *flags)
    assert re.search(message, said if said != "2" else capsys.readouterr().err)  # 2: argparse's own


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("file:///tmp/mlruns", "MLflow refuses the tracking URI file:///tmp/mlruns: The filesystem"),
        ("bogus://x", "MLflow refuses the tracking URI bogus://x"),
        ("http://127.0.0.1:9", "no MLflow server answers at http://127.0.0.1:9"),
    ],
)
def test_refused_tracking_uri(uri, message, empty_home, monkeypatch):
    assert message in call(train.main, monkeypatch, "--tracking-uri", uri)


def test_truncated_shard_is_named(empty_home, monkeypatch, tmp_path, capsys):
    assert call(pack_shards.main, monkeypatch, "--source", "digits", "--out", str(tmp_path / "cut")) == ""
    assert "1430 training and 367 validation images, 10 classes, 0 skipped" in capsys.readouterr().out
    shard = tmp_path / "cut/train/000001.parquet"
    shard.write_bytes(shard.read_bytes()[:1000])
    message = call(train.main, monkeypatch, "--data", str(tmp_path / "cut"))
    assert "train/000001.parquet has 1000 bytes, the manifest says" in message


def test_train_completes_resumes_and_refuses_another_config(empty_home, monkeypatch, capsys):
    """Once through everything that --resume and --fresh promise."""
    soft = ["--name", "soft", "--set", "model.moe.router.kind=soft", "--set", "train.steps=10"]
    assert "nothing to resume" in call(train.main, monkeypatch, *soft, "--resume")
    assert call(train.main, monkeypatch, *soft) == ""
    first = capsys.readouterr().out
    assert "step 10/10  train/loss" in first
    assert "soft is complete: finished after 10 steps" in first

    assert call(train.main, monkeypatch, *soft) == ""
    assert "step 10/10" not in (again := capsys.readouterr().out)
    assert "soft is complete" in again

    changed = [*soft, "--set", "train.lr=0.5"]
    assert "another config (train.lr: 0.001 -> 0.5)" in call(train.main, monkeypatch, *changed)
    assert call(train.main, monkeypatch, *soft, "--set", "train.microbatch=16") == ""
    assert call(train.main, monkeypatch, *changed, "--fresh") == ""
    assert {path.name for path in empty_home.iterdir()} >= {"soft", "soft.old-1"}

    client = MlflowClient(f"sqlite:///{empty_home}/mlflow.db")
    runs = client.search_runs([client.get_experiment_by_name(EXPERIMENT).experiment_id])
    assert [run.info.status for run in runs] == ["FINISHED", "FINISHED"]
    for run in runs:
        losses = client.get_metric_history(run.info.run_id, "train/loss")
        assert [loss.step for loss in losses] == [640]
    rebuilt = find_run(open_reader(f"sqlite:///{empty_home}/mlflow.db"), runs[0].info.run_id).config()
    config = {name: str(value) for name, value in flat(rebuilt).items()}
    assert config.items() <= runs[0].data.params.items()
    assert rebuilt.train.lr == 0.5


def test_set_takes_json_for_null_lists_and_groups():
    values = {"null": None, "[1, 2]": [1, 2], '{"k": 1}': {"k": 1}, "1": "1", "nullable": "nullable"}
    assert {text: assignment(f"model.moe={text}")[1] for text in values} == values


@pytest.mark.parametrize("main", [train.main, pareto_sweep.main], ids=["train", "pareto_sweep"])
def test_set_help_shows_every_field(main, empty_home, monkeypatch, capsys):
    assert call(main, monkeypatch, "--set", "help") == ""
    shown = capsys.readouterr().out
    for field in (
        "model.moe.router.slots_per_expert = 1",
        "train.schedule.timescale = 10000",
        "scale.ep = 1",
    ):
        assert field in shown


def test_a_sweep_may_judge_frozen_features(empty_home, monkeypatch):
    """Every trial then measures them; other shots are no metric of its."""
    for shots, known in ((10, True), (7, False)):
        monkeypatch.setattr(sys, "argv", ["job", "--quality", f"fewshot/acc_{shots}shot"])
        sweep = sweep_flags.sweep_from(sweep_flags.parse(""))
        assert all(run.train.fewshot for run in sweep.runs().values())
        with nullcontext() if known else pytest.raises(UsageError, match="acc_7shot' of a sweep is none of"):
            check_metrics(sweep)


@pytest.mark.smoke  # 15 trials, and a confirmation on two workers
def test_the_quickstart_from_shards_to_a_registered_model(empty_home):
    """`make sweep` with fewer steps: frontier, confirmation on two workers, registry; again adds nothing."""
    command = ["jobs/pareto_sweep.py", "--set", "train.steps=12", "--set", "train.report_every=6"]
    done = run_job(empty_home, *command)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "[15/15]" in done.stdout
    assert "confirming" in done.stdout
    assert "hypervolume" in done.stdout

    client = MlflowClient(f"sqlite:///{empty_home}/mlflow.db")
    experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
    runs = client.search_runs([experiment])
    roles = [run.data.tags["role"] for run in runs]
    assert {role: roles.count(role) for role in roles} == {"sweep": 1, "trial": 15, "confirm": 1}
    assert {run.info.status for run in runs} == {"FINISHED"}
    parent = next(run for run in runs if run.data.tags["role"] == "sweep")
    assert all(run.data.tags["mlflow.parentRunId"] == parent.info.run_id for run in runs if run is not parent)
    assert any(run.data.tags.get("pareto") == "true" for run in runs)
    confirmed = next(run for run in runs if run.data.tags["role"] == "confirm")
    assert "pareto" not in confirmed.data.tags
    assert confirmed.data.params["scale.ep"] == "2"

    uri = f"sqlite:///{empty_home}/mlflow.db"
    model = load_model("models:/quickstart@confirmed", tracking_uri=uri)
    assert model.config.moe is not None
    version = client.get_model_version_by_alias("quickstart", "confirmed")
    assert version.run_id == confirmed.info.run_id
    same = load_model(f"models:/quickstart/{version.version}", tracking_uri=uri)
    images = torch.rand(4, 3, 8, 8)
    assert torch.equal(model(images).logits, same(images).logits)
    assert model(images).logits.abs().sum() > 0

    versions = len(client.search_model_versions("name = 'quickstart'"))
    report = run_job(
        empty_home, "jobs/report.py", "--name", "quickstart", "--out", str(empty_home / "report")
    )
    assert report.returncode == 0, report.stderr[-3000:]
    assert (empty_home / "report/frontier.html").read_text() == (
        empty_home / "quickstart/frontier.html"
    ).read_text()

    again = run_job(empty_home, *command)
    assert again.returncode == 0, again.stderr[-3000:]
    assert len(client.search_runs([experiment])) == len(runs)
    assert len(client.search_model_versions("name = 'quickstart'")) == versions
    manifest = open_manifest(f"{empty_home}/data/digits")
    assert manifest.rows("train") + manifest.rows("val") == 1797

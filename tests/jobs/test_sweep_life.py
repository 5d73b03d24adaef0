"""The life of a sweep as a user runs it, in this process: trained, published, the same again."""

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from jobs import pareto_sweep, report
from orchestrator.tracking.store import EXPERIMENT

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
    return ["--sweep", f"{tmp_path}/small.py:make", "--confirm", "0", "--max-concurrent", "1"]


def test_trained_and_published_once(command: list[str], call: Call, tmp_path: Path) -> None:
    home = tmp_path / "home"
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    stopped, said = call(pareto_sweep.main, *command)
    assert stopped == ""
    assert "2/2]" in said
    assert "hypervolume" in said
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
    assert not re.search(r"step \d", said)
    assert trained == {path: path.stat().st_mtime_ns for path in trained}
    assert len(client.search_runs([experiment.experiment_id])) == len(runs)
    assert len(client.search_model_versions("name = 'small'")) == versions

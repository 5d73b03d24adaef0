"""`papers/jobs/study.py` as a user runs it."""

import json
import pkgutil
from collections.abc import Callable
from pathlib import Path

import pytest
from mlflow import MlflowClient

from orchestrator.tracking.store import open_reader
from papers import STUDIES
from papers.implicit_bias.specialisation import STOP_AT
from papers.jobs import study
from tests.mlflow_reader import find_run

Call = Callable[..., tuple[str, str]]


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, call: Call, tmp_path: Path) -> Call:
    """``call("l2norm", "--seeds", "2")``: what it exits with, and what it prints."""
    monkeypatch.setattr("papers.implicit_bias.l2norm.STEPS", 20)
    return lambda *args: call(study.main, *args, "--storage", str(tmp_path / "home"))


@pytest.mark.smoke
def test_a_study_prints_its_table_and_leaves_it_in_mlflow(call, tmp_path):
    error, out = call("l2norm", "--seeds", "1", "--out", str(tmp_path / "out"))
    assert error == ""
    assert "5 tokens of 2, n=1: " in out
    assert "MSE, 2 tokens of 5" in out
    assert out.index("hidden units each") < out.index(f"{tmp_path}/out/l2norm.png and .json")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["l2norm.json", "l2norm.png"]
    written = json.loads((tmp_path / "out" / "l2norm.json").read_text())["table"]
    assert written["experts"] == list(range(1, 11))

    store = f"sqlite:///{tmp_path}/home/mlflow.db"
    reader = open_reader(store)
    (found,) = reader.client.search_runs([reader.experiment_id])
    run = find_run(reader, found.info.run_id)
    assert run.status == "FINISHED"
    assert {name: run.tags[name] for name in ("role", "study", "seeds")} == {
        "role": "study",
        "study": "l2norm",
        "seeds": "1",
    }
    ratio = written["MSE, 5 tokens of 2"][0] / max(written["MSE, 5 tokens of 2"][4:])
    assert run.metrics["study/one_over_five_or_more/5x2"] == pytest.approx(ratio)
    artifacts = {item.path for item in MlflowClient(store).list_artifacts(run.run_id)}
    assert artifacts == {"l2norm.png", "table.json"}

    again = call("l2norm", "--seeds", "1", "--out", str(tmp_path / "again"))
    assert again[0] == ""
    assert json.loads((tmp_path / "again" / "l2norm.json").read_text())["table"] == written, "seeds decide"


def test_help_says_what_each_study_stands_for(call):
    assert "capacity           batch prioritized routing against vanilla" in call("--help")[1]
    for about, function in STUDIES.values():
        assert "(V-MoE, " in about or "(Implicit Bias, " in about
        assert callable(pkgutil.resolve_name(function))
    assert f"compared; default: {STOP_AT}" in " ".join(call("--help")[1].split())

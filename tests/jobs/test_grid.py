"""`jobs/evaluate.py --grid` as a user runs it, on a sweep of its own: pages show its points ever after."""

import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from mlflow import MlflowClient

from jobs import evaluate
from jobs._cli import Evaluation, Places
from jobs._record import Record
from orchestrator.evaluation.kinds import GridConfig, grid
from orchestrator.runs.lock import locked
from orchestrator.sweeps.build import sweep_frontier
from orchestrator.sweeps.operating import COSTS, TIMING
from orchestrator.sweeps.publish import publish
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking.store import open_reader
from tests.made_directories import end_sweep, run_at
from tests.mlflow_reader import children, find_sweep
from tests.trained_sweep import train_sweep

Call = Callable[..., tuple[str, str]]


@pytest.fixture
def home(cluster: None, tmp_path: Path, digits: str, monkeypatch: pytest.MonkeyPatch) -> Path:
    train_sweep(tmp_path / "home", digits)
    monkeypatch.setenv("MOE_FRONTIER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.mark.slow
def test_operating_points_of_a_sweep(home: Path, call: Call, tmp_path: Path):
    """Nine settings of the token router, none of the others; the page shows them and what they add. The same
    question again is answered from the disk.
    """
    before = {path: path.read_bytes() for path in home.glob("tiny/trials/*/checkpoints/*/weights*")}
    arguments = ["sweep:tiny", "--repeats", "1", "--grid", "routing.k=1,2,3", "routing.capacity=0.5,1,1.5"]
    stopped, printed = call(evaluate.main, *arguments)
    assert stopped == ""
    assert "12 operating points of 3 models" in printed
    assert "gain in hypervolume by operating points, MoE models alone:" in printed
    assert before == {path: path.read_bytes() for path in home.glob("tiny/trials/*/checkpoints/*/weights*")}

    frontier, *_ = sweep_frontier(f"{home}/tiny")
    assert len(frontier.operating) == 9
    assert all(point.arm.startswith("token: k=") for point in frontier.operating)
    known = {point.arm: point for point in frontier.operating}
    cheap, dear = known["token: k=1 capacity=0.5"], known["token: k=3 capacity=1.5"]
    assert cheap.costs["cost/forward_gflops_2mac"] < dear.costs["cost/forward_gflops_2mac"]
    token = next(point for point in frontier.points if point.arm == "token")
    reader = open_reader(f"sqlite:///{home}/mlflow.db")
    sweep = find_sweep(reader, "tiny")
    (arm,) = [run for run in children(reader, sweep.run_id) if run.tags["arm"] == "token"]
    assert token.quality == arm.metrics["val/acc1"]
    page = (home / "tiny/frontier.html").read_text()
    assert "Operating points</h2>" in page
    assert (home / "tiny/operating.png").stat().st_size > 10_000
    names = {item.path for item in MlflowClient(f"sqlite:///{home}/mlflow.db").list_artifacts(sweep.run_id)}
    assert {"operating_points.json", "operating.png"} <= names

    answers = {path: path.stat().st_mtime_ns for path in (home / "evaluation").glob("*.json")}
    assert len(answers) == 3
    assert call(evaluate.main, *arguments, "--out", str(tmp_path / "again"))[0] == ""
    assert answers == {path: path.stat().st_mtime_ns for path in (home / "evaluation").glob("*.json")}
    assert (tmp_path / "again/frontier.html").exists()


@pytest.mark.slow
def test_operating_points_of_any_models(home: Path, call: Call, tmp_path: Path):
    """Exported files and steps of one run, which are no sweep: a page of their own, forward GFLOPs as cost,
    and each model's own figures.
    """
    steps = [f"{home}/tiny/trials/soft/checkpoints/step-000000{step}" for step in (10, 20)]
    models = [*steps, f"{home}/dense.safetensors"]
    stopped, printed = call(
        evaluate.main, *models, "--grid", "--repeats", "1", "--out", str(tmp_path / "page")
    )
    assert stopped == ""
    assert "11 operating points of 3 models" in printed  # soft as trained and with 1, 2, 4, 6 of 8; dense
    assert "gain in hypervolume by operating points, MoE models alone:" in printed
    page = (tmp_path / "page/frontier.html").read_text()
    assert "Forward pass (" in page
    first, *_ = json.loads(page.split('id="data">')[1].split("</script>")[0])
    texts = [text for trace in first["data"] for text in trace.get("hovertext") or ()]
    for name, path in (("soft@10", steps[0]), ("soft@20", steps[1])):
        point = f"tiny/trials/{name}: experts=2"
        one = ("--repeats", "1", "--set", "routing.experts=2", "--out", str(tmp_path / "one"))
        call(evaluate.main, path, *one)
        (report,) = json.loads((tmp_path / "one").read_text())
        (drawn,) = [text for text in texts if text.startswith(f"<b>{point}</b>")]
        assert f"accuracy @1: {report['metrics']['acc1']:.4f}<" in drawn


def test_points_are_kept_while_a_command_trains(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Measuring takes hours. The page has the points now, and that of the command will have them."""
    monkeypatch.setattr(grid, "on_images_of_training", lambda tasks: True)
    folder = end_sweep(Sweep(base=run_at(tmp_path, "s"), arms={"a": {}}), {"a": 0.5})
    row = dict.fromkeys(("run", "point", "val/acc1", "val/acc5", "val/loss", *COSTS, *TIMING), 0.6) | {
        "batch": 1,
        "device": "CPU",
        "rounds": 1,
        "repeats": 1,
    }
    task: Any = SimpleNamespace(model=SimpleNamespace(name="a", location="there"))
    on = Evaluation(places=Places(storage=str(tmp_path)))
    flags = evaluate.EvaluateFlags(model=("sweep:s",), how=GridConfig(), on=on)
    monkeypatch.setattr(evaluate, "models_of", lambda *_: [task.model])
    asked = evaluate.request(flags, None, Record(on.places))
    rows = {"there": [row | {"run": "a", "point": point} for point in ("as trained", "k=1")]}
    with locked(folder):
        frontier = grid.draw_frontier([task], rows, asked)
    assert [point.arm for point in frontier.operating] == ["a: k=1"]
    assert f"a command trains in {folder}" in capsys.readouterr().out
    assert [point.arm for point in publish(folder).operating] == ["a: k=1"]


@pytest.mark.slow
def test_points_on_training_images_stay_off_the_sweeps_frontier(home: Path, call: Call):
    """They get a page of their own."""
    arguments = ["sweep:tiny", "--split", "train", "--repeats", "1", "--grid", "routing.experts=2"]
    stopped, printed = call(evaluate.main, *arguments)
    assert stopped == ""
    assert "The frontier of tiny stays as it is" in printed
    assert f"page     {home}/operating-points/frontier.html" in printed
    assert "soft: experts=2" in (home / "operating-points/frontier.html").read_text()
    assert sweep_frontier(f"{home}/tiny")[0].operating == ()

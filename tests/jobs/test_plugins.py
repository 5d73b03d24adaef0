"""A router, a model, a task and an optimiser from outside of the tree, each in one file, as users do."""

import json
import math
import shutil
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from jobs import evaluate, export, pack_shards, pareto_sweep, predict, report, train
from moe.exported import load
from orchestrator.plugins import load_plugins
from tests.lanes import mostly_slow
from tests.orchestrator.tracking.test_wandb import reported, written
from tests.parts import png

pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("cluster")]

OWN = Path(__file__).parents[1] / "own"
GUESTS = {
    "cosine": ["model.moe.router.kind=cosine"],
    "convnet": ["model.kind=convnet", "model.moe.layers=last_1", "model.moe.num_experts=4"],
    "proportions": ["task.kind=proportions"],
    "lion": ["train.optimizer.kind=lion", "train.optimizer.weight_decay=0.1", "train.lr=1e-4"],
}
SHORT = ["train.steps=4", "train.report_every=2", "checkpoint.every=2", "checkpoint.keep_last=2"]
SWEEP = """
from orchestrator import RunConfig, Sweep, override

def make():
    base = override(RunConfig(), {"name": "guests", "train.steps": 4, "task.kind": "proportions"})
    arms = {
        "cosine": {"model.moe.router.kind": "cosine"},
        "convnet": {"model.kind": "convnet"},
        "lion": {"train.optimizer.kind": "lion"},
    }
    return Sweep(base=base, arms=arms)
"""


def reports(run: Path) -> list[dict]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("name", mostly_slow(GUESTS, fast=["convnet", "proportions"]))
def test_a_guest(name, empty_home, call, new_process, tmp_path):
    """It trains, goes on, is exported, evaluated, predicts; or refused by name. On two workers the model is
    in tests/cluster/test_sweep_on_a_cluster.py, and the task in tests/orchestrator/tasks/test_proportions.py;
    a router and an optimiser train on two and go on with one.
    """
    file, run = OWN / f"{name}.py", empty_home / name
    plugin, settings = ["--plugin", str(file)], ["--name", name, "--set", *GUESTS[name], *SHORT]
    workers = "1" if name in ("convnet", "proportions") else "2"
    stopped, said = call(train.main, *plugin, *settings, "--workers", workers)
    assert stopped == "", said
    (written,) = load_plugins([file])
    assert json.loads((run / "config.json").read_text())["config"]["plugins"] == [written]
    assert (run / "plugins" / file.name).read_bytes() == file.read_bytes()
    before = reports(run)

    # As if it had been killed after its first checkpoint.
    (run / "result.json").unlink()
    shutil.rmtree(run / "checkpoints" / "step-00000004")
    new_process()
    assert f".kind '{name}'; known: " in call(train.main, *settings)[0]
    assert call(train.main, *plugin, *settings)[0] == ""
    resumed = reports(run)[len(before) :]
    assert [each.get("resumed", each.get("step")) for each in resumed] == [2, 4]
    once, again = before[-1]["metrics"], resumed[-1]["metrics"]
    assert math.isclose(again["train/loss"], once["train/loss"], rel_tol=1e-5)
    assert again["data/fingerprint"] == once["data/fingerprint"]

    exported, folder = tmp_path / f"{name}.safetensors", tmp_path / "folder"
    assert call(export.main, name, "--out", str(exported), *plugin)[0] == ""
    assert call(export.main, name, "--out", f"{folder}/", *plugin)[0] == ""
    new_process()
    missing = f"made with the plugin {file.name} (SHA-256 {written.split('@')[1][:12]}..), and it is not"
    photos, said = tmp_path / "photos", tmp_path / "said"
    photos.mkdir()
    for number in range(9):
        (photos / f"{number}.png").write_bytes(png(np.full((8, 8), 9 * number)))
    predicting = [str(exported), "--images", str(photos), "--out", str(said), "--workers", "1"]
    readers = [(evaluate, [name]), (evaluate, [name, "--shots", "1"]), (predict, predicting)]
    for job, words in (*readers, (export, [name, "--out", str(tmp_path / "again.safetensors")])):
        assert missing in call(job.main, *words)[0], job
    if name in ("cosine", "convnet"):
        with pytest.raises(ValueError, match=f"unknown .*; import the files it was made with: {written}"):
            load(folder)
    if name == "proportions":
        assert "no classes to predict" in call(predict.main, *readers.pop()[1], *plugin)[0]
    for job, words in readers:
        assert call(job.main, *words, *plugin)[0] == "", job
    assert name == "proportions" or pq.read_table(said).num_rows == 9
    assert load(folder).config.kind == ("convnet" if name == "convnet" else "vit")


def test_a_sweep_of_guests(empty_home, call, new_process, tmp_path):
    """For a task of one's own. Trials load what they need; so does a resumed sweep."""
    names = ("proportions", "cosine", "convnet", "lion")
    task, *files = (Path(shutil.copy(OWN / f"{name}.py", tmp_path)) for name in names)
    plugins = [word for file in (task, *files) for word in ("--plugin", str(file))]
    sweep, of = (
        tmp_path / "guests.py",
        ["--sweep", f"{tmp_path}/guests.py:make", "--confirm", "0", "--measure", "never"],
    )
    sweep.write_text(SWEEP)
    stopped, said = call(pareto_sweep.main, *of, *plugins)
    assert stopped == "", said
    trials = empty_home / "guests" / "trials"
    for file in files:
        config = json.loads((trials / file.stem / "config.json").read_text())["config"]
        assert {each.split("@")[0] for each in config["plugins"]} == {task.name, file.name}
        assert (empty_home / "guests" / "plugins" / file.name).read_bytes() == file.read_bytes()

    sweep.write_text(SWEEP.replace("arms = {", 'arms = {"dense": {},'))
    new_process()
    assert call(pareto_sweep.main, *of, *plugins, "--resume")[0] == ""
    assert (trials / "dense" / "result.json").exists()
    new_process()
    assert "made with the plugin" in call(report.main, "--name", "guests")[0]
    assert call(report.main, "--name", "guests", *plugins)[0] == ""

    files[2].write_text(files[2].read_text() + "\n# changed\n")
    new_process()
    stopped, _ = call(pareto_sweep.main, *of, *plugins, "--resume")
    assert stopped.startswith("error: made with the plugin lion.py (SHA-256 ")
    assert "and lion.py (SHA-256 " in stopped


def test_a_guest_source(empty_home, call, tmp_path):
    """A run is trained and judged on the samples that it yields, as shards, which know no source."""
    data = str(tmp_path / "stripes")
    assert call(pack_shards.main, "--source", f"{OWN}/stripes.py:make", "--out", data)[0] == ""
    training = ["--name", "stripes", "--data", data, "--set", *SHORT, "data.batch_size=32"]
    assert call(train.main, *training)[0] == ""
    stopped, said = call(evaluate.main, "stripes")
    assert stopped == "", said
    assert "of 36 images" in said


def test_training_shows_itself_in_a_tracker_of_ones_own(empty_home, call):
    """Beside another; a run does not need its plugin."""
    trackers = ["--plugin", str(OWN / "wandb_tracker.py"), "--tracker", "wandb", "--tracker", "tensorboard"]
    stopped, said = call(train.main, "--name", "run", *trackers, "--set", *SHORT)
    assert stopped == "", said
    directory = str(empty_home / "run")
    assert written(directory) == reported(directory)
    assert {"train/loss", "val/acc1"} <= written(directory).keys()
    assert [*(empty_home / "run" / "tensorboard").iterdir()]
    assert json.loads((empty_home / "run" / "config.json").read_text())["config"]["plugins"] == []

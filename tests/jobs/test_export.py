"""`jobs/export.py` as a user runs it, on the checkpoints of a run that was trained."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import mlflow.pyfunc
import numpy as np
import pandas as pd
import pytest
import torch

from jobs import export
from moe.exported import load
from moe.models.vit import ViT
from orchestrator.checkpoint import files, graphs
from orchestrator.checkpoint.manager import drop_optimizer
from orchestrator.checkpoint.manifest import find_checkpoint, read
from orchestrator.checkpoint.models import read_model
from orchestrator.checkpoint.weights import read_metadata, signature_of_run
from orchestrator.codec import override, read_config
from orchestrator.config import RunConfig
from orchestrator.evaluation.models import load_model
from orchestrator.training.fit import fit
from tests.orchestrator.evaluation.exported import SOFT, exported
from tests.parts import png

ROOT = Path(__file__).parents[2]
CHANGES = {
    "model.moe.router.kind": "soft",
    "model.width": 16,
    "train.steps": 4,
    "train.eval_every": 2,
    "checkpoint.every": 2,
}
MLFLOW = ("--format", "mlflow")
Call = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def trained(digits: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with the run `soft` and its checkpoints of steps 2 and 4; not to be written to."""
    home = tmp_path_factory.mktemp("home")
    run = override(RunConfig(), {**CHANGES, "name": "soft", "data.path": digits, "storage": str(home)})
    fit(run, lambda step, metrics: None)
    return home


@pytest.fixture
def home(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    shutil.copytree(trained, tmp_path / "home")
    monkeypatch.setenv("MOE_FRONTIER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


@pytest.fixture
def call(call: Callable[..., tuple[str, str]]) -> Call:
    """``call("soft", "--list")``: what it exits with, and what it prints after the first line."""

    def run_here(*args: str) -> tuple[str, str]:
        stopped, said = call(export.main, *args)
        return stopped, said.partition("\n")[2]

    return run_here


def damage(folder: Path) -> str:
    (file,) = folder.glob("weights-*")
    file.write_bytes(file.read_bytes()[:-1])
    return file.name


@pytest.mark.smoke
def test_from_the_command_line_to_a_model(home, tmp_path):
    """A process as a user starts it; then the line that it printed."""
    job = subprocess.run(
        [sys.executable, "jobs/export.py", "soft", "--out", f"{tmp_path}/soft.safetensors"],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    assert job.stderr == ""
    first, line, code = job.stdout.splitlines()
    assert first == "exporting soft: loading libraries .."
    size = (tmp_path / "soft.safetensors").stat().st_size / 1e6
    expected = ViT(override(RunConfig(), CHANGES).model)
    files.load_state(*find_checkpoint(f"{home}/soft/checkpoints"), expected)
    numbers = sum(param.numel() for param in expected.parameters())
    tensors = len(expected.state_dict())
    assert line == (
        f"{tmp_path}/soft.safetensors: step 4, {tensors} tensors, {numbers:,} parameters, {size:.1f} MB"
    )
    found: dict[str, ViT] = {}
    exec(code, found)
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(found["model"](images).logits, expected.eval()(images).logits)


def test_a_folder(home, call, tmp_path):
    """Loaded by `moe.load` (which tests/moe/test_exported.py does alone), and what it says about itself."""
    code, out = call("soft", "--out", f"{tmp_path}/soft")
    assert code == ""
    first, line = out.splitlines()
    assert first.startswith(f"{tmp_path}/soft/model.safetensors: step 4, ")
    assert line == f"from moe import load; model = load('{tmp_path}/soft')"
    names = ["README.md", "config.json", "model.safetensors", "preprocessor_config.json"]
    assert sorted(file.name for file in (tmp_path / "soft").iterdir()) == names
    found: dict[str, ViT] = {}
    exec(line, found)
    expected = load(f"{tmp_path}/soft/model.safetensors")
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(found["model"](images).logits, expected(images).logits)
    config = json.loads((tmp_path / "soft/config.json").read_text())
    assert (config["name"], config["step"]) == ("soft", 4)
    said = config["signature"]
    assert (said["resize"], said["crop"], said["output"]) == ("shorter", 0.875, "softmax")
    assert said["classes"] == list("0123456789")

    for out in (f"{tmp_path}/soft", f"{tmp_path}/soft/"):
        code, _ = call("soft", "--out", out)
        assert code == f"error: {tmp_path}/soft holds an export already; --fresh replaces it"
    assert call("soft", "--step", "2", "--out", f"{tmp_path}/soft", "--fresh")[0] == ""
    assert json.loads((tmp_path / "soft/config.json").read_text())["step"] == 2


def test_the_card_in_a_folder(home, call, tmp_path):
    """The metrics of that very step, and nothing about this machine."""
    assert call("soft", "--out", f"{tmp_path}/soft")[0] == ""
    card = (tmp_path / "soft/README.md").read_text()
    quality = read(f"{home}/soft/checkpoints/step-00000004").quality()
    assert f"| val/acc1 | {quality:.4f} ± " in card
    assert str(home) not in card
    beside = json.loads((tmp_path / "soft/preprocessor_config.json").read_text())
    assert (beside["size"], beside["image_mean"]) == ({"shortest_edge": 9}, [0.5] * 3)


def test_each_image_by_itself(digits, empty_home, call, tmp_path):
    """A model that was trained in pairs of images, and is wanted for one at a time: the config, the signature
    and the card say so, and an accuracy of pairs is not claimed.
    """
    pairs = {**CHANGES, "model.moe.router.kind": "token_choice", "model.moe.images_per_group": 2}
    run = override(RunConfig(), {**pairs, "name": "pairs", "data.path": digits, "storage": str(empty_home)})
    fit(run, lambda step, metrics: None)
    out = tmp_path / "alone"
    assert call("pairs", "--out", str(out), "--images-per-group", "1")[0] == ""
    model, images = load(out), torch.randn(2, 3, 8, 8)
    torch.testing.assert_close(model(images[:1]).logits, model(images).logits[:1])
    config = json.loads((out / "config.json").read_text())
    assert config["model"]["moe"]["images_per_group"] == config["signature"]["images_per_group"] == 1
    card = (out / "README.md").read_text()
    assert "Not measured: training and validation routed 2 images together, and this model routes 1." in card
    assert "val/acc1" not in card
    refused = "error: pairs: images_per_group=3 does not divide the model's 2"
    assert call("pairs", "--out", f"{tmp_path}/three", "--images-per-group", "3")[0] == refused
    code, said = call("pairs", "--out", f"{tmp_path}/pairs.pt2", "--format", "torch")
    assert code == ""
    assert "2 consecutive images are routed together" in said
    found = torch.export.load(f"{tmp_path}/pairs.pt2").module()(images[:1])["logits"]
    assert torch.equal(found, load_model("pairs")(images[:1]).logits)


@pytest.mark.smoke
def test_a_program_of_torch(home, call, tmp_path):
    out = f"{tmp_path}/soft.pt2"
    code, said = call("soft", "--out", out, "--format", "torch")
    assert code == ""
    assert said == (
        f"{out}: images (B, 3, H, W) in -1..1, any B; largest difference 0.0e+00 of the largest"
        " output, on random images\n"
        f"its metadata `signature`, JSON: {read_model(f'{home}/soft/checkpoints').signature}\n"
    )
    images = torch.randn(3, 3, 8, 8)
    found = torch.export.load(out).module()(images)["logits"]
    assert torch.equal(found, load_model("soft")(images).logits)
    assert call("soft", "--out", out, "--format", "torch")[0] == (
        f"error: {out} exists already; --fresh replaces it"
    )


def test_a_line_of_the_table_adds_a_format(
    home: Path, call: Call, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each format of the table has a writer of its own and an ending."""
    monkeypatch.setitem(export.GRAPHS, "text", (".txt", "write_text", "a file of text"))
    monkeypatch.setattr(export, "FORMATS", (*export.FORMATS, "text"))
    wrote = []
    for name, (ending, writer, _) in export.GRAPHS.items():
        assert name == "text" or hasattr(graphs, writer)
        monkeypatch.setattr(graphs, writer, lambda *_, name=name: wrote.append(name) or 0.0, raising=False)
        code, said = call("soft", "--out", f"{tmp_path}/soft{ending}", "--format", name)
        assert code == "", said
        assert call("soft", "--out", f"{tmp_path}/soft", "--format", name)[0] == "2"
    assert wrote == ["torch", "onnx", "text"]


def test_for_mlflow(
    home: Path, call: Call, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A checkpoint, and the file that is exported from it, which MLflow opens as the same model."""
    monkeypatch.setattr(sys, "path", [*sys.path])  # MLflow puts the packed code there
    outs = [f"{tmp_path}/{name}" for name in ("soft", "soft.safetensors", "again")]
    for source, out, flags in (("soft", outs[0], MLFLOW), ("soft", outs[1], ()), (outs[1], outs[2], MLFLOW)):
        code, said = call(source, "--out", out, *flags)
        assert code == "", said
    assert said == f"{outs[2]}: mlflow.pyfunc.load_model({outs[2]!r})\n"
    image = pd.DataFrame({"image": [png(np.full((9, 8, 3), 200))]})
    found, again = (mlflow.pyfunc.load_model(out).predict(image) for out in (outs[0], outs[2]))
    assert 0.1 < found["probability"][0] < 1
    assert again.equals(found)
    code, _ = call("soft", "--out", outs[0], *MLFLOW)
    assert code == f"error: {outs[0]} holds an export already; --fresh replaces it"
    assert call("soft", "--out", outs[0], *MLFLOW, "--fresh")[0] == ""


def test_class_names_of_data_that_is_gone(home):
    run = read_config(RunConfig, read(find_checkpoint(f"{home}/soft/checkpoints")[0]).config)
    assert signature_of_run(run).classes == tuple("0123456789")
    assert signature_of_run(override(run, {"data.path": f"{run.data.path}/gone"})).classes is None
    assert signature_of_run(override(run, {"model.num_classes": 11})).classes is None


def test_a_folder_must_be_local_and_of_its_own(home, call, tmp_path, monkeypatch):
    """Never predictions, the folder that one stands in, or the run itself, whatever --fresh says."""
    assert "local file or folder" in call("soft", "--out", "s3://bucket/soft/")[0]
    place = tmp_path / "work/predictions"
    place.mkdir(parents=True)
    (place / "part-000000.parquet").touch()
    monkeypatch.chdir(tmp_path / "work")
    for out, where, file in (("predictions", place, "part-000000.parquet"), (".", place.parent, place.name)):
        code, _ = call("soft", "--out", out, "--fresh")
        assert code == f"error: --out {where} holds other files ({file}): choose a new or an empty folder"
    step = f"{home}/soft/checkpoints/step-00000004"
    for source in (["soft"], ["soft", "--step", "4"], [step]):
        for out in (step, f"{home}/soft/new", str(home)):
            code, _ = call(*source, "--out", out, "--fresh")
            assert code.startswith(f"error: --out {out} and the source {home}/soft lie in each other")
    code, _ = call("soft", "--out", "/proc/nope")
    assert code == "error: --out /proc/nope cannot be written to: No such file or directory"


def test_list(home, call):
    code, out = call("soft", "--list")
    assert code == ""
    title, first, second = (line.split() for line in out.splitlines())
    assert title == ["step", "val/acc1", "MB", "state"]
    assert (first[0], second[0]) == ("2", "4")
    assert 0 < float(second[1]) < 1
    size = sum(file.stat().st_size for file in home.glob("soft/checkpoints/step-00000004/[wo]*")) / 1e6
    assert second[2:] == [f"{size:.1f}", "whole"]

    drop_optimizer(f"{home}/soft/checkpoints")
    broken = damage(home / "soft/checkpoints/step-00000002")
    code, out = call("soft", "--list")
    assert code == "1"
    _, first, second = out.splitlines()
    assert first.endswith(f"  damaged: {broken}")
    assert second.endswith("  whole, weights only")

    (home / "soft/checkpoints/step-00000002/manifest.json").write_text("")
    code, out = call(f"{home}/soft/checkpoints", "--step", "2", "--list")
    assert (code, out.splitlines()[1].split()) == ("1", ["2", "damaged:", "manifest.json"])


@pytest.mark.parametrize(
    ("source", "step"),
    [
        (["soft"], "4"),
        (["soft", "--step", "2"], "2"),
        (["{home}/soft/checkpoints"], "4"),
        (["{home}/soft/checkpoints", "--step", "2"], "2"),
        (["{home}/soft/checkpoints/step-00000002/"], "2"),
    ],
)
def test_which_checkpoint(source, step, home, call, tmp_path):
    code, out = call(*(word.format(home=home) for word in source), "--out", f"{tmp_path}/soft.safetensors")
    assert code == ""
    assert f"soft.safetensors: step {step}, " in out


def test_damage(home, call, tmp_path, caplog):
    """The one before is exported, unless this very one was asked for."""
    out = f"{tmp_path}/soft.safetensors"
    broken = damage(home / "soft/checkpoints/step-00000004")
    assert "soft.safetensors: step 2, " in call("soft", "--out", out)[1]
    assert f"step-00000004 is damaged ({broken}); trying the one before" in caplog.text
    code, _ = call("soft", "--step", "4", "--out", out, "--fresh")
    assert code == f"error: checkpoint {home}/soft/checkpoints/step-00000004 is damaged: {broken}"
    damage(home / "soft/checkpoints/step-00000002")
    code, _ = call("soft", "--out", out, "--fresh")
    assert code == f"error: {home}/soft/checkpoints holds no whole checkpoint"


def test_a_file_that_is_there_stays(home, call, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("soft.safetensors").write_bytes(b"precious")
    code, out = call("soft", "--out", "soft.safetensors")
    assert (code, out) == (f"error: {tmp_path}/soft.safetensors exists already; --fresh replaces it", "")
    assert Path("soft.safetensors").read_bytes() == b"precious"
    assert call("soft", "--out", "soft.safetensors", "--fresh")[0] == ""
    assert load("soft.safetensors").config.width == 16


def test_a_registered_model(trained_home, call, tmp_path, monkeypatch):
    """Export takes a model by the names of the other commands and of `load_model`."""
    monkeypatch.setenv("MOE_FRONTIER_HOME", str(trained_home))
    best, out = "models:/tiny@pareto-best", f"{tmp_path}/best"
    code, said = call(best, "--out", out)
    assert (code, said.partition(",")[0]) == ("", f"{out}/model.safetensors: step 20")
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(load(out)(images).logits, load_model(best)(images).logits)
    assert call(best, "--step", "10", "--list")[0] == f"error: --step 10: {best} is a single checkpoint"
    code, _ = call(out, "--out", f"{tmp_path}/again")
    assert code.startswith(f"error: {out}/model.safetensors is a file of weights already")


@pytest.mark.parametrize("task", [["--list"], ["--out", "{home}/soft.safetensors"]])
def test_what_is_not_there(task, home, call):
    """Runs alone are listed, not what else lies below the storage."""
    for other in ("mlflow.db", "mlflow.db-wal", "mlartifacts", "reports"):
        (home / other).touch()
    missing, trial = "no checkpoint, and neither has", "soft/trials/x"
    for flags, message in [
        (
            ["sotf"],
            f"no trained model 'sotf': {ROOT}/sotf has {missing} {home}/sotf; {home} holds soft;"
            " did you mean 'soft'?; name",
        ),
        ([trial], f"no trained model '{trial}': {ROOT}/{trial} has {missing} {home}/{trial}; name"),
        (["soft", "--step", "3"], f"no checkpoint of step 3 in {home}/soft/checkpoints; of: 2, 4"),
    ]:
        code, out = call(*flags, *(word.format(home=home) for word in task))
        assert code.startswith(f"error: {message}")
        assert out == ""


@pytest.mark.parametrize(
    "flags",
    [
        ["soft"],
        ["--out", "x"],
        ["soft", "--out", "x", "--list"],
        ["soft", "--out", "x", "--evaluate"],
        ["soft", "soft", "--out", "x", "--step", "2"],
        ["soft", "soft", "--list"],
        ["soft", "--list", "--images-per-group", "1"],
        ["soft", "soft", "--out", "x", "--data", "x"],
        ["soft", "soft", "--out", "x", "--format", "timm"],
        ["soft", "--out", "x", "--format", "onnx"],
        ["soft", "--out", "x.onnx", "--format", "torch"],
        ["soft", "--out", "x.safetensors", "--format", "timm"],
        ["soft", "--out", "x.safetensors", "--format", "mlflow"],
        ["soft", "--out", "x", "--format", "tensorflow"],
    ],
)
def test_flags_that_do_not_go_together(flags, call):
    assert call(*flags)[0] == "2"


def table(said: str) -> list[list[str]]:
    """Cells of its rows: model, images, quality .., FLOPs, time."""
    rows = [line.split("│")[1:-1] for line in said.splitlines() if line.startswith("│")]
    return [[cell.strip() for cell in row] for row in rows]


def test_a_soup_and_how_good_it_is(digits, empty_home, call, tmp_path):
    """A soup of one model twice named is that model, and as good as it."""
    one, two = (exported(tmp_path / f"{n}.safetensors", seed=n).location for n in (1, 2))
    out = f"{tmp_path}/soup.safetensors"
    flags = ("--out", out, "--evaluate", "--data", digits)
    code, said = call(one, two, *flags)
    assert code == ""
    line, loads, *_ = said.splitlines()
    assert line.startswith(f"{out}: average of 2 models, ")
    assert [row[0].partition("@")[0] for row in table(said)] == ["1", "2", "soup"]
    found: dict[str, ViT] = {}
    exec(loads, found)
    assert found["model"].config == read_model(out).run.model
    assert read_model(out).run.name == "soup"

    code, said = call(one, one, *flags)
    assert code == f"error: {out} exists already; --fresh replaces it"
    code, said = call(one, one, *flags, "--fresh")
    assert code == ""
    first, second = table(said)
    assert first[1:-1] == second[1:-1]


def test_a_greedy_soup_has_the_models_that_its_figures_choose(digits, empty_home, call, tmp_path):
    """As printed: each alone, then the better one with the other. The file says on which images."""
    models = [exported(tmp_path / f"{n}.safetensors", seed=n).location for n in (1, 2)]
    out = f"{tmp_path}/soup.safetensors"
    assert call(*models, "--out", out, "--greedy")[0] == "2"
    assert call(*models, "--out", out, "--greedy", "--data", digits, "--evaluate")[0] == "2"
    assert call(*models, "--out", out, "--greedy", "--data", digits, "--split", "train")[0] == "2"
    code, said = call(*models, "--out", out, "--greedy", "--data", digits)
    assert code == ""
    one, two, both, *_ = (float(line.rpartition(": ")[2]) for line in said.splitlines()[:3])
    assert one != two
    order = models if one > two else models[::-1]
    metadata = read_metadata(out)
    chosen = [part["location"] for part in json.loads(metadata["soup"])]
    assert chosen == order[: 2 if both > max(one, two) else 1]
    assert metadata["chosen_on"] == f"{digits}, val"


def test_the_average_of_the_weights(digits, empty_home, call, tmp_path):
    """As a file and as a folder, whose card has its figures; a run without an average has none."""
    changes = {**CHANGES, "data.path": digits, "storage": str(empty_home), "train.ema.decay": 0.9}
    fit(override(RunConfig(), {**changes, "name": "averaged"}), lambda step, metrics: None)
    for name in ("file.safetensors", "folder"):
        code, said = call("averaged", "--ema", "--out", f"{tmp_path}/{name}")
        assert code == "", said
        assert "average of the weights to step 4" in said
    result = json.loads((empty_home / "averaged/result.json").read_text())["metrics"]
    assert f"{result['val_ema/acc1']:.4f}" in (tmp_path / "folder/README.md").read_text()
    assert call("averaged", "--ema", "--list")[0] == "2"
    assert call("averaged", "--ema", "--format", "timm", "--out", f"{tmp_path}/timm")[0] == "2"
    assert call(f"{tmp_path}/file.safetensors", "--ema", "--out", f"{tmp_path}/again")[0].startswith(
        "error: "
    )


def test_all_trials_of_a_sweep_are_several_models(trained_home, call, tmp_path, monkeypatch):
    monkeypatch.setenv("MOE_FRONTIER_HOME", str(trained_home))
    code, _ = call("sweep:tiny", "--out", f"{tmp_path}/soup.safetensors")
    assert code.startswith("error: cannot average different models: model.moe")


def test_what_cannot_be_averaged(empty_home, call, tmp_path):
    one, two = (exported(tmp_path / f"{n}.safetensors").location for n in (1, 2))
    wide = exported(tmp_path / "3.safetensors", {**SOFT, "model.width": 32}).location
    out = f"{tmp_path}/soup.safetensors"
    for args, message in [
        ((one, wide, "--out", out), f"cannot average different models: model.width is 16 in {one}, 32 in"),
        ((one, two, "--out", f"{tmp_path}/soup.pt"), "--out "),
        ((one, f"{tmp_path}/4.safetensors", "--out", out), "no file "),
    ]:
        stopped, said = call(*args)
        assert stopped.startswith(f"error: {message}")
        assert not said


def test_a_card_has_no_figures_of_another_step(home, call, digits, tmp_path):
    """The checkpoint of step 3 lies between the evaluations of steps 2 and 4."""
    changes = {**CHANGES, "train.steps": 6, "checkpoint.every": 3, "data.path": digits, "storage": str(home)}
    fit(override(RunConfig(), {**changes, "name": "odd"}), lambda step, metrics: None)
    assert call("odd", "--step", "3", "--out", f"{tmp_path}/odd")[0] == ""
    card = (tmp_path / "odd/README.md").read_text()
    assert "Not measured at this step." in card
    assert "val/acc1 |" not in card

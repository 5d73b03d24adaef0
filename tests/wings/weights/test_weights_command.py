"""Published weights as a user takes them: imported, started from, evaluated, upcycled."""

import json
import math
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from jobs import evaluate, export, train
from moe.exported import load
from orchestrator import load_model
from orchestrator.checkpoint.start import start_from
from orchestrator.sweeps.catalog import make_sweep
from tests.orchestrator.evaluation.exported import exported
from wings.jobs import import_weights

WEIGHTS = Path(__file__).parents[2] / "goldens" / "weights"
Call = Callable[..., tuple[str, str]]


def test_import_says_what_it_did_and_leaves_nothing_of_a_refusal(call: Call, tmp_path: Path) -> None:
    out = tmp_path / "dino"
    stopped, said = call(import_weights.main, str(WEIGHTS / "hf_dinov2"), "--out", str(out))
    assert stopped == ""
    assert "Hugging Face: width 32, 2 blocks" in said
    assert load(out).config.image_size == 32
    assert call(import_weights.main, str(WEIGHTS / "hf_dinov2"), "--out", str(out))[0].endswith(
        "--fresh replaces it"
    )
    unsure = str(WEIGHTS / "torchvision_vit.pth")
    stopped, _ = call(import_weights.main, unsure, "--out", str(tmp_path / "tv"))
    assert "do not say how many attention heads" in stopped
    assert not (tmp_path / "tv").exists()
    tensors = load_file(WEIGHTS / "timm_token" / "model.safetensors")
    tensors["head.bias"][0] = math.nan
    broken = Path(shutil.copytree(WEIGHTS / "timm_token", tmp_path / "broken"))
    save_file(tensors, broken / "model.safetensors")
    stopped, _ = call(import_weights.main, str(broken), "--out", str(tmp_path / "nan"))
    assert "has values that are not finite" in stopped
    assert not (tmp_path / "nan").exists()
    stopped, said = call(import_weights.main, unsure, "--out", str(tmp_path / "tv"), "--set", "model.heads=2")
    assert "does not say by which mean and std" in stopped
    assert not (tmp_path / "tv").exists()
    sized = ["--mean", "imagenet", "--set", "model.heads=2", "model.image_size=48"]
    stopped, said = call(import_weights.main, unsure, "--out", str(tmp_path / "tv.safetensors"), *sized)
    assert stopped == ""
    assert "positions resized from 4 x 4 to 6 x 6" in said
    assert "mean (0.485, 0.456, 0.406) and std (0.229, 0.224, 0.225) are in the weights" in said
    assert load(tmp_path / "tv.safetensors").config.image_size == 48


def test_every_command_takes_a_source_as_a_model(empty_home: Path, call: Call, digits: str) -> None:
    """It is made into a model of ours once. A run that starts from it has its model and its crop."""
    source = str(shutil.copytree(WEIGHTS / "timm_token", empty_home.parent / "timm_token"))
    short = [
        "--set",
        "train.steps=2",
        "train.report_every=2",
        "model.moe.layers=last_1",
        "model.moe.num_experts=4",
    ]
    stopped, said = call(train.main, "--name", "up", "--data", digits, "--init-from", source, *short)
    assert stopped == "", said
    config = json.loads((empty_home / "up" / "config.json").read_text())["config"]
    assert (config["model"]["gelu"], config["model"]["num_classes"]) == ("exact", 10)
    assert (config["data"]["eval_crop"], config["data"]["eval_interpolation"]) == (0.9, "bicubic")
    (made,) = (empty_home / "imports").iterdir()
    assert config["train"]["init_from"] == f"{made}/model.safetensors"
    written = (made / "model.safetensors").stat().st_mtime_ns
    stopped, said = call(evaluate.main, source, "--data", digits, "--shots", "1")
    assert stopped == "", said
    assert (made / "model.safetensors").stat().st_mtime_ns == written
    assert "is a file of weights already" in call(export.main, source, "--out", "x")[0]
    # Another config beside the same weights is another model.
    config = json.loads(Path(source, "config.json").read_text())
    config["pretrained_cfg"]["mean"] = [0.4, 0.4, 0.4]
    Path(source, "config.json").write_text(json.dumps(config))
    assert call(evaluate.main, source, "--data", digits, "--shots", "1")[0] == ""
    assert len([*(empty_home / "imports").iterdir()]) == 2


def test_exact_arms_keep_the_function_of_the_dense_model(tmp_path: Path) -> None:
    """A router that drops no token and whose weights sum to 1; others say something else."""
    arms = make_sweep("upcycle", "tiny").runs()
    dense = arms["dense-seed0"].model.build(seed=3)
    torch.manual_seed(0)
    for parameter in dense.parameters():
        parameter.data += 0.1 * torch.randn_like(parameter)
    save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    images, off = torch.randn(16, 3, *2 * (dense.config.image_size,)), {}
    for name in filter(lambda name: name.endswith("-seed0"), arms):
        run = arms[name]
        model = run.model.build(seed=0)
        start_from(model, str(tmp_path / "dense.safetensors"))
        with torch.no_grad():
            wanted = dense.eval()(images).logits
            off[name] = float((model.eval()(images).logits - wanted).abs().max() / wanted.abs().max())
    exact = {name.removesuffix("-seed0") for name, value in off.items() if value < 1e-5}
    assert exact == {"dense", "exact", "mixture"}, off


def test_copies_with_noise_are_not_equal(tmp_path: Path) -> None:
    """By a share of their own draws: a thousandth moves the outputs by less than a hundredth. The same seed
    draws the same noise.
    """
    run = make_sweep("upcycle", "tiny").runs()["exact-seed0"]
    dense = replace(run.model, moe=None).build(seed=3)
    save_file(dense.state_dict(), tmp_path / "dense.safetensors")
    images, found = torch.randn(4, 3, *2 * (dense.config.image_size,)), {}
    for noise in (0.0, 1e-3, 1e-3):
        model = run.model.build(seed=0).eval()
        fresh = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        start_from(model, str(tmp_path / "dense.safetensors"), noise=noise)
        state = model.state_dict()
        for name, tensor in state.items():
            if ".experts.w_in" in name:
                mlp = dense.state_dict()[name.replace("experts.w_in_EDF", "up.weight")].t()
                torch.testing.assert_close(tensor, mlp + noise * fresh[name], rtol=0, atol=1e-7)
                assert torch.equal(tensor[0], tensor[1]) == (noise == 0)
        assert not noise or noise not in found or torch.equal(found[noise], model.features(images))
        found[noise] = model.features(images).detach()
    off = float((found[1e-3] - found[0.0]).abs().max() / found[0.0].abs().max())
    assert 1e-6 < off < 1e-2


def test_the_loss_before_training_is_measured_beside_that_of_the_weights(
    empty_home: Path, call: Call, digits: str
) -> None:
    """On the same images: equal where the arm keeps the function, known where it does not."""
    train_one = [
        "--data",
        digits,
        "--set",
        "train.steps=2",
        "train.report_every=2",
        "model.width=16",
        "model.mlp_dim=32",
    ]
    assert call(train.main, "--name", "dense", *train_one, "model.moe=null")[0] == ""
    moe = [
        "model.moe.num_experts=4",
        "model.moe.router.kind=token_choice",
        "model.moe.router.capacity_factor=4",
    ]
    found = {}
    for topk in ("before", "after"):
        changed = [*moe, f"model.moe.router.topk={topk}"]
        assert call(train.main, "--name", topk, "--init-from", "dense", *train_one, *changed)[0] == ""
        line = (empty_home / topk / "metrics.jsonl").read_text().splitlines()[0]
        found[topk] = json.loads(line)["metrics"]
    before, after = found["before"], found["after"]
    assert math.isclose(before["init/loss"], before["init/loss_source"], rel_tol=1e-6)
    assert after["init/loss_source"] == before["init/loss_source"]
    assert not math.isclose(after["init/loss"], after["init/loss_source"], rel_tol=1e-5)


def test_classes_of_another_order_or_name(
    empty_home: Path, call: Call, digits: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A run says what becomes of its outputs, and the weights' own model, whose labels mean something else,
    has no loss on its images.
    """
    small = ["--set", "train.steps=1", "model.width=16", "model.mlp_dim=32", "model.moe=null"]
    assert (
        call(train.main, "--name", "there", "--data", digits, *small, "train.schedule.warmup_steps=0")[0]
        == ""
    )
    there = load_model("there", root=str(empty_home)).get_parameter("head.weight")
    assert there.any()
    others = {
        "order": ("9876543210", "which have another order there"),
        "names": (
            "abcdefghij",
            "a new head: its classes are 10 (a, b, c, ..), and those of the weights 10 (0,",
        ),
    }
    for name, (classes, said) in others.items():
        path = Path(shutil.copytree(digits, empty_home.parent / name))
        content = json.loads((path / "manifest.json").read_text())
        (path / "manifest.json").write_text(json.dumps(content | {"classes": [*classes]}))
        begins = ["--name", name, "--data", str(path), "--init-from", "there"]
        caplog.clear()
        assert call(train.main, *begins, *small, "train.lr=0")[0] == ""
        assert said in caplog.text
        assert "own model" not in caplog.text
        head = load_model(name, root=str(empty_home)).get_parameter("head.weight")
        assert torch.equal(head, there.flip(0) if name == "order" else torch.zeros_like(there))


def test_a_mixture_is_refused_by_other_libraries(empty_home: Path, call: Call, tmp_path: Path) -> None:
    soft = exported(tmp_path / "soft.safetensors")
    code, _ = call(export.main, soft.location, "--out", f"{tmp_path}/soft", "--format", "timm")
    assert code == "error: timm cannot express experts: --format moe, torch or onnx can"
    assert not (tmp_path / "soft").exists()


def test_an_exported_file_goes_out(empty_home: Path, call: Call, tmp_path: Path) -> None:
    """A dense model is exported to its folder."""
    fields = {"model.moe": None, "model.width": 16, "model.image_size": 8, "model.patch_size": 2}
    one = exported(tmp_path / "one.safetensors", fields)
    out = f"{tmp_path}/one-timm"
    code, said = call(export.main, one.location, "--out", out, "--format", "timm")
    assert code == ""
    assert said.endswith(f"\n{out}: timm.create_model('local-dir:{out}', pretrained=True)\n")
    images = torch.randn(3, 3, 8, 8)
    assert torch.equal(load_model(out)(images).logits, one.load()(images).logits)

"""Exports load where there are only torch and safetensors, and `moe` imports without Ray."""

import json
import shutil
import subprocess
import sys
from dataclasses import asdict, replace
from importlib import metadata
from pathlib import Path

import pytest
import torch
from packaging.requirements import Requirement
from safetensors.torch import save_file

from moe.codec import from_dict, to_dict
from moe.exported import load
from moe.layer import MoEConfig
from moe.model import ModelConfig
from moe.models.vit import ViTConfig
from moe.presets import PRESETS, VITS, create_model
from moe.routers import ExpertChoiceConfig, SoftConfig, TokenChoiceConfig, TopKConfig
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig
from moe.routers.balance import SignConfig
from moe.upgrade import upgraded_model
from tests.moe.parts import KINDS, build_vit, images

MOE = Path(__file__).parents[2] / "moe"
ROUTERS = [
    None,
    *KINDS,
    TokenChoiceConfig(k=2, affinity=SinkhornConfig()),
    ExpertChoiceConfig(affinity=SparseTransportConfig()),
]
ALONE = """
import sys
sys.path += {path!r}
import torch
from moe import MoEConfig, MoELayer, SoftConfig, ViT, ViTConfig
from moe.exported import load

images = torch.linspace(-1, 1, 4 * 3 * 8 * 8).view(4, 3, 8, 8)
torch.save(load({export!r})(images).logits, {out!r})
for name in ("numpy", "pydantic", "ray", "mlflow", "pyarrow", "PIL", "orchestrator", "jobs"):
    try:
        __import__(name)
    except ModuleNotFoundError:
        continue
    sys.exit(name + " is there: this environment holds more than torch and safetensors")
"""


@pytest.fixture
def export(tmp_path):
    """``export(router)``: a model, and the folder that it was exported to."""

    def write(router=None, **changes):
        model = build_vit(router).eval()
        folder = tmp_path / "export"
        folder.mkdir()
        save_file(dict(model.state_dict()), str(folder / "model.safetensors"), {"format": "pt"})
        config = json.loads(json.dumps(asdict(model.config))) | changes
        (folder / "config.json").write_text(json.dumps({"model": config}))
        return model, folder

    return write


@pytest.mark.parametrize("router", ROUTERS, ids=lambda r: repr(r)[:40])
def test_same_logits_bit_for_bit(router, export):
    model, folder = export(router)
    loaded = load(folder)
    assert loaded.config == model.config
    assert not loaded.training
    assert torch.equal(loaded(images(4)).logits, model(images(4)).logits)
    assert all(p.requires_grad for p in loaded.parameters())


def test_nothing_stays_without_memory(export):
    """Buffers that an export does not hold are set: a loaded model can be moved to a device and trained."""
    _, folder = export(TopKConfig(k=2, balance=SignConfig()))
    loaded = load(folder).to("cpu").train()
    counts = {name: buffer for name, buffer in loaded.named_buffers() if name.endswith("counts")}
    assert counts
    assert all(buffer.device.type == "cpu" and not buffer.any() for buffer in counts.values())
    loaded(images(4), keys_B=torch.arange(4))
    assert all(buffer.any() for buffer in counts.values())


@pytest.mark.smoke
def test_in_a_fresh_interpreter(export, tmp_path):
    """``-I -S``: no PYTHONPATH and no site-packages; but links to torch, to what its wheel asks for and to
    safetensors, and a copy of `moe`.
    """
    model, folder = export(TokenChoiceConfig(k=2, affinity=SinkhornConfig()))
    packages, sources = tmp_path / "packages", tmp_path / "sources"
    packages.mkdir()
    for distribution in required("torch") | {"safetensors"}:
        for top in {file.parts[0] for file in metadata.files(distribution) or ()} - {"..", "__pycache__"}:
            if not (packages / top).is_symlink():
                (packages / top).symlink_to(metadata.distribution(distribution).locate_file(top))
    shutil.copytree(MOE, sources / "moe", ignore=shutil.ignore_patterns("__pycache__"))
    path, out = [str(packages), str(sources)], tmp_path / "logits"
    code = ALONE.format(path=path, export=str(folder), out=str(out))
    job = subprocess.run(
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, check=False
    )
    assert job.returncode == 0, job.stderr
    expected = model(torch.linspace(-1, 1, 4 * 3 * 8 * 8).view(4, 3, 8, 8)).logits
    assert torch.equal(torch.load(out), expected)


def required(distribution):
    """The distribution, and all distributions that it needs."""
    found, waiting = set(), [distribution]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            needs = map(Requirement, metadata.requires(name) or ())
            waiting += [need.name for need in needs if not need.marker or need.marker.evaluate({"extra": ""})]
    return found


def test_a_single_file_whose_header_has_the_config(tmp_path):
    model, path = build_vit(SoftConfig()), tmp_path / "soft.safetensors"
    config = json.dumps({"name": "soft", "model": asdict(model.config)})
    save_file(dict(model.state_dict()), str(path), {"config": config})
    assert torch.equal(load(path).head.weight, model.head.weight)
    save_file(dict(model.state_dict()), str(path))
    with pytest.raises(ValueError, match="is not an export: its config has no model"):
        load(str(path))
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing")


def test_configs_of_presets_and_of_an_older_export():
    """What a field's default was when the export was written is what it still means."""
    for preset in PRESETS.values():
        assert from_dict(ModelConfig, json.loads(json.dumps(to_dict(preset)))) == preset
    config = replace(VITS["debug"], moe=MoEConfig(layers=(0, 1), router=SoftConfig()))
    written = json.loads(json.dumps(asdict(config)))
    del written["head_bias"], written["moe"]["residual"]
    assert from_dict(ViTConfig, written) == config


@pytest.mark.parametrize(
    ("moe", "message"),
    [
        ({"router": {"kind": "magic"}}, "unknown model.moe.router.kind 'magic'; known: expert_choice, "),
        ({"router": {"kind": "soft", "magic": 1}}, "unknown field model.moe.router.magic; .* has: "),
        ({"router": {"kind": "token_choice", "k": 0}}, "k must be at least 1, got 0"),
    ],
)
def test_configs_that_these_sources_do_not_know(moe, message, export):
    _, folder = export(SoftConfig(), moe=moe)
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: whole[:-1], "is not a whole safetensors file"),
        (lambda whole: b"", "is not a whole safetensors file"),
        (lambda whole: whole.replace(b"head.bias", b"head.bigs"), "Missing key.*head.bias"),
    ],
)
def test_damage(damage, message, export):
    _, folder = export(SoftConfig())
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=rf"(?s){message}"):
        load(folder)


def test_another_dtype_is_refused(export):
    model, folder = export(SoftConfig())
    half = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    save_file(half, str(folder / "model.safetensors"))
    with pytest.raises(ValueError, match=r"is torch\.bfloat16, the model's is torch\.float32"):
        load(folder)


def test_a_model_by_name_with_weights(tmp_path: Path) -> None:
    """What was exported is that model, and another name is refused by the field that differs."""
    model = create_model("debug", num_classes=7, seed=3)
    (tmp_path / "config.json").write_text(json.dumps({"model": to_dict(model.config)}))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    found = create_model("debug", weights=tmp_path)
    assert all(torch.equal(tensor, model.state_dict()[name]) for name, tensor in found.state_dict().items())
    with pytest.raises(ValueError, match=r"is no vit_small_patch16_224: image_size is 8 there, and 224 here"):
        create_model("vit_small_patch16_224", weights=tmp_path)


def test_configs_of_earlier_versions_are_read():
    """A decoder and two towers once had a number of classes, on which no weight depends."""
    for kind in ("decoder", "two_towers"):
        assert upgraded_model({"kind": kind, "num_classes": 7}) == {"kind": kind}
    assert upgraded_model(to_dict(ViTConfig(num_classes=7)))["num_classes"] == 7

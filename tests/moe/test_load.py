"""Exports load where there are only torch and safetensors."""

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
from moe.layer import MoEConfig
from moe.load import load
from moe.presets import PRESETS
from moe.routers import ExpertChoiceConfig, MixtureConfig, SoftConfig, TokenChoiceConfig
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig
from moe.vit import ViTConfig

MOE = Path(__file__).parents[2] / "moe"
ROUTERS = {
    "dense": None,
    "token_choice": TokenChoiceConfig(k=2, affinity=SinkhornConfig()),
    "expert_choice": ExpertChoiceConfig(affinity=SparseTransportConfig()),
    "soft": SoftConfig(),
    "mixture": MixtureConfig(),
}
ALONE = """
import sys
sys.path += {path!r}
import torch
from moe.load import load

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
def export(build_vit, tmp_path):
    """``export("soft")``: a model, and the folder that it was exported to."""

    def write(name="soft", **changes):
        model = build_vit(ROUTERS[name]).eval()
        folder = tmp_path / name
        folder.mkdir()
        save_file(dict(model.state_dict()), str(folder / "model.safetensors"), {"format": "pt"})
        config = json.loads(json.dumps(asdict(model.config))) | changes
        (folder / "config.json").write_text(json.dumps({"model": config}))
        return model, folder

    return write


@pytest.mark.parametrize("name", ROUTERS)
def test_same_logits_bit_for_bit(name, export):
    model, folder = export(name)
    images = torch.rand(4, 3, 8, 8) * 2 - 1
    loaded = load(folder)
    assert loaded.config == model.config
    assert not loaded.training
    assert torch.equal(loaded(images).logits, model(images).logits)
    assert all(p.requires_grad for p in loaded.parameters())


@pytest.mark.smoke
def test_in_a_fresh_interpreter(export, tmp_path):
    """``-I -S``: no PYTHONPATH and no site-packages; but links to torch, to what its wheel asks for and to
    safetensors, and a copy of `moe`.
    """
    model, folder = export("token_choice")
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
        [sys.executable, "-I", "-S", "-c", code], capture_output=True, text=True, timeout=120, check=False
    )
    assert job.returncode == 0, job.stderr
    images = torch.linspace(-1, 1, 4 * 3 * 8 * 8).view(4, 3, 8, 8)
    assert torch.equal(torch.load(out), model(images).logits)


def required(distribution):
    """It, and the distributions that it asks for, and they."""
    found, waiting = set(), [distribution]
    while waiting:
        name = waiting.pop()
        if name not in found:
            found.add(name)
            asked = map(Requirement, metadata.requires(name) or ())
            waiting += [one.name for one in asked if not one.marker or one.marker.evaluate({"extra": ""})]
    return found


def test_a_single_file_whose_header_has_the_config(export, tmp_path):
    model, _ = export("soft")
    path = tmp_path / "soft.safetensors"
    config = json.dumps({"name": "soft", "model": asdict(model.config)})
    save_file(dict(model.state_dict()), str(path), {"config": config})
    assert torch.equal(load(path).head.weight, model.head.weight)
    save_file(dict(model.state_dict()), str(path))
    with pytest.raises(ValueError, match="is not an export: its config has no model"):
        load(str(path))


@pytest.mark.parametrize("name", PRESETS)
def test_configs_of_all_presets(name):
    assert from_dict(ViTConfig, json.loads(json.dumps(to_dict(PRESETS[name])))) == PRESETS[name]


def test_layers_by_index_and_fields_of_an_older_export():
    """What a field's default was when the export was written is what it still means."""
    config = replace(PRESETS["debug"], moe=MoEConfig(layers=(0, 1), router=SoftConfig()))
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
    _, folder = export("soft", moe=moe)
    with pytest.raises(ValueError, match=message):
        load(folder)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda whole: whole[:-1], "is not a whole safetensors file"),
        (lambda whole: whole + b"0", "is not a whole safetensors file"),
        (lambda whole: b"", "is not a whole safetensors file"),
        (lambda whole: whole.replace(b"[10]", b"[11]"), "is not a whole safetensors file"),
        (lambda whole: whole.replace(b"head.bias", b"head.bigs"), "Missing key.*head.bias"),
    ],
)
def test_damage(damage, message, export):
    _, folder = export("soft")
    file = folder / "model.safetensors"
    file.write_bytes(damage(file.read_bytes()))
    with pytest.raises(ValueError, match=rf"(?s){message}"):
        load(folder)


def test_another_dtype_is_refused(export):
    model, folder = export("soft")
    half = {name: tensor.bfloat16() for name, tensor in model.state_dict().items()}
    save_file(half, str(folder / "model.safetensors"))
    with pytest.raises(ValueError, match=r"is torch\.bfloat16, the model's is torch\.float32"):
        load(folder)


def test_nothing_there(tmp_path):
    with pytest.raises(FileNotFoundError):
        load(tmp_path / "nothing")

"""Weights that other libraries wrote: their outputs, and what is refused instead of being read wrongly.

Each golden was written by the foreign library itself, which also computed the output.
"""

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from moe.exported import load
from orchestrator.errors import UsageError
from tests.parts import library
from tests.wings.weights.foreign_files import GOLDENS, configured, expected_of, imported, rewritten
from wings.weights import plan_import, write_import

FOLDERS = sorted(path.name for path in GOLDENS.iterdir() if (path / "config.json").is_file())
FILES = sorted(path.name for path in GOLDENS.glob("*.*") if "expected" not in path.name)
CASES = [*FOLDERS, *FILES, "vmoe/vmoe"]
# What these weights do not say.
CHANGES: dict[str, dict[str, Any]] = {
    "torchvision_vit.pth": {"model.heads": 2, "data.mean": "imagenet"},
    "vmoe/vmoe": {"model.moe.images_per_group": 2},
}


@pytest.mark.parametrize("case", CASES)
def test_the_output_is_that_of_the_library(case: str, tmp_path: Path) -> None:
    expected = expected_of(case)
    imported(GOLDENS / case, tmp_path / "out", **CHANGES.get(case, {}))
    model, images = load(tmp_path / "out"), torch.from_numpy(expected["image"]) * 2 - 1
    with torch.no_grad():
        found = model(images).logits if "logits" in expected else model.features(images)
    wanted = torch.from_numpy(expected["logits" if "logits" in expected else "features"])
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_every_tensor_is_accounted_for() -> None:
    said = str(plan_import(str(GOLDENS / "hf_dinov2"), name="x"))
    assert (
        "Hugging Face: width 32, 2 blocks, 2 heads, patches of 8, 32 x 32 pixels, pooling token, exact GELU"
        in said
    )
    for line in ("mean and std folded in", "scaled by LayerScale", "left out: embeddings.mask_token"):
        assert line in said
    assert "head: new, of one class" in said


@pytest.mark.parametrize("case", ["hf_vit", "hf_dinov2", "timm_token"])
def test_wrappers_prefixes_halves_and_shards(case: str, tmp_path: Path) -> None:
    """The same weights, as other tools save them."""
    wanted = imported(GOLDENS / case, tmp_path / "wanted")
    tensors = load_file(GOLDENS / case / "model.safetensors")
    copy = Path(shutil.copytree(GOLDENS / case, tmp_path / case))
    (copy / "model.safetensors").unlink()
    wrapped = {f"module.{name}": tensor for name, tensor in tensors.items()}
    torch.save({"model": tensors, "state_dict_ema": wrapped}, copy / "pytorch_model.bin")
    planned = plan_import(str(copy), name="x")
    assert "the model at 'state_dict_ema' is taken, not model" in str(planned)
    found = imported(copy, tmp_path / "wrapped")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())
    (copy / "pytorch_model.bin").unlink()

    names = sorted(tensors)
    shards = {"a.safetensors": names[::2], "b.safetensors": names[1::2]}
    for shard, members in shards.items():
        save_file({name: tensors[name].half() for name in members}, copy / shard)
    index = {"weight_map": {name: shard for shard, members in shards.items() for name in members}}
    (copy / "model.safetensors.index.json").write_text(json.dumps(index))
    found = imported(copy, tmp_path / "halves")
    assert all((found[name] - tensor).abs().max() < 2e-3 for name, tensor in wanted.items())
    (copy / "b.safetensors").unlink()
    with pytest.raises(UsageError, match=r"lacks b\.safetensors"):
        plan_import(str(copy), name="x")


@pytest.mark.parametrize(
    ("case", "kind"), [("hf_vit", "vit"), ("hf_vit", "vit_mae"), ("hf_dinov2", "dinov2")]
)
def test_names_that_transformers_has_in_memory(case: str, kind: str, tmp_path: Path) -> None:
    wanted = imported(configured(case, tmp_path / "files", {"model_type": kind}), tmp_path / "wanted")

    def as_in_memory(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            word = name.replace("encoder.layer.", "layers.")
            for part in ("query", "key", "value"):
                word = word.replace(f"attention.attention.{part}", f"attention.{part[0]}_proj")
            word = word.replace("attention.output.dense", "attention.o_proj")
            word = word.replace("intermediate.dense", "mlp.fc1").replace(".output.dense", ".mlp.fc2")
            tensors[word] = tensors.pop(name)

    rewritten(case, tmp_path, as_in_memory)
    (tmp_path / case / "config.json").write_text((tmp_path / "files" / case / "config.json").read_text())
    found = imported(tmp_path / case, tmp_path / "found")
    assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items())


def test_bfloat16_in_npz(tmp_path: Path) -> None:
    """numpy has no bfloat16: JAX's are written as two bytes of nothing."""
    with np.load(GOLDENS / "augreg.npz") as file:
        halves = {name: (file[name].view(np.uint32) >> 16).astype(np.uint16) for name in file.files}
    arrays: dict[str, Any] = {name: half.view("V2") for name, half in halves.items()}
    np.savez(tmp_path / "half.npz", **arrays)
    wanted = imported(GOLDENS / "augreg.npz", tmp_path / "wanted")
    found = imported(tmp_path / "half.npz", tmp_path / "found")
    assert all((found[n] - t).abs().max() <= 2**-7 * t.abs().max() for n, t in wanted.items())


@pytest.mark.parametrize(
    ("case", "name", "antialias"),
    [("timm_token", "pos_embed", True), ("hf_vit", "vit.embeddings.position_embeddings", False)],
)
def test_another_size_resizes_positions_as_the_source_does(
    case: str, name: str, antialias: bool, tmp_path: Path
) -> None:
    """The function of the library resizes them too; antialiasing matters only where the grid shrinks."""
    positions = load_file(GOLDENS / case / "model.safetensors")[name]
    found = imported(GOLDENS / case, tmp_path / "out", **{"model.image_size": 24})["position_SD"]
    grid = positions[:, 1:].reshape(1, 4, 4, -1).permute(0, 3, 1, 2)
    wanted = torch.nn.functional.interpolate(grid, size=(3, 3), mode="bicubic", antialias=antialias)
    assert torch.equal(found[0], positions[0, 0])
    assert torch.allclose(found[1:], wanted.flatten(2)[0].T)


def renamed(old: str, new: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        for name in [*tensors]:
            if old in name:
                tensors[name.replace(old, new)] = tensors.pop(name)

    return change


def added(name: str, *shape: int, value: float = 0) -> Callable[[dict[str, Tensor]], None]:
    return lambda tensors: tensors.update({name: torch.full(shape, float(value))})


def dropped(name: str) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.pop(name)


@pytest.mark.parametrize(
    ("case", "change", "says"),
    [
        ("timm_token", added("reg_token", 1, 4, 32), "has register tokens"),
        ("timm_token", added("dist_token", 1, 1, 32), "has a distillation token"),
        ("timm_token", added("norm_pre.weight", 32), "a norm before the blocks"),
        ("timm_gap", renamed("norm.", "fc_norm."), "a norm after the mean"),
        ("timm_gap", added("cls_token", 1, 1, 32), "pools by 'gap', and its tensors are those of 'token'"),
        ("timm_token", dropped("pos_embed"), "no position embedding pos_embed: rotary"),
        ("timm_token", added("blocks.0.mlp.w12.weight", 8, 8), "has SwiGLU"),
        (
            "timm_token",
            added("blocks.0.attn.q_norm.bias", 16, value=1),
            "norms of queries and keys with a bias",
        ),
        ("timm_token", added("blocks.0.attn.rel_pos.bias", 16), "relative positions"),
        (
            "timm_token",
            dropped("blocks.1.attn.qkv.bias"),
            "block 1 has no bias of attention.qkv, and others have",
        ),
        ("timm_token", dropped("norm.weight"), "no tensor norm.weight"),
        ("timm_token", dropped("blocks.1.mlp.fc1.bias"), "block 1 has no bias of mlp.up, and others have"),
        (
            "timm_deit3",
            dropped("blocks.0.ls2.gamma"),
            "block 0 has no LayerScale of mlp.down, and others have",
        ),
        ("timm_token", dropped("norm.bias"), "no tensor norm.bias: .* such as one with RMSNorm"),
        ("timm_token", dropped("head.bias"), "no tensor head.bias"),
        ("timm_siglip", dropped("attn_pool.q.bias"), "queries or keys of the pooling lack their bias"),
        ("timm_token", added("surplus", 3), "no place for surplus"),
        ("timm_token", renamed("blocks.1.", "blocks.2."), "config says depth=2, and the tensors have 1"),
        ("hf_dinov2", added("embeddings.register_tokens", 1, 4, 32), "has register tokens"),
        ("hf_dinov2", added("classifier.weight", 5, 64), "a classifier on class token and mean"),
        ("hf_vit", added("vit.embeddings.distillation_token", 1, 1, 32), "has a distillation token"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    case: str, change: Callable[[dict[str, Tensor]], Any], says: str, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=says):
        plan_import(str(rewritten(case, tmp_path, change)), name="x")


@pytest.mark.parametrize(
    ("case", "changes", "says"),
    [
        ("hf_vit", {"hidden_act": "quick_gelu"}, "hidden_act 'quick_gelu': the model here has gelu"),
        ("hf_vit", {"num_hidden_layers": 3}, "config says depth=3, and the tensors have 2"),
        ("hf_vit", {"model_type": "swin"}, "model_type 'swin' of Hugging Face is none of vit,"),
        ("hf_dinov2", {"use_swiglu_ffn": True}, "use_swiglu_ffn=True of its config"),
        ("timm_token", {"architecture": "eva02_base_patch14_224"}, "is no plain ViT of timm"),
        ("timm_token", {"architecture": "vit_base_patch16_rope_224"}, "is no plain ViT of timm"),
        ("timm_token", {"architecture": "resnet50"}, "is no plain ViT of timm"),
        ("timm_token", {"architecture": "vit_small_patch14_dinov2"}, "LayerScale, and the tensors have none"),
        ("timm_token", {"model_args": {}}, "do not say how many attention heads"),
        ("timm_token", {"num_classes": 9}, "config says num_classes=9, and the tensors have 5"),
        ("timm_token", {"model_args": {"img_size": [64, 32]}}, "images of 64 x 32 pixels"),
        ("timm_token", {"pretrained_cfg": {"mean": "grey", "std": "grey"}}, "must be three numbers each"),
        ("hf_vit", {"intermediate_size": 128}, "config says mlp_dim=128, and the tensors have 64"),
        ("hf_vit", {"image_size": [32, 64]}, "reads square images"),
        ("hf_dinov2", {"mlp_ratio": 3}, "config says mlp_dim=96, and the tensors have "),
        (
            "timm_token",
            {"pretrained_cfg": {"crop_pct": 7}},
            "cannot be used: eval_crop must be at most 1",
        ),
        ("hf_vit", {"layer_norm_eps": "small"}, "settings that cannot be used"),
        ("hf_vit", {"num_attention_heads": 5}, "heads=5 does not divide the width 32"),
    ],
)
def test_configs_that_do_not_fit_are_refused(
    case: str, changes: dict[str, Any], says: str, tmp_path: Path
) -> None:
    copy = configured(case, tmp_path, changes)
    with pytest.raises(UsageError, match=says):
        plan_import(str(copy), name="x")


@pytest.mark.parametrize(
    ("case", "kind", "epsilon", "gelu"),
    [
        ("hf_vit", "vit", 1e-12, "exact"),
        ("hf_vit", "vit_mae", 1e-12, "exact"),
        ("hf_dinov2", "dinov2", 1e-6, "exact"),
        ("hf_siglip", "siglip_vision_model", 1e-6, "tanh"),
        ("hf_siglip", "siglip", 1e-6, "tanh"),
    ],
)
def test_what_a_config_leaves_out_is_the_default_of_its_class(
    case: str, kind: str, epsilon: float, gelu: str, tmp_path: Path
) -> None:
    """The defaults are those of transformers 5.23, where a model has 12 heads."""
    copy = configured(case, tmp_path, {"model_type": kind}, without=("layer_norm_eps", "hidden_act"))
    config = plan_import(str(copy), name="x").plan.config
    assert (config.norm_eps, config.gelu, config.heads) == (epsilon, gelu, 2)
    copy = configured(case, tmp_path, {"model_type": kind}, without=("num_attention_heads",))
    with pytest.raises(UsageError, match="heads=12 does not divide the width 32"):
        plan_import(str(copy), name="x")


def test_a_classifier_of_siglip_takes_the_mean_whatever_pooling_lies_beside_it(tmp_path: Path) -> None:
    def classifying(tensors: dict[str, Tensor]) -> None:
        tensors |= {"classifier.weight": torch.zeros(5, 32), "classifier.bias": torch.zeros(5)}

    planned = plan_import(str(rewritten("hf_siglip", tmp_path, classifying)), name="x")
    assert (planned.plan.config.pooling, planned.plan.config.num_classes) == ("gap", 5)


class Bomb:
    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (Path("/tmp/moe-frontier-was-here"),)


def test_no_pickle_is_executed(tmp_path: Path) -> None:
    for number, write in enumerate((torch.save, lambda bomb, path: path.write_bytes(pickle.dumps(bomb)))):
        path = tmp_path / f"bomb{number}.pth"
        write({"model": Bomb()}, path)
        with pytest.raises(UsageError, match=r"pickled objects .* not opened: save its state dict"):
            plan_import(str(path), name="x")
    assert not Path("/tmp/moe-frontier-was-here").exists()


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"<html>404</html>", "is no file of weights that is known"),
        (b"", "is no file of weights that is known"),
        (b"PK\x03\x04 cut", "is not a whole file"),
    ],
)
def test_other_files_are_refused(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "weights.npz"
    path.write_bytes(content)
    with pytest.raises(UsageError, match=says):
        plan_import(str(path), name="x")
    with pytest.raises(UsageError, match="no file or folder"):
        plan_import(str(tmp_path / "nothing"), name="x")
    (tmp_path / "manifest.ocdbt").touch()
    with pytest.raises(UsageError, match="Orbax"):
        plan_import(str(tmp_path), name="x")


def test_heads_that_nobody_says(tmp_path: Path) -> None:
    """A bare state dict is asked for them, whatever its width; a rule of timm's names may be corrected."""
    with pytest.raises(UsageError, match="do not say how many attention heads"):
        plan_import(str(GOLDENS / "timm_token" / "model.safetensors"), name="x")
    copy = Path(shutil.copytree(GOLDENS / "timm_token", tmp_path / "named"))
    config = json.loads((copy / "config.json").read_text())
    del config["model_args"]
    (copy / "config.json").write_text(json.dumps(config | {"architecture": "test_vit"}))
    assert "1 heads, as test_vit has them" in str(plan_import(str(copy), name="x"))
    assert plan_import(str(copy), name="x", changes={"model.heads": 2}).plan.config.heads == 2
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match="config says depth=12, and the tensors have 2"):
        plan_import(str(copy), name="x", changes={"model.heads": 2})
    with pytest.raises(
        UsageError, match=r"do not say how many attention heads they have: set `model\.heads`"
    ):
        plan_import(str(GOLDENS / "torchvision_vit.pth"), name="x")
    with pytest.raises(UsageError, match=r"`model\.heads` 4: the weights have 2"):
        plan_import(str(GOLDENS / "hf_vit"), name="x", changes={"model.heads": 4})


def damaged(path: Path, rng: Random) -> None:
    """Cuts a file, or changes bytes that are no numbers: of numbers, only zip files have checksums."""
    content = bytearray(path.read_bytes())
    header = len(content)
    if path.suffix == ".safetensors":
        header = 8 + int.from_bytes(content[:8], "little")
    if rng.random() < 0.4:
        del content[rng.randrange(len(content)) :]
    else:
        for _ in range(rng.randint(1, 3)):
            content[rng.randrange(header)] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


@pytest.mark.parametrize("case", [case for case in CASES if case != "vmoe/vmoe"])
def test_damage_is_an_error_of_one_line_or_changes_nothing(case: str, tmp_path: Path) -> None:
    rng, changes = Random(case), CHANGES.get(case, {})
    wanted = imported(GOLDENS / case, tmp_path / "wanted", **changes)
    refused = []
    for number in range(20):
        copy = tmp_path / f"{number}" / case
        copy.parent.mkdir()
        if (GOLDENS / case).is_dir():
            shutil.copytree(GOLDENS / case, copy)
            damaged(copy / "model.safetensors", rng)
        else:
            shutil.copy(GOLDENS / case, copy)
            damaged(copy, rng)
        try:
            found = imported(copy, tmp_path / f"{number}-out", **changes)
        except UsageError as error:
            refused.append(str(error))
            assert not (tmp_path / f"{number}-out").exists()
        else:
            assert all(torch.equal(found[name], tensor) for name, tensor in wanted.items()), number
    assert len(refused) > 10
    assert not any("\n" in reason for reason in refused)


@pytest.mark.slow  # some 180 models
def test_every_plain_vit_of_timm(tmp_path: Path) -> None:
    """By name, at small size with all parameters random: imported with the output of timm, or refused."""
    timm, hub = library("timm"), library("timm.models._hub")
    small = {"depth": 2, "embed_dim": 64, "num_heads": 4, "num_classes": 7}
    taken, generator = [], torch.Generator().manual_seed(0)
    for name in (*timm.list_models(module="vision_transformer"), *timm.list_models(module="deit")):
        try:
            model = timm.create_model(name, pretrained=False, **small).eval()
        except (TypeError, AssertionError):  # of another class, or never so small
            continue
        if sum(parameter.numel() for parameter in model.parameters()) > 10**8:
            continue
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.2 * torch.randn(parameter.shape, generator=generator))
        shutil.rmtree(tmp_path / name, ignore_errors=True)
        hub.save_for_hf(model, str(tmp_path / name), model_args=small)
        try:
            write_import(plan_import(str(tmp_path / name), name="x"), str(tmp_path / "out"), fresh=True)
        except UsageError:
            continue
        size, cfg = model.patch_embed.img_size[0], model.pretrained_cfg
        images = torch.rand(1, 3, size, size, generator=generator)
        mean, std = (torch.tensor(cfg[part]).view(3, 1, 1) for part in ("mean", "std"))
        with torch.no_grad():
            ours = load(tmp_path / "out")
            seen = images[
                ..., : ours.config.image_size, : ours.config.image_size
            ]  # by patches, of 384 and 14
            wanted, found = model((images - mean) / std), ours(2 * seen - 1).logits
        assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max(), name
        taken.append(name)
        shutil.rmtree(tmp_path / name)
    assert len(taken) == 85, taken

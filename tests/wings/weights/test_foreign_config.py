"""What files of weights do not say is asked for, and settings that are not known are refused by name."""

import json
import re
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe.exported import load
from orchestrator.errors import UsageError
from orchestrator.evaluation.models import model_location
from tests.parts import library
from tests.wings.weights.foreign_files import (
    GOLDENS,
    configured,
    expected_of,
    imported,
)
from wings.weights import import_once, plan_import, write_import
from wings.weights.torchvision import KIND

IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
BARE = str(GOLDENS / "timm_deit3" / "model.safetensors")
HEADS = {"model.heads": 2}


def without(case: str, folder: Path, *names: str) -> Path:
    """A copy of a golden folder without files."""
    copy = Path(shutil.copytree(GOLDENS / case, folder / case))
    for name in names:
        (copy / name).unlink()
    return copy


@pytest.mark.parametrize(
    "said",
    [
        {"data.mean": "imagenet"},
        {"data.mean": "imagenet", "data.std": "imagenet"},
        {"data.mean": "0.485,0.456,0.406", "data.std": "0.229, 0.224, 0.225"},
        {"data.mean": [0.485, 0.456, 0.406], "data.std": "imagenet"},
    ],
)
def test_mean_and_std_as_said_give_the_output_of_the_library(said: dict[str, Any], tmp_path: Path) -> None:
    """DeiT III was trained with those of ImageNet; its state dict alone does not say so."""
    expected = expected_of("timm_deit3")
    imported(BARE, tmp_path / "out", **HEADS, **said)
    with torch.no_grad():
        found = load(tmp_path / "out")(torch.from_numpy(expected["image"]) * 2 - 1).logits
    wanted = torch.from_numpy(expected["logits"])
    assert (found - wanted).abs().max() <= 1e-6 * wanted.abs().max()


def test_mean_and_std_that_nobody_says_are_asked_for(tmp_path: Path) -> None:
    """Of any kind, and before anything is written; the plan can be seen before."""
    timm = configured("timm_token", tmp_path, {"pretrained_cfg": {"crop_pct": 1.0}})
    partial = configured("timm_gap", tmp_path, {"pretrained_cfg": {"mean": [0.5] * 3}})
    unsaid = without("hf_siglip", tmp_path, "preprocessor_config.json")
    (unsaid / "preprocessor_config.json").write_text(json.dumps({"size": {"height": 32, "width": 32}}))
    for source, changes in (
        (BARE, HEADS),
        (GOLDENS / "torchvision_vit.pth", HEADS),
        (timm, {}),
        (partial, {}),
        (without("hf_dinov2", tmp_path, "preprocessor_config.json"), {}),
        (unsaid, {}),
    ):
        planned = plan_import(str(source), name="x", changes=changes)
        assert "mean and std are not said, and have to be" in str(planned)
        with pytest.raises(UsageError, match=r"by which mean and std .* set `data\.mean` to imagenet"):
            write_import(planned, str(tmp_path / "out"))
        assert not (tmp_path / "out").exists()
        said = plan_import(str(source), name="x", changes={**changes, "data.mean": "half"}).facts
        assert (said.mean, said.std) == ((0.5,) * 3, (0.5,) * 3)


def test_the_default_of_a_library_is_said_and_may_be_changed(tmp_path: Path) -> None:
    """transformers has a mean and std of its own for ViT, which a folder without a preprocessor means."""
    source = str(without("hf_vit", tmp_path, "preprocessor_config.json"))
    planned = plan_import(source, name="x")
    assert planned.facts.normalisation == ((0.5,) * 3, (0.5,) * 3)
    assert "no preprocessor_config.json: mean and std of 0.5, the library's own" in str(planned)
    said = plan_import(source, name="x", changes={"data.mean": "imagenet"}).facts
    assert said.normalisation == IMAGENET


@pytest.mark.parametrize(
    ("case", "kind", "seen"),
    [
        ("hf_vit", "vit", ("square", 1.0, "bilinear")),
        ("hf_vit", "vit_mae", ("square", 1.0, "bilinear")),
        ("hf_siglip", "siglip_vision_model", ("square", 1.0, "bicubic")),
        ("hf_dinov2", "dinov2", ("shorter", 0.875, "bicubic")),
    ],
)
def test_without_a_preprocessor_images_are_those_of_the_kinds_own(
    case: str, kind: str, seen: tuple[str, float, str], tmp_path: Path
) -> None:
    copy = configured(case, tmp_path, {"model_type": kind})
    (copy / "preprocessor_config.json").unlink()
    data = plan_import(str(copy), name="x", changes={"data.mean": "half"}).run.data
    assert (data.eval_resize, data.eval_crop, data.eval_interpolation) == seen


def test_old_configs_of_timm_have_the_mean_at_the_top(tmp_path: Path) -> None:
    config = json.loads((GOLDENS / "timm_deit3" / "config.json").read_text())
    flat = configured("timm_deit3", tmp_path, config["pretrained_cfg"], without=("pretrained_cfg",))
    facts = plan_import(str(flat), name="x").facts
    assert (facts.mean, facts.std) == IMAGENET


@pytest.mark.parametrize(
    ("source", "said", "says"),
    [
        (
            BARE,
            {"data.mean": "grey"},
            r"`data\.mean` grey: say imagenet or half, or three numbers, as 0\.485",
        ),
        (
            BARE,
            {"data.mean": "0.4,0.4,0.4"},
            r"`data\.std` is missing: .* as 0\.229,0\.224,0\.225; numbers of one",
        ),
        (BARE, {"data.std": "imagenet"}, r"`data\.mean` is missing: say"),
        (BARE, {"data.mean": "123,116,103", "data.std": "half"}, r"three numbers each, of pixels in 0\.\.1"),
        (BARE, {"data.mean": "0.4,0.4", "data.std": "half"}, "three numbers each"),
        (GOLDENS / "timm_deit3", {"data.mean": "half"}, r"`data\.mean` half .*: the weights have \(0\.485"),
        (BARE, {"data.batch_size": 3}, "data.batch_size is no field of an imported model"),
    ],
)
def test_what_is_said_must_be_meant(source: Any, said: dict[str, Any], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        plan_import(str(source), name="x", changes={**HEADS, **said})
    again = {"data.mean": "imagenet", "data.std": "imagenet"}
    assert plan_import(str(GOLDENS / "timm_deit3"), name="x", changes=again).facts.mean == IMAGENET[0]


def test_jax_has_one_normalisation_and_may_be_told_another(tmp_path: Path) -> None:
    planned = plan_import(str(GOLDENS / "augreg.npz"), name="x")
    assert "its library's configs have a mean and std of 0.5" in str(planned)
    assert (
        plan_import(
            str(GOLDENS / "augreg.npz"), name="x", changes={"data.mean": "imagenet"}
        ).facts.normalisation
        == IMAGENET
    )


def test_other_commands_point_to_the_one_that_takes_it(tmp_path: Path) -> None:
    """`--init-from` and the like import the source themselves, and ask no questions."""
    for source in (GOLDENS / "timm_deit3" / "model.safetensors", GOLDENS / "torchvision_vit.pth"):
        with pytest.raises(UsageError, match=r"heads.*\(wings/jobs/import_weights\.py takes what"):
            import_once(str(source), str(tmp_path))
    source = without("hf_dinov2", tmp_path, "preprocessor_config.json")
    with pytest.raises(UsageError, match=r"mean and std .*\(wings/jobs/import_weights\.py takes what"):
        model_location(str(source), root=str(tmp_path))
    assert not (tmp_path / "imports").exists()


def test_an_image_processor_beside_a_tokenizer(tmp_path: Path) -> None:
    """transformers 5 writes it into processor_config.json, of which one part is about images."""
    copy = without("hf_dinov2", tmp_path, "preprocessor_config.json")
    processor = json.loads((GOLDENS / "hf_dinov2" / "preprocessor_config.json").read_text())
    (copy / "processor_config.json").write_text(json.dumps({"image_processor": {**processor, "resample": 3}}))
    planned = plan_import(str(copy), name="x")
    assert (planned.facts.normalisation, planned.run.data.eval_interpolation) == (IMAGENET, "bicubic")
    # The file for images alone goes before it, as in transformers.
    (copy / "preprocessor_config.json").write_text(json.dumps(processor))
    assert plan_import(str(copy), name="x").run.data.eval_interpolation == "bilinear"


def test_a_processor_for_another_size_is_noted(tmp_path: Path) -> None:
    """As DINOv2's, which crops to 224 for models of 518."""
    copy = without("hf_dinov2", tmp_path, "preprocessor_config.json")
    processor = json.loads((GOLDENS / "hf_dinov2" / "preprocessor_config.json").read_text())
    sizes = {"size": {"height": 24, "width": 24}}
    (copy / "preprocessor_config.json").write_text(json.dumps({**processor, **sizes}))
    assert "makes 24 x 24 pixels, and the model is for 32 x 32: set `model.image_size` 24" in str(
        plan_import(str(copy), name="x")
    )


@pytest.mark.parametrize(
    ("case", "field", "value"),
    [
        ("hf_vit", "rope_theta", 100.0),
        ("hf_vit", "use_mean_pooling", False),
        ("hf_vit", "is_decoder", True),
        ("hf_vit", "pruned_heads", {"0": [1]}),
        ("hf_vit", "auto_map", {"AutoModel": "modeling.Other"}),
        ("hf_vit", "quantization_config", {"bits": 8}),
        ("hf_vit", "num_channels", 1),
        ("hf_vit", "vision_use_head", True),
        ("hf_vit_model", "pooler_act", "relu"),
        ("hf_dinov2", "num_register_tokens", 4),
        ("hf_dinov2", "use_swiglu_ffn", True),
        ("hf_dinov2", "mask_ratio", 0.5),
        ("hf_siglip", "vision_use_head", False),
        ("hf_siglip", "max_num_patches", 64),
        ("timm_token", "attn_layer", "diff"),
        ("timm_token", "mlp_layer", "swiglu"),
        ("timm_token", "rope_type", "mixed"),
    ],
)
def test_a_field_that_may_change_the_function_is_refused_by_name(
    case: str, field: str, value: Any, tmp_path: Path
) -> None:
    args = json.loads((GOLDENS / case / "config.json").read_text()).get("model_args")
    changes = {"model_args": {**args, field: value}} if args else {field: value}
    with pytest.raises(UsageError, match=f"{field}.{re.escape(repr(value))}"):
        plan_import(str(configured(case, tmp_path, changes)), name="x")


def test_a_model_without_a_classifier_has_no_names_of_classes(tmp_path: Path) -> None:
    named = configured("hf_vit_model", tmp_path, {"id2label": {"0": "cat", "1": "dog"}})
    facts = plan_import(str(named), name="x").facts
    assert facts.classes is None
    assert not any("names of classes" in note for note in facts.assumed)


def test_every_name_of_gelu_is_the_function_that_it_names(tmp_path: Path) -> None:
    for act, gelu in (("gelu", "exact"), ("gelu_new", "tanh"), ("gelu_pytorch_tanh", "tanh")):
        copy = configured("hf_vit", tmp_path, {"hidden_act": act})
        assert plan_import(str(copy), name="x").plan.config.gelu == gelu


def test_a_field_without_a_value_changes_nothing(tmp_path: Path) -> None:
    for off in ({"rope_theta": None}, {"pruned_heads": {}}, {"quantization_config": []}):
        plan_import(str(configured("hf_vit", tmp_path, off)), name="x")


@pytest.mark.parametrize(
    ("case", "kind"),
    [("hf_vit", "ViT"), ("hf_vit", "ViTMAE"), ("hf_dinov2", "Dinov2"), ("hf_siglip", "SiglipVision")],
)
def test_every_field_of_the_library_s_own_configs_is_known(case: str, kind: str, tmp_path: Path) -> None:
    """At its default: those of its base class, and of the kind of model."""
    defaults = getattr(library("transformers"), f"{kind}Config")().to_dict()
    given = json.loads((GOLDENS / case / "config.json").read_text())
    changes = {**defaults, **given, "model_type": defaults["model_type"]}
    assert plan_import(str(configured(case, tmp_path, changes)), name="x").plan.config.depth == 2


def test_the_two_towers_of_siglip_and_their_config(tmp_path: Path) -> None:
    vision = json.loads((GOLDENS / "hf_siglip" / "config.json").read_text())
    config = library("transformers").SiglipConfig(vision_config=vision).to_dict()
    (folder := tmp_path / "hf_siglip").mkdir()
    for name in ("model.safetensors", "preprocessor_config.json"):
        shutil.copy(GOLDENS / "hf_siglip" / name, folder)
    (folder / "config.json").write_text(json.dumps(config))
    assert plan_import(str(folder), name="x").plan.config.pooling == "map"
    config["vision_config"]["rope_theta"] = 1e4
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UsageError, match=r"rope_theta=10000\.0 of its config is not known here"):
        plan_import(str(folder), name="x")


def test_several_labels_for_an_image_are_probabilities_of_their_own(tmp_path: Path) -> None:
    for problem, loss in ((None, "softmax"), ("multi_label_classification", "sigmoid")):
        copy = configured("hf_vit", tmp_path, {"problem_type": problem})
        assert plan_import(str(copy), name="x").run.task.output == loss
    with pytest.raises(UsageError, match="problem_type 'regression': the model here classifies"):
        plan_import(str(configured("hf_vit", tmp_path, {"problem_type": "regression"})), name="x")


@pytest.mark.parametrize("group", [3, 48, 64, 100])
def test_groups_of_images_need_no_batch_of_training(group: int, tmp_path: Path) -> None:
    changes = {"model.moe.images_per_group": group, "model.moe.router.kind": "expert_choice"}
    imported(GOLDENS / "vmoe/vmoe", tmp_path / "out", **changes)
    assert load(tmp_path / "out").config.moe.images_per_group == group


def test_the_crop_of_torchvisions_large_model() -> None:
    opened: Any = SimpleNamespace(tensors={"conv_proj.weight": SimpleNamespace(shape=(1024, 3, 16, 16))})
    assert KIND.read(opened)[2].evaluation["eval_crop"] == 224 / 242

"""Dense models as folders of timm and transformers: opened with no difference, and read back equal."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch

from moe.exported import load
from moe.model import Model
from moe.presets import preset
from orchestrator.checkpoint.card import preprocessor
from orchestrator.checkpoint.export import write_export
from orchestrator.checkpoint.models import read_model
from orchestrator.codec import override, to_dict
from orchestrator.config import DataConfig, RunConfig
from orchestrator.errors import UsageError
from tests.parts import library
from wings.weights import foreign_folder, plan_import, write_import
from wings.weights.outward import write_foreign

Library = Literal["timm", "huggingface"]
TINY = {"image_size": 32, "patch_size": 8, "width": 32, "depth": 2, "heads": 2, "mlp_dim": 48, "moe": None}
CLASSES = ("ant", "bee", "cat", "dog", "elk")
CASES: list[tuple[Library, dict[str, Any]]] = [
    ("timm", {"pooling": "token", "qk_norm": False, "gelu": "exact"}),
    ("timm", {"pooling": "gap"}),
    ("timm", {"pooling": "map", "qk_norm": False}),
    ("timm", {"pooling": "token", "position": "sincos2d"}),
    ("timm", {"pooling": "token", "position": "none", "mlp_dim": 37}),
    ("huggingface", {"pooling": "token", "qk_norm": False, "norm_eps": 1e-12}),
    ("huggingface", {"pooling": "token", "qk_norm": False, "gelu": "exact", "position": "sincos2d"}),
    ("huggingface", {"pooling": "gap", "qk_norm": False}),
    ("huggingface", {"pooling": "gap", "qk_norm": False, "gelu": "exact", "norm_eps": 1e-5}),
]


def written(
    folder: Path, model: dict[str, Any], *, classes: Sequence[str] = CLASSES, **changes: Any
) -> Model:
    """A model of random weights, all away from where they start, and its export in a folder."""
    fields = {f"model.{name}": value for name, value in {"num_classes": 5, **TINY, **model}.items()}
    run = override(RunConfig(), {"name": "x", **fields, **changes})
    built = run.model.build(seed=1)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    named = classes if run.model.num_classes == len(classes) else None
    write_export(str(folder), built.state_dict(), run, classes=named, more={})
    return built.eval()


def sent(to: Library, folder: Path, out: Path) -> None:
    model = read_model(str(folder / "model.safetensors"))
    write_foreign(str(out), foreign_folder(to, model), model)


def some_images(size: int) -> torch.Tensor:
    return torch.rand(3, 3, size, size, generator=torch.Generator().manual_seed(2)) * 2 - 1


def opened(to: Library, folder: Path) -> Any:
    """The logits that the library computes."""
    if to == "timm":
        return library("timm").create_model(f"local-dir:{folder}", pretrained=True).eval()
    auto = library("transformers").AutoModelForImageClassification
    model, report = auto.from_pretrained(str(folder), output_loading_info=True)
    assert not any(report.values()), report
    if model.config.num_labels == len(CLASSES):
        assert tuple(model.config.id2label.values()) == CLASSES
    return lambda images: model.eval()(images).logits


@pytest.mark.parametrize(("to", "model"), CASES)
def test_the_library_computes_the_same(to: Library, model: dict[str, Any], tmp_path: Path) -> None:
    ours, images = written(tmp_path / "ours", model), some_images(32)
    sent(to, tmp_path / "ours", tmp_path / "theirs")
    with torch.no_grad():
        assert torch.equal(opened(to, tmp_path / "theirs")(images), ours(images).logits)


def test_an_unknown_kind_of_positions_is_refused(tmp_path: Path) -> None:
    """It is not written as another kind, and the export that stands there is kept."""
    written(tmp_path / "ours", {"pooling": "token", "position": "none"})
    sent("timm", tmp_path / "ours", tmp_path / "theirs")
    model = read_model(str(tmp_path / "ours/model.safetensors"))
    object.__setattr__(model.run.model, "position", "rotary")  # as a new word of its Literal
    with pytest.raises(UsageError, match="cannot express position='rotary'"):
        write_foreign(str(tmp_path / "theirs"), foreign_folder("timm", model), model, fresh=True)
    assert (tmp_path / "theirs/config.json").is_file()


@pytest.mark.parametrize(("to", "error"), [("timm", 0), ("huggingface", 1e-6)])
def test_layer_scale(to: Library, error: float, tmp_path: Path) -> None:
    """Where the library has none, the factors are in the layer before; an import has them there."""
    model = {"pooling": "token", "qk_norm": False, "layer_scale": 0.5}
    ours, images = written(tmp_path / "ours", model), some_images(32)
    sent(to, tmp_path / "ours", tmp_path / "theirs")
    write_import(plan_import(str(tmp_path / "theirs"), name="x"), str(tmp_path / "again"))
    with torch.no_grad():
        expected = ours(images).logits
        theirs = opened(to, tmp_path / "theirs")(images)
        again = load(tmp_path / "again")(images).logits
    torch.testing.assert_close(theirs, expected, rtol=0, atol=error)
    torch.testing.assert_close(again, expected, rtol=0, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("size", ["S/32", "S/16", "B/32", "B/16", "L/16"])
@pytest.mark.parametrize("to", ["timm", "huggingface"])
def test_the_library_computes_the_same_at_real_size(to: Library, size: str, tmp_path: Path) -> None:
    model = to_dict(preset(size)) | {"qk_norm": to == "timm", "num_classes": 1000}
    ours = written(tmp_path / "ours", model)
    images = some_images(ours.config.image_size)
    sent(to, tmp_path / "ours", tmp_path / "theirs")
    with torch.no_grad():
        assert torch.equal(opened(to, tmp_path / "theirs")(images), ours(images).logits)


@pytest.mark.parametrize(("to", "model"), CASES)
def test_out_and_in_again_is_the_same_model(to: Library, model: dict[str, Any], tmp_path: Path) -> None:
    ours, images = (
        written(tmp_path / "ours", model, **{"data.eval_interpolation": "bicubic"}),
        some_images(32),
    )
    sent(to, tmp_path / "ours", tmp_path / "theirs")
    planned = plan_import(str(tmp_path / "theirs"), name="x")
    assert planned.plan.made == {}
    assert planned.run.data.eval_interpolation == "bicubic"
    assert planned.facts.classes == CLASSES
    write_import(planned, str(tmp_path / "again"))
    again = load(tmp_path / "again")
    with torch.no_grad():
        assert torch.equal(again(images).logits, ours(images).logits)
    for name, tensor in ours.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name


@pytest.mark.parametrize("to", ["timm", "huggingface"])
@pytest.mark.parametrize("names", [tuple("lkjihgfedcba"), ()], ids=["named", "unnamed"])
def test_twelve_classes_go_out_and_in_again_in_order(
    to: Library, names: tuple[str, ...], tmp_path: Path
) -> None:
    """Ten and more have numbers of two digits; classes without names have none afterwards either."""
    model = {"pooling": "token", "qk_norm": False, "num_classes": 12}
    written(tmp_path / "ours", model, classes=names)
    sent(to, tmp_path / "ours", tmp_path / "theirs")
    assert plan_import(str(tmp_path / "theirs"), name="x").facts.classes == (names or None)
    if to == "huggingface":
        config = json.loads((tmp_path / "theirs/config.json").read_text())
        assert [*config["id2label"]] == [str(i) for i in range(12)]
        assert {str(i): name for name, i in config["label2id"].items()} == config["id2label"]


NAMED = {  # what a config says of five outputs -> the names that are taken, or why none is
    "by number": ({str(n): f"c{n}" for n in (2, 0, 1, 4, 3)}, ("c0", "c1", "c2", "c3", "c4")),
    "fewer": ({"0": "a", "1": "b"}, "2 names of classes, numbered 0 to 1, for 5 outputs: left out"),
    "from 1": ({str(n): "abcde"[n - 1] for n in range(1, 6)}, "5 names of classes, numbered 1 to 5"),
    "of others": ({"cat": "a", "dog": "b"}, "2 names of classes, numbered cat to dog"),
    "made up": ({str(n): f"LABEL_{n}" for n in range(5)}, ""),
}


@pytest.mark.parametrize("case", NAMED)
@pytest.mark.parametrize(("to", "field"), [("huggingface", "id2label"), ("timm", "label_names")])
def test_names_are_those_of_the_outputs_or_none(to: Library, field: str, case: str, tmp_path: Path) -> None:
    written(tmp_path / "ours", {"pooling": "token", "qk_norm": False})
    sent(to, tmp_path / "ours", tmp_path / "theirs")
    config = json.loads((tmp_path / "theirs/config.json").read_text())
    names, expected = NAMED[case]
    (tmp_path / "theirs/config.json").write_text(json.dumps(config | {field: names}))
    facts = plan_import(str(tmp_path / "theirs"), name="x").facts
    assert facts.classes == (expected if isinstance(expected, tuple) else None)
    if isinstance(expected, str):
        assert expected in "; ".join(facts.assumed)


@pytest.mark.parametrize(
    ("to", "model", "says"),
    [
        ("timm", {"moe": {"num_experts": 4}}, "timm cannot express experts: `format` moe, torch or onnx can"),
        ("timm", {"stem": "conv"}, "cannot express stem='conv'"),
        ("timm", {"representation_size": 8}, "cannot express representation_size"),
        ("timm", {"norm_eps": 1e-12}, r"cannot express norm_eps=1e-12 \(its own is 1e-06\)"),
        ("timm", {"pooling": "map"}, "cannot express qk_norm with pooling='map'"),
        (
            "huggingface",
            {"moe": {"num_experts": 4}},
            "transformers cannot express experts, qk_norm: `format`",
        ),
        ("huggingface", {"pooling": "map", "qk_norm": False}, "express a classifier behind pooling='map':"),
        (
            "huggingface",
            {"stem": "conv", "representation_size": 8},
            "stem='conv', representation_size, qk_norm",
        ),
    ],
)
def test_what_cannot_be_expressed_is_refused(
    to: Library, model: dict[str, Any], says: str, tmp_path: Path
) -> None:
    written(tmp_path / "ours", model)
    with pytest.raises(UsageError, match=says):
        sent(to, tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()


def test_an_export_is_not_replaced(tmp_path: Path) -> None:
    written(tmp_path / "ours", {})
    sent("timm", tmp_path / "ours", tmp_path / "theirs")
    with pytest.raises(UsageError, match="holds an export already; `fresh` replaces it"):
        sent("timm", tmp_path / "ours", tmp_path / "theirs")


@pytest.mark.parametrize(
    ("resize", "crop", "size", "crops"),
    [
        ("shorter", 0.875, {"shortest_edge": 256}, True),
        ("square", 1.0, {"height": 224, "width": 224}, False),
        ("square", 0.875, {"height": 256, "width": 256}, True),
    ],
)
def test_the_preprocessor(
    resize: Any, crop: float, size: dict[str, int], crops: bool, tmp_path: Path
) -> None:
    data = DataConfig(eval_resize=resize, eval_crop=crop, eval_interpolation="bicubic")
    content = preprocessor(224, data)
    assert (content["size"], content["do_center_crop"], content["resample"]) == (size, crops, 3)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(content))
    auto = library("transformers").AutoImageProcessor.from_pretrained(str(tmp_path))
    white = torch.full((3, 300, 400), 255, dtype=torch.uint8)
    pixels = auto(white, return_tensors="pt")["pixel_values"]
    assert pixels.shape == (1, 3, 224, 224)
    assert torch.allclose(pixels, torch.ones(()))

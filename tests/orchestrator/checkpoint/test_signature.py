"""The signature of a model: the same behind every door."""

from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, get_args, get_type_hints

import mlflow.pyfunc
import numpy as np
import onnx
import pytest
import torch
from PIL import Image

from moe import load_signature
from moe.signature import Signature, read_signature
from orchestrator import inference
from orchestrator.checkpoint import graphs
from orchestrator.checkpoint.export import write_export
from orchestrator.checkpoint.models import ModelRef, read_model
from orchestrator.checkpoint.weights import signature_of
from orchestrator.codec import override, to_dict
from orchestrator.config import RunConfig
from orchestrator.data.batch import normalize
from orchestrator.data.images import Transform
from orchestrator.data.preparation import Preparation
from orchestrator.evaluation.soup import write_soup
from orchestrator.tracking.pyfunc import write_pyfunc
from tests.orchestrator.data.images import encoded, exif

RNG = np.random.default_rng(0)
# Bicubic sums stay within 0..255: two libraries cut them at different times.
GLASS = RNG.integers(90, 166, (20, 31, 4), np.uint8)
PICTURES = {
    "oblong": encoded(Image.fromarray(GLASS[..., :3])),
    "transparent": encoded(Image.fromarray(GLASS)),
    "of its size": encoded(Image.fromarray(GLASS[:16, :16, :3])),
    "turned": encoded(Image.fromarray(GLASS[..., :3]), exif=exif(6)),
    "12 bits": encoded(Image.fromarray(RNG.integers(1400, 2700, (20, 31), np.uint16))),
    "grey with alpha": encoded(Image.fromarray(GLASS[..., :2])),
}
WAYS = get_args(get_type_hints(Signature)["pixels"])
RUN = override(
    RunConfig(),
    {
        **{"name": "signed", "task.loss": "sigmoid", "data.path": "/gone"},
        **{"data.eval_resize": "square", "data.eval_crop": 0.9, "data.eval_interpolation": "bicubic"},
        **{"model.moe": None, "model.image_size": 16, "model.patch_size": 8, "model.width": 16},
        **{"model.mlp_dim": 16, "model.depth": 1, "model.heads": 2, "model.num_classes": 3},
        **{"model.pooling": "token", "model.qk_norm": False, "model.position": "learned"},
    },
)
SIGNED = signature_of(
    RUN,
    classes=("cat", "dog, hot", "null"),
    preparation=Preparation(background="white", white=4095),
    origin=("timm, SHA-256 abc", "apache-2.0"),
)


def write_signed(folder: Path) -> ModelRef:
    write_export(str(folder), RUN.model.build(seed=0).state_dict(), RUN, signature=SIGNED, more={})
    return read_model(f"{folder}/model.safetensors")


@pytest.fixture(scope="module")
def signed(tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    return write_signed(tmp_path_factory.mktemp("signed") / "model")


def test_what_it_says(signed: ModelRef) -> None:
    assert signed.signature == SIGNED
    assert (SIGNED.output, SIGNED.background, SIGNED.white) == ("sigmoid", "white", 4095)
    assert signed.preparation == Preparation(background="white", white=4095)
    assert signed.classes == SIGNED.classes
    assert str(SIGNED) == (
        "takes RGB images of 16 x 16 pixels (both sides, central 0.9, bicubic), mean 0.5, std 0.5,"
        " transparent pixels on white, 16 bits with 4095 as white; gives sigmoid, of 3 named classes"
    )
    assert "2 images are routed together" in str(replace(SIGNED, images_per_group=2))


def test_our_own_formats_have_it(signed: ModelRef, tmp_path: Path) -> None:
    """A folder, the file in it, a soup, and what MLflow serves."""
    folder = Path(signed.location).parent
    assert load_signature(folder) == load_signature(signed.location) == SIGNED
    write_soup([signed], str(tmp_path / "soup.safetensors"))
    assert read_model(str(tmp_path / "soup.safetensors")).signature == SIGNED
    write_pyfunc(signed, str(tmp_path / "packed"))
    served = mlflow.pyfunc.load_model(str(tmp_path / "packed"))._model_impl
    assert served.signature == SIGNED  # pyright: ignore
    assert f"The model {SIGNED}." in (folder / "README.md").read_text()


@pytest.mark.smoke
def test_graphs_have_it(signed: ModelRef, tmp_path: Path) -> None:
    model = signed.load()
    graphs.write_program(model, str(tmp_path / "a.pt2"), SIGNED)
    extra = {"signature": ""}
    torch.export.load(tmp_path / "a.pt2", extra_files=extra)
    assert read_signature(extra["signature"]) == SIGNED
    graphs.write_onnx(model, str(tmp_path / "a.onnx"), SIGNED)
    found = {each.key: each.value for each in onnx.load(str(tmp_path / "a.onnx")).metadata_props}
    assert read_signature(found["signature"]) == SIGNED
    reader: dict[str, Any] = {"__file__": str(tmp_path / "read.py"), "__name__": "reader"}
    (tmp_path / "a.onnx").rename(tmp_path / "model.onnx")
    exec(Path(inference.__path__[0], "reader.py").read_text(), reader)
    for way, resize, (name, image) in product(WAYS, ("shorter", "square"), PICTURES.items()):
        reader["signature"] = to_dict(here := replace(SIGNED, pixels=way, resize=resize))
        pixels = normalize(Transform.of(here)(signed.preparation.prepare(image)))
        # A level of 255 where two libraries round otherwise.
        off = np.abs(reader["model_input"](image) - pixels[None].numpy()).max()
        assert off < 1.01 * 2 / 255, (way, resize, name)
        logits = model(pixels[None]).logits[0]
        assert reader["probabilities"](image) == pytest.approx(logits.sigmoid().detach().numpy(), abs=0.01)


@pytest.mark.parametrize("tree", ["{}", "[]", '{"image_size": -1}', '{"image_size": 8, "crop": 2}', "no"])
def test_what_is_no_signature(tree: str) -> None:
    with pytest.raises(ValueError, match=r"signature|Expecting|image_size|crop"):
        read_signature(tree)

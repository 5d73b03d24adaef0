"""Images as the source's library, and the reader's, has them: compared with timm and transformers."""

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from orchestrator.checkpoint.card import PREPROCESSOR, preprocessor
from orchestrator.codec import read_config
from orchestrator.config import DataConfig
from orchestrator.data.batch import normalize
from orchestrator.data.images import Transform
from tests.parts import library
from wings.weights import plan_import

GOLDENS = Path(__file__).parents[2] / "goldens" / "weights"
SIDES = ((50, 37), (32, 32), (33, 32), (36, 36), (97, 101), (19, 210), (240, 17), (64, 49))  # width, height
SIZE = 32


def image_of(width: int, height: int, kind: str = "PNG") -> tuple[Image.Image, bytes]:
    """An image of coarse noise, as Pillow reads it, and as a file."""
    rng = np.random.default_rng(width)
    rough = rng.integers(0, 255, (height // 5 + 2, width // 5 + 2, 3), dtype="uint8")
    content = io.BytesIO()
    Image.fromarray(rough).resize((width, height), Image.Resampling.BICUBIC).save(content, kind, quality=90)
    return Image.open(content).convert("RGB"), content.getvalue()


def ours(data: DataConfig, content: bytes, size: int = SIZE) -> Tensor:
    return normalize(Transform(size=size, **data.eval_settings())(content)[None])[0]


def theirs_of_timm(image: Image.Image, config: dict[str, Any]) -> Tensor:
    half = (0.5,) * 3
    make = library("timm").data.create_transform
    return make(input_size=(3, SIZE, SIZE), is_training=False, mean=half, std=half, **config)(image)


@pytest.mark.parametrize("mode", ["center", "squash"])
@pytest.mark.parametrize("way", ["bilinear", "bicubic"])
def test_weights_of_timm_see_the_pixels_of_timm(mode: str, way: str, tmp_path: Path) -> None:
    """To the bit, whatever the size of an image: also of the model's size, which timm magnifies and crops."""
    for crop in (0.875, 0.9, 0.95, 1.0):
        folder = Path(shutil.copytree(GOLDENS / "timm_token", tmp_path / str(crop)))
        config = json.loads((folder / "config.json").read_text())
        settings = {"crop_pct": crop, "interpolation": way, "crop_mode": mode}
        config["pretrained_cfg"] |= settings
        (folder / "config.json").write_text(json.dumps(config))
        data = plan_import(str(folder), name="x").run.data
        for sides in SIDES:
            image, content = image_of(*sides, "JPEG")
            assert torch.equal(ours(data, content), theirs_of_timm(image, settings)), (crop, sides)


@pytest.mark.parametrize("resample", [2, 3])
@pytest.mark.parametrize("square", [False, True])
def test_weights_of_transformers_see_the_pixels_of_transformers(
    square: bool, resample: int, tmp_path: Path
) -> None:
    """Its sides are stated, and may be those that timm would not have: 37 for 32 / .875."""
    for whole in (32, 35, 36, 37, 40):
        folder = Path(shutil.copytree(GOLDENS / "hf_vit", tmp_path / str(whole)))
        size = {"height": whole, "width": whole} if square else {"shortest_edge": whole}
        content = preprocessor(SIZE, DataConfig()) | {"size": size, "resample": resample}
        content |= {"do_center_crop": True}
        (folder / PREPROCESSOR).write_text(json.dumps(content))
        processor = library("transformers").AutoImageProcessor.from_pretrained(str(folder))
        data = plan_import(str(folder), name="x").run.data
        assert preprocessor(SIZE, data)["size"] == size
        for sides in SIDES:
            image, encoded = image_of(*sides)
            wanted = processor(image, return_tensors="pt")["pixel_values"][0]
            torch.testing.assert_close(ours(data, encoded), wanted, rtol=0, atol=1e-6, msg=f"{whole} {sides}")


def test_readers_of_our_models_see_our_pixels(tmp_path: Path) -> None:
    """timm, and transformers where it agrees with timm: the resized side is rounded down."""
    assert preprocessor(224, DataConfig(eval_crop=0.9))["size"] == {"shortest_edge": 248}
    for crop, way in ((0.875, "bilinear"), (0.8, "bicubic"), (1.0, "bilinear")):
        data = read_config(DataConfig, {"eval_crop": crop, "eval_interpolation": way})
        (tmp_path / PREPROCESSOR).write_text(json.dumps(preprocessor(SIZE, data)))
        processor = library("transformers").AutoImageProcessor.from_pretrained(str(tmp_path))
        agree = 0
        for sides in {*SIDES} - {(SIZE, SIZE)}:  # which ours keeps
            image, content = image_of(*sides)
            of_timm = theirs_of_timm(image, {"crop_pct": crop, "interpolation": way})
            of_transformers = processor(image, return_tensors="pt")["pixel_values"][0]
            assert (ours(data, content) - of_timm).abs().mean() < 1e-3, (crop, sides)
            agree += bool((of_transformers - of_timm).abs().mean() < 1e-3)
        assert agree > len(SIDES) / 2  # they round half a pixel differently


def test_a_thin_image_is_cropped_before_it_is_resized(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its other side would be enormous."""
    monkeypatch.setattr("orchestrator.data.images.MAX_PIXELS", SIZE * SIZE * 20)
    _, content = image_of(3, 200)
    for pixels in ("whole", "timm", "transformers"):
        data = read_config(DataConfig, {"eval_pixels": pixels})
        assert torch.equal(ours(data, content), ours(DataConfig(eval_pixels="parts"), content))

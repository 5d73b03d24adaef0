"""What image processors of transformers do to pixels, against the processors themselves."""

from typing import Any

import numpy as np
import pytest
import torch

from orchestrator.data.batch import normalize
from orchestrator.data.images import Transform, encode_png
from orchestrator.errors import UsageError
from tests.parts import library
from wings.weights.preprocessor import read_preprocessor

PROCESSORS: list[tuple[str, dict[str, Any]]] = [
    ("ViT", {}),
    ("ViT", {"do_normalize": False, "resample": 3}),
    ("Siglip", {"image_mean": [0.3, 0.5, 0.6], "image_std": [0.2, 0.3, 0.4]}),
    ("Bit", {"size": {"shortest_edge": 256}}),
    ("DeiT", {}),
    ("CLIP", {}),
    ("Beit", {"size": {"height": 256, "width": 256}, "do_center_crop": True}),
    ("ConvNext", {"size": {"shortest_edge": 224}}),
    ("ConvNext", {"size": {"shortest_edge": 224}, "crop_pct": 0.95}),
    ("ConvNext", {}),
]


@pytest.mark.parametrize(("kind", "settings"), PROCESSORS)
def test_pixels_are_those_of_the_processor(kind: str, settings: dict[str, Any]) -> None:
    """On an oblong image whose colours say where a pixel is: a crop of 0.95 for 1 is off by two bounds."""
    processor = getattr(library("transformers"), f"{kind}ImageProcessor")(**settings)
    rows, columns = np.mgrid[0:300, 0:400]
    image = np.stack([rows * 0.8, columns * 0.6, 250 - columns * 0.6], axis=-1).astype(np.uint8)
    wanted = processor(torch.from_numpy(image).permute(2, 0, 1), return_tensors="pt")["pixel_values"][0]
    found = read_preprocessor(processor.to_dict())
    assert found.side
    assert found.side == wanted.shape[-1]
    pixels = normalize(Transform(size=found.side, **found.evaluation)(encode_png(image))) / 2 + 0.5
    mean, std = (torch.tensor(numbers).view(3, 1, 1) for numbers in (found.mean, found.std))
    assert not found.assumed
    assert ((pixels - mean) / std - wanted).abs().max() < 0.01 / std.min()


SAID = {
    "image_processor_type": "ViTImageProcessor",
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "resample": 2,
    "size": {"height": 32, "width": 32},
}


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("do_rescale", False),
        ("rescale_factor", 1 / 127.5),
        ("do_pad", True),
        ("crop_pct", 0.9),
        ("offset", 1),
        ("do_flip_channel_order", True),
        ("size", {"height": 32, "width": 64}),
        ("size", {"longest_edge": 32}),
        ("size", {"shortest_edge": 32, "longest_edge": 64}),
        ("size", {"shortest_edge": 32, "longest_edge": 32}),
        ("crop_size", {"height": 32, "width": 32}),
        ("do_center_crop", True),
    ],
)
def test_fields_that_are_not_understood_are_refused_by_name(field: str, value: Any) -> None:
    with pytest.raises(UsageError, match=rf"{field}=.* of its image processor: "):
        read_preprocessor({**SAID, field: value})


def test_a_crop_that_is_larger_is_refused() -> None:
    with pytest.raises(UsageError, match=r"crop_size=40 .* images of 32 pixels would get black edges"):
        read_preprocessor({**SAID, "do_center_crop": True, "crop_size": 40})


def test_what_is_off_or_without_a_value_changes_nothing() -> None:
    plain = read_preprocessor(SAID)
    assert not plain.assumed
    off = {"do_pad": False, "crop_pct": None, "do_center_crop": False, "do_reduce_labels": True}
    off |= {"_valid_processor_keys": ["images"]}  # of transformers 4
    assert read_preprocessor({**SAID, **off}) == plain


def test_what_is_taken_for_granted_is_noted() -> None:
    shorter = {"size": {"shortest_edge": 32}}
    for settings, note in (
        ({"resample": 1}, "resample 1 is not known"),
        ({"image_processor_type": "LevitImageProcessor"}, "LevitImageProcessor is not known"),
        ({"do_resize": False}, "do_resize is false"),
        ({"size": None}, "size is not said"),
        (shorter, "of oblong images the central square is taken"),
    ):
        assert note in "; ".join(read_preprocessor({**SAID, **settings}).assumed), settings
    nothing = read_preprocessor({})
    assert nothing.mean is None
    assert "resample none is not known here: bilinear" in nothing.assumed[0]


def test_the_resize_before_a_crop_is_cut_to_whole_pixels() -> None:
    """Rounded, it would be 236."""
    convnext = {"image_processor_type": "ConvNextImageProcessor", "size": {"shortest_edge": 224}}
    assert read_preprocessor({**SAID, **convnext, "crop_pct": 0.95}).evaluation["eval_crop"] == 224 / 235


def test_a_size_of_one_number_is_what_the_processor_takes_it_for() -> None:
    """Of old files."""
    for settings, resize in (
        ({}, "square"),
        ({"default_to_square": False}, "shorter"),
        *(
            ({"image_processor_type": f"{kind}ImageProcessor"}, "shorter")
            for kind in ("Bit", "CLIP", "ConvNext")
        ),
        ({"image_processor_type": None, "feature_extractor_type": "CLIPFeatureExtractor"}, "shorter"),
        ({"image_processor_type": "CLIPImageProcessor", "default_to_square": True}, "square"),
    ):
        found = read_preprocessor({**SAID, "size": 32, **settings})
        assert found.evaluation["eval_resize"] == resize, settings

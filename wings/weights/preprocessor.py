"""Image processors of transformers: their mean, std, resize and crop as fields of `DataConfig`.

Source: ``preprocessor_config.json``. Every field is understood, does not change pixels, or is refused.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.errors import UsageError
from wings.weights.kind import by_channel

RESAMPLES = {2: "bilinear", 3: "bicubic"}  # Pillow's numbers
# Processors whose fields mean the same. Others do what their code says, as to resize by 256/224.
ALIKE = ("ViT", "Siglip", "Bit", "DeiT", "CLIP", "Beit", "ConvNext")
BY_SHORTER = ("Bit", "CLIP", "ConvNext")  # which take a size of one number so
READ = {
    *("do_resize", "size", "resample", "do_center_crop", "crop_size", "do_rescale", "rescale_factor"),
    *(
        "default_to_square",
        "do_normalize",
        "image_mean",
        "image_std",
        "image_processor_type",
        "feature_extractor_type",
    ),
}
HARMLESS = {
    *("processor_class", "do_convert_rgb", "do_reduce_labels", "reduce_labels", "return_tensors"),
    *("data_format", "input_data_format", "device", "disable_grouping", "_valid_processor_keys"),
}


@dataclass(frozen=True, kw_only=True)
class Preprocessing:
    """Attributes as of `kind.Facts`, and the pixels per side of the image that it makes; None: not said."""

    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    evaluation: Mapping[str, Any]
    assumed: tuple[str, ...]
    side: int | None = None


def read_preprocessor(found: Mapping[str, Any]) -> Preprocessing:
    """Returns what a processor with these settings does.

    Raises:
        UsageError: for a field that is not known, or a value for which there is nothing here.
    """
    kind = str(found.get("image_processor_type") or found.get("feature_extractor_type") or "")
    convnext = kind.startswith("ConvNext")
    for name, value in found.items():
        known = name in READ or name in HARMLESS or (convnext and name == "crop_pct")
        if not known and value is not None and value is not False:
            raise _refused(found, name, "it is not known here, and may change pixels")
    if not found.get("do_rescale", True):
        raise _refused(found, "do_rescale", "the model here takes pixels that are rescaled by 1/255")
    if not math.isclose(found.get("rescale_factor", 1 / 255), 1 / 255, rel_tol=1e-6):
        raise _refused(found, "rescale_factor", "the model here takes pixels that are rescaled by 1/255")
    mean, std = by_channel(found.get("image_mean")), by_channel(found.get("image_std"))
    if not found.get("do_normalize", True):
        mean, std = (0.0,) * 3, (1.0,) * 3
    assumed = []
    if kind and not kind.startswith(ALIKE):
        assumed.append(f"{kind} is not known here: its fields are taken as those of a BitImageProcessor")
    if not found.get("do_resize", True):
        assumed.append("do_resize is false: images are resized here")
    resample = found.get("resample", "none")
    if resample not in RESAMPLES:
        assumed.append(f"resample {resample} is not known here: bilinear is taken")
    whole, shorter = _resized(found, kind)
    cropped = _cropped(found)
    side = cropped or whole
    if convnext and whole and shorter:
        shorter = whole < 384
        whole = int(whole / (found.get("crop_pct") or 224 / 256)) if shorter else whole
    if whole is None:
        assumed.append("size is not said: images are resized to squares")
    elif shorter and not cropped and not convnext:
        assumed.append("do_center_crop is false: of oblong images the central square is taken here")
    if whole and side and side > whole:
        raise _refused(found, "crop_size", f"images of {whole} pixels would get black edges")
    evaluation = {
        "eval_resize": "shorter" if shorter else "square",
        "eval_crop": side / whole if whole and side else 1.0,
        "eval_interpolation": RESAMPLES.get(resample, "bilinear"),
        "eval_pixels": "transformers",
    }
    return Preprocessing(mean=mean, std=std, evaluation=evaluation, assumed=tuple(assumed), side=side)


def _resized(found: Mapping[str, Any], kind: str) -> tuple[int | None, bool]:
    """Returns the pixels to which images are resized, and whether their shorter side is."""
    size = found.get("size")
    if isinstance(size, int):
        return size, not found.get("default_to_square", not kind.startswith(BY_SHORTER))
    if isinstance(size, Mapping) and {*size} == {"shortest_edge"}:
        return int(size["shortest_edge"]), True
    return _side(found, "size"), False


def _cropped(found: Mapping[str, Any]) -> int | None:
    """Returns the side of the square that is cut from the centre; None if none is."""
    crops, crop = found.get("do_center_crop"), found.get("crop_size")
    if crops is None and crop is not None:
        raise _refused(found, "crop_size", "it is not said whether images are cropped (do_center_crop)")
    if crops and crop is None:
        raise _refused(found, "do_center_crop", "it is not said to what (crop_size)")
    return _side(found, "crop_size") if crops else None


def _side(found: Mapping[str, Any], name: str) -> int | None:
    size = found.get(name)
    if size is None or isinstance(size, int):
        return size
    sides = [*size.values()] if isinstance(size, Mapping) and {*size} == {"height", "width"} else size
    if not isinstance(sides, list) or len(sides) != 2 or sides[0] != sides[1]:
        raise _refused(found, name, "the model here reads squares")
    return int(sides[0])


def _refused(found: Mapping[str, Any], name: str, why: str) -> UsageError:
    return UsageError(f"{name}={found[name]!r} of its image processor: {why}")

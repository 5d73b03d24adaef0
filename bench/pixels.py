"""CPU time of what happens to one image on one thread: decoding, cropping and each random operation.

python bench/pixels.py          # less than a minute; writes the file and the tables of docs/data.md
python bench/pixels.py --page   # writes the tables from the file
"""

import io
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from PIL import Image

from bench.harness import RESULTS, ROOT, options, with_block
from bench.images import draw as draw_jpeg
from bench.provenance import provenance
from orchestrator.data.augment import (
    ColorJitterConfig,
    InceptionConfig,
    RandAugmentConfig,
    RandomErasingConfig,
    ThreeAugmentConfig,
)
from orchestrator.data.augment.randaugment import OPERATIONS
from orchestrator.data.images import Picture, Transform, decode

PAGE = ROOT / "docs/data.md"
SIDES = (1000, 2000, 4000)
SOME = 40  # calls of a median


def main() -> None:
    args = options(__doc__, page=False, out=str(RESULTS / "pixels.json"))
    if not args.page:
        torch.set_num_threads(1)
        result = provenance("pillow", "torch", "torchvision")
        result |= {"decoding ms": decoding(), "operation ms": operations()}
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(with_tables(PAGE.read_text(), json.loads(Path(args.out).read_text())))


def cpu_ms(call: Callable[[int], Any], some: int = SOME) -> float:
    """Returns the median CPU time of a call, which gets its number."""
    times = []
    for number in range(-2, some):
        began = time.process_time()
        call(number)
        times.append(1000 * (time.process_time() - began))
    return statistics.median(times[2:])


def decoding() -> dict[str, dict[str, float]]:
    """Measures JPEGs with and without grain: read as in training, without reducing, and by Pillow."""
    found: dict[str, dict[str, float]] = {}
    transform = Transform(size=224, augment=(InceptionConfig(),))
    for side in (450, *SIDES):
        for kind in ("smooth", "grainy"):
            image = jpeg(side, grain=kind == "grainy")
            row = {"as done": cpu_ms(lambda number, image=image: transform(image, str(number)), 12)}
            with patch.object(Picture, "scale", return_value=1):
                row["whole"] = cpu_ms(lambda number, image=image: transform(image, str(number)), 12)
            row["decoding alone"] = cpu_ms(lambda _, image=image: decode(image), 12)
            row["by Pillow"] = cpu_ms(
                lambda _, image=image: np.asarray(Image.open(io.BytesIO(image)).convert("RGB")), 12
            )
            found[f"{side} x {side * 3 // 4}, {kind}"] = row
    return found


def jpeg(side: int, grain: bool) -> bytes:
    """A picture of bench/images.py, enlarged; grain of single pixels makes its file large."""
    image = Image.open(io.BytesIO(draw_jpeg(0))).resize((side, side * 3 // 4), Image.Resampling.BICUBIC)
    pixels = np.asarray(image, np.float32)
    if grain:
        pixels = pixels + np.random.default_rng(0).normal(0, 8, (*pixels.shape[:2], 1))
    buffer = io.BytesIO()
    Image.fromarray(pixels.clip(0, 255).astype("uint8")).save(buffer, "JPEG", quality=90)
    return buffer.getvalue()


def operations() -> dict[str, float]:
    """Measures every random operation on 224 x 224 pixels, RandAugment's at the full range."""
    image = decode(draw_jpeg(0))[:, :224, :224].contiguous()
    others, blurs = seeds(1), seeds(2)
    calls: dict[str, Callable[[int], Any]] = {
        "`randaugment`": lambda number: RandAugmentConfig().apply(image, Random(number)),
        **{
            name: lambda number, apply=apply: apply(image, 1.0, Random(number))
            for name, apply in OPERATIONS.items()
        },
        "`three_augment`: a blur": lambda n: ThreeAugmentConfig().apply(image, Random(blurs[n])),
        "`three_augment`: solarizing": lambda n: ThreeAugmentConfig().apply(image, Random(others[n])),
        "`color_jitter`": lambda number: ColorJitterConfig().apply(image, Random(number)),
        "`random_erasing`": lambda number: RandomErasingConfig(fraction=1.0).apply(image, Random(number)),
    }
    return {name: cpu_ms(call) for name, call in calls.items()}


def seeds(case: int) -> list[int]:
    """Returns seeds with which 3-Augment draws the operation number `case`."""
    return [seed for seed in range(1000) if Random(seed).randrange(3) == case]


def with_tables(page: str, result: dict[str, Any]) -> str:
    decoded, found = result["decoding ms"], result["operation ms"]
    head = "| JPEG | as done | without reducing it |\n|---|--:|--:|"
    rows = [f"| {name} | {shown(row['as done'])} | {shown(row['whole'])} |" for name, row in decoded.items()]
    page = with_block(page, "decoding", "\n".join([head, *rows]))
    slowest = max(OPERATIONS, key=found.__getitem__)
    rows = [
        f"| {slowest}, the slowest of RandAugment's operations | {shown(found[slowest])} |",
        *(f"| {name} | {shown(ms)} |" for name, ms in found.items() if name not in OPERATIONS),
    ]
    return with_block(page, "operations", "\n".join(["| on 224 x 224 pixels | ms |\n|---|--:|", *rows]))


def shown(ms: float) -> str:
    return f"{ms:.0f}" if ms >= 10 else f"{ms:.1f}"


if __name__ == "__main__":
    main()

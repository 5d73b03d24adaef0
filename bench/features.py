"""A step of LiT with stored features of the frozen tower, against a step that computes them.

  python bench/features.py [--steps N] [--out bench/results/features.json]

The image tower is ViT-S/32, dense or with Soft MoE, at 224 pixels, the text tower has its width and 4 blocks;
64 pairs, one thread. Images are decoded in neither case. Steps of both kinds take turns; medians, and the
median of the ratios of pairs.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from statistics import median

import torch

from bench.harness import Record, options
from bench.provenance import provenance
from moe.layer import MoEConfig
from moe.presets import VITS
from moe.routers import SoftConfig
from orchestrator.config import RunConfig, TrainConfig
from orchestrator.data.batch import Batch
from orchestrator.training.loop import train_step
from orchestrator.training.worker import build_model
from wings.image_text.contrastive import ContrastiveConfig
from wings.image_text.text_tower import TextConfig
from wings.image_text.two_towers import TwoTowersConfig

BATCH, LENGTH, WORDS = 64, 16, 2_000
TOWERS = {"dense": None, "soft": MoEConfig(layers="last_6", num_experts=32, router=SoftConfig())}


def main() -> None:
    args = options(__doc__, steps=10, out="")
    torch.set_num_threads(1)
    records = [measure(name, args.steps) for name in TOWERS]
    for record in records:
        print(
            "{tower:6} computed {computed_s:.3f} s  stored {stored_s:.3f} s  ratio {ratio:.3f}".format(
                **record
            )
        )
    if args.out:
        Path(args.out).write_text(json.dumps(provenance("torch") | {"records": records}, indent=1) + "\n")


def measure(tower: str, steps: int) -> Record:
    image = replace(VITS["S/32"], moe=TOWERS[tower])
    text = TextConfig(vocabulary=WORDS, length=LENGTH, width=384, depth=4, heads=6, mlp_dim=1536)
    run = RunConfig(
        model=TwoTowersConfig(image=image, text=text),
        task=ContrastiveConfig(captions=1),
        train=TrainConfig(freeze=("image.",)),
    )
    model = build_model(run, torch.device("cpu"), seed=0)
    optimizer = run.train.optimizer.build(model)
    images = torch.randint(256, (BATCH, 3, image.image_size, image.image_size), dtype=torch.uint8)
    inputs = {"computed": images, "stored": torch.randn(BATCH, image.width)}
    seconds: dict[str, list[float]] = {kind: [] for kind in inputs}
    for step in range(1 + steps):
        for kind, given in inputs.items():
            began = time.perf_counter()
            train_step(model, optimizer, batch(given), run, step=step, stats=False)
            if step:  # the first warms up
                seconds[kind].append(time.perf_counter() - began)
    pairs = zip(seconds["stored"], seconds["computed"], strict=True)
    return {
        "tower": tower,
        "steps": steps,
        "ratio": median(stored / computed for stored, computed in pairs),
        **{f"{kind}_s": median(times) for kind, times in seconds.items()},
    }


def batch(images: torch.Tensor) -> Batch:
    text = torch.randint(WORDS, (BATCH, 1, LENGTH), dtype=torch.int32)
    number = torch.arange(BATCH)
    return Batch(fields={"image": images, "text": text}, valid=torch.ones(BATCH), key=number, sample=number)


if __name__ == "__main__":
    main()

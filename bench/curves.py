"""Learning curves of sweeps at toy size, recorded once for `bench/stopping.py` to replay.

  python bench/curves.py routers --out bench/results/curves-routers-tiny.json
  python bench/curves.py pareto --out bench/results/curves-pareto-moved.json
  python bench/curves.py textures --out bench/results/curves-quickstart-textures.json
  python bench/curves.py clutter --seeds 2 --out bench/results/curves-clutter.json

`routers`: 65 arms x 3 seeds on the digits. `pareto`: 36 arms x 3 seeds of other families, in other sizes and
on other images: the digits, moved and with noise. `textures`: 15 arms in 2 widths, on made-up textures
of 16 x 16 pixels; 21 of these arms are recorded, with 2 seeds. `clutter`: the arms of the quickstart on its
cluttered digits, and 31 others. The validation accuracy of every arm is recorded 32 times, so that 1/32,
1/16, .. 1/2 of the steps are among them, with the cost of its training. The first three files are older: they
have it after every 10 steps.
"""

import argparse
import json
import math
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
from sklearn.datasets import load_digits

from bench.provenance import provenance
from moe.cost import train_flops_6mac
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.images import encode_png
from orchestrator.data.stream import in_process
from orchestrator.packing import open_source
from orchestrator.packing.pack import write_shards
from orchestrator.packing.samples import Sample
from orchestrator.runs.metrics_file import Metrics
from orchestrator.sweeps.arms import Arm, expert_choice, moe, soft, token_choice
from orchestrator.sweeps.catalog import SHARP, make_sweep
from orchestrator.sweeps.scales import TINY, Scale, vit_size
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.worker import train_worker
from papers.routers.sweeps import routers
from papers.soft_moe.sweeps import pareto

ROOT = Path(__file__).parent.parent
MOVED = Scale(
    base=override(TINY.base, {"train.steps": 160}),
    sizes={
        "w24d2": vit_size(24, 2, 2),
        "w40d3": vit_size(40, 3, 2),
        "w56d4": vit_size(56, 4, 4),
        "w80d4": vit_size(80, 4, 4),
    },
    experts=8,
)
# Width, depth and heads of the sizes that `clutter` has beside the quickstart's.
SIZES = {"w8": (8, 2, 2), "w24d4": (24, 4, 2), "w48d3": (48, 3, 3), "w64d4": (64, 4, 4)}

Images = Iterator[tuple[str, Sample]]  # split, sample


def bundled(name: str) -> Images:
    for split, samples in open_source(name).splits.items():
        yield from ((split, sample) for sample in samples)


def moved_digits() -> Images:
    """Yields every digit moved sideways by up to a pixel, with noise. The last fifth is ``val``."""
    loaded: Any = load_digits()
    rng = np.random.default_rng(0)
    for i, (image, label) in enumerate(zip(loaded.images, loaded.target, strict=True)):
        moved = np.roll(image, rng.integers(-1, 2), axis=1) + rng.normal(0, 1.5, image.shape)
        pixels = (moved.clip(0, 16) * (255 / 16)).round().astype("uint8")
        split = "train" if i < 0.8 * len(loaded.target) else "val"
        yield split, Sample(encode_png(pixels), int(label), f"digit-{i:04d}")


def textures() -> Images:
    """Yields stripes in 8 directions, with noise. The class is the direction; the stripes' width, phase and
    contrast vary. The last 400 images are ``val``.
    """
    rng = np.random.default_rng(1)
    y, x = np.mgrid[:16, :16]
    for i in range(2200):
        label = int(rng.integers(8))
        angle = (label + rng.uniform(-0.3, 0.3)) * np.pi / 8
        across = x * np.cos(angle) + y * np.sin(angle)
        wave = np.sin(across * rng.uniform(0.6, 1.6) + rng.uniform(0, 2 * np.pi))
        pixels = 128 + rng.uniform(20, 50) * wave + rng.normal(0, 50, wave.shape)
        split = "train" if i < 1800 else "val"
        yield split, Sample(encode_png(pixels.clip(0, 255).astype("uint8")), label, f"stripes-{i:04d}")


def make(name: str, folder: str) -> Sweep:
    """Returns the sweep, with its data packed in `folder`."""
    match name:
        case "routers":
            sweep, images = routers(TINY), bundled("digits")
        case "pareto":
            sweep, images = pareto(MOVED), moved_digits()
        case "clutter":
            sweep, images = wider_quickstart(), bundled("cluttered-digits")
        case _:
            sweep, images = families_in_widths(), textures()
    splits: dict[str, list[Sample]] = {"train": [], "val": []}
    for split, sample in images:
        splits[split].append(sample)
    write_shards(f"{folder}/data", [str(i) for i in range(sweep.base.model.num_outputs())], splits)
    return replace(sweep, base=override(sweep.base, {"data.path": f"{folder}/data"}))


def families_in_widths() -> Sweep:
    base = override(
        TINY.base,
        {"train.steps": 160, "model.image_size": 16, "model.patch_size": 4, "model.num_classes": 8},
    )
    kinds: dict[str, Arm] = {f"dense-d{depth}": {"model.depth": depth} for depth in (2, 4)}
    for e, s in ((4, 1), (8, 1), (4, 2), (8, 2), (8, 4)):
        kinds[f"soft-e{e}-s{s}"] = moe("soft", e, slots_per_expert=s, scale_init=8.0)
    for k, c in ((1, 0.5), (1, 1.0), (1, 2.0), (2, 0.5), (2, 1.0)):
        kinds[f"token-k{k}-c{c}"] = token_choice(8, k, c)
    for c in (0.5, 1.0, 2.0):
        kinds[f"expert-c{c}"] = expert_choice(8, c, images=1)
    widths = {f"w{width}": vit_size(width, 4, heads) for width, heads in ((24, 2), (60, 3))}
    # The kinds come last: two of them change the depth.
    arms = {f"{w}-{name}": {**fields, **kind} for w, fields in widths.items() for name, kind in kinds.items()}
    return Sweep(base=base, arms=arms)


def wider_quickstart() -> Sweep:
    """The quickstart with smaller and larger sizes, and other routers at three widths."""
    base = make_sweep("quickstart", "tiny", {"train.steps": 320})
    tokens, widths = base.base.model.tokens(), TINY.sizes_of["quickstart"]
    arms = {name: dict(arm) for name, arm in base.changes.items()}
    sizes = {name: vit_size(*size) for name, size in SIZES.items()}
    kinds = {name.removeprefix("w16-"): arm for name, arm in arms.items() if name.startswith("w16-")}
    for name, size in sizes.items():
        arms |= {f"{name}-{kind}": {**arm, **size} for kind, arm in kinds.items()}
    others = {
        "token-e4": token_choice(4, 1),
        "token-k2": token_choice(8, 2, layers="last_2"),
        "expert-c2": expert_choice(8, 2.0, images=1, layers="last_2"),
        "soft-e4": soft(4, 1, tokens, layers="last_2", scale_init=SHARP),
        "soft-half": soft(8, 0.5, tokens, scale_init=SHARP),
    }
    for name, size in {"w16": widths["w16"], "w32": widths["w32"], "w48d3": sizes["w48d3"]}.items():
        arms |= {f"{name}-{kind}": {**size, **arm} for kind, arm in others.items()}
    return Sweep(base=base.base, arms=arms)


def curve(run: RunConfig) -> dict[int, float]:
    """Returns step -> ``val/acc1``."""
    found: dict[int, float] = {}

    def report(step: int, metrics: Metrics) -> None:
        found[step] = round(metrics["val/acc1"], 5)

    with tempfile.TemporaryDirectory() as folder:
        train_worker(replace(run, storage=folder), report=report, read=in_process)
    return found


def record(name: str, seeds: int, processes: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        sweep = make(name, folder)
        steps = sweep.base.train.steps
        every = math.ceil(steps / 32)
        fixed = {"train.eval_every": every, "train.report_every": every, "checkpoint.every": steps}
        runs = {
            (arm, seed): override(sweep.base, {**changes, **fixed, "train.seed": seed})
            for seed in range(seeds)
            for arm, changes in sweep.changes.items()
        }
        with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
            futures = {key: pool.submit(curve, run) for key, run in runs.items()}
            curves: dict[str, Any] = {}
            for i, ((arm, seed), future) in enumerate(futures.items(), start=1):
                run = runs[arm, seed]
                cost = train_flops_6mac(run.model, images=steps * run.data.batch_size)
                entry = curves.setdefault(arm, {"cost/train_flops_6mac": cost, "val/acc1": []})
                entry["val/acc1"].append(list(future.result().values()))
                print(f"{i:4}/{len(runs)}  {arm}, seed {seed}: {future.result()[steps]:.4f}", flush=True)
    about = {"sweep": name, "steps": steps, "every": every, "classes": sweep.base.model.num_outputs()}
    return provenance() | about | {"arms": curves}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("sweep", choices=("routers", "pareto", "textures", "clutter"))
    parser.add_argument("--out", required=True, type=Path, help="JSON file to write")
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="(%(default)s)")
    args = parser.parse_args()
    recorded = record(args.sweep, args.seeds, args.processes)
    args.out.write_text(json.dumps(recorded, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

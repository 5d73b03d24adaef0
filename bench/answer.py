"""Whether times repeat, whether a model keeps its bound, and how long measuring takes, of 36 small models.

python bench/answer.py          # twenty quiet minutes; writes the file, and a table of docs/answer.md
python bench/answer.py --page   # writes the table from the file

The models: width 16, 32 and 64, depth 2 and 4; dense, Soft MoE with 4 and 16 experts, expert choice, token
choice with k = 1 and 2. They are timed untrained as a plan does, trained on scikit-learn's digits for a
minute in all, measured, again beside a process that keeps one processor busy, and then 40 times.

Replays draw arms of known quality: each is judged by three seeds on the images of the quickstart, and the
best within a random bound is asked for.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.harness import RESULTS, ROOT, options, with_block
from bench.provenance import provenance
from moe import MoEConfig, ViTConfig
from moe.codec import from_dict
from orchestrator import RunConfig, TrainConfig, train
from orchestrator.checkpoint.models import ModelRef, read_model
from orchestrator.costs import MS_P95
from orchestrator.frontier.answer import answer
from orchestrator.frontier.points import Point
from orchestrator.inference.measure import ONE_IMAGE, disturbance, machine, run_clock, write_models
from orchestrator.inference.planned import planned_times
from orchestrator.inference.timing import times
from orchestrator.runs.run_directory import RunDir

PAGE = ROOT / "docs/answer.md"
LATER = 40
STEPS = 30  # of training
REPLAYS, SEEDS, SEED_SD, IMAGES = 200, 3, 0.01, 2720
KINDS: dict[str, dict[str, Any]] = {
    "soft4": {"num_experts": 4, "router": {"kind": "soft"}},
    "soft16": {"num_experts": 16, "router": {"kind": "soft"}},
    "expert4": {"num_experts": 4, "router": {"kind": "expert_choice"}},
    "token4": {"num_experts": 4, "router": {"kind": "token_choice", "k": 1}},
    "token8-k2": {"num_experts": 8, "router": {"kind": "token_choice", "k": 2}},
}


def main() -> None:
    args = options(__doc__, page=False, out=str(RESULTS / "answer.json"))
    if not args.page:
        result = {**provenance("onnxruntime", "torch"), "machine": machine(), **measured()}
        Path(args.out).write_text(json.dumps(result, indent=1) + "\n")
    PAGE.write_text(with_block(PAGE.read_text(), "answer", table(json.loads(Path(args.out).read_text()))))


def runs(folder: str) -> dict[str, RunConfig]:
    """Returns each architecture by its name."""
    found = {}
    for width, depth, kind in product((16, 32, 64), (2, 4), ("dense", *KINDS)):
        config = ViTConfig(
            image_size=28,
            patch_size=4,
            num_classes=10,
            width=width,
            depth=depth,
            heads=max(2, width // 16),
            mlp_dim=4 * width,
            moe=None if kind == "dense" else from_dict(MoEConfig, KINDS[kind]),
        )
        name = f"{kind}-w{width}-d{depth}"
        train = TrainConfig(steps=STEPS)
        found[name] = RunConfig(name=name, storage=folder, model=config, train=train)
    return found


def trained(runs: Mapping[str, RunConfig]) -> Iterator[tuple[str, ModelRef]]:
    """Trains each architecture for a few steps; yields its name and the model."""
    for name, run in runs.items():
        train(run, progress=False)
        yield name, read_model(RunDir.of(run).checkpoints)


def replayed(ms: np.ndarray) -> float:
    """Returns the share of replays in which the truly best arm within a bound is the named one, or among
    those that are not significantly worse. `ms`: of each arm.
    """
    rng, kept = np.random.default_rng(0), 0
    for _ in range(REPLAYS):
        truth = 0.5 + 0.02 * np.log2(ms / ms.min()) + rng.normal(0, 0.01, len(ms))
        seeds = rng.normal(truth[:, None], SEED_SD, (len(ms), SEEDS))
        judged = rng.binomial(IMAGES, seeds.clip(0, 1)) / IMAGES
        points = [
            Point(
                arm=str(number),
                family="",
                cost=1.0,
                quality=float(found.mean()),
                qualities=tuple(found.tolist()),
                size=1.0,
                run_id=str(number),
                status="finished",
                costs={MS_P95: float(ms[number])},
                images=IMAGES,
            )
            for number, found in enumerate(judged)
        ]
        bound = float(rng.choice(ms))
        found = answer(points, {MS_P95: bound}, quality_name="val/acc1")
        assert found.best
        best = int(np.argmax(np.where(ms <= bound, truth, -1)))
        kept += str(best) in {point.arm for point in (found.best, *found.tied)}
    return kept / REPLAYS


def measured() -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        known = runs(folder)
        planned = planned_times(known, say=print)
        found = dict(trained(known))
        began = time.monotonic()
        files, _ = write_models(found, "onnx", folder, print)
        written_s = time.monotonic() - began

        def once(at_most_s: float = 60.0) -> tuple[np.ndarray, np.ndarray, np.ndarray, str]:
            rounds, _ = run_clock(found, files, ONE_IMAGE, at_most_s)
            each = times(rounds)
            p50, p95, high = np.array([(t.p50, t.p95, t.p95_high) for t in each]).T
            return p50, p95, high, disturbance(rounds)

        began = time.monotonic()
        first = once()
        timed_s = time.monotonic() - began
        print(f"written in {written_s:.0f} s, timed in {timed_s:.0f} s", flush=True)
        busy = subprocess.Popen([sys.executable, "-c", "while True: pass"])
        try:
            disturbed = once()
        finally:
            busy.kill()
            busy.wait()
        later = [once(0.0) for _ in range(LATER)]
    second = later[-1]
    off = np.abs(first[0] / [planned[name].ms for name in found] - 1)
    bounds = np.geomspace(first[2].min() * 1.001, first[2].max() * 1.2, 40)
    slowest = [int(np.argmax(np.where(first[2] <= bound, first[2], -1))) for bound in bounds]
    kept = [
        float(np.mean([each[1][arm] <= bound for each in later]))
        for arm, bound in zip(slowest, bounds, strict=True)
    ]
    return {
        "models": len(found),
        "written_s": written_s,
        "timed_s": timed_s,
        "spearman_quiet": rank_correlation(first[0], second[0]),
        "spearman_disturbed": rank_correlation(first[0], disturbed[0]),
        "noticed": disturbed[3],
        "later": LATER,
        "bounds": len(bounds),
        "kept": float(np.mean(kept)),
        "kept_least": min(kept),
        "planned_off_median": float(np.median(off)),
        "planned_off_most": float(off.max()),
        "replays": REPLAYS,
        "replays_kept": replayed(first[2]),
        "planned_ms": {name: round(planned[name].ms, 4) for name in found},
        "ms": dict(zip(found, first[0].round(4).tolist(), strict=True)),
        "ms_p95_high": dict(zip(found, first[2].round(4).tolist(), strict=True)),
    }


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Returns Spearman's, of times that all differ."""
    return float(np.corrcoef(first.argsort().argsort(), second.argsort().argsort())[0, 1])


def table(result: dict[str, Any]) -> str:
    kept = f"it keeps a bound, {result['bounds']} bounds, {result['later']} later measurements"
    named = f"the truly best is named, or not significantly worse, {result['replays']} replays"
    rows = {
        "models written as ONNX, then timed": f"{result['written_s']:.0f} s + {result['timed_s']:.0f} s",
        "rank correlation of medians, two quiet measurements": f"{result['spearman_quiet']:.3f}",
        "the same beside a process that keeps a processor busy": f"{result['spearman_disturbed']:.3f}",
        f"the slowest model of which a measurement says that {kept}": f"{result['kept']:.1%}",
        f"of models within a random bound, {named}": f"{result['replays_kept']:.1%}",
        "time before training off that after it: median": f"{result['planned_off_median']:.1%}",
        "the same, of the worst model": f"{result['planned_off_most']:.1%}",
    }
    lines = [
        "| measured of 36 models | |",
        "|---|--:|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

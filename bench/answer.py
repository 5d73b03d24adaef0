"""Whether times repeat, whether a model keeps its bound, and how long measuring takes, of 36 small models.

python bench/answer.py          # eight quiet minutes; writes the file, and a table of docs/answer.md
python bench/answer.py --page   # writes the table from the file

The models have random weights, which take the time of trained ones: width 16, 32 and 64, depth 2 and 4;
dense, Soft MoE with 4 and 16 experts, expert choice, token choice with k = 1 and 2. They are measured, again
beside a process that keeps one processor busy, and then 40 times.
"""

import json
import subprocess
import sys
import time
from collections.abc import Iterator
from itertools import product
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np

from bench.harness import RESULTS, ROOT, options, with_block
from bench.provenance import provenance
from moe import MoEConfig, ViTConfig
from moe.codec import from_dict
from orchestrator import RunConfig
from orchestrator.checkpoint.models import ModelRef, read_model
from orchestrator.checkpoint.weights import write_export
from orchestrator.inference.measure import ONE_IMAGE, disturbance, machine, run_clock, write_models
from orchestrator.inference.timing import times

PAGE = ROOT / "docs/answer.md"
LATER = 40
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


def models(folder: str) -> Iterator[tuple[str, ModelRef]]:
    """Yields each architecture with random weights, in a file of its own."""
    for width, depth, kind in product((16, 32, 64), (2, 4), ("dense", *KINDS)):
        moe = None if kind == "dense" else from_dict(MoEConfig, KINDS[kind])
        config = ViTConfig(
            image_size=28,
            patch_size=4,
            num_classes=10,
            width=width,
            depth=depth,
            heads=max(2, width // 16),
            mlp_dim=4 * width,
            moe=moe,
        )
        name = f"{kind}-w{width}-d{depth}"
        path = f"{folder}/{name}.safetensors"
        run = RunConfig(name=name, storage=folder, model=config)
        write_export(path, config.build(seed=0).state_dict(), run, more={"step": "0"})
        yield name, read_model(path)


def measured() -> dict[str, Any]:
    with TemporaryDirectory() as folder:
        found = dict(models(folder))
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
        "ms": dict(zip(found, first[0].round(4).tolist(), strict=True)),
        "ms_p95_high": dict(zip(found, first[2].round(4).tolist(), strict=True)),
    }


def rank_correlation(first: np.ndarray, second: np.ndarray) -> float:
    """Returns Spearman's, of times that all differ."""
    return float(np.corrcoef(first.argsort().argsort(), second.argsort().argsort())[0, 1])


def table(result: dict[str, Any]) -> str:
    rows = {
        "models written as ONNX, then timed": f"{result['written_s']:.0f} s + {result['timed_s']:.0f} s",
        "rank correlation of medians, two quiet measurements": f"{result['spearman_quiet']:.3f}",
        "the same beside a process that keeps a processor busy": f"{result['spearman_disturbed']:.3f}",
        f"the slowest model within a bound keeps it, {result['bounds']} bounds, {result['later']} later"
        " measurements": f"{result['kept']:.1%}",
    }
    lines = [
        "| measured of 36 models | |",
        "|---|--:|",
        *(f"| {name} | {value} |" for name, value in rows.items()),
    ]
    return "\n".join(lines)


if __name__ == "__main__":
    main()

"""Learning curves of the sweep `routers` at tiny scale, recorded once for `bench/stopping.py` to replay.

  python bench/curves.py --out bench/results/curves-routers-tiny.json

65 arms x 3 seeds: every arm's validation accuracy after every 10 of 220 steps, and what its steps cost.
"""

import argparse
import json
import os
import tempfile
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

from moe.cost import train_flops_6mac
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.loader import in_process
from orchestrator.data.packing import write_shards
from orchestrator.data.sources import open_source
from orchestrator.sweeps.catalog.routers import routers
from orchestrator.sweeps.catalog.scales import SCALES
from orchestrator.training.loop import Metrics
from orchestrator.training.worker import train_worker

EVERY = 10


def curve(run: RunConfig) -> list[float]:
    """``val/acc1`` after every `EVERY` steps."""
    found: list[float] = []

    def report(step: int, metrics: Metrics) -> None:
        found.append(round(metrics["val/acc1"], 5))

    with tempfile.TemporaryDirectory() as folder:
        train_worker(replace(run, storage=folder), report=report, read=in_process)
    return found


def record(seeds: int, processes: int, steps: int) -> dict[str, object]:
    sweep = routers(SCALES["tiny"])
    folder = tempfile.mkdtemp()
    digits = open_source("digits")
    write_shards(f"{folder}/digits", digits.classes, digits.splits)
    fixed = {
        "data.path": f"{folder}/digits",
        "train.steps": steps,
        "train.eval_every": EVERY,
        "train.report_every": EVERY,
        "checkpoint.every": steps,
    }
    runs = {
        (arm, seed): override(sweep.base, {**changes, **fixed, "train.seed": seed})
        for arm, changes in sweep.arms.items()
        for seed in range(seeds)
    }
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        futures = {key: pool.submit(curve, run) for key, run in runs.items()}
        curves: dict[str, dict[str, object]] = {}
        for i, ((arm, seed), future) in enumerate(futures.items(), start=1):
            run = runs[arm, seed]
            cost = train_flops_6mac(run.model, images=steps * run.data.batch_size)
            entry = curves.setdefault(arm, {"cost/train_flops_6mac": cost, "val/acc1": []})
            entry["val/acc1"].append(future.result())  # pyright: ignore[reportAttributeAccessIssue]
            print(f"{i:4}/{len(runs)}  {arm}, seed {seed}: {future.result()[-1]:.4f}", flush=True)
    return {"sweep": "routers", "scale": "tiny", "steps": steps, "every": EVERY, "arms": curves}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", required=True, help="JSON file to write")
    parser.add_argument("--seeds", type=int, default=3, help="(%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--steps", type=int, default=220, help="of every run (%(default)s)")
    args = parser.parse_args()
    recorded = record(args.seeds, args.processes, args.steps)
    Path(args.out).write_text(json.dumps(recorded, indent=None, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

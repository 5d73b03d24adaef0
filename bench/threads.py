"""Threads of one training process, on an idle machine and beside two busy loops.

  python bench/threads.py [--seconds S] [--rounds N] [--out bench/results/threads.json]

Images/s of whole training steps (forward, backward, update) of a small, a middle and a large Soft MoE on CPU:
with one thread, with torch's default (all cores, whose threads spin for milliseconds while they wait), and as
`orchestrator.training.loop` and `orchestrator/__init__.py` set it. Each figure is a process of its own;
settings take turns; medians over rounds, and each setting against the best of its row.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

from bench.provenance import provenance

ROOT = Path(__file__).parent.parent

BUSY = 2  # loops
SPIN_OF_LIBGOMP = "300000"  # its default, where nothing is set
SETTINGS = ("one thread", "torch's default", "ours")


def vit(image: int, patch: int, width: int, depth: int, heads: int, batch: int) -> dict[str, Any]:
    size = {"image_size": image, "patch_size": patch, "width": width, "depth": depth, "heads": heads}
    fields = {f"model.{name}": value for name, value in (size | {"mlp_dim": 4 * width}).items()}
    return fields | {"data.batch_size": batch, "model.moe.router.kind": "soft", "model.moe.num_experts": 4}


MODELS = {
    "small": vit(28, 7, 48, 4, 3, batch=64),
    "middle": vit(8, 2, 96, 6, 6, batch=64),
    "large": vit(224, 32, 384, 6, 6, batch=16),
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="of each measurement (%(default)s)")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", help="also write all figures as JSON")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(json.dumps(measure(*args.child, seconds=args.seconds)))
        return
    records = []
    for loops in (0, BUSY):
        with busy(loops):
            for _ in range(args.rounds):
                for model in MODELS:
                    for setting in SETTINGS:
                        records.append({"busy_loops": loops, **asked(model, setting, args.seconds)})
            for model in MODELS:
                print_row(loops, model, records)
    if args.out:
        Path(args.out).write_text(json.dumps(provenance() | {"records": records}, indent=1) + "\n")


def print_row(loops: int, model: str, records: list[dict[str, Any]]) -> None:
    rates = {
        setting: median(
            record["images_per_s"]
            for record in records
            if (record["busy_loops"], record["model"], record["setting"]) == (loops, model, setting)
        )
        for setting in SETTINGS
    }
    best = max(rates.values())
    cells = "  ".join(f"{name} {rate:7.4g} ({rate / best:4.0%})" for name, rate in rates.items())
    print(f"{loops} busy loops  {model:6}  {cells}", flush=True)


@contextmanager
def busy(loops: int) -> Iterator[None]:
    running = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
    try:
        yield
    finally:
        for process in running:
            process.kill()


def asked(model: str, setting: str, seconds: float) -> dict[str, Any]:
    env = {name: value for name, value in os.environ.items() if not name.startswith(("OMP_", "GOMP_"))}
    if setting != "ours":
        env["GOMP_SPINCOUNT"] = SPIN_OF_LIBGOMP
    command = [sys.executable, "-m", "bench.threads", "--seconds", str(seconds), "--child", model, setting]
    done = subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


def measure(model: str, setting: str, *, seconds: float) -> dict[str, Any]:
    """Trains on random images for `seconds`, after three steps of warm-up."""
    import torch  # here, so that the parent does not load it

    from orchestrator.codec import override
    from orchestrator.config import RunConfig
    from orchestrator.data.batch import Batch
    from orchestrator.threads import set_threads
    from orchestrator.training.loop import train_step
    from orchestrator.training.worker import build_model, keep_freed_memory

    run = override(RunConfig(), MODELS[model])
    if setting == "one thread":
        torch.set_num_threads(1)
    elif setting == "ours":
        set_threads(run.model, run.images_per_pass())
    keep_freed_memory()
    network = build_model(run, torch.device("cpu"), seed=run.train.seed)
    optimizer = run.train.optimizer.build(network)
    images, side = run.data.batch_size, run.model.image_size
    batch = Batch(
        fields={
            "image": torch.randint(256, (images, 3, side, side), dtype=torch.uint8),
            "label": torch.randint(run.model.num_classes, (images, 1)),
        },
        valid=torch.ones(images),
        key=torch.arange(images),
        sample=torch.arange(images),
    )
    for step in range(3):
        train_step(network, optimizer, batch, run, step=step)
    steps, began, cpu = 0, time.perf_counter(), time.process_time()
    while (wall := time.perf_counter() - began) < seconds:
        train_step(network, optimizer, batch, run, step=3 + steps)
        steps += 1
    return {
        "model": model,
        "setting": setting,
        "threads": torch.get_num_threads(),
        "images_per_s": steps * images / wall,
        "cores_busy": (time.process_time() - cpu) / wall,
    }


if __name__ == "__main__":
    main()

"""Threads of one training process, on an idle machine and beside two busy loops.

  python bench/threads.py [--seconds S] [--rounds N] [--out bench/results/threads.json]

Images/s of whole training steps (forward, backward, update) of a small, a middle and a large Soft MoE on CPU:
with one thread, with torch's default (all cores, whose threads spin for milliseconds while they wait), and as
`orchestrator.training.loop` and `orchestrator/__init__.py` set it. Each figure is a process of its own, of
`--seconds`; settings take turns; medians over rounds, and each setting against the best of its row.
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from statistics import median

from bench.harness import Record, options, processes
from bench.provenance import provenance

BUSY = 2  # loops
SPIN_OF_LIBGOMP = "300000"  # its default, where nothing is set
SETTINGS = ("one thread", "torch's default", "ours")


def vit(image: int, patch: int, width: int, depth: int, heads: int, batch: int) -> Record:
    size = {"image_size": image, "patch_size": patch, "width": width, "depth": depth, "heads": heads}
    fields = {f"model.{name}": value for name, value in (size | {"mlp_dim": 4 * width}).items()}
    return fields | {"data.batch_size": batch, "model.moe.router.kind": "soft", "model.moe.num_experts": 4}


MODELS = {
    "small": vit(28, 7, 48, 4, 3, batch=64),
    "middle": vit(8, 2, 96, 6, 6, batch=64),
    "large": vit(224, 32, 384, 6, 6, batch=16),
}


def main() -> None:
    args = options(__doc__, seconds=6.0, rounds=3, out="")
    origin, records = provenance(), list[Record]()
    for name in [name for name in os.environ if name.startswith(("OMP_", "GOMP_"))]:
        del os.environ[name]
    for loops in (0, BUSY):
        busy = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(loops)]
        found: dict[tuple[str, str], list[float]] = {}
        for _ in range(args.rounds):
            for model in MODELS:
                for setting in SETTINGS:
                    os.environ["GOMP_SPINCOUNT"] = SPIN_OF_LIBGOMP
                    if setting == "ours":
                        del os.environ["GOMP_SPINCOUNT"]  # our package sets it
                    with processes() as own:
                        record = own.submit(measure, model, setting, args.seconds).result()
                    found.setdefault((model, setting), []).append(record["images_per_s"])
                    records.append({"busy_loops": loops, **record})
        for loop in busy:
            loop.kill()
        for model in MODELS:
            rates = {setting: median(found[model, setting]) for setting in SETTINGS}
            best = max(rates.values())
            cells = "  ".join(f"{name} {rate:7.4g} ({rate / best:4.0%})" for name, rate in rates.items())
            print(f"{loops} busy loops  {model:6}  {cells}", flush=True)
    if args.out:
        Path(args.out).write_text(json.dumps(origin | {"records": records}, indent=1) + "\n")


def measure(model: str, setting: str, seconds: float) -> Record:
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
    images, side, at = run.data.batch_size, run.model.image_side(), torch.arange(run.data.batch_size)
    pixels = torch.randint(256, (images, 3, side, side), dtype=torch.uint8)
    fields = {"image": pixels, "label": torch.randint(run.model.num_outputs(), (images, 1))}
    batch = Batch(fields=fields, valid=torch.ones(images), key=at, sample=at)
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

"""How long saving stalls the training loop, synchronously and beside training, by the size of the state.

  python bench/checkpoint.py [--rounds N] [--megabytes 50 200 450] [--storage DIR] [--out FILE]

One worker and one thread of compute, AdamW, local disk. Both ways save the same state in turns; before every
save it trains a step, and waits until the save before is written. Wall seconds, for disks are waited for.
"""

import argparse
import json
import shutil
import statistics
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from layers import provenance
from torch import nn

from moe.vit import ViT
from orchestrator.codec import override, to_dict
from orchestrator.config import CheckpointConfig, RunConfig
from orchestrator.training.allocator import keep_freed_memory
from orchestrator.training.checkpoint.run import Checkpoints
from orchestrator.training.optim import build_optimizer

BYTES_PER_PARAM = 12  # float32 weights and AdamW's two moments
TARGET = 0.10


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--megabytes", type=int, nargs="*", default=[50, 200, 450], help="of the state")
    parser.add_argument("--storage", help="directory on the disk to measure; default: a temporary one")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    keep_freed_memory()
    records = [measure(megabytes, args.rounds, args.storage) for megabytes in args.megabytes]
    for record in records:
        sync, stall = (statistics.median(record["seconds"][how]) for how in ("synchronous", "stall"))
        met = "met" if stall < TARGET * sync else "missed"
        print(
            f"{record['megabytes']:6.0f} MB  synchronous {sync:.3f} s  stall {stall:.3f} s"
            f"  {stall / sync:.1%} (target {TARGET:.0%}: {met})"
        )
    if args.out:
        args.out.write_text(json.dumps(provenance() | {"records": records}, indent=1))


def measure(megabytes: int, rounds: int, storage: str | None) -> dict[str, Any]:
    run = sized(megabytes)
    model = ViT(run.model)
    optimizer = build_optimizer(run.train.optimizer, model)
    seconds: dict[str, list[float]] = {"synchronous": [], "stall": []}
    directory = tempfile.mkdtemp(dir=storage)
    try:
        ways = {
            how: Checkpoints(f"{directory}/{how}", CheckpointConfig(keep_last=1, asynchronous=how == "stall"))
            for how in seconds
        }
        for checkpoints in ways.values():
            checkpoints.restore(model, optimizer)
        for step in range(1, rounds + 1):
            for how, checkpoints in ways.items():
                train_step(model, optimizer)
                began = time.perf_counter()
                checkpoints.save(step, model, optimizer, images=step, progress={}, config=to_dict(run))
                seconds[how].append(time.perf_counter() - began)
                checkpoints.settle()
        for checkpoints in ways.values():
            checkpoints.finish()
    finally:
        shutil.rmtree(directory)
    params = sum(p.numel() for p in model.parameters())
    return {"megabytes": params * BYTES_PER_PARAM / 1e6, "seconds": seconds}


def sized(megabytes: int) -> RunConfig:
    """A soft MoE whose state has about that many bytes: its experts are as wide as needed."""
    base: Mapping[str, Any] = {"model.width": 256, "model.heads": 4, "model.moe.router.kind": "soft"}
    experts = 2 * 8 * 256 * 2  # numbers in two blocks' experts for each of their hidden units
    hidden = int(megabytes * 1e6 / BYTES_PER_PARAM / experts / 1.2)
    return override(RunConfig(), {**base, "model.depth": 4, "model.mlp_dim": hidden})


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """New numbers everywhere; what they mean does not matter here."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


if __name__ == "__main__":
    main()

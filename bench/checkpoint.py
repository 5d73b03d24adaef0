"""How long training waits for a save beside training or in step with it, and for resuming.

  python bench/checkpoint.py [--rounds N] [--models s32 s32-soft16 ..] [--folder DIR] [--out FILE]

Both ways are measured in pairs in one process, on the same disk, for a model that was resumed from a
checkpoint, with AdamW's state; a training step lies between two saves. The stall is the time until save()
returns, the write the time until the checkpoint exists, the load the time to verify and read it. The share is
the median over pairs of the stall beside training relative to the stall in step.
"""

import argparse
import json
import os
import shutil
import statistics
import subprocess
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # which torch reads when it is imported

import torch
from torch import nn

from bench.provenance import provenance
from moe.layer import MoEConfig
from moe.models.vit import ViT, ViTConfig
from moe.routers import SoftConfig
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.config import CheckpointConfig

S = ViTConfig(image_size=224, patch_size=32, width=384, depth=12, heads=6, mlp_dim=1536)
MODELS = {
    "tiny": replace(S, width=96, depth=4, heads=3, mlp_dim=384),
    "s32": S,
    "s32-soft16": replace(S, moe=MoEConfig(num_experts=16, router=SoftConfig(), layers="last_6")),
    "b32": replace(S, width=768, heads=12, mlp_dim=3072),
}
TARGET = 0.05  # the largest share
Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--models", nargs="*", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--folder", help="where checkpoints go; default: a temporary folder")
    parser.add_argument("--out", help="also write all samples as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    folder = Path(tempfile.mkdtemp(dir=args.folder))
    try:
        records = [measure(name, folder / name, args.rounds) for name in args.models]
    finally:
        shutil.rmtree(folder)
    if args.out:
        disk = ["df", "--output=fstype", str(folder.parent)]
        about = provenance("safetensors", "torch") | {
            "disk": subprocess.run(disk, capture_output=True, text=True).stdout.split()[-1],
            "threads": torch.get_num_threads(),
        }
        Path(args.out).write_text(json.dumps(about | {"records": records}, indent=1))


def measure(name: str, folder: Path, rounds: int) -> Record:
    """Returns the seconds of all saves but the first pair, and of as many loads."""
    ways = {"beside": folder / "beside", "in step": folder / "in step"}
    model, optimizer = resumed_once(name, *ways.values())
    keeping = {
        way: Checkpoints(str(directory), CheckpointConfig(asynchronous=way == "beside", keep_last=1))
        for way, directory in ways.items()
    }
    for checkpoints in keeping.values():
        checkpoints.restore(model, optimizer)
    names = ("stall beside", "write beside", "stall in step", "load")
    samples: dict[str, list[float]] = {name: [] for name in names}
    for i in range(1 + rounds):
        for way, checkpoints in keeping.items():
            update(model, optimizer)
            began = time.perf_counter()
            checkpoints.save(2 + i, model, optimizer, images=0, progress={}, config={})
            stall = time.perf_counter() - began
            checkpoints.settle()
            if i:
                samples[f"stall {way}"].append(stall)
                if way == "beside":
                    samples["write beside"].append(time.perf_counter() - began)
        began = time.perf_counter()
        Checkpoints(str(ways["in step"]), CheckpointConfig(asynchronous=False)).restore(model, optimizer)
        if i:
            samples["load"].append(time.perf_counter() - began)
    for checkpoints in keeping.values():
        checkpoints.finish()
        assert not checkpoints.failures
    size = sum(file.stat().st_size for file in ways["beside"].rglob("step-*/*"))
    shutil.rmtree(folder)
    record = {"model": name, "bytes": size, "tensors": len(model.state_dict()), "seconds": samples}
    medians = {what: statistics.median(seconds) for what, seconds in samples.items()}
    pairs = zip(samples["stall beside"], samples["stall in step"], strict=True)
    record["share"] = statistics.median(beside / in_step for beside, in_step in pairs)
    print(f"{name}: {size / 1e6:.0f} MB, {record['tensors']} tensors of the model")
    for what, seconds in samples.items():
        low, median, high = (1000 * value for value in (min(seconds), medians[what], max(seconds)))
        print(f"  {what:14} {median:7.1f} ms, {low:.1f} .. {high:.1f}")
    verdict = "met" if record["share"] <= TARGET else "MISSED"
    print(f"  median of pairs {record['share']:.1%}, {verdict}", flush=True)
    return record


def resumed_once(name: str, *directories: Path) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Returns a model after its first step, and saves a checkpoint of it in each directory."""
    model = ViT(MODELS[name])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    update(model, optimizer)
    for directory in directories:
        checkpoints = Checkpoints(str(directory), CheckpointConfig(asynchronous=False))
        checkpoints.save(1, model, optimizer, images=0, progress={}, config={})
        checkpoints.finish()
    return model, optimizer


def update(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    output = model(torch.randn(2, 3, 224, 224))
    output.logits.logsumexp(-1).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


if __name__ == "__main__":
    main()

"""A dry run of every preset at full size, and the estimate of the same layout beside it.

  python bench/layouts.py [--models NAME ..] [--out FILE]

A model has 8 GPUs up to 1.5 billion parameters, 64 up to 15 billion, and 512 above; those of docs/scale.md
have its numbers of GPUs. Batches are of 1024 images on 8 GPUs, else of 4096; `ep` is what `auto` takes.
Models of two towers train contrastively, `lit-` with a frozen image tower. Bytes are of the first rank.
"""

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, Record, options
from bench.provenance import provenance
from moe.cost import num_params
from moe.presets import PRESETS
from orchestrator.codec import override, to_dict
from orchestrator.config import RunConfig
from orchestrator.sweeps.estimate import GIB, checkpoint_bytes, layout, resolve_auto
from orchestrator.training.dry_run import dry_run

GPUS = {  # of docs/scale.md
    "soft-S/16-128e": (8,),
    "soft-B/16-128e": (8, 64),
    "soft-L/16-128e": (64, 512),
    "soft-H/14-256e": (512,),
}


def main() -> None:
    args = options(__doc__, models=(), out=str(RESULTS / "layouts.json"))
    result, rows = provenance("torch"), list[Record]()
    for name in args.models or PRESETS:
        for gpus in GPUS.get(name, (usual(name),)):
            rows.append(measure(name, run_of(name, gpus)))
            print(json.dumps(rows[-1]), flush=True)
    errors = sorted(abs(row["estimate"]["peak GiB"] / row["peak GiB"] - 1) for row in rows)
    result["estimates"] = {"median error": errors[len(errors) // 2], "largest error": errors[-1]}
    result["seconds"] = sum(row["dry run s"] for row in rows)
    Path(args.out).write_text(json.dumps(result | {"rows": rows}, indent=1) + "\n")


def usual(name: str) -> int:
    params = num_params(PRESETS[name])
    return 8 if params <= 1.5e9 else 64 if params <= 15e9 else 512


def run_of(name: str, gpus: int) -> RunConfig:
    changes: dict[str, Any] = {"scale.use_gpu": True, "scale.ep": "auto", "scale.workers": gpus}
    changes["data.batch_size"] = 1024 if gpus == 8 else 4096
    if "logits" not in PRESETS[name].gives:
        changes["task.kind"] = "contrastive"
    if name.startswith("lit-"):
        changes["train.freeze"] = ["image."]
    return resolve_auto(override(RunConfig(), {"model": to_dict(PRESETS[name])} | changes))


def measure(name: str, run: RunConfig) -> Record:
    began = time.perf_counter()
    found, ep = dry_run(run), run.ep()
    seconds, estimated = time.perf_counter() - began, layout(run, ep)
    sent = defaultdict[str, float](float)
    for collective, (_, size) in found.collectives.items():
        sent[collective.kind] += size / 1e9
    return {
        "model": name,
        "gpus": run.scale.workers,
        "batch": run.data.batch_size,
        "dp": estimated.dp,
        "ep": ep,
        "parameters": num_params(run.model),
        "checkpoint GB": checkpoint_bytes(run) / 1e9,
        "parameters GiB": found.parameters / GIB,
        "optimizer GiB": found.optimizer / GIB,
        "peaks GiB": {phase: size / GIB for phase, size in found.peaks.items()},
        "peak GiB": max(found.peaks.values()) / GIB,
        "collectives": sum(count for count, _ in found.collectives.values()),
        "GB sent": dict(sent),
        "estimate": {
            "peak GiB": estimated.peak() / GIB,
            "GB sent": {kind: (one.intra + one.inter) / 1e9 for kind, one in estimated.traffic.items()},
            "link s": estimated.seconds,
            "link s, ep=8": layout(run, 8).seconds if run.model.moe and ep > 8 else None,
        },
        "dry run s": seconds,
    }


if __name__ == "__main__":
    main()

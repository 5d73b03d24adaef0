"""The memory and the time of an evaluation by workers that hold a model together, against the whole model.

  python bench/sharded.py [--batches N] [--out bench/results/sharded.json]

The model is ViT-S/32 with 16 soft experts in each of its last six blocks, at 224 pixels, in an exported file;
batches of 32 images, as trained and with 4 experts. Workers are processes with one thread and gloo, and every
worker has its own experts. Memory is the highest of a worker, above what it took before it loaded the model.
"""

import json
import time
from dataclasses import replace
from pathlib import Path
from resource import RUSAGE_SELF, getrusage
from tempfile import TemporaryDirectory

import psutil
import torch
import torch.distributed as dist

from bench.harness import Record, options, processes
from bench.provenance import provenance
from moe.layer import MoEConfig
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.parallel import make_mesh
from moe.presets import VITS
from moe.routers import SoftConfig
from orchestrator.checkpoint.export import write_export
from orchestrator.checkpoint.models import read_model
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch
from orchestrator.evaluation.scores import evaluate_at

BATCH = 32
CASES = [(0, "float32"), (2, "float32"), (4, "float32"), (4, "bfloat16")]  # 0 workers: the whole model


def main() -> None:
    args = options(__doc__, batches=3, out="")
    config = replace(VITS["S/32"], moe=MoEConfig(layers="last_6", num_experts=16, router=SoftConfig()))
    records = []
    with TemporaryDirectory() as folder:
        model, file = config.build(seed=0), f"{folder}/model.safetensors"
        write_export(file, model.state_dict(), RunConfig(model=config), classes=None, more={})
        del model
        for workers, dtype in CASES:
            store, ranks = f"file://{folder}/store-{workers}-{dtype}", max(workers, 1)
            with processes(ranks) as pool:
                asked = [
                    pool.submit(measure, file, store, r, workers, dtype, args.batches) for r in range(ranks)
                ]
                found = [each.result() for each in asked]
            highest = {name: max(each[name] for each in found) for name in found[0]}
            records.append({"workers": workers, "dtype": dtype, **highest})
            print(
                "{workers} workers, {dtype:8} {memory_gb:.2f} GB  load {load_s:.1f} s  {ms_per_image:.1f} ms"
                " per image".format(**records[-1]),
                flush=True,
            )
    if args.out:
        Path(args.out).write_text(json.dumps(provenance("torch") | {"records": records}, indent=1) + "\n")


def measure(file: str, store: str, rank: int, workers: int, dtype: str, batches: int) -> Record:
    torch.set_num_threads(1)
    if workers:
        dist.init_process_group("gloo", init_method=store, rank=rank, world_size=workers)
    ref, before, began = read_model(file), psutil.Process().memory_info().rss, time.perf_counter()
    if workers:
        rounded = torch.bfloat16 if dtype == "bfloat16" else None
        model = ref.load_sharded(make_mesh("cpu", ep=workers), rounded)
    else:
        model = ref.load()
    torch.set_num_threads(1)
    loaded = time.perf_counter()
    share = BATCH // max(workers, 1)
    batch = Batch(
        fields={
            "image": torch.randint(256, (share, 3, 224, 224), dtype=torch.uint8),
            "label": torch.zeros(share, 1, dtype=torch.int64),
        },
        valid=torch.ones(share),
        key=torch.arange(share),
        sample=torch.arange(share),
    )
    evaluate_at(model, ref.run.task, [batch] * batches, [AS_TRAINED, RoutingOverrides(experts=4)])
    return {
        "load_s": loaded - began,
        "ms_per_image": 1000 * (time.perf_counter() - loaded) / (batches * BATCH),
        "memory_gb": (getrusage(RUSAGE_SELF).ru_maxrss * 1024 - before) / 1e9,
    }


if __name__ == "__main__":
    main()

"""A dry run of every preset at full size, and the estimate of the same layout beside it.

  python bench/layouts.py [--models NAME ..] [--out FILE]
  python bench/layouts.py --page     # fills the tables of docs/scale.md from the file

A model has 8 GPUs up to 1.5 billion parameters, 64 up to 15 billion, and 512 above; those of docs/scale.md
have its numbers of GPUs. Batches are of 1024 images on 8 GPUs, else of 4096; `ep` is what `auto` takes.
Models of two towers train contrastively, `lit-` with a frozen image tower. Bytes are of the first rank.
"""

import json
import time
from collections import defaultdict
from pathlib import Path
from typing import Any

from bench.harness import RESULTS, ROOT, Record, options, with_block
from bench.provenance import provenance
from moe.cost import num_params
from moe.guests import join_families
from moe.presets import PRESETS
from orchestrator.codec import override, to_dict
from orchestrator.config import RunConfig
from orchestrator.estimate import GIB, checkpoint_bytes, layout, resolve_auto
from orchestrator.training.dry_run import dry_run

PAGE = ROOT / "docs/scale.md"
GPUS = {  # of docs/scale.md
    "soft-S/16-128e": (8,),
    "soft-B/16-128e": (8, 64),
    "soft-L/16-128e": (64, 512),
    "soft-H/14-256e": (512,),
}


def main() -> None:
    args = options(__doc__, models=(), page=False, out=str(RESULTS / "layouts.json"))
    if args.page:
        rows = json.loads(Path(args.out).read_text())["rows"]
        PAGE.write_text(with_tables(PAGE.read_text(), rows))
        return
    result, rows = provenance("torch"), list[Record]()
    join_families()
    for name in args.models or PRESETS:
        for gpus in GPUS.get(name, (usual(name),)):
            rows.append(measure(run_of(name, gpus)) | {"model": name})
            print(json.dumps(rows[-1]), flush=True)
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


def measure(run: RunConfig) -> Record:
    began = time.perf_counter()
    found, ep = dry_run(run), run.ep()
    seconds, estimated = time.perf_counter() - began, layout(run, ep)
    sent = defaultdict[str, float](float)
    for collective, (_, size) in found.collectives.items():
        sent[collective.kind] += size / 1e9
    return {
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


def with_tables(page: str, rows: list[Record]) -> str:
    """Returns the page with its two tables filled: of its layouts, and of every model."""
    layouts = [
        "| model | GPUs | batch | parameters | checkpoint | ep | dp | GiB | GB | link s | link s, ep=8 |",
        "|---|" + 10 * "--:|",
        *(
            f"| {of['model']} | {of['gpus']} | {of['batch']:,} | {of['parameters'] / 1e9:.2f} B"
            f" | {of['checkpoint GB']:.0f} GB | {of['ep']} | {of['dp']} | {of['peak GiB']:.1f}"
            f" | {sum(of['GB sent'].values()):.2f} | {_figure(of['estimate']['link s'])}"
            f" | {_figure(of['estimate']['link s, ep=8'])} |"
            for of in rows
            if of["model"] in GPUS
        ),
    ]
    models = [
        "| model | GPUs | dp x ep | parameters, M | state, GiB | peak, GiB | calls | sent, GB"
        " | estimate, % | s |",
        "|---|" + 9 * "--:|",
    ]
    for of in rows:
        state, peaks = of["parameters GiB"] + of["optimizer GiB"], of["peaks GiB"].values()
        error = 100 * of["estimate"]["peak GiB"] / of["peak GiB"] - 100
        models.append(
            f"| {of['model']} | {of['gpus']} | {of['dp']} x {of['ep']} | {of['parameters'] / 1e6:,.1f}"
            f" | {state:.2f} | {' / '.join(f'{peak:.1f}' for peak in peaks)} | {of['collectives']}"
            f" | {sum(of['GB sent'].values()):.2f} | {error:+.0f} | {of['dry run s']:.0f} |"
        )
    page = with_block(page, "layouts", "\n".join(layouts))
    return with_block(page, "models", "\n".join(models))


def _figure(value: float | None) -> str:
    return "" if value is None else f"{value:.2g}"


if __name__ == "__main__":
    main()

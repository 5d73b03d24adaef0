"""Results, launches and speed of layers, training and inference on one GPU.

  python bench/gpu.py --out FILE [--minutes 9] [--parts correct launches ..] [--device cuda|cpu] [--tiny]

Needs torch and what `moe` imports, numpy and safetensors. FILE is written after every case. The same command
again runs the cases that are missing from it or failed, and keeps the others; another FILE begins anew. Parts
share the minutes; the most telling come first, and in each its most telling cases. Exits with 1 if a case
failed or missed its bound.

correct     every router in float32 and bfloat16 against float64 on the CPU; bits of repeated gradients
launches    syncs, kernels and the host's time of training steps
training    images/s, memory and phases of whole models; the number of experts at equal slots, in one block
layers      transport solvers, MoE layers, their matmuls, plain matmuls and peers against measured ceilings
inference   images/s of the same models
tf32        error and speed of float32 with and without TF32
compiled    a few of these cases under torch.compile, which takes most of their time

With --tiny, sizes are such that a CPU needs less than a minute, and no figure means anything.
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

# Deterministic algorithms need it, from the first use of CUDA on.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.gpu_checks import Bench, Case, Cases, Row, Rows, compare, correct, launched, launches
from bench.gpu_speed import Run, infer, inference, layers, models, tf32, train, training
from bench.harness import options
from bench.provenance import accelerator, provenance


def compiled(bench: Bench, rows: Rows) -> Iterator[Case]:
    """Cases of other parts with compiled blocks."""
    for name in ("token choice", "soft"):
        yield f"correct: {name}", partial(compare, bench, name, torch.bfloat16, compiled=True)
    for name in ("S/16", "soft-S/16-128e"):
        run = Run(f"training: {name}", models()[name], "training: S/16", compiled=True)
        yield run.label, partial(train, bench, run, rows)
    for name in ("dense", "soft"):
        yield f"launches: {name}", partial(launched, bench, name, rows, "launches: dense", compiled=True)
    for name in ("S/16", "soft-S/16-128e"):
        call = partial(infer, bench, name, 4 if bench.tiny else 256, rows, "inference: S/16", compiled=True)
        yield f"inference: {name}", call


# part -> its cases, and its share of the time relative to the other parts
PARTS: dict[str, tuple[Cases, float]] = {
    "correct": (correct, 3),
    "launches": (launches, 2),
    "training": (training, 4),
    "layers": (layers, 3),
    "inference": (inference, 1),
    "tf32": (tf32, 1),
    "compiled": (compiled, 4),
}


def main() -> int:
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    args = options(__doc__, out="gpu.json", parts=(), minutes=9.0, device=device, tiny=False)
    if args.device == "cuda" and not gpu:
        raise SystemExit("torch finds no GPU: use --device cpu")
    if args.tiny:
        torch.set_num_threads(1)
    if args.device == "cpu":
        # Graphs are traced, but a compiler for CPUs would take minutes.
        torch.compiler.set_stance("default", force_backend="aot_eager")
    gc.freeze()  # what is imported is not looked through after every case
    bench, end = Bench(torch.device(args.device), args.tiny), time.monotonic() + 60 * args.minutes
    origin, out = provenance("torch") | accelerator(), Path(args.out)
    what = {"device": args.device, "gpu": origin.get("gpu", ""), "tiny": args.tiny}
    result = json.loads(out.read_text()) if out.exists() else {**what, "runs": [], "parts": {}}
    if found := [f"{key}={result[key]}" for key in what if result[key] != what[key]]:
        raise SystemExit(f"{out} has results of {', '.join(found)}: use another --out")
    result["runs"].append(origin)
    parts = args.parts or [*PARTS]
    for number, name in enumerate(parts):
        # What a part leaves over, later parts may use.
        share = PARTS[name][1] / sum(PARTS[other][1] for other in parts[number:])
        until = time.monotonic() + share * (end - time.monotonic())
        run_part(name, PARTS[name][0], bench, until, result, out)
    return int(any(result["parts"][name]["failed"] or result["parts"][name]["error"] for name in parts))


def run_part(name: str, cases: Cases, bench: Bench, until: float, result: Row, out: Path) -> None:
    """Runs the cases of a part whose rows are missing or failed. A case that raises leaves its error, and the
    others run."""
    part = result["parts"].setdefault(name, {"rows": {}})
    part |= {"left_out": [], "error": ""}
    rows: Rows = part["rows"]
    try:
        for label, case in cases(bench, rows):
            if label in rows and not has_failed(rows[label]):
                continue
            if time.monotonic() >= until:
                part["left_out"].append(label)
                continue
            began = time.monotonic()
            rows[label] = row = attempt(bench, case)
            row |= {"seconds": time.monotonic() - began, "run": len(result["runs"])}
            values = (f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
            print(f"{name}, {label}: {', '.join(values)[:300]}", flush=True)
            write(out, result)
    except Exception:
        part["error"] = traceback.format_exc()[-2000:]
    part["failed"] = [label for label, row in rows.items() if has_failed(row)]
    print(name, f"{len(rows)} rows; failed: {part['failed']}; no time for: {part['left_out']}", part["error"])
    write(out, result)


def has_failed(row: Row) -> bool:
    return "error" in row or row.get("passed") is False


def attempt(bench: Bench, case: Callable[[], Row]) -> Row:
    try:
        return case()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:500], "where": traceback.format_exc()[-1500:]}
    finally:
        gc.collect()
        if bench.cuda:
            torch.cuda.empty_cache()


def write(path: Path, result: Row) -> None:
    """Replaces the file at once, so that an interruption leaves the one before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    new = path.with_name(f"{path.name}.new")
    new.write_text(json.dumps(result, indent=1))
    new.replace(path)


if __name__ == "__main__":
    sys.exit(main())

"""Results, launches and speed of layers, training and inference on one GPU.

  python bench/gpu.py --out FILE [--parts correct launches layers training inference] [--budget-s 420]
      [--device cuda|cpu] [--tiny]

Needs `moe` and torch alone. FILE is written after every case; the same command again runs the parts that are
missing from it, had errors or left out cases, and `--parts` runs the named ones in any case. A part begins
with its most telling cases and lists those for which no time was left. Exits with 1 if a case failed or
missed its bound.

correct     every router in float32 and bfloat16, eager and compiled, against float64 on the CPU; bits of
            repeated gradients
launches    syncs, kernels and the host's time of training steps
layers      MoE layers, their matmuls, plain matmuls and peers against the device's measured ceilings
training    images/s, memory and phases of whole models; the number of experts at equal slots, in one block
inference   images/s of the same models

With --tiny, sizes are such that a CPU needs less than a minute, and no figure means anything.
"""

import gc
import json
import os
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Deterministic algorithms need it, from the first use of CUDA on.
os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")

import torch

sys.path.insert(0, str(Path(__file__).parent.parent))

from bench.gpu_checks import Bench, Case, Row, correct, launches
from bench.gpu_speed import inference, layers, training
from bench.harness import options
from bench.provenance import accelerator, provenance

# part -> its cases, and its share of the time relative to the other parts
PARTS: dict[str, tuple[Callable[[Bench], Iterator[Case]], float]] = {
    "correct": (correct, 3),
    "launches": (launches, 2),
    "layers": (layers, 3),
    "training": (training, 4),
    "inference": (inference, 2),
}


def main() -> int:
    gpu = torch.cuda.is_available()
    device = "cuda" if gpu else "cpu"
    args = options(__doc__, out="gpu.json", parts=(), budget_s=420.0, device=device, tiny=False)
    if args.device == "cuda" and not gpu:
        raise SystemExit("torch finds no GPU: use --device cpu")
    if args.tiny:
        torch.set_num_threads(1)
    if args.device == "cpu":
        # Graphs are traced, but a compiler for CPUs would take minutes.
        torch.compiler.set_stance("default", force_backend="aot_eager")
    gc.freeze()  # what is imported is not looked through after every case
    bench, end = Bench(torch.device(args.device), args.tiny), time.monotonic() + args.budget_s
    what, out = {"device": args.device, "tiny": args.tiny}, Path(args.out)
    result: dict[str, Any] = json.loads(out.read_text()) if out.exists() else {"parts": {}, **what}
    if what != {key: result[key] for key in what}:
        raise SystemExit(f"{out} has results of {result['device']}, tiny={result['tiny']}")
    parts = args.parts or [name for name in PARTS if not result["parts"].get(name, {}).get("finished")]
    for number, name in enumerate(parts):
        # What a part leaves over, later parts may use.
        share = PARTS[name][1] / sum(PARTS[other][1] for other in parts[number:])
        found = result["parts"][name] = {"origin": provenance("torch") | accelerator()}
        until = time.monotonic() + share * (end - time.monotonic())
        run_part(name, bench, until, found, lambda: write(out, result))
    return int(any(result["parts"][name]["failed"] for name in parts))


def run_part(name: str, bench: Bench, until: float, found: Row, save: Callable[[], None]) -> None:
    """Runs the cases of a part into `found`. A case that raises leaves its error, and the others run."""
    began = time.monotonic()
    found |= {"rows": [], "left_out": [], "error": "", "finished": False}
    try:
        for label, case in PARTS[name][0](bench):
            if time.monotonic() >= until:
                found["left_out"].append(label)
                continue
            started = time.monotonic()
            row = {"case": label} | attempt(bench, case)
            found["rows"].append(row)
            values = (f"{k}={v:.3g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items())
            print(f"{name} {time.monotonic() - started:5.1f} s  {', '.join(values)[:300]}", flush=True)
            save()
    except Exception:
        found["error"] = traceback.format_exc()[-2000:]
        print(f"{name}: {found['error']}", flush=True)
    failed = any("error" in row or row.get("passed") is False for row in found["rows"])
    found["failed"] = bool(found["error"]) or failed
    found |= {"finished": not found["failed"] and not found["left_out"], "seconds": time.monotonic() - began}
    if found["left_out"]:
        print(f"no time for {len(found['left_out'])}, run the command again: {'; '.join(found['left_out'])}")
    save()


def attempt(bench: Bench, case: Callable[[], Row]) -> Row:
    torch.compiler.reset()  # Dynamo compiles a function only a few times
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

"""MoE layers and the whole Soft MoE S/16 against PyTorch peers and this machine's matmul peak.

  python bench/layers.py [--rounds N] [--experts 8 32 128 256] [--dtype float32 bfloat16]
      [--routers soft token_choice expert_choice model] [--groups ..] [--out FILE]
  python bench/layers.py --routers arms --experts 8 --dtype float32
  python bench/layers.py --out bench/results/layers-float32.json --draw docs/throughput.png

One thread, D=384, H=1536, 196 tokens, 16 images (of the whole model 8), 256 slots per image. CPU seconds of a
forward pass, of a training step (forward and backward) and of a matmul; every implementation lives in a
process of its own and is asked for one timing at a time, in rotating order; medians. A whole model needs
8 GB, so each of its timings has a process, one at a time.

Needs `pip install -e .[bench]`. Ours runs as in our training workers, which keep freed memory
(`keep_freed_memory`); the others run "as shipped", or with the "same allocator".
`arms` are routers of today beside token choice with the same number of rows.
With --draw nothing is timed: what --out holds of ours is drawn against the number of experts, as figure 6 of
Soft MoE.
"""

import argparse
import importlib
import json
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from itertools import chain
from pathlib import Path

import torch

from bench.harness import Record, options, processes
from bench.peers import ARMS, DIM, HIDDEN, PEERS, SLOTS, TOKENS, build
from bench.provenance import provenance
from papers.results import finish, panels

STEPS = ("forward", "train")
GEMM, GEMMS = 1024, 9
WARM_UP = 4  # steps until a heap that keeps its pages has them all
TARGETS = [  # what, experts, group, at least
    ("train", (8, 32), "as shipped", 0.97),
    ("train", (128, 256), "as shipped", 1.3),
    ("train", (128, 256), "same allocator", 1.1),
    ("forward", (128, 256), "as shipped", 1.1),
    ("forward", (8,), "as shipped", 0.85),  # their exact GELU is cheaper on a CPU than ours by tanh
]
MODEL_TARGET = ("train", (128,), "as shipped", 1.2)
ARM_TARGET = 0.9  # of the rate of token choice, for arms of fixed slots
timed: dict[str, tuple[Callable[[], object], int]] = {}  # of the process of one implementation


def main() -> None:
    args = options(
        __doc__,
        rounds=5,
        experts=(8, 32, 128, 256),
        dtype=("float32", "bfloat16"),
        routers=("soft", "token_choice", "expert_choice"),
        groups=("as shipped", "same allocator"),
        out="",
        draw="",
    )
    if args.draw:
        return draw(json.loads(Path(args.out).read_text())["records"], args.draw)
    origin, records = provenance("torch", "timm", *PEERS["soft"], *PEERS["token_choice"]), list[Record]()
    for case, group in cases(args):
        found = measure(case, group, args.rounds)
        print_group(found)
        records += found
        if args.out:
            Path(args.out).write_text(json.dumps(origin | {"records": records}, indent=1))
    print("", *verdicts(records), sep="\n")


def cases(args: argparse.Namespace) -> Iterator[tuple[Record, str]]:
    for router in args.routers:
        whole = router == "model"
        for dtype in args.dtype if not whole else ["float32"]:
            for experts in args.experts if not whole else [128]:
                case = {"router": router, "experts": experts, "dtype": dtype, "images": 8 if whole else 16}
                for group in args.groups if others(case) else ["as shipped"]:
                    yield case, group


def others(case: Record) -> list[str]:
    # The peers of token choice mix float32 masks with bf16 tokens and stop.
    stop = (case["router"], case["dtype"]) == ("token_choice", "bfloat16")
    return [] if stop else list(PEERS.get(case["router"], ()))


def measure(case: Record, group: str, rounds: int) -> list[Record]:
    """Interleaved timings."""
    names, alone = ["ours", *others(case)], case["router"] == "model"
    if case["router"] == "arms":
        names = list(ARMS)
    keeps = {name: name in ("ours", *ARMS) or group == "same allocator" for name in names}
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in names}

    def worker(name: str) -> ProcessPoolExecutor:
        return processes(1, prepare, name, case, keeps[name])

    workers = {} if alone else {name: worker(name) for name in names}
    for i in range(min(rounds, 3) if alone else rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            asked = workers.get(name) or worker(name)
            samples[name].append(asked.submit(sample).result())
            if alone:
                asked.shutdown()
    for each in workers.values():
        each.shutdown()
    return [
        {
            "case": case,
            "group": group,
            "implementation": name,
            "setting": "keeps memory" if keeps[name] else "bare",
        }
        | {"cpu_seconds": {key: [each[key] for each in samples[name]] for key in (*STEPS, "gemm")}}
        for name in names
    ]


def prepare(name: str, case: Record, keep_memory: bool) -> None:
    """Builds what this process times."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if keep_memory:
        importlib.import_module("orchestrator.training.worker").keep_freed_memory()
    dtype, whole = getattr(torch, case["dtype"]), case["router"] == "model"
    module = build(case["router"], name, case["experts"]).to(dtype)
    shape = (3, 224, 224) if whole else (TOKENS, DIM)
    x = torch.randn(case["images"], *shape, dtype=dtype, requires_grad=not whole)
    a, b = torch.randn(2, GEMM, GEMM, dtype=dtype)

    def forward() -> None:
        with torch.no_grad():
            module(x)

    def train() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x).sum().backward()

    timed.update(forward=(forward, 1), train=(train, 1), gemm=(lambda: a @ b, GEMMS))
    for step in (forward, *[train] * WARM_UP, forward):
        step()


def sample() -> dict[str, float]:
    """CPU seconds, medians; of the process, so that neighbours on the machine cost nothing but cache."""
    found = {}
    for name, (step, repeats) in timed.items():
        seconds = []
        for _ in range(repeats):
            began = time.process_time()
            step()
            seconds.append(time.process_time() - began)
        found[name] = statistics.median(seconds)
    return found


def per_second(record: Record, what: str) -> float:
    """Tokens per second; of a whole model, images."""
    case = record["case"]
    count = case["images"] * (1 if case["router"] == "model" else TOKENS)
    return count / statistics.median(record["cpu_seconds"][what])


def peak_share(record: Record, what: str) -> float:
    """Of the matmul rate in the same process and rounds; backward counts twice the forward."""
    case = record["case"]
    mixing = 3 * TOKENS * SLOTS * DIM if case["router"] == "soft" else TOKENS * DIM * case["experts"]
    rows = TOKENS if case["router"] == "arms" else SLOTS
    flops = 2 * case["images"] * (2 * rows * DIM * HIDDEN + mixing)
    if case["router"] == "model":
        flops = case["images"] * (9.20e9 if record["implementation"] == "timm dense" else 8.57e9)
    flops *= 3 if what == "train" else 1
    seconds = zip(record["cpu_seconds"]["gemm"], record["cpu_seconds"][what], strict=True)
    return statistics.median(flops / (2 * GEMM**3) * gemm / step for gemm, step in seconds)


def print_group(records: list[Record]) -> None:
    ours, case = records[0], records[0]["case"]
    print(f"\n{case['router']} E={case['experts']} {case['dtype']}, {case['images']} images: {ours['group']}")
    for record in records:
        cells = [f"  {record['implementation']:19} {record['setting']:12}"]
        for what in STEPS:
            rate, share = per_second(record, what), peak_share(record, what)
            times = per_second(ours, what) / rate
            cells.append(
                f"{what} {rate:9.2f}/s {share:5.0%} of peak, {ours['implementation']} is {times:.3f}x"
            )
        print("  ".join(cells), flush=True)


def draw(records: list[Record], picture: str) -> None:
    """Images per second of our layers, in a panel for each step."""
    figure, axes_of = panels("Our layers on one thread, 256 slots per image", len(STEPS))
    for axes, what, title in zip(axes_of, STEPS, ("Forward", "Forward and backward"), strict=True):
        rates: dict[str, dict[int, float]] = {}
        for record in records:
            if (record["implementation"], record["group"]) == ("ours", "as shipped"):
                case = record["case"]
                rates.setdefault(case["router"], {})[case["experts"]] = per_second(record, what) / TOKENS
        for router, rate in rates.items():
            axes.semilogx(rate.keys(), rate.values(), "o-", label=router.replace("_", " "))
        axes.set_ylim(0)
        finish(axes, "Experts", "Images per second", sorted({*chain(*rates.values())}), title)
    figure.savefig(picture)


def verdicts(records: list[Record]) -> Iterator[str]:
    """Ours against the best peer, for each target."""
    for router, dtype in dict.fromkeys((r["case"]["router"], r["case"]["dtype"]) for r in records):
        if router == "arms":
            yield from arm_verdicts([r for r in records if r["case"]["dtype"] == dtype], dtype)
            continue
        for what, all_experts, group, least in [MODEL_TARGET] if router == "model" else TARGETS:
            for experts in all_experts:
                case = {"router": router, "experts": experts, "dtype": dtype}
                rates = {
                    r["implementation"]: per_second(r, what)
                    for r in records
                    if r["group"] == group and case.items() <= r["case"].items()
                }
                best = max((rates[name] for name in rates.keys() - {"ours", "timm dense"}), default=None)
                if best:
                    times = rates["ours"] / best
                    met = "met   " if times >= least else "MISSED"
                    yield f"{met} {router} E={experts} {dtype} {what}, {group}: {times:.3f}x, target {least}x"


def arm_verdicts(records: list[Record], dtype: str) -> Iterator[str]:
    """Each arm against token choice, the median of the rounds."""
    for record in records:
        case, arm = record["case"], record["implementation"]
        if case["router"] != "arms" or arm == "token":
            continue
        (token,) = (r for r in records if r["case"] == case and r["implementation"] == "token")
        for what in STEPS:
            rounds = zip(token["cpu_seconds"][what], record["cpu_seconds"][what], strict=True)
            times = statistics.median(before / now for before, now in rounds)
            met = "      " if arm == "dropless" else "met   " if times >= ARM_TARGET else "MISSED"
            yield f"{met} {arm} E={case['experts']} {dtype} {what}: {times:.3f}x token choice"


if __name__ == "__main__":
    main()

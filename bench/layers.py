"""MoE layers and the whole Soft MoE S/16 against PyTorch peers and this machine's matmul peak.

  python bench/layers.py [--rounds N] [--experts 8 32 128 256] [--dtype float32 bfloat16]
      [--routers soft token_choice expert_choice] [--groups ..] [--whole-model] [--out FILE]

One thread, D=384, H=1536, 196 tokens, 16 images, 256 slots per image. CPU seconds; every implementation lives
in a process of its own and is asked for one timing at a time, in rotating order; medians.

Needs `pip install -e .[bench]`. Ours runs as in our training workers, which keep freed memory
(`orchestrator/training/allocator.py`); the others run "as shipped", or with the "same allocator" settings.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bench.provenance import provenance

ROOT = Path(__file__).parent.parent

DIM, HIDDEN, TOKENS, IMAGES, SLOTS = 384, 1536, 196, 16, 256  # as in peers.py
MODEL_IMAGES, MANY_IMAGES = 8, 64
STEPS = ("forward", "train")
GEMM_FLOPS = 2 * 1024**3
PEERS: dict[str, tuple[str, ...]] = {
    "soft": ("soft-moe", "soft-moe-pytorch"),
    "token_choice": ("st-moe-pytorch", "mixture-of-experts"),  # tutel is not on PyPI
    "expert_choice": (),  # no PyTorch peer has it
    "model": ("soft-moe", "soft-moe-pytorch"),
}
REFERENCES: dict[str, tuple[str, ...]] = {"soft": ("bmm",), "model": ("timm dense",)}  # timed, but no peers
GROUPS = {  # name -> settings of ours, settings of the others
    "as shipped": ("keeps memory", "bare"),
    "same allocator": ("keeps memory", "keeps memory"),
}
TARGETS = [  # what, experts, group, at least
    ("train", (8, 32), "as shipped", 0.97),
    ("train", (128, 256), "as shipped", 1.3),
    ("train", (128, 256), "same allocator", 1.1),
    ("forward", (128, 256), "as shipped", 1.1),
]
MODEL_TARGET = ("train", (128,), "as shipped", 1.2)
Record = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--experts", type=int, nargs="*", default=[8, 32, 128, 256])
    parser.add_argument("--dtype", nargs="*", default=["float32", "bfloat16"])
    parser.add_argument("--routers", nargs="*", default=["soft", "token_choice", "expert_choice"])
    parser.add_argument("--groups", nargs="*", default=list(GROUPS), help="settings of the others")
    parser.add_argument("--whole-model", action="store_true", help="Soft MoE S/16 too")
    parser.add_argument("--out", help="also write all samples as JSON")
    args = parser.parse_args()
    records: list[Record] = []
    for record in measurements(args):
        records.append(record)
        if record["last"]:
            print_group([r for r in records if all(r[k] == record[k] for k in ("case", "group"))])
        if args.out:
            packages = {"torch", "timm", *(peer for peers in PEERS.values() for peer in peers)}
            Path(args.out).write_text(json.dumps(provenance(*packages) | {"records": records}, indent=1))
    for line in verdicts(records):
        print(line)


def measurements(args: argparse.Namespace) -> Iterator[Record]:
    """One record per implementation, case and group."""
    for router in args.routers:
        for dtype in args.dtype:
            # the peers of token choice mix float32 masks with bf16 tokens and stop
            peers = PEERS[router] if (router, dtype) != ("token_choice", "bfloat16") else ()
            for experts in args.experts:
                case = {"router": router, "experts": experts, "dtype": dtype, "images": IMAGES}
                others = (*peers, *REFERENCES.get(router, ()))
                for group in args.groups:
                    ours, theirs = GROUPS[group]
                    if others or group == "as shipped":
                        settings = {"ours": ours} | dict.fromkeys(others, theirs)
                        yield from measure(case, group, settings, args.rounds)
    if "soft" in args.routers and {8, 256} <= set(args.experts) and "float32" in args.dtype:
        for experts in (8, 256):  # 64 rows per expert and more
            case = {"router": "soft", "experts": experts, "dtype": "float32", "images": MANY_IMAGES}
            yield from measure(case, "flatness", {"ours": "keeps memory"}, args.rounds)
    if args.whole_model:
        case = {"router": "model", "experts": 128, "dtype": "float32", "images": MODEL_IMAGES}
        for group in args.groups:
            ours, theirs = GROUPS[group]
            settings = {"ours": ours} | dict.fromkeys((*PEERS["model"], *REFERENCES["model"]), theirs)
            yield from measure(case, group, settings, min(args.rounds, 3), alone=True)


def measure(
    case: Record, group: str, settings: dict[str, str], rounds: int, *, alone: bool = False
) -> Iterator[Record]:
    """Interleaved timings. `alone`: whole models need 8 GB each, so a process per timing, one at a time."""
    samples: dict[str, list[dict[str, float]]] = {name: [] for name in settings}
    workers = {} if alone else {name: Worker(name, case, setting) for name, setting in settings.items()}
    for worker in workers.values():
        worker.ready()
    names = list(settings)
    for i in range(rounds):
        for name in names[i % len(names) :] + names[: i % len(names)]:
            worker = workers.get(name) or Worker(name, case, settings[name])
            if alone:
                worker.ready()
            samples[name].append(worker.sample())
            if alone:
                worker.close()
    for worker in workers.values():
        worker.close()
    for name, setting in settings.items():
        seconds = {key: [sample[key] for sample in samples[name]] for key in samples[name][0]}
        labels = {"case": case, "group": group, "implementation": name, "setting": setting}
        yield labels | {"cpu_seconds": seconds, "last": name == names[-1]}


class Worker:
    """A process of `bench/peers.py`; workers build and warm up side by side until `ready`."""

    def __init__(self, implementation: str, case: Record, setting: str) -> None:
        job = case | {"implementation": implementation, "keep_memory": setting != "bare"}
        env = {k: v for k, v in os.environ.items() if "MALLOC" not in k} | {"PYTHONPATH": str(ROOT)}
        command = [sys.executable, "-m", "bench.peers", json.dumps(job)]
        self.process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=env
        )

    def ready(self) -> None:
        self._read()

    def sample(self) -> dict[str, float]:
        assert self.process.stdin
        self.process.stdin.write("\n")
        self.process.stdin.flush()
        return self._read()

    def close(self) -> None:
        self.process.communicate()

    def _read(self) -> dict[str, float]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        if not line:
            raise SystemExit(f"worker ended: {self.process.args}")
        return json.loads(line)


def per_second(record: Record, what: str) -> float:
    """Tokens per second; of a whole model, images."""
    case = record["case"]
    count = case["images"] * (1 if case["router"] == "model" else TOKENS)
    return count / statistics.median(record["cpu_seconds"][what])


def peak_share(record: Record, what: str) -> float:
    """Of the matmul rate in the same process and rounds; backward counts twice the forward."""
    case = record["case"]
    mixing = 3 * TOKENS * SLOTS * DIM if case["router"] == "soft" else TOKENS * DIM * case["experts"]
    flops = 2 * case["images"] * (2 * SLOTS * DIM * HIDDEN + mixing)
    if case["router"] == "model":
        flops = case["images"] * (9.20e9 if record["implementation"] == "timm dense" else 8.57e9)
    flops *= 3 if what == "train" else 1
    seconds = zip(record["cpu_seconds"]["gemm"], record["cpu_seconds"][what], strict=True)
    return statistics.median(flops / GEMM_FLOPS * gemm / step for gemm, step in seconds)


def print_group(records: list[Record]) -> None:
    case = records[0]["case"]
    print(
        f"\n{case['router']} E={case['experts']} {case['dtype']}, {case['images']} images:"
        f" {records[0]['group']}"
    )
    for record in records:
        cells = [f"  {record['implementation']:19} {record['setting']:12}"]
        for what in STEPS:
            rate, share = per_second(record, what), peak_share(record, what)
            cells.append(f"{what} {rate:9.2f}/s {share:5.0%} of peak, ours is {ratio(records, record, what)}")
        print("  ".join(cells), flush=True)


def ratio(records: list[Record], other: Record, what: str) -> str:
    ours = next(record for record in records if record["implementation"] == "ours")
    return "      " if other is ours else f"{per_second(ours, what) / per_second(other, what):.3f}x"


def verdicts(records: list[Record]) -> Iterator[str]:
    """Ours against the best peer, for each target."""
    print()
    for router, dtype in dict.fromkeys((r["case"]["router"], r["case"]["dtype"]) for r in records):
        for what, all_experts, group, least in [MODEL_TARGET] if router == "model" else TARGETS:
            for experts in all_experts:
                case = {"router": router, "experts": experts, "dtype": dtype}
                rates = {
                    r["implementation"]: per_second(r, what)
                    for r in records
                    if r["group"] == group and case.items() <= r["case"].items()
                }
                best = max((rates[name] for name in PEERS[router] if name in rates), default=None)
                if best:
                    times = rates["ours"] / best
                    met = "met   " if times >= least else "MISSED"
                    yield f"{met} {router} E={experts} {dtype} {what}, {group}: {times:.3f}x, target {least}x"
    flat = {r["case"]["experts"]: r for r in records if r["group"] == "flatness"}
    if flat:
        shares = [f"{what} {per_second(flat[256], what) / per_second(flat[8], what):.2f}" for what in STEPS]
        yield f"flatness, soft, tokens/s at E=256 over E=8, {MANY_IMAGES} images: {', '.join(shares)}"


if __name__ == "__main__":
    main()

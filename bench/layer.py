"""Forward + backward of a MoE layer for each router, as a fraction of this machine's matmul peak.

  python bench/layer.py [--out bench/results/layer-<hardware>.json]

One thread, float32, D=384, H=1536, 196 tokens, 16 images, 256 slots per image; medians of interleaved rounds.
"""

import argparse
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import torch

from moe.init import init_weights
from moe.layer import MoEConfig, MoELayer
from moe.routers import ExpertChoiceConfig, RouterConfig, SoftConfig, TokenChoiceConfig

DIM, HIDDEN, TOKENS, IMAGES, SLOTS = 384, 1536, 196, 16, 256
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", help="also write the results as JSON")
    args = parser.parse_args()
    torch.set_num_threads(1)
    steps = {"matmul": matmul_step()} | {
        f"{router.kind}-e{experts}": layer_step(router, experts)
        for experts in (8, 32)
        for router in (
            SoftConfig(slots_per_expert=SLOTS // experts),
            TokenChoiceConfig(k=1, capacity_factor=SLOTS / TOKENS),
            ExpertChoiceConfig(capacity_factor=SLOTS / TOKENS),
        )
    }
    seconds: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(ROUNDS + 1):
        for name, (step, _flops) in steps.items():
            began = time.process_time()
            step()
            seconds[name].append(time.process_time() - began)
    rates = {name: [flops / s / 1e9 for s in seconds[name][1:]] for name, (_, flops) in steps.items()}
    peak = statistics.median(rates["matmul"])
    for name, rate in rates.items():
        low, middle, high = min(rate), statistics.median(rate), max(rate)
        print(f"{name:20} {middle:7.1f} GFLOP/s ({low:.1f} .. {high:.1f})  {middle / peak:5.2f} of matmul")
    if args.out:
        result = {
            "hardware": hardware(),
            "commit": commit(),
            "torch": torch.__version__,
            "gflop_per_s": rates,
        }
        Path(args.out).write_text(json.dumps(result, indent=1))


def matmul_step() -> tuple[Callable[[], object], float]:
    a, b = torch.randn(1024, 1024), torch.randn(1024, 1024)
    return lambda: a @ b, 2 * 1024**3


def layer_step(router: RouterConfig, experts: int) -> tuple[Callable[[], object], float]:
    """A training step, and its FLOPs: three times the forward matmuls of experts and of soft mixing."""
    layer = MoELayer(MoEConfig(num_experts=experts, router=router), dim=DIM, hidden=HIDDEN)
    init_weights(layer, seed=0)
    x = torch.randn(IMAGES, TOKENS, DIM, requires_grad=True)
    slots = experts * router.slots(num_tokens=TOKENS, num_experts=experts)
    mixing = 3 * TOKENS * slots * DIM if router.kind == "soft" else TOKENS * DIM * experts

    def step() -> None:
        layer.zero_grad(set_to_none=True)
        layer(x, torch.ones(IMAGES))[0].sum().backward()

    return step, 3 * 2 * IMAGES * (slots * 2 * DIM * HIDDEN + mixing)


def hardware() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    model = next(
        (line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor()
    )
    return f"{model}, 1 thread"


def commit() -> str:
    return subprocess.run(
        ["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=True
    ).stdout.strip()


if __name__ == "__main__":
    main()

"""Checks for `bench/gpu.py`: results against the CPU, repeatability, and what a step asks of the host.

A part of the bench is a function that yields cases; a case has a name and a function that returns a row. The
rows so far, of earlier runs too, are what later cases compare theirs with.
"""

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from functools import cache, cached_property, partial
from itertools import pairwise, product
from statistics import median
from typing import Any
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from moe import ExpertChoiceConfig, MixtureConfig, MoEConfig, SoftConfig, TokenChoiceConfig, TopKConfig
from moe.config import members
from moe.layout import ParallelConfig
from moe.models.vit import ViT, ViTConfig
from moe.parallel import accumulate, build_whole, update
from moe.presets import VITS
from moe.routers import RouterConfig
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig
from moe.routers.balance import SignConfig
from moe.routing import GatherRouting, Routing
from moe.rows import RowsRouting

ROUTERS: dict[str, RouterConfig | None] = {
    "dense": None,
    # On CUDA its experts have code of their own, a grouped matmul.
    "dropless": TopKConfig(k=2, capacity_factor="dropless", score="sigmoid", balance=SignConfig()),
    "top-k": TopKConfig(k=2, capacity_factor=0.8, cosine=True, balance_weight=0.1, z_weight=0.1),
    "soft": SoftConfig(slots_per_expert=2, noise_std=0.5),
    "token choice": TokenChoiceConfig(
        k=2, capacity_factor=0.8, priority="max", importance_weight=0.1, load_weight=0.1
    ),
    "expert choice": ExpertChoiceConfig(capacity_factor=1.5, noise_std=1.0),
    "sinkhorn token choice": TokenChoiceConfig(k=2, affinity=SinkhornConfig(), combine="affinity"),
    "sinkhorn expert choice": ExpertChoiceConfig(affinity=SinkhornConfig(), combine="affinity"),
    "sparse transport, E*C <= S": ExpertChoiceConfig(affinity=SparseTransportConfig()),
    "sparse transport, E*C > S": ExpertChoiceConfig(capacity_factor=2.0, affinity=SparseTransportConfig()),
    "mixture": MixtureConfig(),
    "mixture, hierarchical": MixtureConfig(level="hierarchical"),
}
# Every other router that exists.
ROUTERS |= {
    config.kind: config()
    for config in members(RouterConfig)
    if config.kind not in {router.kind for router in ROUTERS.values() if router}
}
# Largest relative errors of the loss and of the whole gradient, as in tests/moe/test_parallel_gpu.py, and
# the largest share of a layer's decisions that differ.
BOUNDS = {torch.float32: (1e-5, 1e-4, 0.01), torch.bfloat16: (2e-3, 0.05, 0.2)}
# The plan amplifies rounding: in float32, several percent of its decisions differ from those in float64.
FOLLOWS_ROUNDING = "sparse transport, E*C > S"
SEED = 3
FLUSH_BYTES = 256 << 20  # more than any L2 cache
CYCLES_PER_S = 2e9
LAUNCHES = ("cudaLaunch", "cuLaunch", "cudaGraphLaunch", "cudaMemcpy", "cudaMemset")
MAX_NORM = 1.0
Row = dict[str, Any]
Rows = dict[str, Row]  # of a part, by the names of its cases
Case = tuple[str, Callable[[], Row]]
Cases = Callable[["Bench", Rows], Iterator[Case]]
Batch = tuple[Tensor, Tensor, Tensor]


class Bench:
    """The device to measure, its clock and its ceilings; with `tiny`, sizes are for a test on a CPU."""

    def __init__(self, device: torch.device, tiny: bool) -> None:
        self.device, self.tiny, self.cuda = device, tiny, device.type == "cuda"

    def sync(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def mark(self) -> Any:
        """Returns a point in time: of the device's queue, or of the host if that computes."""
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, first: Any, second: Any) -> float:
        """Seconds between two marks, which the device must have reached."""
        return first.elapsed_time(second) / 1000 if self.cuda else second - first

    def seconds(self, step: Callable[[], object], repeats: int = 10) -> float:
        """Returns the median time of `step` on the device, with cold caches and without waits for the host.

        The device sleeps before each step while the host enqueues all of it. What the host takes is measured
        in "launches" and in whole training steps.
        """
        for _ in range(2):
            step()
        flush = torch.empty(FLUSH_BYTES if self.cuda else 0, dtype=torch.uint8, device=self.device)
        self.sync()
        began, marks = time.perf_counter(), []
        step()
        host_s = time.perf_counter() - began
        for _ in range(3 if self.tiny else repeats):
            if self.cuda:
                flush.zero_()
                torch.cuda._sleep(int(2 * min(host_s, 0.05) * CYCLES_PER_S))
            first = self.mark()
            step()
            marks.append((first, self.mark()))
        self.sync()
        return median([self.between(*pair) for pair in marks])

    @cached_property
    def memory(self) -> float:
        """The free bytes of GPU memory at the first call."""
        return torch.cuda.mem_get_info()[0] if self.cuda else math.inf

    @cached_property
    def peak_flops(self) -> float:
        """FLOP/s of a large matmul in bfloat16."""
        size = 256 if self.tiny else 8192
        a, b = torch.randn(2, size, size, device=self.device, dtype=torch.bfloat16)
        return 2 * size**3 / self.seconds(lambda: a @ b)

    @cached_property
    def bandwidth(self) -> float:
        """Returns the bytes that a large copy reads and writes in a second."""
        source = torch.randn(1 << (20 if self.tiny else 30), device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))

    def ceilings(self) -> Row:
        return {"peak_tflops": self.peak_flops / 1e12, "copy_tb_s": self.bandwidth / 1e12}


class TrainStep:
    """A whole training step in three phases, over random images."""

    def __init__(self, model: ViT, device: torch.device, images: int, *, stats: bool = False) -> None:
        self.model, self.stats, size = model, stats, model.config.image_side()
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        self.images = torch.randn(images, 3, size, size, device=device)
        self.labels = torch.randint(0, model.config.num_outputs(), (images,), device=device)
        self.keys = torch.arange(images, device=device)
        self.loss = self.images.new_zeros(())

    def forward(self, last: bool = True) -> None:
        accumulate(self.model, last=last)
        output = self.model(self.images, keys_B=self.keys, return_stats=self.stats)
        self.loss = F.cross_entropy(output.logits, self.labels) + output.aux

    def backward(self) -> None:
        self.loss.backward()

    def update(self) -> None:
        update(self.model, self.optimizer, MAX_NORM)
        self.optimizer.zero_grad(set_to_none=True)

    def __call__(self) -> None:
        self.forward()
        self.backward()
        self.update()


def small(name: str, depth: int = 2, moe_blocks: int = 2, dropout: float = 0.0) -> ViTConfig:
    """The debug model with four experts in its last blocks."""
    router, layers = ROUTERS[name], f"last_{moe_blocks}"
    moe = router and MoEConfig(layers=layers, num_experts=4, router=router, expert_dropout=dropout)
    return replace(VITS["debug"], depth=depth, moe=moe)


def correct(bench: Bench, rows: Rows) -> Iterator[Case]:
    """Loss and gradient against float64 on the CPU, and whether a second pass gives the same bits."""
    for how, check in (("", compare), (", repeated", repeat)):
        for name, dtype in product(ROUTERS, BOUNDS):
            label = f"{name}, {str(dtype).removeprefix('torch.')}{how}"
            yield label, partial(check, bench, name, dtype)


@cache
def reference(name: str) -> ViT:
    """The debug model in float64 on the CPU."""
    model = ViT(small(name, dropout=0.1), seed=SEED).double()
    wake(model)
    return model


def build(bench: Bench, config: ViTConfig, dtype: torch.dtype, compiled: bool = False) -> ViT:
    """The model on the device; it computes in `dtype`."""
    compute_dtype, options = None if dtype is torch.float32 else dtype, ParallelConfig(compile=compiled)
    model = build_whole(config, bench.device, seed=SEED, options=options, compute_dtype=compute_dtype)
    assert isinstance(model, ViT)
    wake(model)
    return model


def wake(model: ViT) -> None:
    """Draws a head: from its start at zero, a head passes no gradient on."""
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        model.head.weight.copy_(torch.randn(model.head.weight.shape, generator=generator) / 10)


def random_batch(images: int, size: int) -> Batch:
    generator = torch.Generator().manual_seed(SEED)
    pixels = torch.randn(images, 3, size, size, generator=generator)
    return pixels, torch.arange(images) % 10, torch.arange(images)


def forward_backward(model: ViT, batch: Batch) -> tuple[float, list[Tensor], list[Tensor]]:
    """Returns the loss, the gradients, and the decisions of each router that makes any: the token in each
    slot, or the experts of each token if there are no slots.
    """
    images, labels, keys = (field.to(model.head.weight.device) for field in batch)
    model.zero_grad(set_to_none=True)
    accumulate(model, last=True)
    output = model(images, keys_B=keys, return_routings=True)
    loss = F.cross_entropy(output.logits, labels) + output.aux
    loss.backward()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    deciding = [routing for routing in output.routings if isinstance(routing, GatherRouting | RowsRouting)]
    decisions = [r.token_GEC if isinstance(r, GatherRouting) else r.expert_GSK for r in deciding]
    return loss.item(), gradients, decisions


def decided(decisions: list[Tensor]) -> ExitStack:
    """Returns a context in which routers decide as they did in another forward pass."""
    left, stack = iter(decisions), ExitStack()

    def take_next(make: Callable[..., Routing], _: Tensor, **rest: Any) -> Routing:
        return make(next(left), **rest)

    for module in {sys.modules[base.__module__] for kind in members(RouterConfig) for base in kind.__mro__}:
        for name in ("gather_routing", "rows_routing"):
            if make := getattr(module, name, None):
                stack.enter_context(patch.object(module, name, partial(take_next, make)))
    return stack


def compare(bench: Bench, name: str, dtype: torch.dtype, compiled: bool = False) -> Row:
    """Relative errors of the loss and of the gradient, and the share of decisions that differ.

    Where two scores are almost equal, rounding decides which expert a token has. So that this does not hide
    other errors, the reference computes loss and gradient with the decisions of the device.
    """
    allow_tf32(False)
    batch = random_batch(16, 8)
    model = build(bench, small(name, dropout=0.1), dtype, compiled)
    forward_backward(model, batch)
    loss, gradients, ours = forward_backward(model, batch)
    exact, batch = reference(name), (batch[0].double(), *batch[1:])
    _, _, theirs = forward_backward(exact, batch)
    ours = [chosen.cpu() for chosen in ours]
    with decided(ours):
        expected_loss, expected_gradients, _ = forward_backward(exact, batch)
    off = square = 0.0
    for gradient, expected in zip(gradients, expected_gradients, strict=True):
        off += (gradient.cpu().double() - expected).square().sum().item()
        square += expected.square().sum().item()
    pairs = zip(ours, theirs, strict=True)
    moved = [(a.sort(-1).values != b.sort(-1).values).double().mean().item() for a, b in pairs]
    errors = {
        "loss_error": abs(loss / expected_loss - 1),
        "gradient_error": (off / square) ** 0.5,
        "moved": max(moved, default=0.0),
    }
    within = [error <= most for error, most in zip(errors.values(), BOUNDS[dtype], strict=True)]
    return errors | {"passed": all(within[: 2 if name == FOLLOWS_ROUNDING else 3])}


def allow_tf32(allowed: bool) -> None:
    """Allows TF32 in matmuls and convolutions, or in none. Torch's default allows it in convolutions only."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = allowed


def repeat(bench: Bench, name: str, dtype: torch.dtype) -> Row:
    """Whether gradients of equal inputs are equal to the bit, and if not, which ones are not; and the kind of
    attention that torch chose.

    The model is wide enough for kernels of more than one block, whose order is not fixed.
    """
    config, row = small(name, moe_blocks=1), Row()
    if not bench.tiny:
        config = replace(VITS["S/16"], depth=2, moe=config.moe)
    model, batch = build(bench, config, dtype), random_batch(4 if bench.tiny else 32, config.image_side())
    names = [parameter for parameter, _ in model.named_parameters()]
    with Operators() as operators:
        forward_backward(model, batch)
    row["attention"] = ", ".join(sorted(operators.attention)) or "matmuls"
    for mode, deterministic in (("by_default", False), ("deterministic", True)):
        torch.use_deterministic_algorithms(deterministic)
        try:
            first, *others = [forward_backward(model, batch)[1] for _ in range(3)]
            differ = [
                parameter
                for parameter, a, *rest in zip(names, first, *others, strict=True)
                if not all(torch.equal(a, b) for b in rest)
            ]
            row[mode] = f"{len(differ)} differ: {', '.join(differ[:3])}" if differ else "equal"
        except RuntimeError as error:  # an operator has no deterministic form
            row[mode] = str(error)[:300]
        finally:
            torch.use_deterministic_algorithms(False)
    return row


def launches(bench: Bench, rows: Rows) -> Iterator[Case]:
    """Syncs, kernels and the host's time of a training step: tiny tensors, the depth of B/16."""
    for how in ("", ", with statistics"):
        for name in ROUTERS:
            yield name + how, partial(launched, bench, name, rows, "dense" + how, stats=bool(how))


def launched(
    bench: Bench, name: str, rows: Rows, base: str, *, stats: bool = False, compiled: bool = False
) -> Row:
    """One row. A MoE block is compared with one of the dense model in row `base`."""
    depth = 2 if bench.tiny else 12
    config = small(name, depth=depth, moe_blocks=depth // 2)
    model = build(bench, config, torch.bfloat16, compiled)
    step = TrainStep(model, bench.device, 8, stats=stats)
    for _ in range(3):
        step()
    sync = synced(step) if bench.cuda else "none, on a CPU"
    phases = {"forward": step.forward, "backward": step.backward, "update": step.update}
    queued(bench, bench.sync)  # the profiler's first use
    counts, dense = dict[str, int](), rows.get(base, {}) if config.moe else {}
    for phase, call in phases.items():
        counts |= {f"{phase}_{what}": number for what, number in queued(bench, call).items()}
    # A profiler that sees nothing has failed.
    row = Row(sync=sync, passed=sync.startswith("none") and all(counts.values())) | counts
    for key in [key for key in counts if key in dense and not key.startswith("update")]:
        row[f"block_{key}"] = (counts[key] - dense[key]) / (depth // 2)
    times = {phase: list[float]() for phase in (*phases, "step")}
    for _ in range(3 if bench.tiny else 20):
        bench.sync()
        marks = [time.perf_counter()]
        for call in phases.values():
            call()
            marks.append(time.perf_counter())
        bench.sync()
        for phase, (began, ended) in zip(phases, pairwise(marks), strict=True):
            times[phase].append(ended - began)
        times["step"].append(time.perf_counter() - marks[0])
    return row | {f"{phase}_host_ms": 1000 * median(seconds) for phase, seconds in times.items()}


def synced(step: TrainStep) -> str:
    """Returns the message if a step waits for the device, else ``none``."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        step.optimizer.zero_grad(set_to_none=True)
        return str(error)[:300]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return "none"


def queued(bench: Bench, call: Callable[[], object]) -> dict[str, int]:
    """Counts what `call` launches, and the kernels, copies and fills that run, which are more if a launch is
    that of a CUDA graph. On a CPU, operators."""
    if not bench.cuda:
        with Operators() as operators:
            call()
        return {"operators": operators.count}
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
        bench.sync()
    events = [event for event in profiler.events() or [] if not event.is_user_annotation]
    return {
        "launches": sum(event.name.startswith(LAUNCHES) for event in events),
        "kernels": sum(event.device_type.name == "CUDA" for event in events),
    }


class Operators(TorchDispatchMode):
    """Counts operators that compute or copy, which would be kernels, and collects the names of those of
    attention. A custom operator counts as one."""

    def __init__(self) -> None:
        super().__init__()
        self.count, self.attention = 0, set[str]()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        idle = func.is_view or any(word in func.__name__ for word in ("empty", "detach", "view"))
        self.count += not idle
        if "attention" in func.__name__ and "backward" not in func.__name__:
            self.attention.add(func.__name__)
        return func(*args, **(kwargs or {}))

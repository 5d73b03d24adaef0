"""Speed for `bench/gpu.py`: MoE layers, whole training steps and inference."""

import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from itertools import pairwise, product
from math import prod
from statistics import median

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.gpu_checks import ROUTERS as CHECKED, Bench, Case, Row, Rows, TrainStep, allow_tf32
from bench.peers import DIM, PEERS, ROUTERS, SLOTS, TOKENS, Layer, build
from moe import ExpertChoiceConfig, MoEConfig, SoftConfig, ViT, ViTConfig
from moe.cost import (
    forward_gflops_2mac,
    model_costs,
    num_params,
    param_shapes,
    slots_per_token,
    train_flops_6mac,
)
from moe.experts import Experts
from moe.layout import ParallelConfig
from moe.parallel import build_whole
from moe.presets import VITS
from moe.routers import RouterConfig

OTHERS = {name: router for router in ROUTERS for name in PEERS[router]}  # peer -> its router
EQUAL_SLOTS = 4096  # of all experts together, where the number of experts varies
IMAGES, FEWER_IMAGES = 256, 64
MICROBATCHES = 4  # of IMAGES each: 1,024 images per update
FLOAT32_ERROR, TF32_ERROR = 1e-5, 1e-2  # the most, relative


@dataclass(frozen=True)
class Shape:
    """A MoE layer and the rows that each of its experts computes."""

    dim: int
    experts: int
    rows: int

    def images(self) -> int:
        return self.rows * self.experts // SLOTS

    def flops(self, router: RouterConfig | None = None) -> float:
        """FLOPs of the experts' forward pass, and of the router, dispatch and combine if they are matmuls."""
        flops = 4.0 * self.experts * self.rows * self.dim * 4 * self.dim
        if isinstance(router, SoftConfig):
            return flops + 6 * self.images() * TOKENS * SLOTS * self.dim
        return flops + (2 * self.images() * TOKENS * self.dim * self.experts if router else 0)

    def roofline(self, bench: Bench) -> float:
        """FLOP/s that the device can reach in the experts' matmuls, forward and backward alike: each reads
        two matrices and writes one, of rows, weights and hidden units, in two bytes."""
        rows, hidden = self.rows * self.dim, self.rows * 4 * self.dim
        read_and_written = 2 * 2 * self.experts * (rows + hidden + self.dim * 4 * self.dim)
        return min(bench.peak_flops, bench.bandwidth * self.flops() / read_and_written)


class Matmuls(nn.Module):
    """The experts' two matmuls without biases and GELU."""

    def __init__(self, shape: Shape, grouped: bool) -> None:
        super().__init__()
        self.experts, self.grouped = Experts(shape.experts, shape.dim, 4 * shape.dim), grouped
        self.end_E = torch.arange(1, shape.experts + 1, dtype=torch.int32) * shape.rows

    def forward(self, x_END: Tensor) -> Tensor:
        w_in, w_out = self.experts.w_in_EDF, self.experts.w_out_EFD
        if not self.grouped:
            return torch.bmm(torch.bmm(x_END, w_in), w_out)
        h_MF = F.grouped_mm(x_END.flatten(0, 1), w_in, offs=self.end_E)
        return F.grouped_mm(h_MF, w_out, offs=self.end_E).view_as(x_END)


def layers(bench: Bench, rows: Rows) -> Iterator[Case]:
    """Transport solvers, the experts' matmuls and whole layers; rows per expert as in the papers first."""
    yield "ceilings", bench.ceilings
    for name, router in CHECKED.items():
        if isinstance(router, ExpertChoiceConfig) and router.affinity.kind != "softmax":
            yield f"solver of {name}", partial(solver, bench, router)
    all_rows, experts, dims = (256, 1024, 64, 4096), (32, 128, 8, 256), (DIM, 1024, 768)
    if bench.tiny:
        all_rows, experts, dims = (64,), (8,), (32, DIM)
    for per_expert, dim, count in product(all_rows, dims, experts):
        names = ["experts", "bmm", "grouped_mm", *ROUTERS] * (not bench.tiny or dim == dims[0])
        names += OTHERS if dim == DIM and per_expert == all_rows[0] else ()
        for name in names:
            yield (
                f"D={dim} E={count} rows={per_expert}: {name}",
                partial(layer, bench, Shape(dim, count, per_expert), name),
            )


@torch.no_grad()
def solver(bench: Bench, router: ExpertChoiceConfig) -> Row:
    """Time of a MoE layer's transport plans for 256 images in groups of 8."""
    G, S, E = (2, 64, 4) if bench.tiny else (32, 1576, 32)
    logits_GSE, valid_GS = torch.randn(G, S, E, device=bench.device), torch.ones(G, S, device=bench.device)
    gates_GSE, capacity = logits_GSE.softmax(-1), router.slots(num_tokens=S, num_experts=E)
    plan = partial(router.affinity.plan, logits_GSE, gates_GSE, valid_GS, capacity)
    return {"ms": 1000 * bench.seconds(plan)}


def layer(bench: Bench, shape: Shape, name: str) -> Row:
    """Time, FLOP/s and the share of the roofline of the experts' matmuls, without and with backward."""
    router = ROUTERS.get(name)
    whole = router is not None or name in OTHERS
    with bench.device:
        x = torch.randn(*((shape.images(), TOKENS) if whole else (shape.experts, shape.rows)), shape.dim)
        if name in OTHERS:
            try:
                module = build(OTHERS[name], name, shape.experts)
            except ImportError as error:
                return {"skipped": f"not installed: {error.name}"}
        elif router:
            with torch.device("meta"):  # where no weights are drawn
                module = Layer(router, shape.experts, shape.dim)
            module.to_empty(device=bench.device)
        else:
            plain = name == "experts"
            module = (
                Experts(shape.experts, shape.dim, 4 * shape.dim) if plain else Matmuls(shape, name != "bmm")
            )
    draw_weights(module)
    for part in [module] if name in OTHERS else [m for m in module.modules() if isinstance(m, Experts)]:
        part.bfloat16()
    x = x.bfloat16().requires_grad_()
    gradient = torch.randn_like(x)

    def forward() -> None:
        with torch.no_grad():
            module(x)

    def train() -> None:
        module.zero_grad(set_to_none=True)
        x.grad = None
        module(x).backward(gradient)

    row, flops, roofline = Row(), shape.flops(router), shape.roofline(bench)
    try:
        for what, step, passes in (("forward", forward, 1), ("train", train, 3)):
            seconds = bench.seconds(step)
            rate = passes * flops / seconds
            row |= {f"{what}_ms": 1000 * seconds, f"{what}_tflops": rate / 1e12}
            row[f"{what}_of_roofline"] = rate / roofline
    except RuntimeError as error:
        if name in ROUTERS or name == "experts":
            raise
        row["skipped"] = str(error)[:300]  # others need not have every dtype
    return row


def draw_weights(module: nn.Module) -> None:
    """Random weights, drawn on the device: on the host, billions take longer than the bench."""
    with torch.no_grad():
        for name, p in module.named_parameters():
            if p.ndim > 1:
                p.normal_(0, 0.02)
            else:
                p.fill_(float(name.endswith(("weight", "scale"))))


@lru_cache(maxsize=1)
def model_of(bench: Bench, config: ViTConfig, compiled: bool) -> ViT:
    """Computes in bfloat16. Only the last one is kept."""
    options = ParallelConfig(compile=compiled)
    model = build_whole(config, bench.device, seed=None, options=options, compute_dtype=torch.bfloat16)
    assert isinstance(model, ViT)
    draw_weights(model)
    return model


def models() -> dict[str, ViTConfig]:
    """Dense models and the MoE models that are compared with them.

    An image has 196 tokens. One slot for each of 128 experts is less work than a dense MLP, so there is a
    Soft MoE of 196 slots too.
    """
    dense, vmoe = VITS["S/16"], VITS["vmoe-B/16"]
    soft = MoEConfig(layers="last_6", num_experts=196, router=SoftConfig())
    return {
        "S/16": dense,
        "soft-S/16-128e": VITS["soft-S/16-128e"],
        "soft-S/16-196e": replace(dense, moe=soft),
        "vmoe-S/16-32e": replace(vmoe, width=384, heads=6, mlp_dim=1536, representation_size=384),
        "B/16": VITS["B/16"],
        "soft-B/16-128e": VITS["soft-B/16-128e"],
    }


def shrunk(config: ViTConfig) -> ViTConfig:
    """The debug model with the routers of `config`."""
    moe = config.moe
    if moe:
        router = replace(moe.router, total_slots=16) if isinstance(moe.router, SoftConfig) else moe.router
        moe = replace(moe, layers=(1,), num_experts=min(8, moe.num_experts), router=router)
    return replace(VITS["debug"], moe=moe)


def dense_of(name: str) -> str:
    return "B/16" if "B/16" in name else "S/16"


@dataclass(frozen=True)
class Run:
    """A model to train; `base` is the label of the run that it is compared with."""

    label: str
    config: ViTConfig
    base: str
    compiled: bool = False
    microbatches: int = 1
    images: int = IMAGES


def training(bench: Bench, rows: Rows) -> Iterator[Case]:
    """Steps with AdamW and clipping."""
    for run in training_runs(bench):
        yield run.label, partial(train, bench, run, rows)


def training_runs(bench: Bench) -> Iterator[Run]:
    yield from [Run(name, config, dense_of(name)) for name, config in models().items()]
    for name in ("B/16", "soft-B/16-128e"):
        label, base = (f"{model}, {MICROBATCHES} microbatches" for model in (name, "B/16"))
        yield Run(label, models()[name], base, microbatches=MICROBATCHES)
    # Soft MoE, figure 6, in a single block: with more, thousands of experts do not fit on one device.
    counts = (8, 16) if bench.tiny else (8, 4096, 512, 64, 2048, 256, 1024, 128, 32, 16)
    for count in counts:
        moe = MoEConfig(layers="last_1", num_experts=count, router=SoftConfig(total_slots=EQUAL_SLOTS))
        config, few = replace(VITS["S/16"], moe=moe), f"{EQUAL_SLOTS} slots of {counts[0]} experts"
        yield Run(f"{EQUAL_SLOTS} slots of {count} experts", config, few, images=FEWER_IMAGES)


def train_bytes(config: ViTConfig) -> float:
    """Returns the least memory of a training step on one image: of a parameter the weight, the gradient and
    AdamW's two means in float32 and a copy in bfloat16, one gradient in bfloat16, and activations."""
    sizes = [*map(prod, param_shapes(config).values())]
    return (4 * 4 + 2) * sum(sizes) + 2 * max(sizes) + sum(model_costs(config, number=2).activations.saved)


def train(bench: Bench, run: Run, rows: Rows) -> Row:
    """Medians of consecutive steps. A batch that does not fit is split into microbatches: an update is of as
    many images as the one that it is compared with."""
    config = shrunk(run.config) if bench.tiny else run.config
    model_of.cache_clear()
    gc.collect()  # a model is a cycle of references
    if (needed := train_bytes(config)) > bench.memory:
        gb, free_gb = round(needed / 1e9), round(bench.memory / 1e9)
        return {"skipped": f"does not fit: a step needs {gb} GB at least, and {free_gb} GB are free"}
    images, microbatches, times = 4 if bench.tiny else run.images, run.microbatches, {}
    total, model = images * microbatches, model_of(bench, config, run.compiled)
    while not times:
        if bench.cuda:
            torch.cuda.reset_peak_memory_stats()
        try:
            times = phases(bench, TrainStep(model, bench.device, images), microbatches)
        except torch.OutOfMemoryError:
            if images == 1:
                raise
        if not times:  # the error is gone, and with it what the step holds
            images, microbatches = images // 2, microbatches * 2
            model.zero_grad(set_to_none=True)
            gc.collect()
    memory_gb = torch.cuda.max_memory_allocated() / 1e9 if bench.cuda else None
    model_of.cache_clear()
    rate, base = total / times["step"], rows.get(run.base, {}).get("images_per_s")
    flops = train_flops_6mac(config, 1) * rate
    row: Row = {
        "images": total,
        "microbatches": microbatches,
        "images_per_s": rate,
        "of_base": rate / base if base else None,
        "without_update": total / (times["forward"] + times["backward"]),
        "slots_per_token": slots_per_token(config),
        "tflops": flops / 1e12,
        "of_peak": flops / bench.peak_flops,
        "memory_gb": memory_gb,
    }
    return row | {f"{phase}_ms": 1000 * seconds for phase, seconds in times.items()}


def phases(bench: Bench, step: TrainStep, microbatches: int) -> dict[str, float]:
    """Seconds of each phase of an update, medians; the host does not wait between updates."""
    names, updates = ["forward", "backward"] * microbatches + ["update"], []
    for _ in range(3 if bench.tiny else 13):
        marks = [bench.mark()]
        for number in range(microbatches):
            step.forward(last=number == microbatches - 1)
            marks.append(bench.mark())
            step.backward()
            marks.append(bench.mark())
        step.update()
        updates.append([*marks, bench.mark()])
    bench.sync()
    times: dict[str, list[float]] = {"forward": [], "backward": [], "update": [], "step": []}
    for marks in updates[1 if bench.tiny else 3 :]:  # the others warm up
        seconds = [bench.between(*pair) for pair in pairwise(marks)]
        for phase in ("forward", "backward", "update"):
            times[phase].append(sum(s for s, name in zip(seconds, names, strict=True) if name == phase))
        times["step"].append(sum(seconds))
    return {phase: median(values) for phase, values in times.items()}


def inference(bench: Bench, rows: Rows) -> Iterator[Case]:
    """Forward passes without gradients. V-MoE routes 8 images together, and a single one is padded to 8."""
    for name, images in product(models(), (4,) if bench.tiny else (256, 32, 1)):
        how = f", {images} images"
        yield name + how, partial(infer, bench, name, images, rows, dense_of(name) + how)


def infer(bench: Bench, name: str, images: int, rows: Rows, base: str, *, compiled: bool = False) -> Row:
    """Images per second as called, with the host's time, and the device's time alone."""
    config = shrunk(models()[name]) if bench.tiny else models()[name]
    model = model_of(bench, config, compiled)
    batch = torch.randn(images, 3, config.image_size, config.image_size, device=bench.device)

    def forward() -> None:
        with torch.no_grad():
            model(batch)

    device_s, repeats = bench.seconds(forward), 2 if bench.tiny else 20
    bench.sync()
    first = time.perf_counter()
    for _ in range(repeats):
        forward()
    bench.sync()
    rate = repeats * images / (time.perf_counter() - first)
    dense = rows.get(base, {}).get("images_per_s")
    return {
        "images_per_s": rate,
        "of_dense": rate / dense if dense else None,
        "device_images_per_s": images / device_s,
        "device_ms": 1000 * device_s,
        "device_tflops": forward_gflops_2mac(config) / 1000 * images / device_s,
        "million_parameters": num_params(config) / 1e6,
    }


def tf32(bench: Bench, rows: Rows) -> Iterator[Case]:
    """Float32 with and without TF32: the experts' first matmul of S/16, and B/16's convolution of patches."""
    count, size = (2, 32) if bench.tiny else (128, 224)
    convolution = partial(F.conv2d, stride=16), (count, 3, size, size), (768, 3, 16, 16)
    matmul = torch.bmm, (count, SLOTS, DIM), (count, DIM, 4 * DIM)
    for name, what in (("matmul", matmul), ("convolution", convolution)):
        for allowed in (False, True):
            yield f"{name}, TF32 {'on' if allowed else 'off'}", partial(rounded, bench, allowed, *what)


def rounded(bench: Bench, allowed: bool, operator: Callable[..., Tensor], *shapes: tuple[int, ...]) -> Row:
    """Time, and the error against float64."""
    a, b = (torch.randn(*shape, device=bench.device) for shape in shapes)
    exact = operator(a.double(), b.double())
    allow_tf32(allowed)
    try:
        error = ((operator(a, b) - exact).norm() / exact.norm()).item()
        ms = 1000 * bench.seconds(lambda: operator(a, b))
    finally:
        allow_tf32(False)
    return {"relative_error": error, "ms": ms, "passed": error < (TF32_ERROR if allowed else FLOAT32_ERROR)}

"""Time against the number of experts that run: for one image, and for a hundred with different experts.

Two blocks on digits, 384 wide, each a Soft MoE with 8 experts of 3840 hidden units, which hold nearly all
weights, as in the paper's model. The model is not trained: time does not depend on weights, and images
differ in their experts all the same.

Source: Chung et al. 2024, "Beyond Parameter Count: Implicit Bias in Soft Mixture of Experts", section 4.5 and
table 3.
"""

from dataclasses import dataclass, replace
from statistics import fmean

import torch

from moe import MoEConfig, RoutingOverrides, SoftConfig, ViT
from moe.cost import forward_gflops_2mac, num_expert_params, num_params
from moe.presets import VITS
from orchestrator.evaluation.evaluate import Latency, device_name, latencies
from papers.digits import TESTED, digits, vit_config
from papers.results import ProgressFn, StudyResult, draw_curve, draw_reference, finish, panels

EXPERTS, WIDTH, WIDER = 8, 384, 10
RUN = (8, 6, 4, 3, 2, 1)  # experts of an image that run
BATCHES = (1, 100)
REPEATS = {1: 40, 100: 8}


@dataclass(frozen=True, kw_only=True)
class Timing:
    """The time of a batch whose images each run `k` experts."""

    k: int
    batch: int
    latency: Latency
    union: float  # experts of a layer that at least one image of the batch runs, mean over layers


def wide_model() -> ViT:
    moe = MoEConfig(
        layers="last_2",
        num_experts=EXPERTS,
        expert_dim=WIDER * WIDTH,
        router=SoftConfig(slots_per_expert=2, scale_init=8.0),
    )
    return ViT(vit_config(moe, width=WIDTH, depth=2)).eval()


def published_model() -> ViT:
    """The paper's model of 2.32 B parameters (appendix D.4): ViT-B/16, 8 experts of one slot in each of the
    last 6 blocks. Its text has lost the hidden units; 30,720 give the printed parameters.
    """
    moe = MoEConfig(layers="last_6", num_experts=8, expert_dim=30_720, router=SoftConfig())
    model = ViT(replace(VITS["B/16"], moe=moe), seed=None).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.02)
    return model


def measure(
    model: ViT,
    progress: ProgressFn,
    *,
    images: torch.Tensor | None = None,
    repeats: dict[int, int] = REPEATS,
) -> list[Timing]:
    """Times all settings in turns, on the same images, by default digits."""
    settings = [RoutingOverrides(experts=k) for k in RUN]
    rows = []
    found = digits().rgb[TESTED] if images is None else images
    for batch in BATCHES:
        images = found[:batch]
        measured = latencies(model, images, settings, repeats=repeats[batch])
        for k, setting, latency in zip(RUN, settings, measured, strict=True):
            union = mean_union(model, images, setting)
            rows.append(Timing(k=k, batch=batch, latency=latency, union=union))
            progress(f"{batch} images, {k} experts: {latency.median:.3f} ms per image, union {union:.1f}")
    return rows


@torch.no_grad()
def mean_union(model: ViT, images: torch.Tensor, setting: RoutingOverrides) -> float:
    routings = model(images, routing_overrides=setting, return_routings=True).routings
    kept = [routing.kept_GE for routing in routings]
    return fmean(int(kept_GE.any(0).sum()) for kept_GE in kept if kept_GE is not None)


def time_experts(_: int, progress: ProgressFn, *, repeats: dict[int, int] = REPEATS) -> StudyResult:
    """Implicit Bias in Soft MoE, table 3."""
    model = wide_model()
    rows = measure(model, progress, repeats=repeats)
    config = model.config
    all_ms = {row.batch: row.latency.median for row in rows if row.k == EXPERTS}
    times_faster = [all_ms[row.batch] / row.latency.median for row in rows]
    title = f"Time against experts that run: {EXPERTS} experts, {WIDER} times as wide as the model"
    figure, both = panels(title, len(BATCHES))
    for axes, batch in zip(both, BATCHES, strict=True):
        quartiles = [row.latency.quartiles for row in rows if row.batch == batch]
        draw_curve(axes, RUN, *zip(*quartiles, strict=True), label="median, quartiles")
        draw_reference(axes, RUN, [all_ms[batch] * k / EXPERTS for k in RUN], "in proportion to k")
        finish(axes, "Experts of an image that run, k", "Milliseconds per image", RUN, f"batch of {batch}")
    flops = [forward_gflops_2mac(config, RoutingOverrides(experts=row.k)) for row in rows]
    low, median, high = zip(*(row.latency.quartiles for row in rows), strict=True)
    parameters, share = num_params(config), num_expert_params(config) / num_params(config)
    device = device_name(digits().rgb.device)
    return StudyResult(
        title=title,
        table={
            "batch": [row.batch for row in rows],
            "k": [row.k for row in rows],
            "ms per image": median,
            "lower quartile": low,
            "upper quartile": high,
            "times faster": times_faster,
            "union": [row.union for row in rows],
            "GFLOPs per image": flops,
        },
        figure=figure,
        metrics={
            f"times_faster/batch-{row.batch}_k-{row.k}": times
            for row, times in zip(rows, times_faster, strict=True)
        },
        notes=[
            f"{parameters / 1e6:.1f}M parameters, {share:.1%} of them in experts; {device}",
            "union: experts of a layer that at least one image of the batch runs, mean over layers",
        ],
    )

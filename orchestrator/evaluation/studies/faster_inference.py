"""Time against the number of experts that run: for one image, and for a hundred that choose differently.

Two blocks on digits, 384 wide, each a Soft MoE with 8 experts of 3840 hidden units, which hold nearly all
weights, as in the paper's model. Not trained: time does not depend on weights, and images differ in their
experts all the same.

Source: Chung et al. 2024, "Beyond Parameter Count: Implicit Bias in Soft Mixture of Experts", section 4.5 and
table 3.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

import torch

from moe.cost import forward_gflops_2mac, num_expert_params, num_params
from moe.layer import MoEConfig
from moe.overrides import RoutingOverrides
from moe.routers import SoftConfig
from moe.vit import ViT
from orchestrator.evaluation.evaluate import Latency, device_name, latencies
from orchestrator.evaluation.studies.digits import TESTED, digits, vit_config
from orchestrator.evaluation.studies.found import Curve, Found, Panel, Say

EXPERTS, WIDTH, WIDER = 8, 384, 10
RUN = (8, 6, 4, 3, 2, 1)  # experts of an image that run
BATCHES = (1, 100)
REPEATS = {1: 40, 100: 8}


@dataclass(frozen=True, kw_only=True)
class Timed:
    """Attributes:
    latency: milliseconds per image.
    union: experts of a layer that some image of the batch runs; the mean over layers.
    """

    k: int
    batch: int
    latency: Latency
    union: float


def wide_model() -> ViT:
    moe = MoEConfig(
        layers="last_2",
        num_experts=EXPERTS,
        expert_dim=WIDER * WIDTH,
        router=SoftConfig(slots_per_expert=2, scale_init=8.0),
    )
    return ViT(vit_config(moe, width=WIDTH, depth=2)).eval()


def measure(model: ViT, say: Say, *, repeats: dict[int, int] = REPEATS) -> list[Timed]:
    """Settings take turns in one run, on the same images."""
    points = [RoutingOverrides(experts=k) for k in RUN]
    rows = []
    for batch in BATCHES:
        images = digits().rgb[TESTED][:batch]
        taken = latencies(model, images, points, repeats=repeats[batch])
        for k, point, latency in zip(RUN, points, taken, strict=True):
            union = mean_union(model, images, point)
            rows.append(Timed(k=k, batch=batch, latency=latency, union=union))
            say(f"{batch} images, {k} experts: {latency.median:.3f} ms per image, union {union:.1f}")
    return rows


@torch.no_grad()
def mean_union(model: ViT, images: torch.Tensor, point: RoutingOverrides) -> float:
    routings = model(images, routing_overrides=point, return_routings=True).routings
    kept = [routing.kept_GE for routing in routings]
    return fmean(int(kept_GE.any(0).sum()) for kept_GE in kept if kept_GE is not None)


def found(model: ViT, rows: Sequence[Timed]) -> Found:
    whole = {row.batch: row.latency.median for row in rows if row.k == EXPERTS}
    times = [whole[row.batch] / row.latency.median for row in rows]
    config, device = model.config, device_name(digits().rgb.device)
    share = num_expert_params(config) / num_params(config)
    panels = []
    for batch in BATCHES:
        ones = [row for row in rows if row.batch == batch]
        median = Curve(
            label="median, quartiles",
            x=RUN,
            y=[row.latency.median for row in ones],
            low=[row.latency.low for row in ones],
            high=[row.latency.high for row in ones],
        )
        ideal = Curve(
            label="in proportion to k", x=RUN, y=[whole[batch] * k / EXPERTS for k in RUN], reference=True
        )
        panels.append(
            Panel(
                curves=[median, ideal],
                title=f"batch of {batch}",
                x_title="Experts of an image that run, k",
                y_title="Milliseconds per image",
                x_ticks=RUN[::-1],
            )
        )
    return Found(
        title=f"Time against experts that run: {EXPERTS} experts, {WIDER} times as wide as the model",
        table={
            "batch": [row.batch for row in rows],
            "k": [row.k for row in rows],
            "ms per image": [row.latency.median for row in rows],
            "lower quartile": [row.latency.low for row in rows],
            "upper quartile": [row.latency.high for row in rows],
            "times faster": times,
            "union": [row.union for row in rows],
            "GFLOPs per image": [
                forward_gflops_2mac(config, RoutingOverrides(experts=row.k)) for row in rows
            ],
        },
        panels=panels,
        figures={
            f"times_faster/batch-{row.batch}_k-{row.k}": faster
            for row, faster in zip(rows, times, strict=True)
        },
        notes=[
            f"{num_params(config) / 1e6:.1f}M parameters, {share:.1%} of them in experts; {device}",
            "union: experts of a layer that some image of the batch runs, mean over layers",
        ],
    )

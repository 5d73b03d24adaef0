"""All router families of the papers on 8x8 digits, in minutes on a laptop.

Source: the families and capacities of Routers in Vision MoE (section 3.1), the slot counts of Soft MoE
(figure 6), at toy size. Toy data does not reproduce the papers' order of routers; it shows what each costs
and that all of it runs.
"""

from typing import Any

from moe.vit import ViTConfig
from orchestrator.config import DataConfig, RunConfig, TrainConfig
from orchestrator.sweeping.sweep import Sweep


def quickstart() -> Sweep:
    return Sweep(
        base=RunConfig(
            name="quickstart",
            model=ViTConfig(
                image_size=8, patch_size=2, width=48, depth=4, heads=3, mlp_dim=192, num_classes=10
            ),
            data=DataConfig(batch_size=64),
            train=TrainConfig(steps=220, lr=3e-3, report_every=20),  # 10 epochs
        ),
        arms=(
            {f"dense-d{depth}": {"model.depth": depth} for depth in (2, 4)}
            | {f"soft-e{e}-s{s}": _soft(e, s) for e, s in ((4, 1), (8, 1), (4, 2), (8, 2), (8, 4))}
            | {
                f"token-k{k}-c{c}": _token(k, c)
                for k, c in ((1, 0.5), (1, 1.0), (1, 2.0), (2, 0.5), (2, 1.0))
            }
            | {f"expert-c{c}": _moe("expert_choice", 8, capacity_factor=c) for c in (0.5, 1.0, 2.0)}
        ),
    )


def _soft(num_experts: int, slots_per_expert: int) -> dict[str, Any]:
    # at this size the papers' scale of 1 leaves routing nearly uniform
    return _moe("soft", num_experts, slots_per_expert=slots_per_expert, scale_init=8.0)


def _token(k: int, capacity_factor: float) -> dict[str, Any]:
    # images compete for buffers in groups of eight, as in V-MoE's configs
    arm = _moe("token_choice", 8, k=k, capacity_factor=capacity_factor)
    return arm | {"model.moe.images_per_group": 8}


def _moe(kind: str, num_experts: int, **router: Any) -> dict[str, Any]:
    fields = {"layers": "every_2", "num_experts": num_experts, "router.kind": kind}
    fields |= {f"router.{name}": value for name, value in router.items()}
    return {f"model.moe.{name}": value for name, value in fields.items()}

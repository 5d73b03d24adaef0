"""Golden case of a causal block: how much later tokens change an output, under each router."""

from typing import Any

import torch
from torch import Tensor

from moe.encoder import Block
from moe.layer import MoEConfig
from moe.routers import ExpertChoiceConfig, MixtureConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from moe.routers.affinity import SinkhornConfig, SoftmaxConfig
from moe.routing import RoutingInput
from tests.golden_report import Arrays, Meta, Report, block_state

NOT_HERE = {"hash_position", "base"}  # kinds of routers of the file


def causal(z: Arrays, meta: Meta, report: Report) -> None:
    """Outputs before and after a change of the later tokens, those of prefixes that run alone, and whether
    the router's config says what the file measures.
    """
    z = {name.removeprefix("p/"): array for name, array in z.items()}
    S, experts, kept = len(z["x"]), z["router"].shape[1], meta["last_kept"] + 1
    for number, name in enumerate(meta["order_of_routers"]):
        settings = meta["routers"][name]
        if settings["kind"] in NOT_HERE:
            continue
        router = router_of(settings, tokens=S, experts=experts)
        leaks = router.leaks_future(num_tokens=S, num_experts=experts)
        report.exact(f"{name} leaks", bool(leaks) == (name not in meta["safe"]))
        block = block_of(z, meta, router)
        y, changed = (outputs(block, z[x]) for x in ("x", "x_changed"))
        moved = (y - changed)[:kept].abs().max()
        report.bound(f"{name} moved", abs(float(moved) - meta["leak"][name]), 1e-6)
        report.close(f"{name} y", y, z["y"][number])
        report.close(f"{name} y_changed", changed, z["y_changed"][number])
        if f"y_prefix/{name}" in z:
            alone = [outputs(block, z["x"][: end + 1])[-1] for end in range(S)]
            report.close(f"{name} y_prefix", torch.stack(alone), z[f"y_prefix/{name}"])


def router_of(settings: Meta, *, tokens: int, experts: int) -> RouterConfig:
    """The file's capacity is in slots per expert; without one no token is dropped."""
    k = settings.get("k", 1)
    factor = settings.get("capacity", tokens) * experts / (k * tokens)
    match settings["kind"]:
        case "soft":
            return SoftConfig(slots_per_expert=2, normalize="none")
        case "expert_choice":
            return ExpertChoiceConfig(capacity_factor=factor)
        case "mixture" | "image_mixture" as kind:
            return MixtureConfig(level="image" if kind == "image_mixture" else "token")
    priority: Any = "max" if settings.get("order") == "bpr" else "none"
    affinity = SinkhornConfig(iterations=500) if settings["kind"] == "sinkhorn" else SoftmaxConfig()
    return TokenChoiceConfig(k=k, capacity_factor=factor, priority=priority, affinity=affinity)


def block_of(z: Arrays, meta: Meta, router: RouterConfig) -> Block:
    experts, width, hidden = z["W1"].shape
    moe = MoEConfig(num_experts=experts, router=router)
    shape: Any = {"heads": meta["heads"], "qk_norm": False, "dropout": 0.0, "causal": True}
    block = Block(width, hidden, moe=moe, index=0, **shape).to(z["x"].dtype).eval()
    values = {"phi_DEC": z["phi"]} if router.kind == "soft" else {"gate_DE": z["router"]}
    if router.kind == "mixture":
        values["temperature"] = torch.ones(1)
    block.load_state_dict(block_state(z, values))
    return block


@torch.no_grad()
def outputs(block: Block, x_SD: Tensor) -> Tensor:
    return block(x_SD.unsqueeze(0), RoutingInput(x_SD.new_ones(1))).x[0]

"""Our layers against numbers from google-research/vmoe, run in JAX; tests/goldens/*.npz.

Run here: token choice in token order without noise, expert choice without noise, Soft MoE without noise and
with the authors' l2 norm or none, the importance loss, the capacity table's rows that round and do not pad,
the Soft MoE model. Slot counts that no config of ours gives (rounded up) go to the router as they are.

Waiting for code: batch priority; noise, with the load and gshard losses; capacities that round up or to
multiples; Sinkhorn and sparsity-constrained routers; the paper's l2 norm and the ablations of Soft MoE;
class-token models; position embedding zoom; few-shot. Of the trainer, not of `moe`: optimizer and schedules.
"""

import json
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe.experts import Experts
from moe.layer import MoEConfig
from moe.routers import ExpertChoiceConfig, SoftConfig, TokenChoiceConfig, build_router
from moe.routers.capacity import slots_per_expert
from moe.routers.expert_choice import ExpertChoiceRouter
from moe.routers.losses import importance_loss
from moe.routers.token_choice import TokenChoiceRouter
from moe.vit import ViT, ViTConfig

GOLDENS = Path(__file__).parents[1] / "goldens"
META = {
    path.stem: json.loads(str(np.load(path)["meta"])) for path in sorted(GOLDENS.glob("*.npz"))
}  # the arrays stay on disk until their test
FORWARD, GRADIENT = 3e-5, 1e-4  # relative to the largest entry; SEMANTICS.md of the goldens


def names(router: str, **config) -> list[str]:
    """The goldens of a router whose config has these values."""
    return [
        name
        for name, meta in META.items()
        if meta["router"] == router and all(meta["config"][key] == value for key, value in config.items())
    ]


TOKEN_CHOICE = names("softmax_token_choice", batch_priority=False, noise=False)
EXPERT_CHOICE = names("softmax_expert_choice", noise=False)
SOFT = names("soft_moe", noise=False, normalize="vmoe") + names("soft_moe", noise=False, normalize="none")
# where gates underflow, so does the reference's own loss
IMPORTANCE = [n for n in names("softmax_token_choice") if "f32_underflow" not in META[n]["flags"]]


@dataclass(frozen=True, kw_only=True)
class FixedTokenChoice(TokenChoiceConfig):
    capacity: int

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        return self.capacity


@dataclass(frozen=True, kw_only=True)
class FixedExpertChoice(ExpertChoiceConfig):
    capacity: int

    def slots(self, *, num_tokens: int, num_experts: int) -> int:
        return self.capacity


def load(name: str) -> dict[str, Tensor]:
    with np.load(GOLDENS / f"{name}.npz") as file:
        return {key: torch.from_numpy(np.array(file[key])) for key in file.files if key != "meta"}


def close(got: Tensor, expected: Tensor, tolerance: float, what: str = "") -> None:
    assert got.shape == expected.shape, what
    assert expected.isfinite().all(), what
    bound = tolerance * max(expected.abs().max().item(), 1e-6)
    assert (got - expected).abs().max().item() <= bound, what


def test_nothing_falls_out():
    """A golden is run here or its family waits, as the module says; none is forgotten."""
    assert len(META) == 70
    assert len(TOKEN_CHOICE) == 10
    assert len(EXPERT_CHOICE) == 9
    assert len(SOFT) == 7
    assert len(IMPORTANCE) == 17
    waiting = set(META) - {*TOKEN_CHOICE, *EXPERT_CHOICE, *SOFT, "capacity__table", "model__soft_gap_qknorm"}
    assert Counter(META[name]["router"] for name in waiting) == {
        "softmax_token_choice": 8,  # batch priority, noise
        "softmax_expert_choice": 1,  # noise
        "sinkhorn_token_choice": 7,
        "sinkhorn_expert_choice": 6,
        "sparsity_constrained_expert_choice": 7,
        "soft_moe": 2,  # noise, the paper's l2 norm
        "soft_moe_ablation": 4,
        "model": 2,  # class token
        "posemb_zoom": 1,
        "fewshot": 1,
        "optimizer": 1,
        "schedule": 2,
    }


def check_layer(golden: dict[str, Tensor], router: nn.Module, group: int, weights: dict[str, str]) -> None:
    """Dispatch, combine, output, every gradient of sum(y * r). `weights`: our name -> the golden's."""
    experts = Experts(*golden["W1"].shape)
    with torch.no_grad():
        for ours, theirs in weights.items():
            router.get_parameter(ours).copy_(golden[theirs])
        for ours, theirs in (("w_in_EDF", "W1"), ("b_in_EF", "b1"), ("w_out_EFD", "W2"), ("b_out_ED", "b2")):
            experts.get_parameter(ours).copy_(golden[theirs])
    assert {name for name, _ in router.named_parameters()} == set(weights)

    x = golden["x"].clone().requires_grad_()
    x_GSD = x.reshape(-1, group, x.shape[-1])
    G, S, E, C = golden["dispatch"].shape
    routing = router(x_GSD, torch.ones(G, S))
    D_EGCS = routing.dispatch(torch.eye(S).expand(G, S, S)).view(E, G, C, S)
    slots = torch.eye(E * C).view(E, 1, C, E * C).expand(-1, G, -1, -1).flatten(1, 2)
    dispatch, combine = D_EGCS.permute(1, 3, 0, 2), routing.combine(slots).view(G, S, E, C)
    if golden["dispatch"].dtype == torch.uint8:
        assert torch.equal(dispatch, golden["dispatch"].float())
    else:
        close(dispatch, golden["dispatch"], FORWARD, "dispatch")
    close(combine, golden["combine"], FORWARD, "combine")

    y = routing.combine(experts(routing.dispatch(x_GSD))).reshape(x.shape)
    close(y, golden["y"], FORWARD, "y")
    (y * golden["r"]).sum().backward()
    close(x.grad, golden["grad_x"], GRADIENT, "x")
    for ours, theirs in weights.items():
        parameter = router.get_parameter(ours)
        close(parameter.grad, golden[f"grad_{theirs}"].view_as(parameter), GRADIENT, theirs)
    for parameter, theirs in zip(experts.parameters(), ("W1", "b1", "W2", "b2"), strict=True):
        close(parameter.grad, golden[f"grad_{theirs}"], GRADIENT, theirs)


@pytest.mark.parametrize("name", TOKEN_CHOICE)
def test_token_choice(name):
    golden, c = load(name), META[name]["config"]
    config = FixedTokenChoice(k=c["num_selected_experts"], capacity=c["resolved_capacity"])
    router = TokenChoiceRouter(config, dim=golden["x"].shape[-1], num_experts=c["num_experts"])
    check_layer(golden, router, c["group_size"], {"gate_DE": "W"})


@pytest.mark.parametrize("name", EXPERT_CHOICE)
def test_expert_choice(name):
    golden, c = load(name), META[name]["config"]
    config = FixedExpertChoice(capacity=c["resolved_capacity"])
    router = ExpertChoiceRouter(config, dim=golden["x"].shape[-1], num_experts=c["num_experts"])
    check_layer(golden, router, c["group_size"], {"gate_DE": "W"})


@pytest.mark.parametrize("name", SOFT)
def test_soft(name):
    golden, c = load(name), META[name]["config"]
    config = SoftConfig(slots_per_expert=c["num_slots"], normalize=c["normalize"] == "vmoe")
    router = build_router(config, dim=golden["x"].shape[-1], num_experts=c["num_experts"])
    weights = {"phi_DEC": "mu"} | ({"scale": "scale"} if config.normalize else {})
    check_layer(golden, router, c["group_size"], weights)


@pytest.mark.parametrize("name", IMPORTANCE)
def test_importance_loss(name):
    """Of the gates without noise, whatever the router of the file does with them."""
    golden = load(name)
    S = META[name]["config"]["group_size"]
    W = golden["W"].clone().requires_grad_()
    x_GSD = golden["x"].reshape(-1, S, len(W))
    loss = importance_loss((x_GSD @ W).softmax(-1), torch.ones(x_GSD.shape[:2]))
    close(loss, golden["importance_loss"], FORWARD)
    loss.mean().backward()
    close(W.grad, golden["importance_loss_grad_W"], GRADIENT)


def test_capacity_table():
    """The rows that round half to even and do not pad; -1 is the reference's ValueError."""
    table = load("capacity__table")
    rounded = (table["mode"] == 1) & (table["multiple_of"] <= 1)
    columns = ("num_tokens", "num_experts", "capacity_factor", "capacity")
    rows = list(zip(*(table[column][rounded].tolist() for column in columns), strict=True))
    assert len(rows) == 67
    assert sum(capacity == -1 for *_, capacity in rows) == 6
    for num_tokens, num_experts, factor, capacity in rows:
        if capacity == -1:
            with pytest.raises(ValueError, match="leaves no slot"):
                slots_per_expert(num_tokens, num_experts, factor)
        else:
            assert slots_per_expert(num_tokens, num_experts, factor) == capacity


def from_flax(flax: dict[str, Tensor], depth: int, moe_blocks: tuple[int, ...]) -> dict[str, Tensor]:
    """Flax parameters (or their gradients) under our names and layouts."""

    def norm(ours: str, theirs: str) -> dict[str, Tensor]:
        return {f"{ours}.weight": flax[f"{theirs}/scale"], f"{ours}.bias": flax[f"{theirs}/bias"]}

    def linear(ours: str, theirs: str) -> dict[str, Tensor]:
        return {f"{ours}.weight": flax[f"{theirs}/kernel"].T, f"{ours}.bias": flax[f"{theirs}/bias"]}

    state = {
        "embed.weight": flax["embedding/kernel"].permute(3, 2, 0, 1),  # HWIO -> OIHW
        "embed.bias": flax["embedding/bias"],
        "position_SD": flax["Encoder/posembed_input/pos_embedding"][0],
    }
    for i in range(depth):
        block, attention = f"Encoder/encoderblock_{i}", f"Encoder/encoderblock_{i}/SelfAttention"
        qkv = [f"{attention}/{part}" for part in ("query", "key", "value")]
        state |= norm(f"blocks.{i}.norm1", f"{block}/LayerNorm_0")
        state |= norm(f"blocks.{i}.norm2", f"{block}/LayerNorm_1")
        state |= {
            f"blocks.{i}.attention.qkv.weight": torch.cat([flax[f"{p}/kernel"].flatten(1).T for p in qkv]),
            f"blocks.{i}.attention.qkv.bias": torch.cat([flax[f"{p}/bias"].flatten() for p in qkv]),
            f"blocks.{i}.attention.norm_q.weight": flax[f"{attention}/query_ln/scale"],
            f"blocks.{i}.attention.norm_k.weight": flax[f"{attention}/key_ln/scale"],
            f"blocks.{i}.attention.out.weight": flax[f"{attention}/out/kernel"].flatten(0, 1).T,
            f"blocks.{i}.attention.out.bias": flax[f"{attention}/out/bias"],
        }
        if i in moe_blocks:
            state |= {
                f"blocks.{i}.mlp.router.phi_DEC": flax[f"{block}/Moe/Router/mu"],
                f"blocks.{i}.mlp.router.scale": flax[f"{block}/Moe/Router/scale"].view(1),
                f"blocks.{i}.mlp.experts.w_in_EDF": flax[f"{block}/Moe/Mlp/Dense_0/kernel"],
                f"blocks.{i}.mlp.experts.b_in_EF": flax[f"{block}/Moe/Mlp/Dense_0/bias"],
                f"blocks.{i}.mlp.experts.w_out_EFD": flax[f"{block}/Moe/Mlp/Dense_1/kernel"],
                f"blocks.{i}.mlp.experts.b_out_ED": flax[f"{block}/Moe/Mlp/Dense_1/bias"],
            }
        else:
            state |= linear(f"blocks.{i}.mlp.up", f"{block}/Mlp/Dense_0")
            state |= linear(f"blocks.{i}.mlp.down", f"{block}/Mlp/Dense_1")
    return state | norm("norm", "Encoder/encoder_norm") | linear("head", "head")


def test_soft_moe_model():
    """Logits and the gradient of every parameter; a dense block, then a Soft MoE block."""
    golden, c = load("model__soft_gap_qknorm"), META["model__soft_gap_qknorm"]["config"]
    encoder = c["encoder"]
    moe = MoEConfig(
        layers=tuple(encoder["moe"]["layers"]),
        num_experts=encoder["moe"]["num_experts"],
        router=SoftConfig(slots_per_expert=encoder["moe"]["router"]["num_slots"]),
    )
    config = ViTConfig(
        image_size=golden["images"].shape[1],
        patch_size=c["patch_size"][0],
        width=c["hidden_size"],
        depth=encoder["num_layers"],
        heads=encoder["num_heads"],
        mlp_dim=encoder["mlp_dim"],
        num_classes=c["num_classes"],
        moe=moe,
    )
    flax = {k.removeprefix("param/"): v for k, v in golden.items() if k.startswith("param/")}
    flax_grad = {k.removeprefix("grad/"): v for k, v in golden.items() if k.startswith("grad/")}
    blocks = config.moe_blocks()
    model, gradients = ViT(config), from_flax(flax_grad, config.depth, blocks)
    model.load_state_dict(from_flax(flax, config.depth, blocks))

    logits, aux, _ = model(golden["images"].permute(0, 3, 1, 2))
    close(logits, golden["logits"], FORWARD)
    assert aux == 0
    (logits * golden["r"]).sum().backward()
    assert set(gradients) == {name for name, _ in model.named_parameters()}
    assert sum(g.numel() for g in gradients.values()) == sum(g.numel() for g in flax_grad.values())
    for name, parameter in model.named_parameters():
        close(parameter.grad, gradients[name], GRADIENT, name)

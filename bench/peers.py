"""MoE layers to time: ours and those of other PyTorch projects, for `bench/layers.py` and `bench/gpu.py`.

Made comparable: every expert is Linear-GELU-Linear (st-moe-pytorch ships GEGLU, mixture-of-experts ReLU),
every second choice is routed, and the least capacity is 1 (both ship 4, which would compute 2-4 times the
slots here). mixture-of-experts has no biases in its experts. The peers take the exact GELU, as they ship.
tutel is missing: it is not on PyPI.
"""

import importlib
from collections.abc import Callable
from dataclasses import replace

from torch import Tensor, nn

from moe.layer import MoEConfig, MoELayer
from moe.models.vit import ViT, ViTConfig
from moe.routers import (
    ExpertChoiceConfig,
    ReLUConfig,
    RouterConfig,
    SoftConfig,
    TokenChoiceConfig,
    TopKConfig,
)
from moe.routers.balance import QuantileConfig, SignConfig

DIM, HIDDEN, TOKENS, SLOTS = 384, 1536, 196, 256  # BASELINES.md, A3
MODEL_EXPERTS = 128
PEER_CAPACITY = SLOTS / TOKENS + 1e-6  # they round down


class Layer(nn.Module):
    """A MoE layer without noise and statistics. Its router has float32 weights."""

    def __init__(
        self, router: RouterConfig, experts: int, dim: int = DIM, *, small: int = 1, shared: bool = False
    ) -> None:
        """`small`: the part of an MLP that an expert is; `shared`: half an MLP beside the experts."""
        super().__init__()
        config = MoEConfig(
            num_experts=experts,
            router=router,
            expert_dim=4 * dim // small,
            shared_dim=2 * dim if shared else None,
        )
        self.layer = MoELayer(config, dim=dim, hidden=4 * dim)

    def forward(self, x_BSD: Tensor) -> Tensor:
        return self.layer(x_BSD)


class Pick(nn.Module):
    """Some modules return more than their output."""

    def __init__(self, module: nn.Module, pick: Callable[..., Tensor]) -> None:
        super().__init__()
        self.module, self.pick = module, pick

    def forward(self, x: Tensor) -> Tensor:
        return self.pick(self.module(x))


def soft_moe(experts: int) -> nn.Module:
    wrapper = importlib.import_module("soft_moe").SoftMoELayerWrapper
    mlp = importlib.import_module("timm.layers").Mlp
    return wrapper(DIM, experts, SLOTS // experts, mlp, in_features=DIM, hidden_features=HIDDEN)


def soft_moe_pytorch(experts: int, slots: int = SLOTS) -> nn.Module:
    soft = importlib.import_module("soft_moe_pytorch").SoftMoE
    return soft(DIM, num_experts=experts, num_slots=slots // experts)


def token_choice(name: str, experts: int) -> nn.Module:
    """st-moe-pytorch and mixture-of-experts, which one author wrote alike."""
    package = importlib.import_module(f"{name}.{name}")
    vars(package)["MIN_EXPERT_CAPACITY"] = 1
    capacity = {f"capacity_factor_{when}": PEER_CAPACITY for when in ("train", "eval")}
    if name == "st_moe_pytorch":
        mlps = (
            nn.Sequential(nn.Linear(DIM, HIDDEN), nn.GELU(), nn.Linear(HIDDEN, DIM)) for _ in range(experts)
        )
        how = {
            "gating_top_n": 2,
            "threshold_train": 0.0,
            "threshold_eval": 0.0,
            "experts": nn.ModuleList(mlps),
        }
    else:
        how = {"hidden_dim": HIDDEN, "activation": nn.GELU}
        how |= {"second_policy_train": "all", "second_policy_eval": "all"}
    return Pick(package.MoE(DIM, num_experts=experts, **how, **capacity), lambda outputs: outputs[0])


def our_model(_: int) -> nn.Module:
    moe = MoEConfig(layers="last_6", num_experts=MODEL_EXPERTS, router=SoftConfig())
    return Pick(ViT(ViTConfig(moe=moe)), lambda output: output.logits)


def timm_dense(_: int) -> nn.Module:
    return importlib.import_module("timm").create_model("vit_small_patch16_224")


def soft_moe_pytorch_model(_: int) -> nn.Module:
    model = timm_dense(0)
    for block in list(model.blocks)[6:]:  # pyright: ignore[reportArgumentType]  # timm's blocks are a Sequential
        block.mlp = soft_moe_pytorch(MODEL_EXPERTS, slots=MODEL_EXPERTS)
    return model


ROUTERS: dict[str, RouterConfig] = {
    "soft": SoftConfig(total_slots=SLOTS),
    "token_choice": TokenChoiceConfig(k=2, capacity_factor=SLOTS / TOKENS / 2),
    "expert_choice": ExpertChoiceConfig(capacity_factor=SLOTS / TOKENS),
}
LOSS_FREE = TopKConfig(score="sigmoid", balance=SignConfig())
FINE = replace(LOSS_FREE, k=2, normalise=True)
# Token choice, k = 1 and capacity 1, and today's routers in as many multiply-adds of MLPs.
ARMS: dict[str, Callable[[int], nn.Module]] = {
    "token": lambda experts: Layer(TokenChoiceConfig(capacity_factor=1.0), experts),
    "sign": lambda experts: Layer(LOSS_FREE, experts),
    "quantile": lambda experts: Layer(replace(LOSS_FREE, balance=QuantileConfig()), experts),
    "shared": lambda experts: Layer(LOSS_FREE, 2 * experts, small=2, shared=True),
    "fine": lambda experts: Layer(FINE, 4 * experts, small=4, shared=True),
    "relu": lambda experts: Layer(ReLUConfig(), experts),
    "dropless": lambda experts: Layer(replace(LOSS_FREE, capacity_factor="dropless"), experts),
}
# router, or a whole Soft MoE S/16 -> project -> its module of so many experts
PEERS: dict[str, dict[str, Callable[[int], nn.Module]]] = {
    "soft": {"soft-moe": soft_moe, "soft-moe-pytorch": soft_moe_pytorch},
    "token_choice": {
        "st-moe-pytorch": lambda experts: token_choice("st_moe_pytorch", experts),
        "mixture-of-experts": lambda experts: token_choice("mixture_of_experts", experts),
    },
    "expert_choice": {},  # no PyTorch peer has it
    "model": {
        "soft-moe": lambda _: importlib.import_module("soft_moe.vision_transformer").soft_moe_vit_small(),
        "soft-moe-pytorch": soft_moe_pytorch_model,
        "timm dense": timm_dense,
    },
}


def build(router: str, implementation: str, experts: int) -> nn.Module:
    if router == "arms":
        return ARMS[implementation](experts)
    if implementation != "ours":
        return PEERS[router][implementation](experts)
    return our_model(experts) if router == "model" else Layer(ROUTERS[router], experts)

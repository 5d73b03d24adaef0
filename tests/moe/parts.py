"""Parts that tests of `moe` share: seeded tensors, routers, layers and models with weights, golden files."""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from moe.adapt import plan_transfer, shapes_of
from moe.config import members
from moe.init import init_weights, split
from moe.layer import MoEConfig, MoELayer
from moe.models.vit import ViT, ViTConfig
from moe.presets import PRESETS
from moe.routers import RouterConfig

GOLDENS = Path(__file__).parents[1] / "goldens"
KINDS = [kind() for kind in members(RouterConfig)]

each_kind = pytest.mark.parametrize("router", KINDS, ids=lambda r: r.kind)
each_model = pytest.mark.parametrize("router", [None, *KINDS], ids=lambda r: r.kind if r else "dense")


def randn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def images(count: int, seed: int = 0) -> Tensor:
    """Images of the debug preset."""
    return randn(count, 3, 8, 8, seed=seed)


def keys(groups: int, tokens: int) -> Tensor:
    """Keys (G, S) that are all different."""
    return split(torch.arange(7, 7 + groups), tokens)


def build_router(config: RouterConfig, *, dim: int = 8, num_experts: int = 4) -> Any:
    router = config.build(dim=dim, num_experts=num_experts)
    init_weights(router, seed=0)
    return router


def gate_router(config: RouterConfig, gate_DE: list[list[float]]) -> Any:
    """A router with this gate."""
    router = config.build(dim=len(gate_DE), num_experts=len(gate_DE[0]))
    with torch.no_grad():
        router.get_parameter("gate_DE").copy_(torch.tensor(gate_DE))
    return router


class RoutedLayer(MoELayer):
    """A layer that always returns its routing with statistics."""

    def forward(self, *args: Any) -> Any:
        return super().forward(*args, return_stats=True, return_routing=True)


def build_layer(
    config: RouterConfig,
    *,
    dim: int = 8,
    hidden: int = 16,
    num_experts: int = 4,
    block: int = 0,
    **fields: Any,
) -> Any:
    """A MoE layer whose experts have an output bias, so that empty slots compute something too."""
    moe_config = MoEConfig(num_experts=num_experts, router=config, **fields)
    layer = RoutedLayer(moe_config, dim=dim, hidden=hidden, block=block)
    init_weights(layer, seed=0)
    nn.init.normal_(layer.experts.b_out_ED, generator=torch.Generator().manual_seed(0))
    return layer


def vit_config(router: RouterConfig | None, *, preset: str = "debug", **fields: Any) -> ViTConfig:
    """A preset with four experts, dense for None."""
    moe = MoEConfig(router=router, **{"num_experts": 4, **fields}) if router else None
    return replace(PRESETS[preset], moe=moe)


def build_vit(router: RouterConfig | None, **fields: Any) -> Any:
    """The debug model with a random head: its logits depend on every block."""
    model = ViT(vit_config(router, **fields))
    nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model


def every_expert(layer: Any, x_GSD: Tensor) -> Tensor:
    """Output of every expert for every token, (E, G, S, D)."""
    G, S, D = x_GSD.shape
    E = len(layer.experts.w_in_EDF)
    return layer.experts(x_GSD.reshape(1, G * S, D).expand(E, -1, -1)).unflatten(1, (G, S))


def upcycle(state: Mapping[str, Tensor], config: ViTConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """The state of `ViT(config, seed=seed)` with all that `plan_transfer` takes over from `state`."""
    new = ViT(config, seed=seed).state_dict()
    transfer = plan_transfer(shapes_of(state), shapes_of(new))
    taken = {name: state[name] for name in transfer.copied}
    taken |= {name: made.of(state[made.source]) for name, made in transfer.converted.items()}
    return new | {name: tensor.clone() for name, tensor in taken.items()}


def read_golden(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Arrays and description of a golden file; arrays of strings are numpy's."""
    # No pickle: the files hold strings and numbers alone.
    with np.load(path) as file:
        arrays: dict[str, Any] = {name: np.array(file[name]) for name in file.files if name != "meta"}
        numbers = {name: torch.from_numpy(array) for name, array in arrays.items() if array.dtype.kind != "U"}
        return arrays | numbers, json.loads(str(file["meta"]))

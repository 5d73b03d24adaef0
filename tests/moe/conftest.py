"""Fixtures of the tests of `moe`: one thread, and a small model with a random head."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moe.layer import MoEConfig
from moe.presets import PRESETS
from moe.routers import RouterConfig
from moe.vit import ViT


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture
def build_vit() -> Callable[..., ViT]:
    """``build_vit(router, **moe_fields)``: the debug model, dense for None; logits depend on every block."""

    def build(router: RouterConfig | None, **fields) -> ViT:
        moe = MoEConfig(router=router, **{"num_experts": 4, **fields}) if router else None
        model = ViT(replace(PRESETS["debug"], moe=moe))
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
        return model

    return build

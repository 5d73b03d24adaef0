"""What these tests share: batches of noise as images, and small models of every router."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from moe.layer import MoEConfig
from moe.presets import PRESETS
from moe.routers import RouterConfig
from moe.vit import ViT
from orchestrator.data.batch import Batch


@pytest.fixture
def build_vit() -> Callable[..., ViT]:
    """``build_vit(router, images_per_group=2, pooling="token")``: the debug model in evaluation mode; its
    logits depend on every block."""

    def build(router: RouterConfig, pooling: str = "gap", **fields) -> ViT:
        moe = MoEConfig(router=router, **{"num_experts": 4, "layers": "last_2", **fields})
        model = ViT(replace(PRESETS["debug"], moe=moe, pooling=pooling))
        torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
        return model.eval()

    return build


@pytest.fixture
def noise_batch() -> Callable[..., Batch]:
    """``noise_batch(6, valid=4)``: images of noise, labels 0, 1, 2, 0, .., the last ones padding."""

    def make(count: int, valid: int | None = None, seed: int = 0) -> Batch:
        drawn = torch.Generator().manual_seed(seed)
        return Batch(
            image=torch.randint(0, 250, (count, 3, 8, 8), generator=drawn, dtype=torch.uint8),
            label=torch.arange(count) % 3,
            valid=(torch.arange(count) < (count if valid is None else valid)).float(),
            key=torch.arange(count),
            sample=torch.arange(count),
            mix=torch.zeros(count, 5),
        )

    return make

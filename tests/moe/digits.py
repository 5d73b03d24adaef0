"""The digits that come with scikit-learn, 8x8 pixels, and how the tests of mechanisms learn them."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from moe.layer import MoEConfig
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routers import RouterConfig
from moe.vit import Output, ViT, ViTConfig

# Of the 797 images that are not for training 790, so that they fill groups of ten. Experts in blocks 1 and 3
# would matter little in so small a model: the dense block before them has done the work.
TRAIN, TEST, GROUP, BATCH = 1000, 790, 10, 20
EXPERTS, MOE_BLOCKS = 8, (0, 2)

_digits = load_digits()
GREY = torch.tensor(_digits.images, dtype=torch.float32).unsqueeze(1) / 16  # 0..1
RGB = (2 * GREY - 1).expand(-1, 3, -1, -1).contiguous()  # -1..1, as a ViT wants them
LABELS = torch.tensor(_digits.target)
TESTED = slice(TRAIN, TRAIN + TEST)


def descend(
    model: nn.Module, loss: Callable[[Tensor, int], Tensor], *, epochs: int, peak: float, seed: int
) -> None:
    """AdamW; its rate rises to `peak` over a fifth of the steps and falls to 0 as a cosine does.

    Args:
        loss: of the training images with these indices, at this step.
    """
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    shuffle, steps = torch.Generator().manual_seed(seed), epochs * TRAIN // BATCH
    order = torch.cat([torch.randperm(TRAIN, generator=shuffle) for _ in range(epochs)])
    for step, index_B in enumerate(order.split(BATCH)):
        falling = 0.5 + 0.5 * math.cos(math.pi * max(0.0, step / steps - 0.2) / 0.8)
        optimizer.param_groups[0]["lr"] = peak * min((step + 1) / (0.2 * steps), falling)
        optimizer.zero_grad()
        loss(index_B, step).backward()
        optimizer.step()


def trained_vit(router: RouterConfig, *, epochs: int, seed: int, images_per_group: int = GROUP) -> ViT:
    """Four blocks on 16 tokens of 2x2 pixels; two of them with 8 experts."""
    model = ViT(
        ViTConfig(
            image_size=8,
            patch_size=2,
            width=32,
            depth=4,
            heads=2,
            mlp_dim=64,
            num_classes=10,
            moe=MoEConfig(
                layers=MOE_BLOCKS, num_experts=EXPERTS, images_per_group=images_per_group, router=router
            ),
        ),
        seed=seed,
    )

    def loss(index_B: Tensor, step: int) -> Tensor:
        output = model(RGB[index_B], keys_B=step * BATCH + torch.arange(BATCH))
        return F.cross_entropy(output.logits, LABELS[index_B]) + output.aux

    descend(model, loss, epochs=epochs, peak=5e-3, seed=seed)
    return model.eval()


@torch.no_grad()
def answer(model: ViT, overrides: RoutingOverrides = AS_TRAINED) -> Output:
    """Of the images that it has not seen."""
    return model(RGB[TESTED], routing_overrides=overrides, return_routings=True)


def accuracy(model: ViT, overrides: RoutingOverrides = AS_TRAINED) -> float:
    return correct(answer(model, overrides).logits).float().mean().item()


def correct(logits: Tensor) -> Tensor:
    return logits.argmax(-1) == LABELS[TESTED]

"""The digits of scikit-learn, with 8x8 pixels, and small models that learn them."""

import math
from collections.abc import Callable
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch import Tensor, nn

from moe import MoEConfig, RoutingOverrides, ViT, ViTConfig
from moe.model import Output
from moe.overrides import AS_TRAINED
from moe.routers import RouterConfig

# 790 of the 797 images that are not for training are used, so that they fill groups of ten. Experts in blocks
# 1 and 3 would matter little in so small a model, because the dense block before them suffices.
TRAIN, TEST, GROUP, BATCH = 1000, 790, 10, 20
EXPERTS, MOE_BLOCKS = 8, (0, 2)
CHECK_EVERY = 5  # steps between two checks whether to end
TESTED = slice(TRAIN, TRAIN + TEST)


class Digits(NamedTuple):
    """`grey`: (1797, 1, 8, 8) in 0..1; `rgb`: (1797, 3, 8, 8) in -1..1, as a ViT expects it."""

    grey: Tensor
    rgb: Tensor
    labels: Tensor


@cache
def digits() -> Digits:
    """Shuffled, because other people wrote the last digits than the first."""
    pixels, labels = load_digits(return_X_y=True)
    order = torch.randperm(len(pixels), generator=torch.Generator().manual_seed(0))
    grey = torch.tensor(pixels, dtype=torch.float32)[order].view(-1, 1, 8, 8) / 16
    return Digits(grey, (2 * grey - 1).expand(-1, 3, -1, -1).contiguous(), torch.tensor(labels)[order])


def descend(
    model: nn.Module,
    loss: Callable[[Tensor, int], Tensor],
    *,
    epochs: int,
    peak: float,
    seed: int,
    stop: Callable[[], bool] = lambda: False,
    images: int = TRAIN,
) -> int:
    """Trains with AdamW, whose rate rises to `peak` over a fifth of the steps and falls to 0 along a cosine.

    Args:
        loss: called with the indices of training images and the step.
        stop: called after every `CHECK_EVERY` steps; ends the training if it returns true.
        images: their number.

    Returns:
        The number of steps taken.
    """
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    shuffle, steps = torch.Generator().manual_seed(seed), epochs * images // BATCH
    order = torch.cat([torch.randperm(images, generator=shuffle) for _ in range(epochs)])
    for step, index_B in enumerate(order.split(BATCH)):
        falling = 0.5 + 0.5 * math.cos(math.pi * max(0.0, step / steps - 0.2) / 0.8)
        optimizer.param_groups[0]["lr"] = peak * min((step + 1) / (0.2 * steps), falling)
        optimizer.zero_grad()
        loss(index_B, step).backward()
        optimizer.step()
        if (step + 1) % CHECK_EVERY == 0 and stop():
            return step + 1
    return steps


def vit_config(moe: MoEConfig, *, width: int = 32, depth: int = 4) -> ViTConfig:
    """16 tokens of 2x2 pixels."""
    return ViTConfig(
        image_size=8,
        patch_size=2,
        width=width,
        depth=depth,
        heads=2,
        mlp_dim=2 * width,
        num_classes=10,
        moe=moe,
    )


def trained_vit(router: RouterConfig, *, epochs: int, seed: int, images_per_group: int = GROUP) -> ViT:
    """A trained model of four blocks, two of them with 8 experts."""
    moe = MoEConfig(layers=MOE_BLOCKS, num_experts=EXPERTS, images_per_group=images_per_group, router=router)
    model, data = ViT(vit_config(moe), seed=seed), digits()

    def loss(index_B: Tensor, step: int) -> Tensor:
        output = model(data.rgb[index_B], keys_B=step * BATCH + torch.arange(BATCH))
        return F.cross_entropy(output.logits, data.labels[index_B]) + output.aux

    descend(model, loss, epochs=epochs, peak=5e-3, seed=seed)
    return model.eval()


@torch.no_grad()
def answer(model: ViT, overrides: RoutingOverrides = AS_TRAINED) -> Output:
    """The model's output for the images that it was not trained on."""
    return model(digits().rgb[TESTED], routing_overrides=overrides, return_routings=True)


def accuracy(model: ViT, overrides: RoutingOverrides = AS_TRAINED) -> float:
    """The accuracy on the images that the model was not trained on."""
    return accuracy_of(answer(model, overrides).logits)


def accuracy_of(logits: Tensor) -> float:
    return (logits.argmax(-1) == digits().labels[TESTED]).float().mean().item()

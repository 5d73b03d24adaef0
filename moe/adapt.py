"""Weights of one model as the start of another: a new resolution, or experts from a dense model.

Source: V-MoE section 3.5 fine-tunes at 384 pixels with the position embedding resized (``vit_zoom`` of the
authors' code); Komatsuzaki et al. 2022, "Sparse Upcycling", https://arxiv.org/abs/2212.05055.
"""

import math
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.vit import ViT, ViTConfig

# an MLP's linear layers keep (out, in), experts (E, in, out)
_EXPERTS = {
    "up.weight": "w_in_EDF",
    "up.bias": "b_in_EF",
    "down.weight": "w_out_EFD",
    "down.bias": "b_out_ED",
}


def resize_position(position_SD: Tensor, old_grid: int, new_grid: int, *, class_token: bool) -> Tensor:
    """The embedding for new_grid^2 patches, bilinear with aligned corners; the first row stays if it is a
    class token's.

    Raises:
        ValueError: if `position_SD` is not one of old_grid^2 patches.
    """
    if len(position_SD) != old_grid**2 + class_token:
        raise ValueError(
            f"position embedding has {len(position_SD)} rows, a grid of {old_grid} x {old_grid}"
            f" {'and a class token' if class_token else 'without class token'} {old_grid**2 + class_token}"
        )
    if old_grid == new_grid:
        return position_SD
    first_SD, patches_SD = position_SD.split([int(class_token), old_grid**2])
    image_1DHW = patches_SD.T.reshape(1, -1, old_grid, old_grid)
    resized = F.interpolate(image_1DHW, size=(new_grid, new_grid), mode="bilinear", align_corners=True)
    return torch.cat([first_SD, resized.flatten(2)[0].T])


def upcycle(dense_state: Mapping[str, Tensor], config: ViTConfig, *, seed: int = 0) -> dict[str, Tensor]:
    """The state of `ViT(config)` that continues a dense one: each expert is a copy of its block's MLP,
    routers are new (drawn from `seed`), a position embedding of another grid is resized, the rest is copied.

    Raises:
        ValueError: if a tensor is missing, has no place in the model, or has another shape.
    """
    dense = dict(dense_state)
    if config.position == "learned" and "position_SD" in dense:
        class_token = config.pooling == "token"
        old_grid = math.isqrt(max(0, len(dense["position_SD"]) - class_token))
        dense["position_SD"] = resize_position(
            dense["position_SD"], old_grid, config.grid(), class_token=class_token
        )
    _check(dense, config)
    state = ViT(config, seed=seed).state_dict()
    for name, tensor in dense.items():
        if name in state:
            state[name] = tensor.to(state[name].dtype, copy=True)
        else:
            mlp, _, part = name.partition(".mlp.")
            expert = f"{mlp}.mlp.experts.{_EXPERTS[part]}"
            state[expert] = tensor.t().expand_as(state[expert]).to(state[expert].dtype, copy=True)
    return state


def _check(dense: Mapping[str, Tensor], config: ViTConfig) -> None:
    with torch.device("meta"):
        wanted = ViT(replace(config, moe=None)).state_dict()
    if missing := sorted(wanted.keys() - dense.keys()):
        raise ValueError(f"the dense model has no {', '.join(missing)}")
    if unknown := sorted(dense.keys() - wanted.keys()):
        raise ValueError(f"the model has no place for {', '.join(unknown)}")
    for name, tensor in dense.items():
        if tensor.shape != wanted[name].shape:
            raise ValueError(
                f"{name} of the dense model has shape {tuple(tensor.shape)}, the model needs"
                f" {tuple(wanted[name].shape)}"
            )

"""How firm a router's choices are: the share that changes when noise is added to its logits.

Source: V-MoE (Riquelme et al. 2021), section 2.3: their training noise changes 15 % of the choices early in
training and 2-3 % later.
"""

import copy
from dataclasses import replace

import torch
from torch import Tensor, nn

from moe.init import mix, split
from moe.overrides import RoutingOverrides
from moe.routers.soft import SoftRouter

SIGMAS = (0.0, 0.25, 0.5, 1.0, 2.0, 4.0, 8.0)


def has_noise(router: nn.Module) -> bool:
    """Mixtures know no noise, and choose nothing."""
    return hasattr(router.config, "noise_std")


def flips(
    router: nn.Module,
    x_GSD: Tensor,
    valid_GS: Tensor,
    key_B: Tensor,
    *,
    block: int,
    sigmas: tuple[float, ...],
) -> Tensor:
    """(sigmas,): the share of choices that noise of that `noise_std` changes, mean over groups.

    A choice is an expert that a token takes (token choice) or a token that an expert takes (expert choice);
    for soft routers the expert of the largest weight in a token's combination. Only this layer has noise.
    """
    keys_GS = split(mix(key_B, block), valid_GS.numel() // len(key_B)).view(valid_GS.shape)
    return torch.stack([_flip(router, x_GSD, valid_GS, keys_GS, sigma) for sigma in sigmas])


def _flip(router: nn.Module, x_GSD: Tensor, valid_GS: Tensor, keys_GS: Tensor, sigma: float) -> Tensor:
    noisy = copy.copy(router)  # shares the weights
    noisy.config = replace(router.config, noise_std=sigma)  # pyright: ignore[reportArgumentType]
    routing = noisy(x_GSD, valid_GS, keys_GS, RoutingOverrides())
    if not isinstance(router, SoftRouter):
        return routing.stats["flip_frac"].double()
    best_GS = router(x_GSD, valid_GS, None, RoutingOverrides()).gates_GSE.argmax(-1)
    valid_GS = valid_GS.double()
    return ((best_GS != routing.gates_GSE.argmax(-1)) * valid_GS).sum() / valid_GS.sum().clamp(min=1)

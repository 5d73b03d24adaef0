"""The cost of a model, from its config: parameters, FLOPs and activations.

Conventions differ by factors of two between the papers, so each cost has its convention in its name:
``2mac`` counts a multiply-add (MAC) as two FLOPs (Soft MoE table 1, GFLOP/img), ``3mac`` counts forward and
backward at one FLOP per MAC (its exaFLOP), ``6mac`` at two (V-MoE table 2).
"""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

import torch

from moe.experts import is_expert
from moe.model import Activations, Costs, ModelConfig, unit_shapes
from moe.overrides import AS_TRAINED, RoutingOverrides


def model_costs(
    config: ModelConfig,
    overrides: RoutingOverrides = AS_TRAINED,
    *,
    number: int = 4,
    frozen: Sequence[str] = (),
) -> Costs:
    """Returns the costs of one image: those that the config knows (`ModelConfig.costs` has the arguments), or
    as measured in a forward pass on the meta device.

    Raises ValueError if the router refuses the overrides.
    """
    if known := config.costs(overrides, number=number, frozen=frozen):
        return known
    import moe.trace as measured  # which loads torch's formulas

    macs, largest, (saved, stream, widest) = measured.trace(config.at_point(overrides))
    macs, part = dict(macs), number / 4
    if config.moe:
        # With a subset of experts only their slots are mixed and computed (`experts.run_chosen`).
        share = overrides.num_kept(config.moe.num_experts) / config.moe.num_experts
        macs |= {name: share * macs[name] for name in ("experts", "dispatch_combine") if name in macs}
    return Costs(macs, largest, Activations([part * size for size in saved], part * stream, part * widest))


def num_params(config: ModelConfig) -> int:
    """Number of trainable parameters, including biases, norms and position embedding."""
    return sum(map(prod, param_shapes(config).values()))


def num_expert_params(config: ModelConfig) -> int:
    """Number of parameters of the experts' MLPs."""
    return sum(prod(shape) for name, shape in param_shapes(config).items() if is_expert(name))


def num_active_params(config: ModelConfig) -> float:
    """Number of parameters that process a token.

    A token is processed by k experts in token choice, by capacity_factor experts on average in expert choice,
    and by all experts if they process mixes of tokens or every token.
    """
    if not config.moe:
        return num_params(config)
    share = config.moe.router.active_experts(config.moe.num_experts) / config.moe.num_experts
    return num_params(config) - (1 - share) * num_expert_params(config)


def param_shapes(config: ModelConfig) -> dict[str, torch.Size]:
    """Shapes by parameter name."""
    return {name: shape for unit in unit_shapes(config) for name, shape in unit.items()}


def forward_gflops_2mac(config: ModelConfig, overrides: RoutingOverrides = AS_TRAINED) -> float:
    """GFLOP of one image's forward pass in evaluation mode at two FLOPs per MAC.

    Raises ValueError if the router refuses the overrides.
    """
    if config.moe:
        config = config.with_moe(replace(config.moe, router=config.moe.router.eval_config()))
    return 2 * sum(model_costs(config, overrides).macs.values()) / 1e9


def train_flops_6mac(config: ModelConfig, images: int) -> float:
    """FLOPs of training on `images` images, forward and backward (twice the forward), two FLOPs per MAC."""
    return 6 * sum(model_costs(config).macs.values()) * images


def train_flops_3mac(config: ModelConfig, images: int) -> float:
    """FLOPs of training on `images` images, forward and backward, at one FLOP per MAC."""
    return train_flops_6mac(config, images) / 2


def slots_per_token(config: ModelConfig) -> float:
    """Expert rows computed per token: k*c, c or slots/tokens, depending on the router; 1 for dense."""
    return config.expert_rows() / config.tokens() if config.moe else 1.0

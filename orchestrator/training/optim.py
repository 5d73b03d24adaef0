"""The optimiser and the learning rate of every step."""

import math

import torch
from torch import nn

from orchestrator.recipe import (
    ConstantConfig,
    LinearConfig,
    OptimizerConfig,
    RsqrtConfig,
    ScheduleConfig,
    SGDConfig,
)


def build_optimizer(config: OptimizerConfig, model: nn.Module) -> torch.optim.Optimizer:
    """The learning rate is set before every step, from the schedule.

    Only matmul weights decay: not biases (the experts' are 2-D, so the name decides), norms, position
    embedding, nor the parameters of soft routing.
    """
    groups: dict[float, list[nn.Parameter]] = {}
    for name, param in model.named_parameters():
        groups.setdefault(_weight_decay(config, name), []).append(param)
    params = [{"params": members, "weight_decay": decay} for decay, members in groups.items()]
    if isinstance(config, SGDConfig):
        return torch.optim.SGD(params, lr=0.0, momentum=config.momentum)
    # fused: one pass over memory instead of a dozen, on CPU too
    return torch.optim.AdamW(params, lr=0.0, betas=(config.beta1, config.beta2), fused=True)


def _weight_decay(config: OptimizerConfig, name: str) -> float:
    owner, leaf = name.split(".")[-2:] if "." in name else ("", name)
    if owner == "head" and leaf == "weight":
        return config.weight_decay_head
    kernel = leaf in ("w_in_EDF", "w_out_EFD", "gate_DE") or (leaf == "weight" and "norm" not in owner)
    return config.weight_decay if kernel else 0.0


def learning_rate(config: ScheduleConfig, step: int, *, peak: float, total: int) -> float:
    """Rate of update `step`, from 0; the first update of a warm-up has rate 0, as in the reference. Beyond
    `total` it stays what it ended with."""
    warmup, cooldown = config.phases(total)
    step = min(step, total)
    if step < warmup:
        return peak * step / warmup
    if isinstance(config, RsqrtConfig | ConstantConfig):
        before = min(step, total - cooldown)
        rate = peak
        if isinstance(config, RsqrtConfig):
            rate /= math.sqrt(1 + (before - warmup) / config.timescale)
        return rate * (total - step) / cooldown if step > before else rate
    done = (step - warmup) / max(1, total - warmup)
    left = 1 - done if isinstance(config, LinearConfig) else (1 + math.cos(math.pi * done)) / 2
    return peak * (config.end_frac + (1 - config.end_frac) * left)

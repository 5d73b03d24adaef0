"""A single expert of Soft MoE cannot learn the length of its input; several of the same total size can.

Vectors of 10 numbers from N(0, 1), cut into tokens of 2 or 5; one Soft MoE layer whose outputs are summed;
80 hidden units in all experts together, or the nearest number that divides; fresh batches, Adam.

Source: Chung et al. 2024, "Beyond Parameter Count: Implicit Bias in Soft Mixture of Experts", theorem 1 and
appendix B, figure 4. Sizes and rates are ours: the paper's text lacks them.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from moe import SoftConfig
from moe.experts import Experts
from moe.init import init_weights
from moe.routers.soft import SoftRouter
from papers.results import ProgressFn, StudyResult, draw_reference, draw_seeds, finish, panels

TOKENISED = ((5, 2), (2, 5))  # tokens, numbers in each
EXPERTS = tuple(range(1, 11))
TOTAL_HIDDEN, BATCH, STEPS, RATE, TESTED = 80, 256, 3000, 4e-3, 10_000
VARIANCE = 0.49  # of the length of 10 normal numbers: the error of a constant answer, the mean


class NormNet(nn.Module):
    def __init__(self, num_experts: int, width: int, *, seed: int) -> None:
        super().__init__()
        self.router = SoftRouter(SoftConfig(normalize="none"), dim=width, num_experts=num_experts)
        self.experts = Experts(num_experts, width, hidden_units(num_experts), activation="relu")
        init_weights(self, seed)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """(B,): the estimated length of each input."""
        routing = self.router(x_BSD, torch.ones(x_BSD.shape[:2]))
        return routing.combine(self.experts(routing.dispatch(x_BSD))).sum((1, 2))


def hidden_units(num_experts: int) -> int:
    """Hidden units of each expert."""
    return round(TOTAL_HIDDEN / num_experts)


def norm_errors(num_experts: int, tokens: int, width: int, *, seeds: int, steps: int) -> list[float]:
    """The mean squared error on fresh inputs of a net of each seed."""
    nets = [NormNet(num_experts, width, seed=seed) for seed in range(seeds)]
    generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    # All nets take a step together, because each alone is too small to keep a core busy.
    weights, _ = stack_module_state(nets)
    optimizer = torch.optim.Adam(weights.values(), lr=RATE, fused=True)

    def squared_error(weights_of_one: dict[str, Tensor], x_BSD: Tensor) -> Tensor:
        found_B = functional_call(nets[0], weights_of_one, x_BSD)
        return (found_B - torch.linalg.vector_norm(x_BSD, dim=(1, 2))).square().mean()

    def inputs(count: int) -> Tensor:
        return torch.stack([torch.randn(count, tokens, width, generator=g) for g in generators])

    gradients = vmap(grad(squared_error))
    for _ in range(steps):
        for name, gradient in gradients(weights, inputs(BATCH)).items():
            weights[name].grad = gradient
        optimizer.step()
    with torch.no_grad():
        return vmap(squared_error)(weights, inputs(TESTED)).tolist()


def learn_length(seeds: int, progress: ProgressFn) -> StudyResult:
    """Implicit Bias in Soft MoE, figure 4."""
    title = f"Learning the length of a vector, {TOTAL_HIDDEN} hidden units in all ({seeds} seeds)"
    figure, (axes,) = panels(title)
    table: dict[str, Any] = {"experts": EXPERTS, "hidden units each": [hidden_units(n) for n in EXPERTS]}
    ratios = {}
    for tokens, width in TOKENISED:
        label, errors = f"{tokens} tokens of {width}", []
        for n in EXPERTS:
            errors.append(norm_errors(n, tokens, width, seeds=seeds, steps=STEPS))
            progress(f"{label}, n={n}: " + " ".join(f"{error:.4f}" for error in errors[-1]))
        means = np.mean(errors, axis=1).tolist()
        draw_seeds(axes, EXPERTS, np.transpose(errors), label=label)
        table[f"MSE, {label}"] = means
        ratios[f"{tokens}x{width}"] = means[0] / max(means[4:])
    draw_reference(axes, EXPERTS, [VARIANCE] * len(EXPERTS), "the mean, for any input")
    axes.set_yscale("log")
    finish(axes, "Experts", "Mean squared error", EXPERTS)
    listed = ", ".join(f"{ratio:.1f} ({inputs})" for inputs, ratio in ratios.items())
    return StudyResult(
        title=title,
        table=table,
        figure=figure,
        metrics={f"one_over_five_or_more/{inputs}": ratio for inputs, ratio in ratios.items()},
        notes=[f"error of one expert / largest error of five or more experts: {listed}"],
    )

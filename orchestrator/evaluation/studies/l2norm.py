"""One expert of Soft MoE cannot learn the length of its input; several, as large together, can.

Vectors of 10 numbers from N(0, 1), cut into tokens of 2 or 5; one Soft MoE layer whose outputs are summed;
80 hidden units in all experts together, or the nearest number that divides; fresh batches, Adam.

Source: Chung et al. 2024, "Beyond Parameter Count: Implicit Bias in Soft Mixture of Experts", theorem 1 and
appendix B, figure 4. Sizes and rates are ours: the paper's text lacks them.
"""

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, stack_module_state, vmap

from moe.experts import Experts
from moe.init import init_weights
from moe.routers.soft import SoftConfig, SoftRouter
from orchestrator.evaluation.studies.found import Curve, Found, Panel, Say, band

TOKENISED = ((5, 2), (2, 5))  # tokens, numbers in each
EXPERTS = tuple(range(1, 11))
TOTAL_HIDDEN, BATCH, STEPS, RATE, TESTED = 80, 256, 3000, 4e-3, 10_000
VARIANCE = 0.49  # of the length of 10 normal numbers: the error of always saying the mean


class NormNet(nn.Module):
    def __init__(self, num_experts: int, width: int, *, seed: int) -> None:
        super().__init__()
        self.router = SoftRouter(SoftConfig(normalize="none"), dim=width, num_experts=num_experts)
        hidden = round(TOTAL_HIDDEN / num_experts)
        self.experts = Experts(num_experts, width, hidden, activation="relu")
        init_weights(self, seed)

    def forward(self, x_BSD: Tensor) -> Tensor:
        """(B,), what it takes for the length of each input."""
        routing = self.router(x_BSD, torch.ones(x_BSD.shape[:2]))
        return routing.combine(self.experts(routing.dispatch(x_BSD))).sum((1, 2))


def norm_errors(num_experts: int, tokens: int, width: int, *, seeds: int, steps: int) -> list[float]:
    """Mean squared error of a net of each seed on inputs that it has not seen."""
    nets = [NormNet(num_experts, width, seed=seed) for seed in range(seeds)]
    generators = [torch.Generator().manual_seed(seed) for seed in range(seeds)]
    # all nets in one step: alone, each is too small to keep a core busy
    weights, _ = stack_module_state(nets)
    optimizer = torch.optim.Adam(weights.values(), lr=RATE, fused=True)

    def squared_error(weights_of_one: dict[str, Tensor], x_BSD: Tensor) -> Tensor:
        error_B = functional_call(nets[0], weights_of_one, x_BSD) - torch.linalg.vector_norm(
            x_BSD, dim=(1, 2)
        )
        return error_B.square().mean()

    def inputs(count: int) -> Tensor:
        return torch.stack([torch.randn(count, tokens, width, generator=one) for one in generators])

    gradients = vmap(grad(squared_error))
    for _ in range(steps):
        for name, gradient in gradients(weights, inputs(BATCH)).items():
            weights[name].grad = gradient
        optimizer.step()
    with torch.no_grad():
        return vmap(squared_error)(weights, inputs(TESTED)).tolist()


def l2norm(seeds: int, say: Say) -> Found:
    """Implicit Bias in Soft MoE, figure 4."""
    curves: list[Curve] = []
    for tokens, width in TOKENISED:
        by_experts = []
        for n in EXPERTS:
            by_experts.append(norm_errors(n, tokens, width, seeds=seeds, steps=STEPS))
            say(f"{tokens} tokens of {width}, n={n}: " + " ".join(f"{e:.4f}" for e in by_experts[-1]))
        curves.append(band(f"{tokens} tokens of {width}", EXPERTS, list(zip(*by_experts, strict=True))))
    return found(curves, seeds)


def found(curves: Sequence[Curve], seeds: int) -> Found:
    ratios = [curve.y[0] / max(curve.y[4:]) for curve in curves]
    return Found(
        title=f"Learning the length of a vector, {TOTAL_HIDDEN} hidden units in all ({seeds} seeds)",
        table={
            "experts": EXPERTS,
            "hidden units each": [round(TOTAL_HIDDEN / n) for n in EXPERTS],
            **{f"MSE, {curve.label}": curve.y for curve in curves},
        },
        panels=[
            Panel(
                curves=[
                    *curves,
                    Curve(
                        label="the mean, for any input",
                        x=[EXPERTS[0], EXPERTS[-1]],
                        y=[VARIANCE] * 2,
                        reference=True,
                    ),
                ],
                x_title="Experts",
                y_title="Mean squared error",
                log_y=True,
                x_ticks=EXPERTS,
            )
        ],
        figures={
            f"one_over_five_or_more/{t}x{w}": ratio for (t, w), ratio in zip(TOKENISED, ratios, strict=True)
        },
        notes=[
            "one expert's error over the worst of five or more: "
            + ", ".join(f"{ratio:.1f} ({curve.label})" for ratio, curve in zip(ratios, curves, strict=True))
        ],
    )

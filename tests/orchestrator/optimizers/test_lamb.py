"""LAMB against its definition, written out expert by expert."""

import pytest
import torch
from torch import Tensor, nn

from orchestrator.optimizers import LambConfig, base
from orchestrator.optimizers.lamb import Lamb

DECAY, RATES = 0.1, (0.0, 0.02, 0.01, 0.005)


def literal(weight: Tensor, grads: list[Tensor], decay: float, config: LambConfig) -> Tensor:
    """One layer's weights after the updates: You et al., algorithm 2, with timm's exception for no decay."""
    mean, square = torch.zeros_like(weight), torch.zeros_like(weight)
    for step, (grad, rate) in enumerate(zip(grads, RATES, strict=True), start=1):
        mean = config.beta1 * mean + (1 - config.beta1) * grad
        square = config.beta2 * square + (1 - config.beta2) * grad * grad
        m, v = mean / (1 - config.beta1**step), square / (1 - config.beta2**step)
        update = m / (v.sqrt() + config.epsilon) + decay * weight
        length, other = weight.norm().item(), update.norm().item()
        ratio = length / other if decay and length and other else 1.0
        weight = weight - rate * ratio * update
    return weight


@pytest.mark.parametrize("chunk", [1, 20, 1 << 25])
def test_the_definition_layer_by_layer(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights of zeros, a layer without gradients and equal shapes are among them; the last two stacks hold
    four experts each.
    """
    monkeypatch.setattr(base, "CHUNK", chunk)
    rng, config = torch.Generator().manual_seed(0), LambConfig(beta1=0.8, beta2=0.9, epsilon=1e-3)
    shapes = [(5, 3), (7,), (3, 4), (5, 3), (4, 2, 3), (4, 2, 3), (4, 2, 3)]
    params = [nn.Parameter(torch.randn(shape, generator=rng, dtype=torch.float64)) for shape in shapes]
    params[2].data.zero_()
    grads = [[torch.randn(p.shape, generator=rng, dtype=p.dtype) for _ in RATES] for p in params]
    for grad in grads[-1]:
        grad[1] = 0.0  # an expert that no token chooses
    decays = [DECAY, 0.0, *[DECAY] * 5]
    expected = [literal(p.detach(), g, d, config) for p, g, d in zip(params, grads, decays, strict=True)]
    for i in (5, 6):
        each = [literal(params[i][e].detach(), [g[e] for g in grads[i]], DECAY, config) for e in range(4)]
        expected[i] = torch.stack(each)
    built = Lamb(
        [{"params": [p], "weight_decay": d} for p, d in zip(params, decays, strict=True)], config, params[5:]
    )
    for step, rate in enumerate(RATES):
        for group in built.param_groups:
            group["lr"] = rate
        for param, own in zip(params, grads, strict=True):
            param.grad = own[step].clone()
        built.step()
    for param, wanted in zip(params, expected, strict=True):
        torch.testing.assert_close(param.detach(), wanted, rtol=1e-12, atol=1e-14)

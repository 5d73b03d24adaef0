"""AdamW with a rounded first moment: against torch's and against a loop over its definition."""

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from orchestrator.optimizers import base
from orchestrator.optimizers.adamw import AdamW

BETAS = (0.9, 0.999)
RATES = [0.0, *(1e-2 / (1 + step) for step in range(19))]  # the first update of a warm-up has rate 0


def params_of(dtype: torch.dtype) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    tensors = (
        torch.randn(shape, generator=rng, dtype=dtype) for shape in [(7, 3), (), (2, 3, 5), (0, 4), (4,)]
    )
    params = [nn.Parameter(tensor) for tensor in tensors]
    return [*params, nn.Parameter(torch.randn(3, 4, generator=rng, dtype=dtype).T)]


def groups_of(params: list[nn.Parameter]) -> list[dict]:
    return [{"params": params[:3], "weight_decay": 0.3}, {"params": params[3:], "weight_decay": 0.0}]


def gradients(params: list[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Yields gradients of every update; the last parameter has none at every third."""
    rng = torch.Generator().manual_seed(1)
    for step in range(len(RATES)):
        grads = [torch.randn(p.shape, generator=rng, dtype=p.dtype).div(1 + step % 5) for p in params]
        yield [*grads[:-1], None if step % 3 == 1 else grads[-1].T.contiguous().T]


def update(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: list, rate: float) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


@pytest.mark.parametrize("chunk", [1, 20, 1 << 25])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.float64, 1e-12)])
def test_unrounded_it_is_torchs(
    dtype: torch.dtype, tolerance: float, chunk: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(base, "CHUNK", chunk)
    ours, theirs = params_of(dtype), params_of(dtype)
    optimizer = AdamW(groups_of(ours), betas=BETAS, moment_dtype=dtype)
    reference = torch.optim.AdamW(groups_of(theirs), betas=BETAS, foreach=False)
    for grads, rate in zip(gradients(ours), RATES, strict=True):
        update(optimizer, ours, grads, rate)
        update(reference, theirs, grads, rate)
    for a, b in zip(ours, theirs, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)
        for name, tensor in reference.state[b].items():
            torch.testing.assert_close(optimizer.state[a][name], tensor, rtol=tolerance, atol=tolerance)


def test_rounded_it_is_its_definition() -> None:
    """An update uses the first moment before it is rounded. The second moment is never rounded."""
    ours, expected = params_of(torch.float64), [p.detach().clone() for p in params_of(torch.float64)]
    optimizer = AdamW(groups_of(ours), betas=BETAS, moment_dtype=torch.bfloat16)
    means = [torch.zeros_like(p, dtype=torch.bfloat16) for p in expected]
    squares = [torch.zeros_like(p) for p in expected]
    steps = [0] * len(ours)
    for grads, rate in zip(gradients(ours), RATES, strict=True):
        update(optimizer, ours, grads, rate)
        for i, grad in enumerate(grads):
            if grad is None:
                continue
            steps[i] += 1
            mean = 0.9 * means[i].double() + 0.1 * grad
            squares[i] = 0.999 * squares[i] + 0.001 * grad**2
            unbiased = squares[i] / (1 - 0.999 ** steps[i])
            expected[i] = (1 - rate * (0.3 if i < 3 else 0)) * expected[i]
            expected[i] -= rate * mean / (1 - 0.9 ** steps[i]) / (unbiased.sqrt() + 1e-8)
            means[i] = mean.to(torch.bfloat16)
    for param, weight, mean, square in zip(ours, expected, means, squares, strict=True):
        state = optimizer.state[param]
        torch.testing.assert_close(param.detach(), weight, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(state["exp_avg_sq"], square, rtol=1e-12, atol=0)
        assert state["exp_avg"].dtype == torch.bfloat16
        assert torch.equal(state["exp_avg"], mean)


def test_gradients_are_divided_by_their_scale() -> None:
    scaled, divided = params_of(torch.float32), params_of(torch.float32)
    optimizers = [AdamW(groups_of(p), betas=BETAS, moment_dtype=torch.bfloat16) for p in (scaled, divided)]
    assert getattr(optimizers[0], "_step_supports_amp_scaling", False)  # how callers find out
    for step, (grads, rate) in enumerate(zip(gradients(scaled), RATES, strict=True)):
        scale = torch.tensor(2.0 ** (step % 4))
        optimizers[0].grad_scale = scale
        update(optimizers[0], scaled, grads, rate)
        update(optimizers[1], divided, [None if grad is None else grad / scale for grad in grads], rate)
    for a, b in zip(scaled, divided, strict=True):
        assert torch.equal(a, b)


@pytest.mark.gpu
def test_a_gpu_computes_the_same_and_is_not_waited_for() -> None:
    here = params_of(torch.float64)
    there = [nn.Parameter(param.detach().cuda()) for param in here]
    on_cpu, on_gpu = (
        AdamW(groups_of(params), betas=BETAS, moment_dtype=torch.bfloat16) for params in (here, there)
    )
    on_cpu.grad_scale, on_gpu.grad_scale = torch.tensor(3.0), torch.tensor(3.0, device="cuda")
    for grads, rate in zip(gradients(here), RATES, strict=True):
        update(on_cpu, here, grads, rate)
        copies = [None if grad is None else grad.cuda() for grad in grads]
        torch.cuda.set_sync_debug_mode("error")
        try:
            update(on_gpu, there, copies, rate)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    for a, b in zip(here, there, strict=True):
        torch.testing.assert_close(a, b.cpu(), rtol=1e-12, atol=1e-12)

"""Adafactor against loops over its definition."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor, nn

from orchestrator.optimizers import base
from orchestrator.optimizers.adafactor import Adafactor, factored_dims

RATES = [0.0, *(1e-2 / (1 + step) for step in range(19))]  # the first update of a warm-up has rate 0
CAP = 0.8  # reached at the 8th update
# The shape of a parameter and the dimensions of its rows and columns; `EXPERTS` are two experts' weights.
# Of equal shapes, one lacks some gradients, and one is of experts.
SHAPES = [
    ((7, 3), (0, 1)),
    ((2, 3, 5), (1, 2)),
    ((4, 3, 1, 4), (0, 3)),
    ((5, 2), None),
    ((), None),
    ((4,), None),
    ((7, 3), (0, 1)),
    ((6, 5), (0, 1)),
    ((4,), None),
]
EXPERTS = [((6, 3, 4), (1, 2)), ((6, 5), None)]


def params_of(dtype: torch.dtype = torch.float64) -> list[nn.Parameter]:
    rng = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=rng, dtype=dtype)) for shape, _ in SHAPES + EXPERTS]


def optimizer_of(params: list[nn.Parameter]) -> Adafactor:
    groups = [{"params": params[:2], "weight_decay": 0.3}, {"params": params[2:], "weight_decay": 0.0}]
    experts = params[-len(EXPERTS) :]
    return Adafactor(groups, beta1=0.9, beta2_cap=CAP, min_dim_to_factor=3, experts=experts)


def gradients(params: list[nn.Parameter]) -> Iterator[list[Tensor | None]]:
    """Yields gradients of every update; the first parameter has none at every third, the second has zeros."""
    rng = torch.Generator().manual_seed(1)
    for step in range(len(RATES)):
        grads = [torch.randn(p.shape, generator=rng, dtype=p.dtype).div(1 + step % 5) for p in params]
        grads[1][..., 0] = 0
        yield [None if step % 3 == 1 else grads[0], *grads[1:]]


def update(optimizer: torch.optim.Optimizer, params: list[nn.Parameter], grads: list, rate: float) -> None:
    for param, grad in zip(params, grads, strict=True):
        param.grad = None if grad is None else grad.clone()
    for group in optimizer.param_groups:
        group["lr"] = rate
    optimizer.step()


class Definition:
    """Algorithm 4 for each matrix of a parameter, else algorithm 5, number by number."""

    def __init__(self, param: Tensor, dims: tuple[int, int] | None, decay: float) -> None:
        self.weight, self.decay, self.step = param.detach().clone(), decay, 0
        self.mean = torch.zeros_like(self.weight, dtype=torch.bfloat16)
        self.variance = torch.zeros_like(self.weight)
        self.dims = dims
        self.rows, self.columns = torch.zeros_like(self.weight), torch.zeros_like(self.weight)

    def update(self, grad: Tensor, rate: float) -> None:
        self.step += 1
        beta2 = min(CAP, 1 - self.step**-0.8)
        places = list(product(*map(range, grad.shape)))
        if self.dims is None:
            for i in places:
                self.variance[i] = beta2 * self.variance[i] + (1 - beta2) * (grad[i] ** 2 + 1e-30)
        else:
            self._factored(grad, beta2)
        first = torch.zeros_like(grad)
        for i in places:
            scaled = grad[i] / self.variance[i].sqrt()
            first[i] = 0.9 * self.mean[i].double() + 0.1 * scaled
            self.weight[i] -= rate * (first[i] + self.decay * self.weight[i])
        self.mean = first.to(torch.bfloat16)

    def _factored(self, grad: Tensor, beta2: float) -> None:
        """Every matrix, as a view with its dimensions last; its sums are kept beside every number."""
        dims = self.dims or ()

        def matrices(tensor: Tensor) -> list[Tensor]:
            last = tensor.movedim(dims, (-2, -1))
            return [last[i] for i in product(*map(range, last.shape[:-2]))]

        tensors = map(matrices, (grad, self.rows, self.columns, self.variance))
        for square, rows, columns, variance in zip(*tensors, strict=True):
            n, m = square.shape
            for i in range(n):
                rows[i] = beta2 * rows[i, 0] + (1 - beta2) * sum(square[i, j] ** 2 + 1e-30 for j in range(m))
            for j in range(m):
                total = sum(square[i, j] ** 2 + 1e-30 for i in range(n))
                columns[:, j] = beta2 * columns[0, j] + (1 - beta2) * total
            for i in range(n):
                for j in range(m):
                    variance[i, j] = rows[i, 0] * columns[0, j] / sum(rows[k, 0] for k in range(n))


@pytest.mark.parametrize("chunk", [1, 40, 1 << 25])
def test_it_is_its_definition(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(base, "CHUNK", chunk)
    ours = params_of()
    optimizer = optimizer_of(ours)
    pairs = zip(ours, SHAPES + EXPERTS, strict=True)
    expected = [Definition(p, dims, 0.3 if i < 2 else 0) for i, (p, (_, dims)) in enumerate(pairs)]
    for grads, rate in zip(gradients(ours), RATES, strict=True):
        update(optimizer, ours, grads, rate)
        for definition, grad in zip(expected, grads, strict=True):
            if grad is not None:
                definition.update(grad, rate)
    for param, definition in zip(ours, expected, strict=True):
        torch.testing.assert_close(param.detach(), definition.weight, rtol=1e-12, atol=1e-12)
        assert torch.equal(optimizer.state[param]["exp_avg"], definition.mean)
        assert optimizer.state[param].keys() - {"step", "exp_avg"} == (
            {"row_var", "col_var"} if definition.dims else {"variance"}
        )


@pytest.mark.parametrize(
    ("shape", "expert", "dims"),
    [
        ((64, 32), False, (0, 1)),
        ((64, 31), False, None),
        ((64,), False, None),
        ((), False, None),
        ((768, 3, 16, 16), False, None),  # a kernel of patches
        ((768, 3, 32, 32), False, (0, 3)),
        ((384, 256, 2), False, (0, 1)),  # phi_DEC
        ((32, 128, 64), True, (1, 2)),
        ((256, 128, 64), True, (1, 2)),  # more experts than columns
        ((32, 128), True, None),  # biases
        ((32, 128), False, (0, 1)),
    ],
)
def test_factored_dims(shape: tuple[int, ...], expert: bool, dims: tuple[int, int] | None) -> None:
    assert factored_dims(shape, 32, expert=expert) == dims


@pytest.mark.gpu
def test_a_gpu_computes_the_same_and_is_not_waited_for() -> None:
    here = params_of()
    there = [nn.Parameter(param.detach().cuda()) for param in here]
    on_cpu, on_gpu = optimizer_of(here), optimizer_of(there)
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

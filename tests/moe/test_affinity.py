"""Sinkhorn against POT, its definition and differences; freezing, padding, compile."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from moe.routers.affinity import sinkhorn_plan


def logits_of(*shape: int, scale: float = 1.0, seed: int = 0, dtype: torch.dtype = torch.float64) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def column_error(plan_GSE: Tensor, valid_GS: Tensor) -> Tensor:
    target_G1 = valid_GS.sum(1, keepdim=True) / plan_GSE.shape[-1]
    return (plan_GSE.sum(1) / target_G1 - 1).abs().amax(-1)


@pytest.mark.parametrize(("S", "E", "scale"), [(16, 4, 1.0), (9, 5, 3.0), (4, 7, 2.0), (60, 6, 5.0)])
def test_pot(S, E, scale):
    import ot  # it takes a second to load

    logits = logits_of(1, S, E, scale=scale)
    plan, residual = sinkhorn_plan(logits, torch.ones(1, S), 2000)
    reference = ot.bregman.sinkhorn_log(
        np.ones(S), np.full(E, S / E), -logits[0].numpy(), reg=1.0, numItermax=20_000, stopThr=1e-12
    )
    assert residual < 1e-10
    assert np.abs(plan[0].numpy() - reference).max() < 1e-5


def test_gradient_is_that_of_the_converged_plan():
    logits = logits_of(2, 5, 3).requires_grad_()
    valid = torch.tensor([[1.0] * 5, [1.0] * 4 + [0.0]])
    assert torch.autograd.gradcheck(lambda x: sinkhorn_plan(x, valid, 300)[0], (logits,))


@pytest.mark.parametrize("iterations", [1, 10])
def test_residual_is_the_column_error(iterations):
    logits, valid = logits_of(3, 12, 4, scale=4.0), torch.ones(3, 12)
    valid[1, 5:] = 0
    plan, residual = sinkhorn_plan(logits, valid, iterations)
    torch.testing.assert_close(plan.sum(-1), valid.double())
    torch.testing.assert_close(residual, column_error(plan, valid))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_converged_groups_are_frozen(dtype):
    """Bitwise, against more iterations and against a hard group beside them."""
    easy, hard = logits_of(1, 12, 4, dtype=dtype), logits_of(1, 12, 4, scale=80.0, seed=1, dtype=dtype)
    plan, residual = sinkhorn_plan(easy, torch.ones(1, 12), 100)
    assert residual < 1e-5
    assert torch.equal(sinkhorn_plan(easy, torch.ones(1, 12), 1000)[0], plan)
    both, residuals = sinkhorn_plan(torch.cat([hard, easy]), torch.ones(2, 12), 300)
    assert torch.equal(both[1:], plan)
    assert residuals[0] > 1e-4  # the hard group still moves


def test_frozen_from_the_tolerance_on():
    """The plan keeps an error that more iterations would remove, and does not depend on their rounding."""
    logits, tolerance = logits_of(1, 12, 4), torch.finfo(torch.float64).eps ** 0.75
    runs = [sinkhorn_plan(logits, torch.ones(1, 12), n) for n in range(1, 60)]
    first = next(i for i, (_, residual) in enumerate(runs) if residual < 0.9 * tolerance)
    assert all(torch.equal(runs[first][0], plan) for plan, _ in runs[first + 1 :])


@settings(max_examples=40)
@given(
    S=st.integers(1, 9),
    padding=st.integers(0, 4),
    E=st.integers(1, 5),
    scale=st.sampled_from([0.0, 1.0, 30.0]),
    seed=st.integers(0, 2**31),
)
def test_padding_changes_nothing(S, padding, E, scale, seed):
    logits = logits_of(1, S + padding, E, scale=scale, seed=seed)
    logits[:, S:] = float("nan")
    valid = torch.cat([torch.ones(1, S), torch.zeros(1, padding)], 1)
    plan, residual = sinkhorn_plan(logits, valid, 30)
    alone, residual_alone = sinkhorn_plan(logits[:, :S], torch.ones(1, S), 30)
    torch.testing.assert_close(plan[:, :S], alone)
    torch.testing.assert_close(residual, residual_alone)
    assert (plan[:, S:] == 0).all()


def test_a_group_of_padding_is_zero():
    logits = logits_of(2, 5, 3).requires_grad_()
    valid = torch.tensor([[0.0] * 5, [1.0] * 5])
    plan, residual = sinkhorn_plan(logits, valid, 50)
    (grad,) = torch.autograd.grad((plan * logits_of(2, 5, 3, seed=1)).sum(), logits)
    assert (plan[0] == 0).all()
    assert residual[0] == 0
    assert (grad[0] == 0).all()
    assert (grad[1] != 0).any()


@pytest.mark.smoke
def test_compile_whole_graph():
    """Forward and backward, in a graph that the number of iterations does not lengthen."""
    sizes = []

    def backend(graph, inputs):
        sizes.append(len(graph.graph.nodes))
        return torch._dynamo.lookup_backend("aot_eager")(graph, inputs)

    def loss(x, gate, valid, iterations):
        plan, residual = sinkhorn_plan(x @ gate, valid, iterations)
        return (plan * plan).sum() + residual.sum()

    x, valid = logits_of(2, 12, 6), torch.ones(2, 12)
    for iterations in (5, 500):
        torch._dynamo.reset()
        eager, compiled = (logits_of(6, 4, seed=2).requires_grad_() for _ in range(2))
        loss(x, eager, valid, iterations).backward()
        torch.compile(loss, fullgraph=True, backend=backend)(x, compiled, valid, iterations).backward()
        torch.testing.assert_close(compiled.grad, eager.grad)
    assert sizes[0] == sizes[1] < 30


def test_operator_contract():
    """torch's own checks: schema, fake tensors, autograd registration."""
    args = (logits_of(2, 6, 3).requires_grad_(), torch.ones(2, 6, dtype=torch.bool), 50)
    torch.library.opcheck(torch.ops.moe_frontier.sinkhorn.default, args)

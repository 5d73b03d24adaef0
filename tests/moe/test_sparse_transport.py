"""Sparse transport against scipy's assignments, the goldens' optima and a long run; constraints, padding."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from scipy import optimize
from torch import Tensor

from moe.routers.sparse_transport import assign, semi_dual, sparse_plan
from tests.moe.parts import GOLDENS, read_golden

ENOUGH = 200  # measured on the goldens: the slowest semi-dual is then 6e-5 off, assignments settle in 50


def scores_of(G: int, S: int, E: int, scale: float = 1.0, seed: int = 0) -> Tensor:
    """Gates of tokens that prefer some experts to others."""
    g = torch.Generator().manual_seed(seed)
    logits = torch.randn(G, S, E, generator=g) + 0.5 * torch.randn(G, 1, E, generator=g)
    return (scale * logits).double().softmax(-1)


def objective(plan_GSE: Tensor, scores_GSE: Tensor) -> Tensor:
    return (plan_GSE * scores_GSE - 0.5 * plan_GSE.square()).sum((1, 2))


def best_total(scores_SE: Tensor, capacity: int) -> float:
    """Largest total score with `capacity` seats per expert, by scipy."""
    seats = np.repeat(scores_SE.numpy(), capacity, axis=1)
    return seats[optimize.linear_sum_assignment(seats, maximize=True)].sum()


@pytest.mark.parametrize(
    "path", sorted(GOLDENS.glob("sparsity_constrained_*.npz")), ids=lambda path: path.stem
)
def test_goldens(path):
    golden, meta = read_golden(path)
    C, groups = meta["config"]["resolved_capacity"], meta["per_group"]
    scores = golden["softmax"].double()
    G, S, E = scores.shape
    plan, bound, residual = sparse_plan(scores, torch.ones(G, S), C, ENOUGH)
    optimum = torch.tensor([group["semidual_optimum"] for group in groups]).double()
    torch.testing.assert_close(bound, optimum, atol=1e-3, rtol=0)
    assert ((plan > 0).sum(1) <= C).all()
    torch.testing.assert_close(plan.sum(1), torch.full((G, E), S / E).double())
    if "plan_exact" not in golden:
        return
    exact = objective(golden["plan_exact"].double(), scores)
    assert (bound >= exact - 1e-6).all()
    if E * C == S:
        assert (residual == 0).all()
        torch.testing.assert_close(objective(plan, scores), exact, atol=1e-6, rtol=0)
        assert torch.equal(plan, golden["plan_exact"].double().round())


@pytest.mark.parametrize(
    ("S", "E", "C", "scale"), [(6, 3, 2, 1.0), (50, 4, 9, 4.0), (200, 8, 25, 0.03), (199, 8, 24, 1.0)]
)
def test_assignment_is_scipys(S, E, C, scale):
    scores = scores_of(2, S, E, scale)
    plan, bound, residual = sparse_plan(scores, torch.ones(2, S), C, 1500)
    assert (residual == 0).all()
    assert ((plan == 0) | (plan == 1)).all()
    assert (plan.sum(1) == C).all()
    assert (plan.sum(2) <= 1).all()
    best = torch.tensor([best_total(group, C) for group in scores])
    total = (plan * scores).sum((1, 2))
    assert (best - total <= S * 1e-9).all()
    assert (bound >= best - 0.5 * E * C - 1e-9).all()
    assert (bound <= best - 0.5 * E * C + S * 1e-9).all()


@settings(max_examples=60)
@given(
    S=st.integers(1, 12),
    E=st.integers(1, 5),
    C=st.integers(1, 12),
    iterations=st.sampled_from([1, 2, 7, 60]),
    levels=st.sampled_from([1, 2, 100]),
    seed=st.integers(0, 2**31),
)
def test_laws_however_few_iterations(S, E, C, iterations, levels, seed):
    """Ties, padding, float32: at most C entries per column, exact columns, empty padding, true residuals."""
    g = torch.Generator().manual_seed(seed)
    scores = (torch.randint(0, levels, (2, S, E), generator=g) / levels).softmax(-1)
    valid = torch.randint(0, 4, (2, S), generator=g).clamp(max=1).float()
    plan, bound, residual = sparse_plan(scores, valid, C, iterations)
    assert plan.dtype == bound.dtype == residual.dtype == torch.float32
    assert ((plan > 0).sum(1) <= C).all()
    assert (plan[valid == 0] == 0).all()
    if E * C <= S:
        assert ((plan == 0) | (plan == 1)).all()
        assert (plan.sum(2) <= 1).all()
        assert ((residual >= 0) & (residual <= 1)).all()
        settled = residual == 0
        assert (objective(plan, scores) <= bound + 1e-5)[settled].all()
        seated = torch.minimum(valid.sum(1), torch.tensor(E * C))
        assert torch.equal(plan.sum((1, 2))[settled], seated[settled])
    else:
        columns = (valid.sum(1, keepdim=True) / E).expand(2, E) * valid.any(1, keepdim=True)
        torch.testing.assert_close(plan.sum(1), columns)
        torch.testing.assert_close(residual, (plan.sum(2) - valid).abs().amax(1))


@pytest.mark.parametrize(("S", "C", "real"), [(12, 4, 7), (12, 3, 10), (12, 3, 4), (15, 5, 0)])
def test_padding_leaves_real_tokens_their_best_seats(S, C, real):
    """Seats are those of the real tokens alone, whatever the scores of padding."""
    scores = scores_of(1, S, 3)
    valid = (torch.arange(S) % S < real).float().unsqueeze(0)
    plan, _, residual = sparse_plan(scores, valid, C, 500)
    assert residual == 0
    assert (plan[:, real:] == 0).all()
    assert plan.sum() == min(real, 3 * C)
    assert (plan * scores).sum().item() == pytest.approx(best_total(scores[0, :real], C), abs=S * 1e-9)


def test_padding_does_not_move_the_semi_dual():
    scores = scores_of(1, 20, 4)
    valid = (torch.arange(20) < 13).float().unsqueeze(0)
    for padded, alone in zip(
        sparse_plan(scores, valid, 6, 50), sparse_plan(scores[:, :13], torch.ones(1, 13), 6, 50), strict=True
    ):
        torch.testing.assert_close(padded[:, :13] if padded.ndim == 3 else padded, alone)


def test_an_assignment_that_is_not_settled_is_still_complete():
    """It keeps the seats of the last phase that seated every token. Of equal bids the first token's wins."""
    plan, _, residual = sparse_plan(scores_of(2, 64, 8), torch.ones(2, 64), 8, 5)
    assert (residual > 0).all()
    assert (plan.sum(1) == 8).all()
    scores = torch.tensor([[[0.1], [0.9], [0.9], [0.9]]])
    seated, bound, _ = assign(scores, torch.ones(1, 4), capacity=1, rounds=200)
    assert seated[0, :, 0].tolist() == [False, True, False, False]
    assert bound.item() == pytest.approx(0.9, abs=1e-6)


@pytest.mark.parametrize(("S", "E", "C", "scale"), [(64, 8, 16, 1.0), (60, 6, 12, 5.0)])
def test_semi_dual_reaches_its_optimum(S, E, C, scale):
    scores, valid = scores_of(2, S, E, scale), torch.ones(2, S)
    optimum = sparse_plan(scores, valid, C, 3000)[1]
    bound = sparse_plan(scores, valid, C, ENOUGH)[1]
    assert (bound >= optimum - 1e-4).all()
    assert (bound <= optimum + 2e-3).all()


def test_best_point_counts():
    """The first steps of flat scores overshoot; what was better before them is kept."""
    scores, valid = scores_of(1, 196, 32, 0.1), torch.ones(1, 196, dtype=torch.bool)
    start, plan = semi_dual(torch.zeros(1, 196).double(), scores, valid, 12)
    kept, bound, _ = sparse_plan(scores, valid, 12, 3)
    assert torch.equal(bound, start)
    assert torch.equal(kept, plan)


def test_semi_dual_bounds_every_plan_and_has_its_gradient():
    scores, valid = scores_of(2, 12, 3), torch.ones(2, 12, dtype=torch.bool)
    alpha = 0.3 * torch.randn(2, 12, generator=torch.Generator().manual_seed(1)).double()
    balanced = torch.eye(3).repeat(4, 1).double().expand(2, 12, 3)
    value, plan = semi_dual(alpha, scores, valid, 4)
    assert (value >= objective(balanced, scores)).all()
    alpha.requires_grad_()
    semi_dual(alpha, scores, valid, 4)[0].sum().backward()
    torch.testing.assert_close(alpha.grad, plan.sum(-1) - 1)  # Danskin


def test_operator_contract():
    """torch's own checks: schema, fake tensors."""
    for C in (2, 5):
        args = (scores_of(2, 6, 3), torch.ones(2, 6), C, 20)
        torch.library.opcheck(torch.ops.moe_frontier.sparse_plan.default, args)


def test_a_lone_expert_takes_every_token():
    scores = scores_of(2, 6, 1)
    plan, bound, residual = sparse_plan(scores, torch.ones(2, 6), 6, 50)
    assert (residual == 0).all()
    assert (plan == 1).all()
    torch.testing.assert_close(bound, scores.sum((1, 2)) - 3)

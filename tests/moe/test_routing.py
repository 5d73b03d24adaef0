"""Slots filled and emptied by hand: what dispatch and combine of each routing do."""

from typing import Any

import pytest
import torch
from torch import Tensor

from moe.routing import DenseRouting, GatherRouting, SoftRouting, at_least_fp32

X = torch.tensor([[[1.0], [2.0], [3.0]], [[10.0], [20.0], [30.0]]])  # two groups of three tokens, one wide


def rest(gates_GSE: Tensor | None = None) -> dict[str, Any]:
    """What neither dispatch nor combine look at, but for the shape of the gates."""
    gates_GSE = torch.zeros(2, 3, 2) if gates_GSE is None else gates_GSE
    return {"gates_GSE": gates_GSE, "load_GE": torch.zeros(2, 2), "aux_G": torch.zeros(2), "stats": {}}


def test_gather_dispatches_expert_major_and_empty_slots_are_zero():
    """Two experts with two slots per group; 3 marks an empty one. Slots of a group stay together."""
    token_GEC = torch.tensor([[[2, 0], [0, 3]], [[1, 3], [3, 3]]])
    routing = GatherRouting(token_GEC=token_GEC, weight_GEC=torch.zeros(2, 2, 2), **rest())
    assert routing.dispatch(X).squeeze(-1).tolist() == [[3, 1, 20, 0], [1, 0, 0, 0]]


def test_gather_combines_by_weight_and_adds_up():
    """Token 0 of group 0 sits with both experts: 0.5 * 2 + 0.25 * 100. Nobody gets what empty slots say."""
    token_GEC = torch.tensor([[[2, 0], [0, 3]], [[1, 3], [3, 3]]])
    weight_GEC = torch.tensor([[[1.0, 0.5], [0.25, 0.0]], [[2.0, 0.0], [0.0, 0.0]]])
    routing = GatherRouting(token_GEC=token_GEC, weight_GEC=weight_GEC, **rest())
    y_END = torch.tensor([[[1.0], [2.0], [3.0], [7.0]], [[100.0], [7.0], [7.0], [7.0]]])
    assert routing.combine(y_END).squeeze(-1).tolist() == [[26, 0, 1], [0, 6, 0]]


def test_gather_gradient_of_unseated_tokens_is_zero():
    x = X.clone().requires_grad_()
    token_GEC = torch.tensor([[[2, 0], [0, 3]], [[1, 3], [3, 3]]])
    routing = GatherRouting(token_GEC=token_GEC, weight_GEC=torch.ones(2, 2, 2), **rest())
    routing.dispatch(x).sum().backward()
    assert x.grad.squeeze(-1).tolist() == [[2, 0, 1], [0, 1, 0]]  # token 0 of group 0 sits twice


def test_soft_mixes_tokens_into_slots_and_slots_into_tokens():
    """One expert, two slots: the mean of all, and the last token. Every token takes 0.5 of the first, 0.25 of
    the second."""
    dispatch = torch.tensor([[1 / 3, 0.0], [1 / 3, 0.0], [1 / 3, 1.0]]).view(1, 3, 1, 2).expand(2, 3, 1, 2)
    combine = torch.tensor([0.5, 0.25]).expand(2, 3, 1, 2)
    routing = SoftRouting(dispatch_GSEC=dispatch, combine_GSEC=combine, **rest())
    torch.testing.assert_close(routing.dispatch(X).squeeze(-1), torch.tensor([[2.0, 3, 20, 30]]))
    out = routing.combine(torch.tensor([[[8.0], [4.0], [80.0], [40.0]]]))
    assert out.squeeze(-1).tolist() == [[5, 5, 5], [50, 50, 50]]


def test_dense_shows_every_token_to_every_expert():
    gates = torch.tensor([[[0.5, 0.5], [1.0, 0.0], [0.0, 1.0]], [[0.25, 0.75], [1.0, 0.0], [0.0, 1.0]]])
    routing = DenseRouting(weight_GSE=gates, **rest(gates))
    x_END = routing.dispatch(X)
    assert x_END.squeeze(-1).tolist() == [[1, 2, 3, 10, 20, 30]] * 2
    out = routing.combine(x_END * torch.tensor([1.0, -1.0])[:, None, None])
    assert out.squeeze(-1).tolist() == [[0, 2, -3], [-5, 20, -30]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_tokens_keep_their_dtype_whatever_that_of_the_weights(dtype):
    token_GEC = torch.tensor([[[2, 0], [0, 3]], [[1, 3], [3, 3]]])
    for routing in (
        GatherRouting(token_GEC=token_GEC, weight_GEC=torch.ones(2, 2, 2), **rest()),
        SoftRouting(dispatch_GSEC=torch.ones(2, 3, 2, 2), combine_GSEC=torch.ones(2, 3, 2, 2), **rest()),
        DenseRouting(weight_GSE=torch.ones(2, 3, 2), **rest()),
    ):
        x_END = routing.dispatch(X.to(dtype))
        assert x_END.dtype == routing.combine(x_END).dtype == dtype


def test_at_least_fp32():
    dtypes = {torch.bfloat16: torch.float32, torch.float16: torch.float32, torch.float32: torch.float32}
    for given, wanted in (dtypes | {torch.float64: torch.float64}).items():
        assert at_least_fp32(torch.zeros(1, dtype=given)).dtype == wanted

"""Expert subsets that save time: only the chosen experts run, and only their slots are filled.

Every group has experts of its own, so an expert has rows of some groups alone: rows are sorted by expert. The
numbers are those of all experts with the others' weights set to zero.

Source: Chung et al. 2024, "Beyond Parameter Count: Implicit Bias in Soft Mixture of Experts", algorithm 1 and
section 4.5; theirs is of one image.
"""

import torch
from torch import Tensor

from moe.experts import Experts
from moe.overrides import RoutingOverrides
from moe.routing import Routing


def chosen_alone(experts: Experts, routing: Routing, overrides: RoutingOverrides) -> int | None:
    """How many experts of each group are worth running alone; None: run all and leave out the others.

    Training and compiled graphs want the static shapes; experts that are spread over ranks (a subclass, by
    `ExpertParallel` or FSDP) have theirs elsewhere.
    """
    if routing.kept_GE is None or type(experts) is not Experts:
        return None
    if torch.is_grad_enabled() or torch.compiler.is_compiling():
        return None
    num_experts = routing.kept_GE.shape[1]
    k = overrides.num_kept(num_experts)
    return k if k < num_experts else None


def run_chosen(experts: Experts, routing: Routing, x_GSD: Tensor, k: int) -> Tensor:
    """(G, S, D) -> (G, S, D): dispatch, the k kept experts of each group, combine."""
    assert routing.kept_GE is not None
    expert_GK = routing.kept_GE.byte().argsort(dim=1, descending=True, stable=True)[:, :k]
    chosen = routing.only(expert_GK)
    x_KND = chosen.dispatch(x_GSD)
    slots = x_KND.shape[1] // len(expert_GK)
    expert_M = expert_GK.T.repeat_interleave(slots, 1).flatten()
    order_M = expert_M.argsort(stable=True)
    x_MD = x_KND.flatten(0, 1).index_select(0, order_M)
    y_MD = experts.rows(x_MD, routing.kept_GE.sum(0) * slots)
    y_KND = torch.empty_like(y_MD).index_copy(0, order_M, y_MD).view(x_KND.shape)
    return chosen.combine(y_KND)

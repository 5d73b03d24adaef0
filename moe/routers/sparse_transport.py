"""The transport plan between tokens and experts with at most C tokens per expert.

Source: Routers in Vision MoE, eq. 9: argmax <P, scores> - |P|^2 / 2 over plans whose rows (tokens) sum to 1,
whose columns (experts) sum to T/E and have at most C entries; its semi-dual is Liu et al. 2023, "Sparsity-
constrained optimal transport", https://arxiv.org/abs/2209.15466. The authors' code takes 20 steps of Adam of
0.01 each, which leave the rows up to 1.4 off; we take more and longer steps. With C <= S/E the plan is an
assignment, solved by the auction of Bertsekas & Castanon 1989, "The auction algorithm for the transportation
problem".
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Steps on the semi-dual. At S=1576, E=32, C=98 and logits of standard deviation 0.02 to 3, the bound after
# 200 iterations is within 1e-5 (relative) of the bound after 3000. Up to 50 iterations a first step of 0.1 is
# better.
FIRST_STEP, LAST_STEP, MOMENTUM = 0.2, 2e-4, 0.9
# Score of padding: finite, so that 0 times it is 0, and low enough never to enter a plan.
PADDING = -1e9

# The auction, relative to the spread of a group's scores. At S=1576, E=32, C=49 and logits of standard
# deviation 0.1 it took 1800 rounds from prices of 0 and epsilon 0.25, and 100 to 400 rounds from annealed
# prices.
ANNEALING, FIRST_TEMPERATURE, LAST_TEMPERATURE = 100, 0.3, 2e-3
FIRST_EPSILON, SHRINK = 2e-3, 0.2
LAST_EPSILON = 1e-9  # absolute
# Profit of the second best expert where there is only one expert; below all real profits.
NO_RIVAL = -1e3


def sparse_plan(
    scores_GSE: Tensor, valid_GS: Tensor, capacity: int, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Computes the plan for scores in 0..1 (softmax gates), with at most C = `capacity` entries per column.

    All groups are solved at once, in float64, without gradient and without a host sync.

    E*C <= S: the best assignment of tokens to E*C seats (`assign`), with entries 0 and 1. This is eq. 9 if
    C = T/E; for smaller C, rows sum to at most 1 and columns to C.

    E*C > S: the semi-dual of the non-convex problem. Columns are exact; rows are not, even at its optimum.

    Args:
        valid_GS: 1 for real tokens, 0 for padding, whose rows are zero; T counts the real tokens.

    Returns:
        plan_GSE: the plan.
        bound_G: upper bound on the objective of every plan that meets all constraints, including rows.
        residual_G: if E*C <= S, the share of seats that are not settled (0: optimal within S * 1e-9); else
            the largest deviation of a real token's row sum from 1.
    """
    # An exported graph runs where our operators are unknown.
    solve = _solve if torch.compiler.is_exporting() else _sparse_plan
    return solve(scores_GSE.detach(), valid_GS, capacity, iterations)


# One opaque operator, so that the graph of torch.compile does not grow with the iterations.
@torch.library.custom_op("moe_frontier::sparse_plan", mutates_args=())
def _sparse_plan(
    scores_GSE: Tensor, valid_GS: Tensor, capacity: int, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    return _solve(scores_GSE, valid_GS, capacity, iterations)


@_sparse_plan.register_fake
def _(scores_GSE: Tensor, valid_GS: Tensor, capacity: int, iterations: int) -> tuple[Tensor, Tensor, Tensor]:
    per_group = scores_GSE.new_empty(scores_GSE.shape[0])
    return torch.empty_like(scores_GSE), per_group, torch.empty_like(per_group)


def _solve(
    scores_GSE: Tensor, valid_GS: Tensor, capacity: int, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    _, S, E = scores_GSE.shape
    if E * capacity <= S:
        seated_GSE, total_G, residual_G = assign(scores_GSE, valid_GS, capacity, iterations)
        seats_G = valid_GS.bool().sum(1).clamp(max=E * capacity)
        # |P|^2 counts the seats.
        plan_GSE, bound_G = seated_GSE, total_G - 0.5 * seats_G
    else:
        plan_GSE, bound_G, residual_G = _minimise(
            scores_GSE.double(), valid_GS.double(), capacity, iterations
        )
    return plan_GSE.to(scores_GSE), bound_G.to(scores_GSE), residual_G.to(scores_GSE)


def _minimise(
    scores_GSE: Tensor, valid_GS: Tensor, capacity: int, iterations: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Minimises the semi-dual by gradient steps with momentum and decaying length; keeps the best point."""
    masked_GSE = scores_GSE.masked_fill((valid_GS == 0).unsqueeze(-1), PADDING)
    alpha_GS = torch.zeros_like(valid_GS)
    momentum_GS, best_GS = alpha_GS, alpha_GS
    best_G = alpha_GS.new_full((alpha_GS.shape[0],), math.inf)
    for i in range(iterations):
        value_G, plan_GSE = semi_dual(alpha_GS, masked_GSE, valid_GS, capacity)
        best_GS = torch.where((value_G < best_G).unsqueeze(-1), alpha_GS, best_GS)
        best_G = torch.minimum(value_G, best_G)
        gradient_GS = plan_GSE.sum(-1) - valid_GS
        momentum_GS = gradient_GS.lerp(momentum_GS, MOMENTUM)
        step = FIRST_STEP * (LAST_STEP / FIRST_STEP) ** (i / iterations)
        alpha_GS = alpha_GS.sub(momentum_GS, alpha=step)
    bound_G, plan_GSE = semi_dual(best_GS, masked_GSE, valid_GS, capacity)
    return plan_GSE, bound_G, (plan_GSE.sum(-1) - valid_GS).abs().amax(-1)


def semi_dual(alpha_GS: Tensor, scores_GSE: Tensor, valid_GS: Tensor, capacity: int) -> tuple[Tensor, Tensor]:
    """Returns max <P, scores> - |P|^2 / 2 + <alpha, P 1 - 1> over plans with exact columns, and its argmax.

    The value, (G,), is an upper bound on eq. 9 for every alpha; its gradient is the argmax's row sums minus
    1. Each column is the projection of its C largest alpha + score onto the simplex of mass T/E. Padding has
    the score PADDING and alpha 0.
    """
    S, E = scores_GSE.shape[1:]
    mass_G11 = valid_GS.sum(1)[:, None, None] / E
    profit_GSE = alpha_GS.unsqueeze(-1) + scores_GSE
    top_GCE, token_GCE = profit_GSE.topk(min(capacity, S), dim=1)
    rank_C1 = torch.arange(1, top_GCE.shape[1] + 1, device=top_GCE.device).unsqueeze(-1)
    # Of the shifts for a support of `rank` tokens the largest is that of the true support.
    shift_G1E = ((top_GCE.cumsum(1) - mass_G11) / rank_C1).amax(1, keepdim=True)
    part_GCE = (top_GCE - shift_G1E).clamp(min=0)
    value_G = (part_GCE * (top_GCE - 0.5 * part_GCE)).sum((1, 2)) - alpha_GS.sum(1)
    return value_G, torch.zeros_like(profit_GSE).scatter(1, token_GCE, part_GCE)


def assign(scores_GSE: Tensor, valid_GS: Tensor, capacity: int, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """Assigns tokens to `capacity` seats per expert with the largest total score; E * capacity <= S.

    The auction: all tokens without a seat bid at once, every expert keeps its best bids, and epsilon shrinks
    from phase to phase. All groups run side by side under masks; a settled group no longer bids. Of equal
    bids the lower token's wins. `rounds` counts the rounds after the ANNEALING steps that set the first
    prices.

    A settled group's total is within S * LAST_EPSILON of the optimum. Another group gets the assignment of
    its last completed, coarser epsilon, or, if there is none, the tokens seated so far. Tokens beyond the
    seats are assigned to a dummy expert of score 0, as is padding while the dummy has seats; the rest of the
    padding fills seats that real tokens do not need, and is not reported.

    Returns:
        seated_GSE: booleans, at most `capacity` per expert and one per token.
        bound_G: upper bound on the score of every assignment, from the prices (linear programming duality).
        open_G: share of the S seats, including the dummy's, that are still open; 0 for settled groups.
    """
    G, S, E = scores_GSE.shape
    spare = S - E * capacity
    # Padding scores below all real tokens, so that it never takes a seat from a real token.
    values_GSE = torch.where(valid_GS.bool().unsqueeze(-1), scores_GSE.double(), -1.0)
    spread_GS = values_GSE.amax(-1) - values_GSE.amin(-1)
    spread_G11 = spread_GS.mean(1).clamp(min=1e-6)[:, None, None]
    seats_E = torch.full((E,), capacity, device=scores_GSE.device)
    if spare:
        values_GSE, seats_E = F.pad(values_GSE, (0, 1)), F.pad(seats_E, (0, 1), value=spare)
    last_seat_G1E = (seats_E - 1).expand(G, 1, -1)
    most_seats = max(capacity, spare)
    no_bids_GSE = torch.full_like(values_GSE, -math.inf)

    price_G1E = _first_prices(values_GSE, seats_E, spread_G11)
    epsilon_G1 = spread_G11[..., 0] * FIRST_EPSILON
    seated_GS = torch.zeros_like(valid_GS, dtype=torch.bool)
    complete_G1 = torch.zeros_like(seated_GS[:, :1])
    expert_GS = torch.zeros_like(valid_GS, dtype=torch.long)
    complete_GS, bid_GS = expert_GS, torch.zeros_like(values_GSE[..., 0])
    for _ in range(rounds):
        profit_GSE = values_GSE - price_G1E
        best_GS1 = profit_GSE.argmax(-1, keepdim=True)
        second_GS = profit_GSE.scatter(-1, best_GS1, NO_RIVAL).amax(-1)
        new_bid_GS = values_GSE.gather(-1, best_GS1).squeeze(-1) - second_GS + epsilon_G1
        bid_GS = torch.where(seated_GS, bid_GS, new_bid_GS)
        expert_GS = torch.where(seated_GS, expert_GS, best_GS1.squeeze(-1))

        bids_GSE = no_bids_GSE.scatter(-1, expert_GS.unsqueeze(-1), bid_GS.unsqueeze(-1))
        # The lowest seated bid of each expert; -inf if it is not full.
        lowest_G1E = bids_GSE.topk(most_seats, dim=1).values.gather(1, last_seat_G1E)
        full_G1E = lowest_G1E > -math.inf
        higher_GSE = bids_GSE > lowest_G1E
        equal_GSE = (bids_GSE == lowest_G1E) & full_G1E
        room_G1E = seats_E - higher_GSE.sum(1, keepdim=True)
        seated_GS = (higher_GSE | (equal_GSE & (equal_GSE.cumsum(1) <= room_G1E))).any(-1)
        price_G1E = torch.where(full_G1E, lowest_G1E, price_G1E)

        # A completed phase, whose tokens are all seated, keeps its prices, empties the seats and continues
        # with a smaller epsilon.
        all_seated_G1 = seated_GS.all(1, keepdim=True)
        complete_GS = torch.where(all_seated_G1, expert_GS, complete_GS)
        complete_G1 = complete_G1 | all_seated_G1
        next_phase_G1 = all_seated_G1 & (epsilon_G1 > LAST_EPSILON)
        seated_GS = seated_GS ^ next_phase_G1
        shrunk_G1 = (epsilon_G1 * SHRINK).clamp(min=LAST_EPSILON)
        epsilon_G1 = torch.where(next_phase_G1, shrunk_G1, epsilon_G1)

    expert_GS = torch.where(complete_G1, complete_GS, expert_GS)
    reported_GS = (complete_G1 | seated_GS) & valid_GS.bool()
    seated_GSE = (
        expert_GS.unsqueeze(-1) == torch.arange(E, device=expert_GS.device)
    ) & reported_GS.unsqueeze(-1)
    # Each seat that padding must fill costs 1 in `values_GSE`, in every assignment.
    forced_G = ((valid_GS == 0).sum(1) - spare).clamp(min=0)
    bound_G = (price_G1E * seats_E).sum((1, 2)) + (values_GSE - price_G1E).amax(-1).sum(1) + forced_G
    return seated_GSE, bound_G, 1 - seated_GS.double().mean(1)


def _first_prices(values_GSE: Tensor, seats_E: Tensor, spread_G11: Tensor) -> Tensor:
    """Prices at which tokens that choose by a softmax fill each expert's seats.

    These are Sinkhorn's column updates with a falling temperature; they save most of the auction's rounds.
    """
    unit_GSE = values_GSE / spread_G11
    price_G1E = torch.zeros_like(values_GSE[:, :1])
    for i in range(ANNEALING):
        temperature = FIRST_TEMPERATURE * (LAST_TEMPERATURE / FIRST_TEMPERATURE) ** (i / (ANNEALING - 1))
        wanted_G1E = ((unit_GSE - price_G1E) / temperature).softmax(-1).sum(1, keepdim=True)
        price_G1E = price_G1E + temperature * (wanted_G1E.clamp(min=1e-9) / seats_E).log()
    return price_G1E * spread_G11

"""Which expert's seat each token takes, when every expert has the same number of seats and fills them all.

Source: Bertsekas & Castanon 1989, "The auction algorithm for the transportation problem": all tokens without
a seat bid at once, every expert keeps its best bids, epsilon shrinks from phase to phase. Ours runs all
groups side by side: each is a state machine under masks, and one that is settled no longer bids. Its first
prices come from annealed Sinkhorn steps, which spare most of the bidding.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

# Relative to the spread of a group's scores. At S=1576, E=32, C=49 and logits of standard deviation 0.1 the
# bidding took 1800 rounds from prices of 0 and epsilon 0.25; from these prices 100 to 400.
ANNEALING, FIRST_TEMPERATURE, LAST_TEMPERATURE = 100, 0.3, 2e-3
FIRST_EPSILON, SHRINK = 2e-3, 0.2
LAST_EPSILON = 1e-9  # absolute, for scores in 0..1; far above float64 rounding


def assign(scores_GSE: Tensor, valid_GS: Tensor, capacity: int, rounds: int) -> tuple[Tensor, Tensor, Tensor]:
    """The assignment of the largest total score with `capacity` seats per expert, E * capacity <= S.

    In float64; `rounds` counts the bidding after the ANNEALING steps that set the first prices. A settled
    group's total is within S * LAST_EPSILON of the optimum. Others get the assignment of their
    last completed, coarser epsilon; or, without any, the tokens seated so far. Tokens beyond the seats sit
    with a dummy expert of score 0. So does padding as far as it can; the rest of it fills the seats that
    real tokens leave over, and is not reported. Of equal bids the lower token's wins.

    Returns:
        seated_GSE: booleans, at most `capacity` per expert and one per token.
        bound_G: no assignment scores more; from the prices (linear programming duality).
        open_G: share of the S seats, the dummy's among them, that were still open; 0 for settled groups.
    """
    G, S, E = scores_GSE.shape
    spare = S - E * capacity
    # below all real scores, so that padding never keeps a real token from a seat
    values_GSE = torch.where(valid_GS.bool().unsqueeze(-1), scores_GSE.double(), -1.0)
    spread_GS = values_GSE.amax(-1) - values_GSE.amin(-1)
    spread_G11 = spread_GS.mean(1).clamp(min=1e-6)[:, None, None]
    seats_E = torch.full((E,), capacity, device=scores_GSE.device)
    if spare:
        values_GSE, seats_E = F.pad(values_GSE, (0, 1)), F.pad(seats_E, (0, 1), value=spare)
    last_seat_G1E = (seats_E - 1).expand(G, 1, -1)
    most_seats = max(capacity, spare)

    price_G1E = _first_prices(values_GSE, seats_E, spread_G11)
    epsilon_G1 = spread_G11[..., 0] * FIRST_EPSILON
    seated_GS = torch.zeros_like(valid_GS, dtype=torch.bool)
    complete_G1 = torch.zeros_like(seated_GS[:, :1])
    expert_GS = torch.zeros_like(valid_GS, dtype=torch.long)
    complete_GS, bid_GS = expert_GS, torch.zeros_like(values_GSE[..., 0])
    for _ in range(rounds):
        profit_GSE = values_GSE - price_G1E
        best_GS1 = profit_GSE.argmax(-1, keepdim=True)
        second_GS = profit_GSE.scatter(-1, best_GS1, -math.inf).amax(-1)
        new_bid_GS = values_GSE.gather(-1, best_GS1).squeeze(-1) - second_GS + epsilon_G1
        bid_GS = torch.where(seated_GS, bid_GS, new_bid_GS)
        expert_GS = torch.where(seated_GS, expert_GS, best_GS1.squeeze(-1))

        bids_GSE = torch.full_like(values_GSE, -math.inf).scatter(
            -1, expert_GS.unsqueeze(-1), bid_GS.unsqueeze(-1)
        )
        lowest_G1E = bids_GSE.topk(most_seats, dim=1).values.gather(1, last_seat_G1E)  # -inf: not full
        higher_GSE = bids_GSE > lowest_G1E
        equal_GSE = (bids_GSE == lowest_G1E) & bids_GSE.isfinite()
        room_G1E = seats_E - higher_GSE.sum(1, keepdim=True)
        seated_GS = (higher_GSE | (equal_GSE & (equal_GSE.cumsum(1) <= room_G1E))).any(-1)
        price_G1E = torch.where(lowest_G1E.isfinite(), lowest_G1E, price_G1E)

        # a completed phase keeps its prices, empties the seats and goes on with a smaller epsilon
        all_seated_G1 = seated_GS.all(1, keepdim=True)
        complete_GS = torch.where(all_seated_G1, expert_GS, complete_GS)
        complete_G1 = complete_G1 | all_seated_G1
        next_phase_G1 = all_seated_G1 & (epsilon_G1 > LAST_EPSILON)
        seated_GS = seated_GS & ~next_phase_G1
        shrunk_G1 = (epsilon_G1 * SHRINK).clamp(min=LAST_EPSILON)
        epsilon_G1 = torch.where(next_phase_G1, shrunk_G1, epsilon_G1)

    expert_GS = torch.where(complete_G1, complete_GS, expert_GS)
    reported_GS = (complete_G1 | seated_GS) & valid_GS.bool()
    seated_GSE = (
        expert_GS.unsqueeze(-1) == torch.arange(E, device=expert_GS.device)
    ) & reported_GS.unsqueeze(-1)
    # seats that padding must fill cost 1 each in `values_GSE`, in every assignment alike
    forced_G = ((valid_GS == 0).sum(1) - spare).clamp(min=0)
    bound_G = (price_G1E * seats_E).sum((1, 2)) + (values_GSE - price_G1E).amax(-1).sum(1) + forced_G
    return seated_GSE, bound_G, 1 - seated_GS.double().mean(1)


def _first_prices(values_GSE: Tensor, seats_E: Tensor, spread_G11: Tensor) -> Tensor:
    """The prices at which as many tokens want each expert as it has seats, were their choice a softmax.

    Its temperature falls from step to step: Sinkhorn's column update, in a form in which that is one line.
    """
    price_G1E = torch.zeros_like(values_GSE[:, :1])
    for i in range(ANNEALING):
        cooling = (LAST_TEMPERATURE / FIRST_TEMPERATURE) ** (i / (ANNEALING - 1))
        temperature_G11 = spread_G11 * FIRST_TEMPERATURE * cooling
        wanted_G1E = ((values_GSE - price_G1E) / temperature_G11).softmax(-1).sum(1, keepdim=True)
        price_G1E = price_G1E + temperature_G11 * (wanted_G1E.clamp(min=1e-9) / seats_E).log()
    return price_G1E

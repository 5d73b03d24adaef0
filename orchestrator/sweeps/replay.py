"""A sweep replayed on known learning curves: what a policy trains, in which order, and what that costs."""

import heapq
import math
from collections.abc import Callable, Hashable, Iterator, Sequence
from statistics import fmean

import numpy as np

from orchestrator.runs.run_directory import Result
from orchestrator.sweeps.queue import Policy, TrialQueue, TrialState
from orchestrator.sweeps.stopping import ARM_SD, DECADE_SD, LEVEL, SEED_SD, SLOPE

WORKERS = 4
SWEEPS, RANKINGS = 20, 2000  # drawn sweeps, fewer where these would need more rankings in all
# Of a rung and the end, among arms of about the same cost: the middle of the recorded sweeps
# (`bench/stopping.py`) at an eighth of the steps.
CORRELATION = 0.35


def replay(
    states: Sequence[TrialState],
    policy: Policy,
    quality: Callable[[TrialState, int], float],
    *,
    budget: float = math.inf,
) -> Iterator[tuple[float, TrialState]]:
    """Yields the trial of every job that ends, and the cost until then, what running jobs have cost included.

    `WORKERS` jobs run at a time, each for the time of its cost, until the policy has none or the budget holds
    none.

    Args:
        states: trials that have not begun.
        quality: returns the quality of a trial at a step.
        budget: bound of the cost of all jobs.
    """
    running, started = list[tuple[float, int, TrialState]](), 0
    now, spent, promised = 0.0, 0.0, 0.0  # `promised` is what the started jobs cost in all

    def price(state: TrialState, until: int) -> float:
        return state.flops * state.part(until)

    queue = TrialQueue(
        states,
        policy,
        cluster_resources=lambda: {name: math.inf for state in states for name in state.need},
        quality="quality",
        max_concurrent=WORKERS,
        admits=lambda job, state: promised + price(state, job.until) <= budget * (1 + 1e-9),
    )
    while True:
        while job := queue.next():
            cost, started = price(job.state, job.until), started + 1
            promised += cost
            heapq.heappush(running, (now + cost, started, job.state))
        if not running:
            return
        end, _, state = heapq.heappop(running)
        now, spent = end, spent + (end - now) * (len(running) + 1)
        status = "finished" if state.until == state.steps else "paused"
        metrics = {"quality": quality(state, state.until)}
        queue.done(state.name, Result(status=status, step=state.until, metrics=metrics))
        yield spent, state


def expected_spending(
    unbegun: Callable[[], Sequence[TrialState]], policy: Policy
) -> tuple[float, float, float]:
    """Returns the 10, 50 and 90 % quantiles of what a policy spends in sweeps that are drawn from the
    assumptions of `EarlyStopping`, as parts of the cost of training everything.

    Args:
        unbegun: makes the states of all trials, none of which has begun.
    """
    draws = max(1, min(SWEEPS, RANKINGS // len(unbegun())))
    low, middle, high = np.quantile(
        [_spending(unbegun(), policy, seed) for seed in range(draws)], (0.1, 0.5, 0.9)
    )
    return float(low), float(middle), float(high)


def _spending(states: Sequence[TrialState], policy: Policy, seed: int) -> float:
    drawn = _draw(states, np.random.default_rng(seed))
    ends = replay(states, policy, lambda state, step: drawn[state.name][step == state.steps])
    *_, spent = (spent for spent, _ in ends)
    return spent / math.fsum(state.flops for state in states)


def _draw(states: Sequence[TrialState], rng: np.random.Generator) -> dict[str, tuple[float, float]]:
    """Draws the quality of every trial at its rung and at its end. It grows with the logarithm of the cost,
    at a rate of the sweep's own, with a random walk around that.
    """
    cost: dict[Hashable, list[float]] = {}
    for state in states:
        cost.setdefault(state.arm, []).append(math.log10(state.cost))
    x = {arm: fmean(costs) for arm, costs in cost.items()}
    arms = sorted(x, key=lambda arm: (x[arm], str(arm)))
    steps = np.diff([x[arm] for arm in arms], prepend=x[arms[0]])
    growth = abs(rng.normal(0, DECADE_SD)) * steps + rng.normal(0, 0.5 * DECADE_SD * np.sqrt(steps))
    level = dict(
        zip(arms, zip(LEVEL + np.cumsum(growth), rng.normal(0, ARM_SD, len(arms)), strict=True), strict=True)
    )
    sd = math.hypot(ARM_SD, SEED_SD)
    # The end is `SLOPE` times the rung, plus what the rung does not say.
    known, noise = CORRELATION**2 / SLOPE, CORRELATION * math.sqrt(1 - CORRELATION**2) / SLOPE * sd
    drawn = {}
    for state in states:
        trend, own = level[state.arm]
        own += rng.normal(0, SEED_SD)
        drawn[state.name] = float(trend + known * own + rng.normal(0, noise)), float(trend + own)
    return drawn

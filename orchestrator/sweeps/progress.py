"""Where a sweep stands, in the few numbers that somebody who waits wants to see."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from orchestrator.frontier.pareto import hypervolume_2d, pareto_front
from orchestrator.sweeps.budget import BudgetTracker
from orchestrator.sweeps.queue import TrialState
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.run_directory import Result


@dataclass(frozen=True, kw_only=True)
class Snapshot:
    """Attributes:
    complete: finished, diverged or failed.
    paused: step -> trials that wait there for their promotion.
    best: the highest quality; None before the first trial has finished.
    front, hypervolume: of finished trials, each seed for itself.
    spent_s, left_s: device-seconds; of the rest, the wall time that it takes on what runs now; 0: unknown.
    """

    trials: int
    complete: int
    running: int
    paused: Mapping[int, int]
    best: float | None
    front: int
    hypervolume: float
    spent_s: float
    left_s: float


def snapshot(
    sweep: Sweep, states: Sequence[TrialState], budget: BudgetTracker, reference: Mapping[str, float]
) -> Snapshot:
    """Where the sweep stands. `reference`: the sweep's own, so that its hypervolumes can be compared."""
    done = [(one, one.outcome) for one in states if one.trial.role == "trial"]
    rows = [
        (math.log10(one.cost), 1 - end.metrics[sweep.quality])
        for one, end in done
        if isinstance(end, Result) and end.status == "finished"
    ]
    points = np.array(rows, dtype=np.float64).reshape(-1, 2)
    chance = 1 / sweep.base.model.num_classes
    # Costs that are only measured are judged by FLOPs until trials end.
    highest = reference.get(sweep.cost, reference.get("cost/train_flops_6mac", 1.0))
    running = [one for one in states if one.running]
    devices = sum(one.trial.run.scale.workers for one in running)
    return Snapshot(
        trials=len(states),
        complete=sum(one.outcome is not None for one in states),
        running=len(running),
        paused=dict(sorted(Counter(one.begins_at for one in states if one.waiting and one.reached).items())),
        best=1 - float(points[:, 1].min()) if rows else None,
        front=int(pareto_front(points).sum()),
        hypervolume=hypervolume_2d(points, np.array([math.log10(highest), 1 - chance])),
        spent_s=budget.spent_s,
        left_s=budget.remaining_s(states) / devices if devices and budget.can_estimate() else 0.0,
    )

"""Early stopping judged by replay: how much of the frontier a part of the full cost finds.

  python bench/stopping.py --out bench/results/stopping.json

Replays policies on the learning curves that `bench/curves.py` recorded, on 4 workers, with arms in a new
order each time: with one seed of every arm, and with all seeds, where a point is their mean and counts once
all are complete. The policy of `orchestrator/sweeps/asha.py` was made on the curves of `routers` and
`pareto`. Those of `quickstart` judge it.

At 5, 10, 20 and 40 % of the cost of training everything to its end: hypervolume regret, 1 - (hypervolume of
the complete arms) / (hypervolume of all arms), and recall, the part of the full frontier's arms that is
complete. Without a budget: the regret, and the part of the full cost that was spent when the policy had no
jobs left. Means over replays, with bootstrap intervals of 95 %. Stopped trials cost what they cost and add no
point. Costs are FLOPs; a pause costs nothing. Last, the time that the driver takes for an event, at 3,000
trials.
"""

import argparse
import heapq
import json
import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.provenance import provenance
from bench.rivals import CheapestFirst, Oracle, Promotion, non_dominated, scalarised
from orchestrator.frontier.pareto import hypervolume_2d, pareto_front
from orchestrator.sweeps.asha import MultiObjectiveASHA
from orchestrator.sweeps.queue import Policy, RunToCompletion, TrialQueue, TrialState
from orchestrator.training.run_directory import Result

RESULTS = Path(__file__).parent / "results"
CURVES = [RESULTS / f"curves-{name}.json" for name in ("routers-tiny", "pareto-moved", "quickstart-textures")]
PARTS = (0.05, 0.1, 0.2, 0.4)
WORKERS = 4
CHANCE = 0.1


@dataclass(frozen=True, kw_only=True)
class Curves:
    """The learning curves of a sweep.

    Attributes:
        cost: arm -> cost of one full training.
        quality: (arm, seed) -> quality by step.
    """

    steps: int
    cost: Mapping[str, float]
    quality: Mapping[tuple[str, int], Mapping[int, float]]

    @property
    def total(self) -> float:
        return sum(self.cost[arm] for arm, _ in self.quality)

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for _, seed in self.quality})

    def only(self, seed: int) -> "Curves":
        chosen = {key: curve for key, curve in self.quality.items() if key[1] == seed}
        return Curves(steps=self.steps, cost=self.cost, quality=chosen)

    def point(self, arm: str) -> tuple[float, float]:
        final = fmean(self.quality[arm, seed][self.steps] for seed in self.seeds)
        return math.log10(self.cost[arm]), 1 - final

    def space(self, arms: Sequence[str]) -> np.ndarray:
        return np.array([self.point(arm) for arm in arms], dtype=np.float64).reshape(-1, 2)

    @property
    def bound(self) -> np.ndarray:
        return np.array([math.log10(1.1 * max(self.cost.values())), 1 - CHANCE])

    def hypervolume(self, arms: Sequence[str]) -> float:
        return hypervolume_2d(self.space(arms), self.bound)


POLICIES: dict[str, Callable[[Curves], Policy]] = {
    "ours": lambda curves: MultiObjectiveASHA(chance=CHANCE),
    "oracle": lambda curves: Oracle({arm: curves.point(arm) for arm in curves.cost}, curves.bound),
    "random subset": lambda curves: RunToCompletion(),  # the arms arrive in random order
    "cheapest first": lambda curves: CheapestFirst(),
    "ASHA, quality alone": lambda curves: Promotion(scalarised(0.0)),
    "ASHA, 0.1 of quality per decade": lambda curves: Promotion(scalarised(0.1)),
    "MO-ASHA, promotion": lambda curves: Promotion(non_dominated),
}


def load_curves(path: Path) -> Curves:
    table = json.loads(path.read_text())
    at = range(table["every"], table["steps"] + 1, table["every"])
    arms: dict[str, Any] = table["arms"]
    return Curves(
        steps=table["steps"],
        cost={arm: entry["cost/train_flops_6mac"] for arm, entry in arms.items()},
        quality={
            (arm, seed): dict(zip(at, curve, strict=True))
            for arm, entry in arms.items()
            for seed, curve in enumerate(entry["val/acc1"])
        },
    )


@dataclass(frozen=True, kw_only=True)
class Replay:
    """How a replay went.

    Attributes:
        complete: (cost spent when the last seed of the arm was complete, arm), in that order.
        spent: cost at the end.
    """

    complete: Sequence[tuple[float, str]]
    spent: float

    def arms(self, spent: float) -> list[str]:
        return [arm for at, arm in self.complete if at <= spent]


def replay(policy: Policy, curves: Curves, order: Sequence[str]) -> Replay:
    """Runs `WORKERS` jobs at a time, each for the time of its cost, until the policy has none."""
    seeds = curves.seeds
    states = [
        TrialState(
            f"{arm}/{seed}", arm=arm, cost=curves.cost[arm], steps=curves.steps, need={}, trial=(arm, seed)
        )
        for arm in order
        for seed in seeds
    ]
    left = dict.fromkeys(order, len(seeds))
    running: list[tuple[float, int, TrialState, float]] = []
    now, spent, complete = 0.0, 0.0, list[tuple[float, str]]()
    while True:
        while len(running) < WORKERS:
            job = next(iter(policy.jobs(states)), None)
            if job is None:
                break
            state = job.state
            cost = state.cost * (job.until - state.begins_at) / curves.steps
            state.running, state.until = True, job.until
            heapq.heappush(running, (now + cost, states.index(state), state, cost))
        if not running:
            break
        now, _, state, cost = heapq.heappop(running)
        state.running = False
        spent += cost
        curve = curves.quality[state.trial]
        state.reached[state.until] = curve[min(curve, key=lambda step: abs(step - state.until))]
        if state.finished:
            state.outcome = "complete"
            arm, _ = state.trial
            left[arm] -= 1
            if not left[arm]:
                complete.append((spent, arm))
    return Replay(complete=complete, spent=spent)


def judge(name: str, path: Path, single: bool, replays: int) -> dict[str, Any]:
    """Mean figures of one policy, with their intervals. `single`: every replay has one seed of each arm."""
    recorded, rng = load_curves(path), random.Random(0)  # the same orders for every policy
    figures: dict[str, list[float]] = {}
    for i in range(replays):
        curves = recorded.only(recorded.seeds[i % len(recorded.seeds)]) if single else recorded
        order = list(curves.cost)
        rng.shuffle(order)
        full = curves.hypervolume(order)
        front = {a for a, on in zip(order, pareto_front(curves.space(order)), strict=True) if on}
        found = replay(POLICIES[name](curves), curves, order)
        now = {"cost without a budget": found.spent / curves.total}
        now["regret without a budget"] = 1 - curves.hypervolume(found.arms(math.inf)) / full
        for part in PARTS:
            arms = found.arms(part * curves.total)
            now[f"regret at {part:g}"] = 1 - curves.hypervolume(arms) / full
            now[f"recall at {part:g}"] = len(front & set(arms)) / len(front)
        for what, value in now.items():
            figures.setdefault(what, []).append(value)
    return {"scheduler": name} | {what: _interval(np.array(values)) for what, values in figures.items()}


def _interval(values: np.ndarray) -> list[float]:
    """Mean, and the 2.5 and 97.5 % quantiles of the means of 2,000 resamples."""
    resampled = np.random.default_rng(0).choice(values, (2000, len(values))).mean(axis=1)
    return [round(float(x), 5) for x in (values.mean(), *np.quantile(resampled, (0.025, 0.975)))]


def show(record: Mapping[str, Any]) -> str:
    """A row of a table in Markdown."""
    regrets = ["{:.2f} ({:.2f}-{:.2f})".format(*(100 * x for x in record[f"regret at {p:g}"])) for p in PARTS]
    recalls = ", ".join(f"{record[f'recall at {part:g}'][0]:.2f}" for part in PARTS)
    end = [100 * record[f"{what} without a budget"][0] for what in ("regret", "cost")]
    return f"| {' | '.join([record['scheduler'], *regrets, recalls])} | {end[0]:.2f} at {end[1]:.0f} % |"


def driver_time(trials: int = 3000) -> dict[str, float]:
    """Returns milliseconds of an event that changes no ranking, and of a new ranking. Half of the arms are
    tried.
    """
    rng = random.Random(0)
    states = [
        TrialState(f"{i}", arm=i // 3, cost=10 ** rng.uniform(9, 12), steps=160, need={"CPU": 1.0})
        for i in range(trials)
    ]
    for state in states[: trials // 2 : 3]:
        state.reached[10] = rng.uniform(0.3, 0.8)
    policy = MultiObjectiveASHA(chance=CHANCE)
    queue = TrialQueue(states, policy, cluster_resources={"CPU": 8.0}, quality="quality")
    jobs = [job for _ in range(8) if (job := queue.next())]
    assert queue.next() is None
    began = time.perf_counter()
    for _ in range(1000):
        queue.next()
    idle = time.perf_counter() - began
    ranked = []
    for job in jobs:
        queue.done(job.state.name, Result(status="paused", step=job.until, metrics={"quality": 0.5}))
        began = time.perf_counter()
        queue.next()
        ranked.append(time.perf_counter() - began)
    return {"event that changes no ranking, ms": idle, "new ranking, ms": 1000 * float(np.median(ranked))}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curves", type=Path, nargs="+", default=CURVES, help="(all)")
    parser.add_argument("--replays", type=int, default=42, help="of each policy (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    tables = []
    for path in args.curves:
        for seeds, replays in (("one seed", args.replays), ("all seeds", max(1, args.replays // 3))):
            with ProcessPoolExecutor(args.processes) as pool:
                futures = [pool.submit(judge, name, path, seeds == "one seed", replays) for name in POLICIES]
                records = [future.result() for future in futures]
            print(f"\n{path.stem}, {seeds}, {replays} replays")
            print(f"| scheduler | {' | '.join(f'{p:.0%}' for p in PARTS)} | recall | without a budget |")
            print("\n".join(map(show, records)), flush=True)
            tables.append({"curves": path.name, "seeds": seeds, "replays": replays, "records": records})
    driver = driver_time()
    print("\n3,000 trials:", ", ".join(f"{what} {value:.3g}" for what, value in driver.items()))
    if args.out:
        record = provenance() | {"workers": WORKERS, "driver": driver, "tables": tables}
        args.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()

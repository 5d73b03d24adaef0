"""Early stopping judged by replay: what a part of the full cost finds of the frontier that all of it finds.

  python bench/stopping.py --out bench/results/stopping-routers-tiny.json

Replays schedulers on the learning curves that `bench/curves.py` recorded, with arms in a new order and of one
seed in every replay, on 4 workers. At 5, 10, 20 and 40 % of the cost of training every arm to its end:
hypervolume regret, 1 - (of the complete arms' frontier) / (of the full one), and recall, how many arms of the
full frontier are complete; means over replays, with bootstrap intervals of 95 %. Arms that were stopped cost
what they cost and count for nothing. Costs are FLOPs; a pause costs nothing.
"""

import argparse
import heapq
import json
import math
import random
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np

from bench.rivals import Arrival, CheapestFirst, Promotion, SyneTune, non_dominated, scalarised
from orchestrator.frontier.pareto import hypervolume_2d, pareto_front
from orchestrator.sweeps.agenda import Policy, Standing
from orchestrator.sweeps.catalog import make_sweep
from orchestrator.sweeps.scheduler import Halving
from orchestrator.sweeps.sweep import Trial

CURVES = Path(__file__).parent / "results" / "curves-routers-tiny.json"
PARTS = (0.05, 0.1, 0.2, 0.4)
WORKERS = 4
CHANCE = 0.1
POLICIES: dict[str, Callable[[], Policy]] = {
    "ours": lambda: Halving(chance=CHANCE),
    "random subset": Arrival,
    "cheapest first": CheapestFirst,
    "ASHA, quality alone": lambda: Promotion(scalarised(0.0)),
    "ASHA, 0.1 of quality per decade": lambda: Promotion(scalarised(0.1)),
    "MO-ASHA, promotion": lambda: Promotion(non_dominated),
}
if find_spec("syne_tune"):
    POLICIES["MOASHA of syne-tune"] = SyneTune


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Of one seed: arm -> cost of the full training, and quality by step."""

    steps: int
    cost: Mapping[str, float]
    quality: Mapping[str, Mapping[int, float]]

    def space(self, arms: Sequence[str]) -> np.ndarray:
        rows = [(math.log10(self.cost[arm]), 1 - self.quality[arm][self.steps]) for arm in arms]
        return np.array(rows, dtype=np.float64).reshape(-1, 2)

    def hypervolume(self, arms: Sequence[str]) -> float:
        reference = np.array([math.log10(1.1 * max(self.cost.values())), 1 - CHANCE])
        return hypervolume_2d(self.space(arms), reference)


def load_curves(path: Path) -> list[Curves]:
    """One for each seed."""
    table = json.loads(path.read_text())
    steps, every = table["steps"], table["every"]
    arms: dict[str, Any] = table["arms"]
    seeds = len(next(iter(arms.values()))["val/acc1"])
    at = range(every, steps + 1, every)
    return [
        Curves(
            steps=steps,
            cost={arm: entry["cost/train_flops_6mac"] for arm, entry in arms.items()},
            quality={arm: dict(zip(at, entry["val/acc1"][seed], strict=True)) for arm, entry in arms.items()},
        )
        for seed in range(seeds)
    ]


@dataclass(frozen=True, kw_only=True)
class Replay:
    """What was complete when: (cost spent when it was, arm), in that order."""

    complete: Sequence[tuple[float, str]]

    def arms(self, spent: float) -> list[str]:
        return [arm for at, arm in self.complete if at <= spent]


def replay(policy: Policy, curves: Curves, order: Sequence[str], most: float) -> Replay:
    """`WORKERS` jobs at a time, each taking the time of its cost, until `most` is spent."""
    trials = _trials()
    standings = [Standing(trials[arm], cost=curves.cost[arm], need={}) for arm in order]
    by_name = {one.trial.name: one for one in standings}
    running: list[tuple[float, str, int, float]] = []
    now, spent, complete = 0.0, 0.0, list[tuple[float, str]]()
    while spent < most:
        while len(running) < WORKERS:
            job = next(iter(policy.jobs(standings)), None)
            if job is None:
                break
            one = by_name[job.trial.name]
            cost = one.cost * (job.until - one.begins_at) / curves.steps
            one.running = True
            heapq.heappush(running, (now + cost, job.trial.name, job.until, cost))
        if not running:
            break
        now, name, until, cost = heapq.heappop(running)
        one = by_name[name]
        one.running = False
        spent += cost
        at = min(curves.quality[name], key=lambda step: abs(step - until))
        if until >= curves.steps:
            one.outcome = "complete"
            one.reached[until] = curves.quality[name][curves.steps]
            complete.append((spent, name))
        else:
            one.reached[until] = curves.quality[name][at]
    return Replay(complete=complete)


@cache
def _trials() -> dict[str, Trial]:
    return make_sweep("routers", "tiny").trials()


def judge(name: str, path: Path, replays: int) -> tuple[np.ndarray, np.ndarray]:
    """Of one scheduler: regret and recall, each (replays, parts)."""
    seeds, chance = load_curves(path), random.Random(0)  # the same orders for every scheduler
    regret, recall = np.zeros((replays, len(PARTS))), np.zeros((replays, len(PARTS)))
    for i in range(replays):
        curves = seeds[i % len(seeds)]
        order = list(curves.cost)
        chance.shuffle(order)
        whole, all_of_it = sum(curves.cost.values()), curves.hypervolume(order)
        front = {a for a, on in zip(order, pareto_front(curves.space(order)), strict=True) if on}
        found = replay(POLICIES[name](), curves, order, max(PARTS) * whole)
        for k, part in enumerate(PARTS):
            arms = found.arms(part * whole)
            regret[i, k] = 1 - curves.hypervolume(arms) / all_of_it
            recall[i, k] = len(front & set(arms)) / len(front)
    return regret, recall


def record(name: str, judged: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> dict[str, Any]:
    """Means with their intervals; also of the regret beyond ours in the same replay."""
    regret, recall = judged[name]
    figures = {"regret": regret, "recall": recall, "regret beyond ours": regret - judged["ours"][0]}
    return {"scheduler": name} | {
        f"{what} at {part:g}": _interval(values[:, k])
        for what, values in figures.items()
        for k, part in enumerate(PARTS)
    }


def _interval(values: np.ndarray) -> list[float]:
    """Mean, and the 2.5 and 97.5 % quantiles of the means of 2,000 resamples."""
    resampled = np.random.default_rng(0).choice(values, (2000, len(values))).mean(axis=1)
    return [round(float(x), 5) for x in (values.mean(), *np.quantile(resampled, (0.025, 0.975)))]


def show(record: Mapping[str, Any]) -> str:
    cells = []
    for part in PARTS:
        mean, low, high = (100 * x for x in record[f"regret at {part:g}"])
        cells.append(f"{mean:6.2f} ({low:5.2f}-{high:5.2f}) {record[f'recall at {part:g}'][0]:.2f}")
    return f"{record['scheduler']:32}" + "  ".join(cells)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curves", type=Path, default=CURVES, help="(%(default)s)")
    parser.add_argument("--replays", type=int, default=210, help="of each scheduler (%(default)s)")
    parser.add_argument("--processes", type=int, default=2, help="(%(default)s)")
    parser.add_argument("--out", type=Path, help="JSON file to write")
    args = parser.parse_args()
    print(f"{'':32}" + "  ".join(f"{f'{part:.0%}: regret % (95 %) recall':>28}" for part in PARTS))
    with ProcessPoolExecutor(args.processes) as pool:
        futures = {name: pool.submit(judge, name, args.curves, args.replays) for name in POLICIES}
        judged = {name: future.result() for name, future in futures.items()}
    records = [record(name, judged) for name in POLICIES]
    print("\n".join(map(show, records)))
    print("\nregret beyond ours in the same replays, % (95 %)")
    for one in records[1:]:
        beyond = (one[f"regret beyond ours at {part:g}"] for part in PARTS)
        cells = (f"{100 * m:6.2f} ({100 * low:5.2f} to {100 * high:5.2f})" for m, low, high in beyond)
        print(f"{one['scheduler']:32}" + "  ".join(cells))
    if args.out:
        told = {"curves": args.curves.name, "replays": args.replays, "workers": WORKERS, "records": records}
        args.out.write_text(json.dumps(told, indent=1) + "\n")


if __name__ == "__main__":
    main()

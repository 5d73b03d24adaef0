"""Early stopping judged by replay: the hypervolume that it loses, at equal cost and at its own end.

  python bench/stopping.py --out bench/results/stopping.json
  python bench/stopping.py --sweep DIR    replays a sweep that was trained without early stopping

Replays policies on 4 workers. *Recorded* curves (`bench/curves.py`): every replay has a random 75 % of the
arms under new names, the seeds in a new order, one of them or all. *Families* are made up
(`bench/families.py`). The arms are written in a new order each time.

Regret is 1 - (hypervolume of the complete arms) / (hypervolume of all arms). A point is the mean of an arm's
seeds, and counts once all are complete. It is taken at parts of the cost of training everything, and once a
policy has no jobs left, with the cost until then. What running trials have cost is counted, a pause costs
nothing. Recall is the part of the frontier's arms that is complete at the end. Intervals are bootstrap over
replays, 95 %: for recorded curves they say nothing about other data. `best` says in which part of the replays
the arm of the highest quality is complete at the end.

`ours, loss=..` has another exchange rate than the default, 0.015.

With a budget, both of the policies that a user has leave out jobs that it does not hold.

The constants of `orchestrator/sweeps/stopping.py` were set on the first four recorded sets (`study`: the one
with a single learning rate), on an earlier generator of families that is not kept, on those of `TUNING`, and
on arms of equal cost; `FIRST_COST` on `clutter` too, which had been held out before. `modern`, the study with
a rate for each arm, came later. The families of `TEST` were looked at once, after the last change.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

import numpy as np

from bench.families import AT, STEPS, TEST, TUNING, family
from bench.harness import RESULTS, options
from bench.provenance import provenance
from bench.rivals import CheapestFirst, Oracle, Promotion, non_dominated, scalarised
from orchestrator.frontier.pareto import hypervolume_2d, pareto_front
from orchestrator.runs.metrics_file import read_metrics
from orchestrator.runs.run_directory import Result
from orchestrator.runs.sweep_directory import SweepDir
from orchestrator.sweeps.build import read_trials
from orchestrator.sweeps.queue import Policy, RunToCompletion, TrialQueue, TrialState
from orchestrator.sweeps.replay import WORKERS, replay
from orchestrator.sweeps.stopping import RUNG, EarlyStopping

RECORDED = {
    "routers": "curves-routers-tiny",
    "pareto": "curves-pareto-moved",
    "textures": "curves-quickstart-textures",
    "study": "study-one-rate",
    "clutter": "curves-clutter",
    "modern": "study",
}
PARTS = (0.02, 0.05, 0.1, 0.2, 0.4, 0.6, 0.8)


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
    chance: float = 0.1

    @property
    def total(self) -> float:
        return sum(self.cost[arm] for arm, _ in self.quality)

    @property
    def seeds(self) -> list[int]:
        return sorted({seed for _, seed in self.quality})

    @property
    def bound(self) -> np.ndarray:
        return np.array([math.log10(1.1 * max(self.cost.values())), 1 - self.chance])

    def point(self, arm: str) -> tuple[float, float]:
        final = fmean(self.quality[arm, seed][self.steps] for seed in self.seeds)
        return math.log10(self.cost[arm]), 1 - final

    def space(self, arms: Sequence[str]) -> np.ndarray:
        return np.array([self.point(arm) for arm in arms], dtype=np.float64).reshape(-1, 2)

    def hypervolume(self, arms: Sequence[str]) -> float:
        return hypervolume_2d(self.space(arms), self.bound)

    def front(self) -> set[str]:
        return {a for a, on in zip(self.cost, pareto_front(self.space([*self.cost])), strict=True) if on}

    def nearest(self, state: TrialState, step: int) -> float:
        """Returns the quality of a trial at the recorded step that is nearest."""
        curve = self.quality[state.trial]
        return curve[min(curve, key=lambda at: abs(at - step))]

    def resampled(self, rng: random.Random, *, single: bool = False, part: float = 1) -> "Curves":
        """Returns a random part of the arms under new names, with one seed, or all in a new order."""
        arms = [arm for arm in self.cost if rng.random() < part]
        seeds = rng.sample(self.seeds, 1 if single else len(self.seeds))
        names = {arm: f"arm{i}" for i, arm in enumerate(rng.sample(arms, len(arms)))}
        return replace(
            self,
            cost={name: self.cost[arm] for arm, name in names.items()},
            quality={
                (name, i): self.quality[arm, seed]
                for arm, name in names.items()
                for i, seed in enumerate(seeds)
            },
        )


POLICIES: dict[str, Callable[[Curves], Policy]] = {
    "ours": lambda curves: EarlyStopping(chance=curves.chance),
    "cheapest first": lambda curves: CheapestFirst(),
    "random subset": lambda curves: RunToCompletion(),  # the arms arrive in random order
    "oracle": lambda curves: Oracle({arm: curves.point(arm) for arm in curves.cost}, curves.bound),
    "ASHA, quality alone": lambda curves: Promotion(scalarised(0.0)),
    "MO-ASHA": lambda curves: Promotion(non_dominated),
    "ours, loss=0.005": lambda curves: EarlyStopping(chance=curves.chance, loss=0.005),
    "ours, loss=0.03": lambda curves: EarlyStopping(chance=curves.chance, loss=0.03),
    "ours, loss=0.05": lambda curves: EarlyStopping(chance=curves.chance, loss=0.05),
}


BUDGETED = ("ours", "cheapest first")  # the two that the command line has, each with a budget as well


def load_curves(path: Path) -> Curves:
    table = json.loads(path.read_text())
    at = [*range(table["every"], table["steps"], table["every"]), table["steps"]]
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


def sweep_curves(directory: str) -> Curves:
    """Returns the curves of the finished arms of a sweep. Its trials have the same steps, and were evaluated
    at an eighth of them (`train.eval_every`): a trial without that figure has the nearest one.
    """
    record = SweepDir(directory).record()
    assert record, f"no sweep in {directory}"
    trials = [trial for trial in read_trials(directory, record) if trial.status == "finished"]
    quality, cost = dict[tuple[str, int], dict[int, float]](), dict[str, float]()
    for trial in trials:
        rows, arm = read_metrics(trial.directory), trial.labels["arm"]
        seed = sum(name == arm for name, _ in quality)
        quality[arm, seed] = {r.step: r.metrics[record.quality] for r in rows if record.quality in r.metrics}
        cost[arm] = trial.metrics[record.cost]
    steps, seeds = trials[0].config.train.steps, max(seed for _, seed in quality)
    whole = {arm: price for arm, price in cost.items() if (arm, seeds) in quality}
    task, model = trials[0].config.task, trials[0].config.model
    curves = {key: curve for key, curve in quality.items() if key[0] in whole}
    return Curves(steps=steps, cost=whole, quality=curves, chance=task.chance(model))


def reordered(curves: Curves) -> list[Curves]:
    """Returns the curves with the seeds of the arms in 20 random orders."""
    rng = random.Random(0)
    return [curves.resampled(rng) for _ in range(20)]


def made_up(seed: int) -> Curves:
    made = family(seed)
    names = [f"{seed}-arm{i}" for i in range(len(made.cost))]
    quality = {
        (name, i): dict(zip(AT.tolist(), curve, strict=True))
        for name, curves in zip(names, made.quality.tolist(), strict=True)
        for i, curve in enumerate(curves)
    }
    cost = dict(zip(names, made.cost.tolist(), strict=True))
    return Curves(steps=STEPS, cost=cost, quality=quality, chance=made.chance)


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
        return [arm for at, arm in self.complete if at <= spent * (1 + 1e-9)]


def replayed(policy: Policy, curves: Curves, order: Sequence[str], budget: float = math.inf) -> Replay:
    """Replays a policy on arms that are written in this order."""
    fixed: dict[str, Any] = {"steps": curves.steps, "need": {}}
    states = [
        TrialState(f"{arm}/{seed}", arm=arm, cost=curves.cost[arm], trial=(arm, seed), **fixed)
        for arm in order
        for seed in curves.seeds
    ]
    left, complete, spent = dict.fromkeys(order, len(curves.seeds)), list[tuple[float, str]](), 0.0
    for spent, state in replay(states, policy, curves.nearest, budget=budget):
        arm, _ = state.trial
        left[arm] -= state.finished
        if state.finished and not left[arm]:
            complete.append((spent, arm))
    return Replay(complete=complete, spent=spent)


def figures(name: str, each: Sequence[Curves]) -> dict[str, list[float]]:
    """Returns figure -> its value in the replay of each of these sweeps."""
    rng, found = random.Random(0), dict[str, list[float]]()  # the same orders for every policy
    for curves in each:
        order = rng.sample([*curves.cost], len(curves.cost))
        full, front = curves.hypervolume(order), curves.front()

        def regret(run: Replay, spent: float = math.inf, *, of: Curves = curves, full: float = full) -> float:
            return 1 - of.hypervolume(run.arms(spent)) / full

        run = replayed(POLICIES[name](curves), curves, order)
        now = {"regret at end": regret(run), "cost": run.spent / curves.total}
        now["recall"] = len(front & set(run.arms(math.inf))) / len(front)
        now["best"] = float(min(order, key=lambda arm: curves.point(arm)[1]) in run.arms(math.inf))
        for part in PARTS:
            now[f"regret at {part:g}"] = regret(run, part * curves.total)
            if name in BUDGETED:
                bounded = replayed(POLICIES[name](curves), curves, order, part * curves.total)
                now[f"regret for {part:g}"] = regret(bounded)
        for what, value in now.items():
            found.setdefault(what, []).append(value)
    return found


def judge(each: Sequence[Curves], processes: int = 1) -> list[dict[str, Any]]:
    """Returns the record of every policy: means with their intervals, and those of differences."""
    with ProcessPoolExecutor(processes) as pool:
        found = dict(zip(POLICIES, pool.map(figures, POLICIES, [each] * len(POLICIES)), strict=True))
    records = []
    for name, rows in found.items():
        record: dict[str, Any] = {what: _interval(np.array(values)) for what, values in rows.items()}
        for when in (f"{word} {part:g}" for word in ("at", "for") for part in PARTS):
            if (what := f"regret {when}") in rows:
                pair = np.array(rows[what]), np.array(found["cheapest first"][what])
                record[f"minus cheapest first {when}"] = _interval(np.subtract(*pair))
        records.append({"policy": name, **record})
    return records


def _interval(values: np.ndarray) -> list[float]:
    """Mean, and the 2.5 and 97.5 % quantiles of the means of 2,000 resamples."""
    resampled = np.random.default_rng(0).choice(values, (2000, len(values))).mean(axis=1)
    return [round(float(x), 5) for x in (values.mean(), *np.quantile(resampled, (0.025, 0.975)))]


def show(records: Sequence[Mapping[str, Any]]) -> str:
    """A table in Markdown, in percent: regrets, then differences to the cheapest first."""
    percent = "{:.2f} ({:.2f}..{:.2f})"
    lines = [f"| policy | {' | '.join(f'{part:.0%}' for part in PARTS)} | at its end | recall |"]

    def line(record: Mapping[str, Any], what: str, label: str, *last: str) -> None:
        cells = [percent.format(*(100 * x for x in record[f"{what} {part:g}"])) for part in PARTS]
        lines.append(f"| {' | '.join((label, *cells, *last))} |")

    for record in records:
        end, cost = (percent.format(*(100 * x for x in record[name])) for name in ("regret at end", "cost"))
        last = f"{end} at {cost} %", f"{record['recall'][0]:.2f}"
        if record["policy"] == "ours":
            line(record, "minus cheapest first at", "ours, minus cheapest first", *last)
            line(record, "minus cheapest first for", "the same, both with that budget", "", "")
        else:
            line(record, "regret at", record["policy"], *last)
    return "\n".join(lines)


def sets(replays: int, paths: Mapping[str, Path]) -> Iterator[tuple[str, list[Curves]]]:
    for name, path in paths.items():
        for single in (True, False):
            rng, recorded = random.Random(name), load_curves(path)
            each = [recorded.resampled(rng, single=single, part=0.75) for _ in range(replays)]
            yield f"{name}, {'one seed' if single else 'all seeds'}", each
    yield "families for tuning", [made_up(seed) for seed in TUNING]
    families = [made_up(seed) for seed in TEST]
    yield "families", families
    spans = [math.log10(max(c.cost.values()) / min(c.cost.values())) for c in families]
    yield "families of nearly equal costs", [c for c, span in zip(families, spans, strict=True) if span < 0.3]


def num_outcomes(curves: Curves, orders: int = 6) -> int:
    """Returns how many different replays follow from different orders of writing the same arms."""
    rng = random.Random(0)
    shuffled = (rng.sample([*curves.cost], len(curves.cost)) for _ in range(orders))
    runs = [replayed(POLICIES["ours"](curves), curves, order) for order in shuffled]
    return len({(round(run.spent / curves.total, 9), tuple(arm for _, arm in run.complete)) for run in runs})


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
        state.reached[round(160 * RUNG)] = rng.uniform(0.3, 0.8)
    policy = EarlyStopping(chance=0.1)
    queue = TrialQueue(states, policy, cluster_resources=lambda: {"CPU": 8.0}, quality="quality")
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
    args = options(__doc__, sweep="", replays=24, processes=2, out="")
    paths = {name: RESULTS / f"{file}.json" for name, file in RECORDED.items()}
    chosen = [(args.sweep, reordered(sweep_curves(args.sweep)))] if args.sweep else sets(args.replays, paths)
    tables = {}
    for name, each in chosen:
        tables[name] = judge(each, args.processes)
        print(f"\n{name}, {len(each)} replays\n{show(tables[name])}", flush=True)
    orders = {name: num_outcomes(load_curves(path)) for name, path in paths.items()}
    driver = driver_time()
    print("\ndifferent replays of six orders of writing:", orders)
    print("3,000 trials:", ", ".join(f"{what} {value:.3g}" for what, value in driver.items()))
    if args.out:
        about = {"workers": WORKERS, "replays": args.replays, "driver": driver, "orders": orders}
        Path(args.out).write_text(
            json.dumps(provenance() | about | {"tables": tables}, separators=(",", ":")) + "\n"
        )


if __name__ == "__main__":
    main()

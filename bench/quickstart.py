"""The frontier of the quickstart over base seeds: how many points it has, and which arms they are.

  for seed in 0 1 2 3 4 5 6 7 8 9; do
      python jobs/pareto_sweep.py --seed $seed --name q$seed --storage /tmp/quickstarts --confirm 0
  done
  python bench/quickstart.py --sweeps /tmp/quickstarts/q* --out bench/results/quickstart.json

Prints the table of docs/first_frontier.md from the directories of finished sweeps. A base seed stands for
three seeds of each arm.
"""

import json
from pathlib import Path
from statistics import fmean
from typing import Any

from bench.harness import options
from bench.provenance import provenance
from orchestrator.frontier.claims import check_claim
from orchestrator.sweeps.build import sweep_frontier


def described(directory: str) -> dict[str, Any]:
    frontier, record, _ = sweep_frontier(directory)
    assert record.status == "finished", f"{directory} is {record.status}"
    verdicts = [check_claim(claim, frontier.points) for claim in record.claims]
    return {
        "base_seed": record.base["train"]["seed"],
        "hypervolume": round(frontier.hypervolume, 4),
        "knee": frontier.knee.arm,
        "frontier": [point.arm for point in frontier.front],
        "arms": {point.arm: [round(q, 4) for q in point.qualities] for point in frontier.points},
        "baselines": record.baselines,
        "claims": {verdict.claim: str(verdict) for verdict in verdicts},
    }


def table(sweeps: list[dict[str, Any]]) -> str:
    columns = ("base seed", "points", "of them mixtures", "knee", "best, %", "soft above dense")
    lines = [f"| {' | '.join(columns)} |", "|--:|--:|--:|---|--:|---|"]
    for sweep in sorted(sweeps, key=lambda sweep: sweep["base_seed"]):
        front = sweep["frontier"]
        mixtures = sum(not arm.endswith("-dense") for arm in front)
        best = max(fmean(sweep["arms"][arm]) for arm in front)
        verdict, _, _ = next(iter(sweep["claims"].values())).partition(" comparisons")
        cells = (sweep["base_seed"], len(front), mixtures, sweep["knee"], f"{100 * best:.1f}", verdict)
        lines.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(lines)


def main() -> None:
    args = options(__doc__, sweeps=("",), out="")
    sweeps = [described(directory) for directory in args.sweeps]
    print(table(sweeps))
    if args.out:
        table_of_runs = provenance("ray", "torch") | {"sweeps": sweeps}
        Path(args.out).write_text(json.dumps(table_of_runs, separators=(",", ":")) + "\n")


if __name__ == "__main__":
    main()

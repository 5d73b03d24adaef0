"""The study on Fashion-MNIST: its table of runs, and what docs/study.md shows of it.

  python bench/study.py                  writes the numbers and pictures of docs/study.md
  python bench/study.py --collect DIR    first adds what the sweep's directory has by now
  python bench/study.py --test FILE      first adds what `jobs/evaluate.py --out FILE` measured
  python bench/study.py --routing DIR    first adds what `inspect-routing --out DIR/TRIAL` measured

docs/study.md has every command, in order. The table is `bench/results/study.json`; that of an earlier study,
with one learning rate for all arms, `bench/results/study-one-rate.json`. `bench/study_page.py` makes the
page.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from bench.harness import options
from bench.provenance import provenance
from bench.study_page import ROUTING, write_page
from bench.study_table import COST, TABLE, TEST, VAL, Arms, read_table
from orchestrator.codec import override
from orchestrator.data.manifest import open_manifest
from orchestrator.runs.metrics_file import MetricsRow, read_metrics
from orchestrator.runs.sweep_directory import SweepDir, SweepRecord
from orchestrator.sweeps.build import TrialRecord, read_trials
from orchestrator.sweeps.catalog import modern, study
from orchestrator.sweeps.operating import COSTS, operating_rows
from orchestrator.sweeps.scales import Scale
from orchestrator.sweeps.sweep import Sweep

MEASURED = ("cost/device_s", "perf/ms_per_image")
LOAD = ("moe/dropped_frac", "moe/load_cv", "moe/seats_mean")
VIOLATION = "moe/max_violation"
PARTS = (0.1, 0.5, 1.0)  # of training, after which the busiest expert is looked at

# The recipe of DeiT III but for its optimiser: LAMB changes a weight by its rate's part of it, 0.3 %, and in
# 2,400 steps a head that starts from zero hardly grows.
DEIT3 = {
    "model.drop_path": 0.05,
    "model.drop_path_schedule": "constant",
    "model.layer_scale": 1e-4,
    "task.loss": "sigmoid_mean",
    "task.binarised": True,
    "data.augment": [
        "inception",
        "three_augment",
        {"kind": "color_jitter", "strength": 0.3},
        {"kind": "mixup", "alpha": 0.8},
        {"kind": "cutmix", "alpha": 1.0},
    ],
    "data.repeats": 3,
    "train.optimizer.weight_decay": 0.05,
    "train.ema.decay": 0.99,
}


def recipe(scale: Scale) -> Sweep:
    """Returns the dense model and Soft MoE of the middle width, trained by the recipe of DeiT III."""
    sweep = study(scale)
    arms = {name: sweep.changes[name] for name in ("w32-dense", "w32-soft-e16")}
    return replace(sweep, base=override(sweep.base, DEIT3), arms=arms, claims=())


def left(scale: Scale) -> Sweep:
    """Returns the arms of `modern` that the table lacks, or has with fewer seeds."""
    sweep, table = modern(scale), read_table(TABLE)
    assert table, f"no {TABLE}"
    complete = {arm for arm, entry in table["arms"].items() if len(entry["seeds"]) == len(table["seeds"])}
    arms = {arm: changes for arm, changes in sweep.changes.items() if arm not in complete}
    return replace(sweep, arms=arms, claims=())


def beside(old: Mapping[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """Returns the new table with the arms of an old one, if those were trained for as many steps on the same
    images by the same seeds. Arms of both, whose curves are the same, keep their test figures.
    """
    if any(old.get(name) != new[name] for name in ("data_digest", "steps", "seeds")):
        return new
    both = {name: old[name] | new[name] for name in ("arms", "operating", "tuned")}
    for arm, entry in new["arms"].items():
        known = old["arms"].get(arm, {})
        both["arms"][arm] = known | entry if known.get(VAL) == entry[VAL] else entry
    return {**old, **new, **both} | {"planned": [*dict.fromkeys(old["planned"] + new["planned"])]}


def collect(directory: str) -> dict[str, Any]:
    """Returns the table of the finished trials of a sweep and of its first round, if it has one. Arms may
    have fewer seeds than the sweep.
    """
    record = SweepDir(directory).record()
    assert record, f"no sweep in {directory}"
    train, arms = record.base["train"], Arms()
    for trial in read_trials(directory, record):
        if trial.status == "finished":
            entry = arms.setdefault(trial.labels["arm"], {COST: trial.metrics[COST]})
            entry["cost/params"] = trial.metrics["cost/params"]
            entry["train.lr"] = trial.config.train.lr
            for name, value in of_trial(trial, train["steps"]).items():
                entry.setdefault(name, []).append(value)
    about = {"sweep": "modern", "steps": train["steps"], "every": train["eval_every"]}
    planned = dict.fromkeys(labels["arm"] for labels in record.trials.values())
    about |= {"seeds": record.seeds, "planned": [*planned]}
    val_images = open_manifest(record.base["data"]["path"]).rows("val")
    about |= {"classes": record.base["model"]["num_classes"], "val_images": val_images}
    about |= {"operating": operating_points(directory, record), "tuned": first_round(f"{directory}-tune")}
    return provenance("torch", "ray") | about | {"data_digest": record.data_digest, "arms": arms}


def of_trial(trial: TrialRecord, steps: int) -> dict[str, Any]:
    """Returns what the table has of a finished trial."""
    rows = read_metrics(trial.directory)
    found: dict[str, Any] = {"seeds": trial.config.train.seed}
    found[VAL] = [round(row.metrics[VAL], 5) for row in rows if VAL in row.metrics]
    found["val/loss"] = trial.metrics["val/loss"]
    found |= {name: round(trial.metrics[name], 3) for name in MEASURED}
    if LOAD[0] in trial.metrics:
        found |= {name: round(trial.metrics[name], 4) for name in LOAD}
        found[VIOLATION] = [round(_nearest(rows, part * steps), 4) for part in PARTS]
    return found


def _nearest(rows: Sequence[MetricsRow], step: float) -> float:
    """Returns the violation at the report that is nearest to a step."""
    known = [row for row in rows if VIOLATION in row.metrics]
    return min(known, key=lambda row: abs(row.step - step)).metrics[VIOLATION]


def operating_points(directory: str, record: SweepRecord) -> dict[str, dict[str, Any]]:
    """Returns arm -> operating point -> its cost and the quality of each seed, if they were measured."""
    found: dict[str, dict[str, Any]] = {}
    for row in operating_rows(directory):
        points = found.setdefault(record.trials[row["run"]]["arm"], {})
        entry = points.setdefault(row["point"], {COSTS[0]: row[COSTS[0]], VAL: []})
        entry[VAL].append(round(row[VAL], 5))
    return found


def first_round(directory: str) -> dict[str, dict[str, list[float]]]:
    """Returns arm -> learning rate -> the quality of each tuning seed; nothing without a first round."""
    record = SweepDir(directory).record()
    found: dict[str, dict[str, list[float]]] = {}
    for trial in read_trials(directory, record) if record else ():
        if trial.status == "finished":
            rates = found.setdefault(trial.labels["arm"].partition("@")[0], {})
            rates.setdefault(f"{trial.config.train.lr:g}", []).append(round(trial.metrics[VAL], 5))
    return found


def add_test_figures(reports: Sequence[Mapping[str, Any]], arms: Arms) -> None:
    """Adds the accuracy of every run on the test images, from the file of `jobs/evaluate.py --out`; arms of
    which it has no run keep theirs.
    """
    for arm, entry in arms.items():
        named = [f"/{arm}-seed{seed}/" for seed in entry["seeds"]]
        if not any(name in report["location"] for report in reports for name in named):
            continue
        metrics = [next(r["metrics"] for r in reports if name in r["location"]) for name in named]
        entry[TEST] = [found["acc1"] for found in metrics]
        entry["test/loss"] = [round(found["loss"], 5) for found in metrics]


def routing_figures(directory: Path) -> dict[str, dict[str, list[float]]]:
    """Returns arm -> figure of its MoE block -> the value of each seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for trial in sorted(path.name for path in directory.glob("*-seed*")):
        figures = json.loads((directory / trial / "layers.json").read_text())
        for name in ROUTING:
            (value,) = figures[name]
            of_arm = found.setdefault(trial.rpartition("-seed")[0], {})
            of_arm.setdefault(name, []).append(round(value, 5))
    return found


def main() -> None:
    args = options(__doc__, collect="", test="", routing="")
    table = read_table(TABLE) or {"arms": {}}
    if args.collect:
        table = beside(table, collect(args.collect))
    if args.test:
        add_test_figures(json.loads(Path(args.test).read_text()), table["arms"])
    if args.routing:
        table["routing"] = table.get("routing", {}) | routing_figures(Path(args.routing))
    if args.collect or args.test or args.routing:
        TABLE.write_text(json.dumps(table, separators=(",", ":")) + "\n")
    write_page(table)


if __name__ == "__main__":
    main()

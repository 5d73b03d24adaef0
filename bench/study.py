"""The study on Fashion-MNIST: its table of runs, and what docs/study.md shows of it.

  python bench/study.py                  writes the numbers and pictures of docs/study.md
  python bench/study.py --collect DIR    first reads what the sweep's directory has by now
  python bench/study.py --test FILE      first adds what `jobs/evaluate.py --out FILE` measured
  python bench/study.py --routing DIR    first adds what `jobs/inspect_routing.py --out DIR/TRIAL` measured
  python bench/study.py --stopped DIR    first adds what a sweep with early stopping trained

docs/study.md has every command, in order. The table is `bench/results/study.json`. In docs/study.md, text
between `<!-- NAME -->` and `<!-- end -->` is replaced.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean, stdev
from typing import Any

import numpy as np
from scipy import stats

from bench.harness import RESULTS, ROOT, options, with_block
from bench.provenance import provenance
from bench.stopping import PARTS, judge, load_curves
from orchestrator.codec import override
from orchestrator.data.manifest import open_manifest
from orchestrator.frontier.frontier import Frontier, gains
from orchestrator.frontier.points import Point, front_points, hypervolume
from orchestrator.sweeps import operating
from orchestrator.sweeps.build import read_trials
from orchestrator.sweeps.catalog import make_sweep, study
from orchestrator.sweeps.scales import Scale
from orchestrator.sweeps.sweep import Sweep, settings
from orchestrator.training.metrics_file import read_metrics
from orchestrator.training.sweep_directory import SweepDir, SweepRecord

TABLE, PAGE = RESULTS / "study.json", ROOT / "docs/study.md"
COST, VAL, TEST = "cost/train_flops_6mac", "val/acc1", "test/acc1"
FORWARD = operating.COSTS[0]
EXPERTS = "soft-e16 minus soft-e8"
ROUTING = {  # figure of jobs/inspect_routing.py -> its column
    "acc_lost": "accuracy lost by random routing, points",
    "discarded_frac": "patches no expert sees, %",
    "contribution_ratio": "size of the output, % of the input's",
}
POLICIES = ("ours", "oracle", "cheapest first", "random subset")

# The recipe of DeiT III but for its optimiser: LAMB changes a weight by its rate's part of it, 0.3 %, and in
# 2,400 steps a head that starts from zero hardly grows.
DEIT3 = {
    "model.drop_path": 0.05,
    "model.drop_path_schedule": "constant",
    "model.layer_scale": 1e-4,
    "task.loss": "sigmoid_mean",
    "task.binarised": True,
    "data.augment": "inception",
    "data.three_augment": True,
    "data.color_jitter": 0.3,
    "data.repeats": 3,
    "data.mixup": 0.8,
    "data.cutmix": 1.0,
    "train.optimizer.weight_decay": 0.05,
    "train.ema.decay": 0.99,
}

Arms = dict[str, dict[str, Any]]
Table = Mapping[str, Any]


def recipe(scale: Scale) -> Sweep:
    """Returns the dense model and Soft MoE of the middle width, trained by the recipe of DeiT III."""
    sweep = study(scale)
    arms = {name: sweep.changes[name] for name in ("w32-dense", "w32-soft-e16")}
    return replace(sweep, base=override(sweep.base, DEIT3), arms=arms, claims=())


def narrow(scale: Scale) -> Sweep:
    """Returns the study at its smallest width."""
    sweep = study(scale)
    width, _, _ = next(iter(sweep.arms)).partition("-")
    arms = {name: arm for name, arm in sweep.changes.items() if name.startswith(f"{width}-")}
    return replace(sweep, arms=arms)


def collect(directory: str) -> dict[str, Any]:
    """Returns the table of the arms whose seeds are all complete, from a sweep's directory."""
    record = SweepDir(directory).record()
    assert record, f"no sweep in {directory}"
    train, arms = record.base["train"], Arms()
    for trial in read_trials(directory, record):
        if trial.status == "finished":
            rows = read_metrics(f"{directory}/{trial.labels['directory']}")
            entry = arms.setdefault(trial.labels["arm"], {COST: trial.metrics[COST]})
            curve = [round(row.metrics[VAL], 5) for row in rows if VAL in row.metrics]
            for name, value in ((VAL, curve), ("val/loss", trial.metrics["val/loss"])):
                entry.setdefault(name, []).append(value)
            entry.setdefault("device_s", []).append(round(trial.metrics["cost/device_s"], 1))
    complete = {arm: entry for arm, entry in arms.items() if len(entry[VAL]) == len(record.seeds)}
    about = {"steps": train["steps"], "every": train["eval_every"], "seeds": record.seeds}
    val_images = open_manifest(record.base["data"]["path"]).rows("val")
    about |= {"classes": record.base["model"]["num_classes"], "val_images": val_images}
    about |= {"operating": operating_points(directory, record)}
    return provenance("torch", "ray") | about | {"data_digest": record.data_digest, "arms": complete}


def operating_points(directory: str, record: SweepRecord) -> dict[str, dict[str, Any]]:
    """Returns arm -> operating point -> its cost and the quality of each seed, if they were measured."""
    rows: list[dict[str, Any]] = SweepDir(directory).operating()
    found: dict[str, dict[str, Any]] = {}
    for row in rows:
        points = found.setdefault(record.trials[row["run"]]["arm"], {})
        entry = points.setdefault(row["point"], {FORWARD: row[FORWARD], VAL: []})
        entry[VAL].append(round(row[VAL], 5))
    return found


def add_test_figures(reports: Sequence[Mapping[str, Any]], arms: Arms) -> None:
    """Adds the accuracy of every run on the test images, from the file of `jobs/evaluate.py --out`."""
    for arm, entry in arms.items():
        seeds = range(len(entry[VAL]))
        named = [f"/{arm}-seed{seed}/" for seed in seeds]
        metrics = [next(r["metrics"] for r in reports if name in r["location"]) for name in named]
        entry[TEST] = [found["acc1"] for found in metrics]
        entry["test/loss"] = [round(found["loss"], 5) for found in metrics]


def routing_figures(directory: Path, seeds: int) -> dict[str, dict[str, list[float]]]:
    """Returns arm -> figure of its MoE block -> the value of each seed."""
    found: dict[str, dict[str, list[float]]] = {}
    for trial in sorted(path.name for path in directory.glob("*-seed*")):
        arm, _, seed = trial.rpartition("-seed")
        figures = json.loads((directory / trial / "layers.json").read_text())
        for name in ROUTING:
            (value,) = figures[name]
            found.setdefault(arm, {}).setdefault(name, [math.nan] * seeds)[int(seed)] = round(value, 5)
    return found


def stopped_runs(directory: str) -> dict[str, list[int]]:
    """Returns arm -> the steps that each seed was trained in a sweep with early stopping."""
    record = SweepDir(directory).record()
    assert record, f"no sweep in {directory}"
    found: dict[str, list[int]] = {arm: [0] * len(record.seeds) for arm in record.arms}
    for trial in read_trials(directory, record):
        rows = read_metrics(f"{directory}/{trial.labels['directory']}")
        found[trial.labels["arm"]][record.seeds.index(int(trial.labels["seed"]))] = rows[-1].step
    return found


def final(entry: Mapping[str, Any]) -> list[float]:
    return [curve[-1] for curve in entry[VAL]]


def frontier_of(table: Table) -> Frontier:
    """Returns the frontier of validation accuracy over the complete arms, with their operating points."""
    sweep, points, trials = make_sweep("study", "tiny"), list[Point](), list[tuple[str, str]]()
    others = list[Point]()
    for name, trial in sweep.trials().items():
        entry = table["arms"].get(trial.arm)
        if entry is None:
            continue
        trials.append((trial.arm, "finished"))
        if trial.run.train.seed == 0:
            found, measured = settings(trial.run), dict(table["operating"][trial.arm])
            point = Point(
                arm=trial.arm,
                family=trial.run.model.family(),
                cost=entry[COST],
                costs={FORWARD: measured.pop(operating.AS_TRAINED)[FORWARD]},
                quality=fmean(final(entry)),
                qualities=tuple(final(entry)),
                size=float(found["capacity"]),
                run_id=name,
                status="finished",
                settings=found,
            )
            points.append(point)
            others += [
                replace(
                    point,
                    arm=f"{trial.arm}: {setting}",
                    cost=math.nan,  # of training, which it had none of
                    costs={FORWARD: at[FORWARD]},
                    quality=fmean(at[VAL]),
                    qualities=(),
                )
                for setting, at in measured.items()
            ]
    reference = {VAL: 1 / table["classes"], COST: 1.1 * max(point.cost for point in points)}
    reference[FORWARD] = 1.1 * max(point.costs[FORWARD] for point in points)
    return Frontier(
        name="Fashion-MNIST: 18 arms of five seeds",
        cost_name=COST,
        quality_name=VAL,
        points=tuple(points),
        reference=reference,
        operating=tuple(others),
        data=f"{table['val_images']:,} images of Fashion-MNIST (val split)",
        trials=tuple(trials),
    )


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *lines = (f"| {' | '.join(row)} |" for row in (columns, *rows))
    return "\n".join([head, f"|---|{'--:|' * (len(columns) - 1)}", *lines])


def percent(values: Sequence[float]) -> str:
    """Mean and standard error in percent."""
    return f"{100 * fmean(values):.2f} ± {100 * stdev(values) / math.sqrt(len(values)):.2f}"


def runs_block(table: Table) -> str:
    frontier, rows = frontier_of(table), []
    statuses = frontier.statuses()[: len(frontier.points)]
    for point, status in sorted(zip(frontier.points, statuses, strict=True), key=lambda each: each[0].cost):
        entry = table["arms"][point.arm]
        place = "" if status == "dominated" else f"**{status}**"
        rows.append((point.arm, f"{point.cost:.3g}", percent(final(entry)), percent(entry[TEST]), place))
    return markdown(("arm", "training FLOPs", "validation, %", "test, %", "by validation"), rows)


def differences(table: Table, quality: str) -> dict[str, list[float]]:
    """Returns arm -> for each seed, its quality minus that of the dense models at the same cost.

    The quality of dense models between two widths is interpolated over the logarithm of their costs, for each
    seed; beyond the largest width it follows the line of the last two.
    """
    arms: Arms = table["arms"]
    values = {arm: final(entry) if quality == VAL else entry[quality] for arm, entry in arms.items()}
    dense = sorted((arm for arm in arms if arm.endswith("-dense")), key=lambda arm: arms[arm][COST])
    log_costs = np.log10([arms[arm][COST] for arm in dense])
    found: dict[str, list[float]] = {}
    for arm in arms.keys() - set(dense):
        at = math.log10(arms[arm][COST])
        right = min(int(np.searchsorted(log_costs, at)), len(dense) - 1)
        part = (at - log_costs[right - 1]) / (log_costs[right] - log_costs[right - 1])
        low, high = values[dense[right - 1]], values[dense[right]]
        found[arm] = [v - (a + part * (b - a)) for v, a, b in zip(values[arm], low, high, strict=True)]
    return found


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Returns the 95 % interval of the mean by Student's t."""
    half = float(stats.t.ppf(0.975, len(values) - 1)) * stdev(values) / math.sqrt(len(values))
    return fmean(values) - half, fmean(values) + half


def differences_block(table: Table) -> str:
    arms, found = table["arms"], differences(table, TEST)
    for width in (arm.removesuffix("-dense") for arm in arms if arm.endswith("-dense")):
        many, few = (arms[f"{width}-soft-{experts}"][TEST] for experts in ("e16", "e8"))
        found[f"{width}-{EXPERTS}"] = [a - b for a, b in zip(many, few, strict=True)]
    widths = sorted({arm.split("-")[0] for arm in found}, key=lambda width: int(width[1:]))
    kinds = [arm.removeprefix(f"{widths[0]}-") for arm in (*arms, f"{widths[0]}-{EXPERTS}")]
    rows = []
    for kind in kinds:
        cells = []
        for values in (found[f"{width}-{kind}"] for width in widths if f"{width}-{kind}" in found):
            low, high = interval(values)
            cell = f"{100 * fmean(values):+.2f} ({100 * low:+.2f} to {100 * high:+.2f})"
            cells.append(f"**{cell}**" if low > 0 or high < 0 else cell)
        if cells:
            rows.append((kind, *cells))
    return markdown(("test accuracy, points of %", *widths), rows)


def operating_block(table: Table) -> str:
    """The frontier over the forward FLOPs of all trained models and their operating points."""
    frontier = frontier_of(table).at_cost(FORWARD)
    rows = []
    for point in front_points(frontier.points + frontier.operating):
        arm, _, setting = point.arm.partition(": ")
        values = table["operating"][arm][setting or operating.AS_TRAINED][VAL]
        name = f"**{arm}: {setting}**" if setting else arm
        rows.append((name, f"{1e3 * point.cost:.3f}", percent(values)))
    found = "; ".join(f"{gain.models}: {gain}" for gain in gains(frontier) if gain.cost_name == FORWARD)
    arms, others = len(frontier.points), len(frontier.operating)
    made = markdown(("arm: setting", "forward MFLOPs per image", "validation, %"), rows)
    return f"{made}\n\n{arms} arms as trained and {others} other settings. Gain in hypervolume: {found}."


def routing_block(table: Table) -> str:
    arms = table["routing"].items()
    rows = [(arm, *(percent(figures[name]) for name in ROUTING)) for arm, figures in arms]
    return markdown(("arm", *ROUTING.values()), rows)


def replay_block(table: Table) -> str:
    rows, records = [], {record["policy"]: record for record in judge(10 * [load_curves(TABLE)])}
    for name in POLICIES:
        mean = {what: 100 * values[0] for what, values in records[name].items() if what != "policy"}
        cells = [f"{mean[f'regret at {part:g}']:.1f}" for part in PARTS]
        cells.append(f"{mean['regret at end']:.1f} at {mean['cost']:.0f} %")
        rows.append((name, *cells))
    return markdown(("scheduler", *(f"lost at {part:.0%} of the cost" for part in PARTS), "at its end"), rows)


def stopped_block(table: Table) -> str:
    """Returns a sentence: the FLOPs that early stopping spent and the hypervolume that it lost, compared with
    training every trial to its end.
    """
    frontier, stopped, arms = frontier_of(table), table["stopped"], table["arms"]
    spent = sum(arms[arm][COST] * sum(steps) / table["steps"] for arm, steps in stopped.items())
    whole = sum(arms[arm][COST] * len(steps) for arm, steps in stopped.items())
    points = [point for point in frontier.points if point.arm in stopped]
    left = [point for point in points if min(stopped[point.arm]) == table["steps"]]
    reference = (1.1 * max(point.cost for point in points), frontier.bound[1])
    full, found = (hypervolume(group, reference) for group in (points, left))
    complete = sum(step == table["steps"] for steps in stopped.values() for step in steps)
    trials = sum(map(len, stopped.values()))
    return (
        f"With `--stop-early`, {complete} of {trials} trials of the smallest width were trained to their end,"
        f" for {spent / whole:.0%} of the FLOPs of all. The hypervolume of its complete arms is {found:.4f},"
        f" against {full:.4f} of all arms: {1 - found / full:.2%} less."
    )


def time_block(table: Table) -> str:
    seconds = sum(sum(entry["device_s"]) for entry in table["arms"].values())
    runs = sum(len(entry[VAL]) for entry in table["arms"].values())
    return f"{runs} runs, {seconds / 3600:.1f} core-hours of training ({table['hardware']})."


BLOCKS: dict[str, Callable[[Table], str]] = {
    "runs": runs_block,
    "differences": differences_block,
    "operating": operating_block,
    "routing": routing_block,
    "replay": replay_block,
    "stopped": stopped_block,
    "time": time_block,
}


def main() -> None:
    args = options(__doc__, collect="", test="", routing="", stopped="")
    table = json.loads(TABLE.read_text()) if TABLE.exists() else {}
    if args.collect:
        kept = {name: table[name] for name in ("routing", "stopped") if name in table}
        table = kept | collect(args.collect)
    if args.test:
        add_test_figures(json.loads(Path(args.test).read_text()), table["arms"])
    if args.routing:
        table["routing"] = routing_figures(Path(args.routing), len(table["seeds"]))
    if args.stopped:
        table["stopped"] = stopped_runs(args.stopped)
    if args.collect or args.test or args.routing or args.stopped:
        TABLE.write_text(json.dumps(table, separators=(",", ":")) + "\n")
    page = PAGE.read_text()
    for name, block in BLOCKS.items():
        page = with_block(page, name, block(table))
    PAGE.write_text(page)
    frontier = frontier_of(table)
    replace(frontier, operating=()).save_picture(PAGE.with_suffix(".png"))
    frontier.at_cost(FORWARD).save_picture(PAGE.with_name("study-operating.png"))


if __name__ == "__main__":
    main()

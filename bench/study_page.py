"""The numbers and pictures of docs/study.md: text between `<!-- NAME -->` and `<!-- end -->`, and files."""

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from statistics import fmean, median, stdev

from bench.harness import ROOT, with_block
from bench.stopping import PARTS, judge, load_curves, reordered
from bench.study_table import (
    COST,
    ONE_RATE,
    TABLE,
    TEST,
    VAL,
    Table,
    against,
    by_seed,
    judged_by,
    kinds,
    outcomes,
    pair,
    read_table,
    sweep_of,
    widths,
)
from moe.cost import forward_gflops_2mac, slots_per_token
from orchestrator.frontier.frontier import Frontier, gains
from orchestrator.frontier.paired import Interval, decide, interval
from orchestrator.frontier.points import Point, front_points, hypervolume
from orchestrator.output import UNKNOWN
from orchestrator.sweeps import operating
from orchestrator.sweeps.catalog import make_sweep
from orchestrator.sweeps.sweep import settings

PAGE = ROOT / "docs/study.md"
FORWARD = operating.COSTS[0]
NOTHING = "Not measured yet."
PAIRS = (("soft-e16", "soft-e8"), ("lossfree", "lossfree-0"))  # of equal cost, beside the claims
ROUTING = {  # figure of papers/jobs/inspect_routing.py -> its column
    "acc_lost": "accuracy lost by random routing, points",
    "discarded_frac": "patches no expert sees, %",
    "contribution_ratio": "size of the output, % of the input's",
}
POLICIES = ("ours", "oracle", "cheapest first", "random subset")


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head, *lines = (f"| {' | '.join(row)} |" for row in (columns, *rows))
    return "\n".join([head, f"|---|{'--:|' * (len(columns) - 1)}", *lines])


def percent(values: Sequence[float]) -> str:
    """Mean and standard error in percent; a dash for nothing."""
    if len(values) < 2:
        return f"{100 * values[0]:.2f}" if values else UNKNOWN
    return f"{100 * fmean(values):.2f} ± {100 * stdev(values) / math.sqrt(len(values)):.2f}"


def status_block(table: Table) -> str:
    """A sentence: the arms and seeds that there are, and those that are missing."""
    arms, seeds = table["arms"], table["seeds"]
    missing = [arm for arm in table["planned"] if arm not in arms]
    few: dict[int, list[str]] = {}
    for arm in (arm for arm in table["planned"] if arm in arms and len(arms[arm]["seeds"]) < len(seeds)):
        few.setdefault(len(arms[arm]["seeds"]), []).append(arm)
    text = f"{len(table['planned'])} arms with {len(seeds)} seeds each, {seeds[0]} to {seeds[-1]}"
    if not missing and not few:
        return f"{text}: all runs are complete."
    parts = [f"{', '.join(names)}: {count} of {len(seeds)} seeds" for count, names in sorted(few.items())]
    parts += [f"missing: {', '.join(missing)}"] if missing else []
    return f"{text}. **The record is incomplete.** {'; '.join(parts)}."


def picture_block(table: Table) -> str:
    name = f"Validation accuracy against training FLOPs of {len(table['arms'])} arms"
    return f"![{name}, with the frontier of all arms and that of dense models](study.png)"


def frontier_of(table: Table) -> Frontier:
    """Returns the frontier of validation accuracy over the arms, with their operating points."""
    sweep, points, trials, others = sweep_of(table), list[Point](), list[tuple[str, str]](), list[Point]()
    for arm in (arm for arm in sweep.arms if arm in table["arms"]):
        entry, run = table["arms"][arm], sweep.of_arm(arm, sweep.changes[arm])[0].run
        trials += [(arm, "finished")] * len(entry["seeds"])
        found, values = settings(run), tuple(by_seed(entry, VAL).values())
        point = Point(
            arm=arm,
            family=run.model.family(),
            cost=entry[COST],
            costs={FORWARD: forward_gflops_2mac(run.model)},
            quality=fmean(values),
            qualities=values,
            size=float(found["capacity"]),
            run_id=arm,
            status="finished",
            settings=found,
        )
        points.append(point)
        others += [
            replace(
                point,
                arm=f"{arm}: {setting}",
                cost=math.nan,  # of training, which it had none of
                costs={FORWARD: at[FORWARD]},
                quality=fmean(at[VAL]),
                qualities=(),
            )
            for setting, at in table["operating"].get(arm, {}).items()
            if setting != operating.AS_TRAINED
        ]
    reference = {VAL: 1 / table["classes"], COST: 1.1 * max(point.cost for point in points)}
    reference[FORWARD] = 1.1 * max(point.costs[FORWARD] for point in points)
    return Frontier(
        name="Fashion-MNIST",
        cost_name=COST,
        quality_name=VAL,
        points=tuple(points),
        reference=reference,
        operating=tuple(others),
        data=f"{table['val_images']:,} images of Fashion-MNIST (val split)",
        trials=tuple(trials),
    )


def runs_block(table: Table) -> str:
    frontier, rows = frontier_of(table), []
    statuses = frontier.statuses()[: len(frontier.points)]
    for point, status in sorted(zip(frontier.points, statuses, strict=True), key=lambda each: each[0].cost):
        entry = table["arms"][point.arm]
        place = "" if status == "dominated" else f"**{status}**"
        rows.append(
            (
                point.arm,
                f"{entry['train.lr']:g}",
                f"{point.cost:.3g}",
                f"{entry['cost/params']:,.0f}",
                f"{median(entry['perf/ms_per_image']):.3f}",
                percent(point.qualities),
                percent(entry.get(TEST, ())),
                place,
            )
        )
    head = ("arm", "rate", "training FLOPs", "parameters", "ms per image", "validation, %", "test, %")
    return markdown((*head, "by validation"), rows)


def tuning_block(table: Table) -> str:
    """The validation accuracy of the first round at every rate; bold is what was chosen."""
    if not table["tuned"]:
        return NOTHING
    rates = sorted({rate for of_arm in table["tuned"].values() for rate in of_arm}, key=float)
    rows = []
    for arm, of_arm in table["tuned"].items():
        means = {rate: fmean(values) for rate, values in of_arm.items()}
        chosen = f"{table['arms'][arm]['train.lr']:g}" if arm in table["arms"] else ""
        cells = {rate: f"{100 * means[rate]:.2f}" if rate in means else UNKNOWN for rate in rates}
        rows.append((arm, *(f"**{cell}**" if rate == chosen else cell for rate, cell in cells.items())))
    return markdown(("validation accuracy, %", *rates), rows)


def points_of_percent(mean: Interval) -> str:
    low, high = (100 * (mean.mean + sign * mean.half) for sign in (-1, 1))
    return f"{100 * mean.mean:+.2f} ({low:+.2f} to {high:+.2f})"


def differences_block(table: Table) -> str:
    """Differences to dense models, and of the pairs; bold are those that the first claim decides."""
    claim, *_ = make_sweep("modern", "tiny").claims
    decided = {difference.arm: outcome for difference, outcome in outcomes(table, claim)}
    rows = []
    for kind in kinds(table):
        cells = []
        for arm in (f"{width}-{kind}" for width in widths(table) if kind != "dense"):
            found = against(table, judged_by(table), arm, "dense") if arm in table["arms"] else None
            cell = points_of_percent(interval(found.values)) if found else UNKNOWN
            marks = {"better": f"**{cell}**", "worse": f"**{cell}**", "equal": f"{cell}, equal"}
            cells.append(marks.get(decided.get(arm, ""), cell))
        if cells:
            rows.append((kind, *cells))
    for more, less in PAIRS:
        values = [pair(table, *(f"{width}-{kind}" for kind in (more, less))) for width in widths(table)]
        if any(values):
            cells = [points_of_percent(interval(v)) if len(v) > 1 else UNKNOWN for v in values]
            rows.append((f"{more} minus {less}", *cells))
    what = "test" if judged_by(table) == TEST else "validation"
    return markdown((f"{what} accuracy, points of %", *widths(table)), rows)


def claims_block(table: Table) -> str:
    """The claims of the sweep, at which widths which arms are better, worse or equal, and which of these are
    so if the comparisons at all widths are decided together.
    """
    lines = []
    for claim in make_sweep("modern", "tiny").claims:
        found = outcomes(table, claim)
        several = len({difference.against for difference, _ in found}) > 1
        lines.append(f"- `{claim}`: of {len(found)} comparisons")
        names = [f"{each.arm} ({each.against})" if several else each.arm for each, _ in found]
        for outcome in ("better", "worse", "equal"):
            of = [name for name, (_, each) in zip(names, found, strict=True) if each == outcome]
            lines.append(f"    - {len(of)} {outcome}{': ' if of else ''}{', '.join(of)}")
        lines.append(f"    - {sum(each == 'undecided' for _, each in found)} undecided")
        together = decide([difference.values for difference, _ in found])
        stand = [name for name, each in zip(names, together, strict=True) if each != "undecided"]
        lines.append(f"    - decided with all {len(found)} together: {', '.join(stand) or 'none'}")
    return "\n".join(lines)


def load_block(table: Table) -> str:
    """Dropped tokens, load and padding at the end of training, and the busiest expert on the way."""
    sweep, rows = sweep_of(table), []
    for arm in (arm for arm in sweep.arms if "moe/max_violation" in table["arms"].get(arm, {})):
        entry, run = table["arms"][arm], sweep.of_arm(arm, sweep.changes[arm])[0].run
        moe = run.model.moe
        if moe and moe.router.kind != "soft":
            filled = [seats / slots_per_token(run.model) for seats in entry["moe/seats_mean"]]
            violation = [f"{fmean(v):.2f}" for v in zip(*entry["moe/max_violation"], strict=True)]
            shares = [100 * fmean(entry["moe/dropped_frac"]), 100 * (1 - fmean(filled))]
            dropped, padding = (f"{share:.1f}" for share in shares)
            rows.append((arm, dropped, f"{fmean(entry['moe/load_cv']):.2f}", *violation, padding))
    head = ("arm", "tokens no expert takes, %", "variation of the load")
    busiest = (f"busiest expert at {part} %" for part in (10, 50, 100))
    return markdown((*head, *busiest, "rows that are padding, %"), rows) if rows else NOTHING


def operating_block(table: Table) -> str:
    """The frontier over the forward FLOPs of all trained models and their operating points."""
    if not table["operating"]:
        return NOTHING
    frontier = frontier_of(table).at_cost(FORWARD)
    rows = []
    for point in front_points(frontier.points + frontier.operating):
        arm, _, setting = point.arm.partition(": ")
        values = table["operating"][arm][setting][VAL] if setting else point.qualities
        name = f"**{arm}: {setting}**" if setting else arm
        rows.append((name, f"{1e3 * point.cost:.3f}", percent(values)))
    found = "; ".join(f"{gain.models}: {gain}" for gain in gains(frontier) if gain.cost_name == FORWARD)
    arms, others = len(frontier.points), len(frontier.operating)
    made = markdown(("arm: setting", "forward MFLOPs per image", "validation, %"), rows)
    name = "Validation accuracy against forward FLOPs, of arms and their other settings"
    said = f"{arms} arms as trained and {others} other settings. Gain in hypervolume: {found}."
    return f"{made}\n\n![{name}](study-operating.png)\n\n{said}"


def routing_block(table: Table) -> str:
    arms = table.get("routing", {}).items()
    rows = [(arm, *(percent(figures[name]) for name in ROUTING)) for arm, figures in arms]
    return markdown(("arm", *ROUTING.values()), rows) if rows else NOTHING


def replay_block(table: Table) -> str:
    whole = len(table["seeds"])
    if any(len(entry["seeds"]) < whole for entry in table["arms"].values()):
        return "Replayed once all seeds of the arms are complete."
    rows, records = [], {record["policy"]: record for record in judge(reordered(load_curves(TABLE)))}
    for name in POLICIES:
        mean = {what: 100 * values[0] for what, values in records[name].items() if what != "policy"}
        cells = [f"{mean[f'regret at {part:g}']:.1f}" for part in PARTS]
        cells.append(f"{mean['regret at end']:.2f} at {mean['cost']:.0f} %")
        rows.append((name, *cells, f"{mean['recall']:.0f} %"))
    lost = (f"lost at {part:.0%} of the cost" for part in PARTS)
    return markdown(("scheduler", *lost, "at its end", "frontier's arms found"), rows)


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


def dense_block(table: Table) -> str:
    """Returns a sentence: the test accuracy of dense models in the earlier study."""
    cells = [f"{percent(table['arms'][f'{width}-dense'][TEST])} at {width}" for width in widths(table)]
    return f"Its dense models had a test accuracy of {', '.join(cells)}."


def time_block(table: Table) -> str:
    seconds = sum(sum(entry["cost/device_s"]) for entry in table["arms"].values())
    runs = sum(len(entry["seeds"]) for entry in table["arms"].values())
    hours = f"{runs} runs, {seconds / 3600:.1f} core-hours of training"
    return f"{hours} ({table['hardware']}), without the first round."


BLOCKS: dict[str, Callable[[Table], str]] = {
    "status": status_block,
    "picture": picture_block,
    "runs": runs_block,
    "tuning": tuning_block,
    "differences": differences_block,
    "claims": claims_block,
    "load": load_block,
    "operating": operating_block,
    "routing": routing_block,
    "replay": replay_block,
    "time": time_block,
}
EARLIER: dict[str, Callable[[Table], str]] = {
    "one-rate": differences_block,
    "one-rate-dense": dense_block,
    "stopped": stopped_block,
}


def made(name: str, table: Table | None) -> str:
    """Returns the text of a block: of the table, or of the earlier study."""
    if name in EARLIER:
        earlier = read_table(ONE_RATE)
        assert earlier
        return EARLIER[name](earlier)
    return BLOCKS[name](table) if table and table["arms"] else NOTHING


def write_page(table: Table) -> None:
    """Writes the blocks of the page, and its pictures."""
    page = PAGE.read_text()
    for name in (*BLOCKS, *EARLIER):
        page = with_block(page, name, made(name, table))
    PAGE.write_text(page)
    if table["arms"]:
        frontier = frontier_of(table)
        replace(frontier, operating=()).save_picture(PAGE.with_suffix(".png"))
        if frontier.operating:
            frontier.at_cost(FORWARD).save_picture(PAGE.with_name("study-operating.png"))

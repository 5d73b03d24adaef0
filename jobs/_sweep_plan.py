"""Prints what the trials of a sweep need, and what the papers' models of the same name needed."""

from collections.abc import Collection, Mapping

import ray

from jobs._cli import print_table
from orchestrator.errors import UsageError
from orchestrator.estimate import Estimate, estimate, memory_problem
from orchestrator.frontier.published import published
from orchestrator.inference.measure import ONE_IMAGE, machine
from orchestrator.inference.planned import PlannedTime
from orchestrator.output import duration
from orchestrator.planning.preflight import unfit
from orchestrator.sweeps.budget import Device
from orchestrator.sweeps.queue import Policy
from orchestrator.sweeps.sweep import Sweep
from orchestrator.sweeps.tuning import Tuned

SHORT_S = 60.0  # device time of a trial below which starting and reading data take longer than training
REASONS = 5  # of trials that do not fit, with their arithmetic; the others by name
RECORDED = "19 to 43 % with several seeds, 33 to 68 % with one"  # of the cost of training everything
PUBLISHED = """\
FLOPs of the whole training at 6 per multiply-add (Soft MoE counts 3, and prints half of it), chip-days of
TPUv3, for the papers' data (JFT-4B), 224 pixels and steps, from which these trials may differ. The printed
costs of token and expert choice hold matmuls that dispatch, where ours gather. Table 9 of Soft MoE
contradicts its table 8 at H/14 alone."""


def plan(
    sweep: Sweep,
    kind: str,
    device: Device,
    mfu: float,
    first: Sweep | None = None,
    times: Mapping[str, PlannedTime] = {},
) -> None:
    """Prints what every trial needs, and which trials the device or the connected cluster cannot hold.

    Args:
        first: the round that tunes the arms; None: there is none.
        times: of the arms, if they were timed.
    """
    tried = first.runs() if first else {}
    runs = {**tried, **sweep.runs()}
    if not runs:
        raise UsageError("no arms to plan: a search draws them one by one; bound it with --budget-hours")
    found = {name: estimate(run, flops_per_s=device.flops_per_s(mfu)) for name, run in runs.items()}
    problems = unfit(sweep) | (unfit(first) if first else {}) if ray.is_initialized() else {}
    if device.memory_gib:
        too_large = {name: memory_problem(e.memory_gib, device.memory_gib) for name, e in found.items()}
        problems |= {name: problem for name, problem in too_large.items() if problem}
    at = f"{kind} at {mfu:.0%} of its peak"
    print_plan(found, problems, device=at, usd_per_hour=device.usd_per_hour, tried=tried)
    if times:
        print_times(times)
    if tried:
        print("the first round takes more trials if the best value of an arm lies at an end of the grid")
    if any(e.device_s < SHORT_S for e in found.values()):
        print(
            "note: models this small are bound by the start of processes and by data, which the plan leaves"
            " out: trials of seconds take some ten times as long"
        )
    print_papers(sweep, found)


def print_times(times: Mapping[str, PlannedTime]) -> None:
    """Prints the planned time of each arm, the fastest first."""
    rows = [
        (
            arm,
            f"{each.ms:.3g}",
            f"{each.ms_p95:.3g}",
            "timed" if each.factor == 1 else f"estimated, within a factor of {each.factor:.2g}",
        )
        for arm, each in sorted(times.items(), key=lambda item: item[1].ms)
    ]
    title = f"a call of the untrained model: {ONE_IMAGE}, on {machine()}"
    print_table(("arm", "ms", "ms, 95th percentile", "how"), rows, title=title)


def print_tuned(tuned: Tuned) -> None:
    """Prints the quality of every arm at every value, and the value that the arm gets."""
    rows = []
    for arm, points in tuned.tried.items():
        found = [p.quality_text if p.status == "finished" else p.status for p in points.values()]
        rows.append((arm, *found, f"{tuned.best[arm]:g}"))
    title = f"{tuned.sweep.quality} by {tuned.tuning.field}, mean of {tuned.tuning.seeds} seeds"
    columns = ("arm", *(f"{value:g}" for value in tuned.values), "chosen")
    print_table(columns, rows, title=title)


def print_spending(sweep: Sweep, policy: Policy) -> None:
    """Prints which part of the plan early stopping is expected to spend."""
    from orchestrator.sweeps.replay import expected_spending
    from orchestrator.sweeps.run import unbegun

    low, middle, high = expected_spending(
        lambda: [unbegun(trial, sweep.cost) for trial in sweep.trials().values()], policy
    )
    print(
        f"with --stop-early: {middle:.0%} of this, {low:.0%} to {high:.0%} in 8 of 10 sweeps that are drawn"
        f" from what early_stopping assumes, which took {RECORDED} of recorded sweeps"
        " (docs/early_stopping.md)."
    )


def print_papers(sweep: Sweep, estimates: Mapping[str, Estimate]) -> None:
    """Prints the costs of the papers' models beside ours, if the sweep has their names."""
    rows = [
        (arm, f"{ours:.3g}", f"{printed:.3g}", f"{100 * (ours / printed - 1):+.1f}", f"{days:g}")
        for arm, (printed, days) in printed_costs(sweep).items()
        if arm in estimates and (ours := estimates[arm].train_flops_6mac)
    ]
    if rows:
        columns = ("trial", "train FLOPs", "as printed", "difference, %", "TPUv3-days")
        print_table(columns, rows, title="as printed by the paper")
        print(PUBLISHED)


def printed_costs(sweep: Sweep) -> dict[str, tuple[float, float]]:
    """arm -> FLOPs of training at 6 per MAC and TPUv3-days, as far as the papers print them."""
    points = {point.arm: point.costs for point in published("jft4b/prec1", "cost/train_flops_6mac")}
    return {
        arm: (costs["cost/train_flops_6mac"], costs["cost/tpuv3_days"])
        for arm, model in sweep.published.items()
        if (costs := points.get(model))
    }


def print_plan(
    estimates: Mapping[str, Estimate],
    problems: Mapping[str, str],
    *,
    device: str,
    usd_per_hour: float,
    tried: Collection[str] = (),
) -> None:
    """Prints what every trial needs, the sums by family, and the trials that do not fit. `tried`: the trials
    of a first round, which has a sum of its own.
    """

    from orchestrator.costs import FORWARD, TRAIN_FLOPS
    from orchestrator.units import unit_of

    forward = unit_of(FORWARD, [e.forward_gflops_2mac for e in estimates.values()])
    train = unit_of(TRAIN_FLOPS, [e.train_flops_6mac for e in estimates.values()])

    def totals(members: list[Estimate]) -> tuple[str, ...]:
        device_s = sum(e.device_s for e in members)
        usd = device_s / 3600 * usd_per_hour
        flops, disk = sum(e.train_flops_6mac for e in members), sum(e.disk_bytes for e in members)
        price = f"{usd:.2f}" if usd >= 1 else f"{usd:.2g}"
        return f"{flops / train.size:.4g}", duration(device_s), price, f"{disk / 1e9:.3g}"

    groups: dict[str, list[Estimate]] = {}
    rows = []
    for name, e in estimates.items():
        numbers = (
            f"{e.params / 1e6:.3g}M",
            f"{e.forward_gflops_2mac / forward.size:.4g}",
            f"{e.memory_gib:.2f}",
        )
        rows.append((name, e.family, e.workers, *numbers, *totals([e])))
        groups.setdefault("first round" if name in tried else e.family, []).append(e)
    sums = (f"train {train.symbol}", "device time", "usd", "GB on disk")
    columns = ("trial", "family", "devices", "parameters", f"forward {forward.symbol}", "GiB/device", *sums)
    print_table(columns, rows, title=f"plan on {device}", left=3)
    groups["all"] = list(estimates.values())
    families = [(family, len(members), *totals(members)) for family, members in groups.items()]
    print_table(("family", "trials", *sums), families, title="by family", left=2)
    reasons = [*dict.fromkeys(problems.values())]
    for problem in reasons[:REASONS]:
        trials = ", ".join(name for name, why in problems.items() if why == problem)
        print(f"does not fit: {trials}: {problem}")
    if more := [name for name, why in problems.items() if why in reasons[REASONS:]]:
        print(f"does not fit either: {', '.join(more)}")

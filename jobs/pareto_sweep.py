"""Train the arms of a sweep, find the Pareto frontier of quality against cost, and confirm its knee.

  python jobs/pareto_sweep.py
  python jobs/pareto_sweep.py --sweep study --seeds 3 --stop-early --budget-hours 2
  python jobs/pareto_sweep.py --tune train.lr=3e-3,1e-2,3e-2 --tune-seeds 2 --tune-at width=16
  python jobs/pareto_sweep.py --list
  python jobs/pareto_sweep.py --sweep study --scale cifar --plan --mfu 0.35 --device H100-80
  python jobs/pareto_sweep.py --plan --max-ms 0.4
  python jobs/pareto_sweep.py --search tpe --trials 40
  ray job submit --working-dir . -- python jobs/pareto_sweep.py

Run the same command again to continue: finished trials stay, interrupted trials go on from their checkpoints.
"""

from __future__ import annotations

import ast
import sys
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from jobs._cli import (
    OUT_OF_BUDGET,
    command,
    connect,
    exit_if_unsent,
    failed,
    models_of,
    print_table,
    source_labels,
    with_flags,
)
from jobs._flags import flag, numbers, pair, parse, positive
from jobs.train import RunFlags, print_fields
from moe.config import did_you_mean
from moe.guests import offered
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.frontier.frontier import Frontier
    from orchestrator.sweeps.budget import Device
    from orchestrator.sweeps.queue import Policy
    from orchestrator.sweeps.run import SweepRun
    from orchestrator.sweeps.search import SearchOptions
    from orchestrator.sweeps.sweep import Sweep
    from orchestrator.sweeps.tuning import Tuning
    from orchestrator.tracking.store import Tracking

# Of a catalog that takes long to load.
SWEEPS = ("quickstart", "study", "modern", "upcycle", *offered("SWEEPS"))
SCALES = ("tiny", "cifar", *offered("SCALES"))
PLAN_MFU = 0.3
TRIALS = 20


def sweep_name(text: str) -> str:
    """Reads --sweep. Raises UsageError for a sweep or a file that does not exist."""
    path, colon, _ = text.rpartition(":")
    if not colon and text.endswith(".py") and Path(text).is_file():
        body = ast.parse(Path(text).read_text()).body
        functions = ", ".join(node.name for node in body if isinstance(node, ast.FunctionDef))
        raise UsageError(f"{text!r} names no function: write {text}:FUNCTION; it has {functions or 'none'}")
    if colon and not Path(path).is_file():
        raise UsageError(f"no file {path}: a sweep of your own is path/to/file.py:function")
    if not colon and text not in SWEEPS:
        hint = (
            did_you_mean(text, SWEEPS, str)
            or f"; known: {', '.join(SWEEPS)}, or your own as path/to/file.py:function"
        )
        raise UsageError(f"unknown sweep {text!r}{hint}")
    return text


def scale_name(text: str) -> str:
    """Reads --scale. Raises UsageError for a scale that does not exist."""
    if text not in SCALES:
        hint = did_you_mean(text, SCALES, str) or f"; known: {', '.join(SCALES)}"
        raise UsageError(f"unknown scale {text!r}{hint}")
    return text


@dataclass(frozen=True, kw_only=True)
class SweepFlags:
    sweep: str = flag(
        "quickstart", f"{', '.join(SWEEPS)}, or a function in a file: my_sweep.py:make", read=sweep_name
    )
    scale: str = flag(
        "tiny",
        f"sizes and recipe of the sweep: {', '.join(SCALES)}; all but tiny need --data",
        read=scale_name,
    )
    models: tuple[str, ...] | None = flag(
        None,
        "trained models of which the sweep makes its arms, if it is one of those: MODEL,MODEL,..",
        read=numbers(str, "MODEL,MODEL"),
    )
    quality: str | None = flag(
        None, "metric to maximise, e.g. fewshot/acc_10shot; default: the sweep's own, else the task's"
    )
    cost: str | None = flag(
        None, "metric to minimise, e.g. cost/params, or a cost of a --plugin; default: the sweep's own"
    )
    seeds: int | None = flag(
        None, "train every arm with seeds 0 .. N-1; default: the sweep's own", least=1, metavar="N"
    )
    max_concurrent: int | None = flag(
        None, "trials at the same time; default: as many as the cluster holds", least=1
    )
    confirm: int | None = flag(
        None, "number of knees to train again, for twice the steps; default: 1, with --branch-at 0", least=0
    )
    stop_early: tuple[str, ...] | None = flag(
        None,
        "pass by arms that are not worth their cost (docs/early_stopping.md); another policy is named by its"
        " kind, and its fields are set: early_stopping loss=0.03",
        nargs="*",
        metavar="KIND",
    )
    tune: tuple[str, tuple[float, ...]] | None = flag(
        None,
        "first give every arm its best of these values, by trials on seeds of their own (docs/sweeps.md)",
        read=pair(numbers(float, "3e-3,1e-2"), "train.lr=3e-3,1e-2"),
        metavar="FIELD=VALUE,VALUE",
    )
    tune_seeds: int | None = flag(None, "trials of each arm and value; default: 2", least=1, metavar="N")
    tune_at: tuple[str, str] | None = flag(
        None,
        "tune only arms with this in their model, as width=16; w32-NAME takes the value of w16-NAME",
        read=pair(str, "width=16"),
        metavar="FIELD=VALUE",
    )
    search: Literal["random", "tpe", "nsga2"] | None = flag(None, "draw arms from the sweep's space")
    trials: int | None = flag(None, f"arms that a search draws; default: {TRIALS}", least=1)
    warm_start: tuple[str, ...] = flag((), "sweep that a search learns from (repeatable)", metavar="SWEEP")
    branch_at: tuple[int, ...] | None = flag(
        None,
        "train every arm once without cooldown, and cool it down from these steps",
        read=numbers(int, "100,200,400"),
        metavar="STEP,STEP",
    )
    cooldown: int | None = flag(None, "steps of a cooldown run; default: a fifth of its steps", least=1)
    plan: bool = flag(False, "only print what every trial needs and costs, and which trials do not fit")
    mfu: float | None = flag(
        None, f"fraction of the device's peak that training reaches; default of --plan: {PLAN_MFU}"
    )
    device: str | None = flag(None, "kind in the price table; default: CPU-core, with GPUs H100-80")
    prices: str | None = flag(None, "price table of --plan and --budget-usd; default: jobs/prices.yaml")
    budget_hours: float | None = flag(
        None, "device-hours; trials that do not fit are not started", read=positive
    )
    budget_usd: float | None = flag(None, "the same in money", read=positive)
    measure: Literal["auto", "always", "never"] = flag(
        "auto",
        "measure what finished arms take to use: time, memory and size of the ONNX file; auto: where that"
        " takes less than two minutes or a tenth of the sweep",
    )
    owner_hours: float | None = flag(
        None,
        "device-hours of all your runs and sweeps below the storage in a calendar month (UTC); trials that do"
        " not fit are not started",
        read=positive,
    )
    max_ms: float | None = flag(
        None,
        "time the arms before they are trained, and leave out those whose median call takes more milliseconds"
        " (one image, ONNX, one thread); --plan shows the times",
        read=positive,
        metavar="MS",
    )
    run: RunFlags

    def __post_init__(self) -> None:
        needs = {
            "cooldown": "branch_at",
            "trials": "search",
            "warm_start": "search",
            "tune_seeds": "tune",
            "tune_at": "tune",
        }
        for name, needed in needs.items():
            if getattr(self, name) and not getattr(self, needed):
                flags = (f"--{word.replace('_', '-')}" for word in (name, needed))
                raise UsageError("{} does nothing without {}".format(*flags))
        if self.branch_at and (self.search or self.stop_early is not None):
            raise UsageError("--branch-at plans every trial ahead: leave out --search and --stop-early")
        if self.max_ms and (self.search or self.branch_at):
            raise UsageError("--max-ms leaves out arms that are named: leave out --search and --branch-at")
        if self.tune and (self.search or self.branch_at):
            raise UsageError("--tune tries values of arms that are named: leave out --search and --branch-at")
        if self.tune and self.tune[0] in dict(self.run.set):
            raise UsageError(f"--tune and --set {self.tune[0]} exclude each other")

    def source(self) -> str:
        """Returns the source of the images that come with the project; empty if the sweep has none."""
        from orchestrator.sweeps.catalog import SCALES

        return SCALES[self.scale].source(self.sweep)

    def has_data(self) -> bool:
        """Returns whether there are images; a plan can do without."""
        return bool(self.run.data or self.source() or self.run.fields().get("data.path"))

    def retrain(self) -> int:
        """Returns the number of knees to train again."""
        if self.confirm is None:
            return 0 if self.branch_at else 1
        return self.confirm

    def named_sweep(self, changes: Mapping[str, Any] | None = None) -> Sweep:
        """The sweep with these changes of its base. Its name ends with the scale if that is not the smallest,
        unless the changes have a name.

        Raises:
            UsageError: for a file or a function of the user's that makes no sweep.
        """
        from orchestrator.sweeps.catalog import make_sweep

        sweep = make_sweep(self.sweep, self.scale, changes or {})
        if changes:
            return sweep
        name = sweep.base.name if self.scale == "tiny" else f"{sweep.base.name}-{self.scale}"
        return replace(sweep, base=replace(sweep.base, name=name))

    def make(self) -> Sweep:
        """Raises UsageError for flags that the sweep cannot follow."""
        from orchestrator.codec import override
        from orchestrator.sweeps.catalog import SWEEPS
        from orchestrator.sweeps.sweep import Trunk
        from orchestrator.training.train import with_data

        if not self.has_data() and not self.plan:
            raise UsageError(f"--sweep {self.sweep} --scale {self.scale} has no data of its own: give --data")
        sweep, named = self.named_sweep(), SWEEPS.get(self.sweep)
        from_models, needs_weights = named and named.from_models, bool(named and named.needs_weights)
        if needs_weights and not (self.run.init_from or "train.init_from" in self.run.fields() or self.plan):
            raise UsageError(f"--sweep {self.sweep} starts from trained weights: give --init-from MODEL")
        if from_models and not self.models and not self.plan:
            raise UsageError(
                f"--sweep {self.sweep} makes its arms of trained models: give --models MODEL,MODEL"
            )
        if self.models and not from_models:
            raise UsageError(f"--models does nothing here: --sweep {self.sweep} has arms of its own")
        changes = self.run.changes(sweep.base, source=self.source(), model_of_weights=needs_weights)
        sweep = self.named_sweep(changes)
        if self.models and from_models:
            sweep = from_models(sweep, models_of(self.models, self.run.places))
        if self.has_data():
            sweep = sweep.based_on(with_data(sweep.base))
        if self.quality:
            sweep = replace(sweep, quality=self.quality)
            if self.quality.startswith("fewshot/") and sweep.base.train.fewshot is None:
                sweep = replace(sweep, base=override(sweep.base, {"train.fewshot": {}}))
        if self.cost:
            sweep = replace(sweep, cost=self.cost)
        if self.seeds:
            sweep = replace(sweep, seeds=tuple(range(self.seeds)))
        if self.search:
            if sweep.space is None:
                raise UsageError(
                    f"sweep {self.sweep} has no space to search: use --sweep pareto, or give it a space"
                )
            sweep = replace(sweep, arms={})
        if self.branch_at:
            at = tuple(sorted(self.branch_at))
            sweep = replace(sweep, trunk=Trunk(at=at, cooldown=self.cooldown or max(1, at[0] // 4)))
        return sweep

    def priced(self, sweep: Sweep) -> tuple[str, Device]:
        """The kind and the entry of the device in the price table."""
        from orchestrator.sweeps.budget import CORE, PRICES, load_prices

        prices = self.prices or PRICES
        devices = load_prices(prices)
        kind = self.device or ("H100-80" if sweep.base.scale.use_gpu else CORE)
        if kind not in devices:
            raise UsageError(f"--device {kind!r} is not in {prices}: {', '.join(devices)}")
        return kind, devices[kind]

    def policy(self) -> Policy:
        """Raises UsageError for an unknown policy, or a value that its field refuses."""
        from orchestrator.codec import read_config
        from orchestrator.sweeps.queue import Policy, RunToCompletion
        from orchestrator.sweeps.stopping import EarlyStopping

        if self.stop_early is None:
            return RunToCompletion()
        fields = dict(word.split("=", 1) for word in self.stop_early if "=" in word)
        kinds = [word for word in self.stop_early if "=" not in word] or [EarlyStopping.kind]
        try:
            return read_config(Policy, {"kind": " ".join(kinds), **fields})
        except UsageError as error:
            raise UsageError(f"--stop-early: {error}") from None

    def tuning(self) -> Tuning | None:
        """Raises UsageError for values that make no grid."""
        from orchestrator.sweeps.tuning import Tuning

        if not self.tune:
            return None
        field, values = self.tune
        return Tuning(field=field, values=values, seeds=self.tune_seeds or 2, at=self.tune_at)

    def drawing(self) -> SearchOptions | None:
        from orchestrator.sweeps.search import SearchOptions

        if not self.search:
            return None
        return SearchOptions(sampler=self.search, trials=self.trials or TRIALS, warm_start=self.warm_start)


def main() -> None:
    flags = parse(SweepFlags, __doc__)
    doing, places = "planning" if flags.plan else "training", flags.run.places
    if flags.run.list or flags.run.asks_for_fields():
        doing, places = "listing" if flags.run.list else "fields of", None
    what = f"{doing} the sweep {flags.run.name or flags.sweep} (scale {flags.scale})"
    with command(what, places, plugins=flags.run.places.plugin, grace=flags.run.grace):
        sweep(flags)


def sweep(flags: SweepFlags) -> None:
    from jobs._list import description, print_sweeps

    if flags.run.list:
        return print_sweeps(flags.scale)
    from jobs._describe import describe_data
    from jobs._sweep_plan import plan, print_spending, print_tuned
    from orchestrator.planning.preflight import check_sweep
    from orchestrator.sweeps.budget import Budget
    from orchestrator.sweeps.driver import SweepOptions, run_sweep
    from orchestrator.sweeps.progress import SweepProgress
    from orchestrator.sweeps.tuning import tune
    from orchestrator.sweeps.within import arms_within

    if flags.run.asks_for_fields():
        return print_fields(flags.named_sweep().base)
    sweep, tuning, policy = flags.make(), flags.tuning(), flags.policy()
    times = {}
    if flags.max_ms:
        sweep, times = arms_within(sweep, flags.max_ms, say=partial(print, flush=True))
    first = tuning and tuning.first_round(sweep)
    kind, device = flags.priced(sweep)
    budget = Budget(
        hours=flags.budget_hours,
        usd=flags.budget_usd,
        usd_per_hour=device.usd_per_hour,
        owner_hours=flags.owner_hours,
    )
    flops_per_s = None if flags.mfu is None else device.flops_per_s(flags.mfu)
    if not flags.plan:
        check_sweep(sweep, verify=flags.run.verify)
        families = Counter(run.model.family() for run in sweep.runs().values())
        arms = ", ".join(f"{count} {family}" for family, count in families.items())
        trials = f"{families.total()} trials ({arms})" if families else "arms drawn by a search"
        print(f"{sweep.base.name}: {trials}, {describe_data(sweep.base)}", flush=True)
    # With --mfu, a plan is for a cluster that may be elsewhere.
    if not flags.plan or flags.mfu is None:
        connect()
    if flags.plan and flags.sweep in SWEEPS:
        print(description(flags.sweep))
    if flags.plan and not flags.has_data() and (classes := sweep.base.model.num_outputs()):
        print(f"no --data: assuming the {classes:,} classes of scale {flags.scale}")
    if flags.plan or flags.mfu is not None:
        plan(sweep, kind, device, flags.mfu or PLAN_MFU, first, times)
        if flags.stop_early is not None:
            print_spending(sweep, policy)
    if flags.plan:
        return
    store = flags.run.places.open_store()
    options = SweepOptions(
        mode=flags.run.mode(),
        policy=policy,
        max_concurrent=flags.max_concurrent,
        search=flags.drawing(),
        budget=budget,
        retrain=flags.retrain(),
        flops_per_s=flops_per_s,
        labels=source_labels(),
        trackers=flags.run.trackers(),
        measure=flags.measure,
    )
    if tuning:
        tuned = tune(sweep, tuning, options, store=store)
        print_tuned(tuned)
        sweep, options = tuned.sweep, tuned.options
    progress = SweepProgress(sweep)
    frontier = run_sweep(sweep, options, progress=progress, store=store)
    assert progress.run
    print_end(flags, sweep, frontier, progress.run, store)
    if reasons := progress.run.failures():
        sys.exit(failed(reasons))
    if progress.run.trials_left() or progress.run.unpaid:
        sys.exit(OUT_OF_BUDGET)
    exit_if_unsent(f"{sweep.base.storage}/{sweep.base.name}")


def print_end(flags: SweepFlags, sweep: Sweep, frontier: Frontier, run: SweepRun, store: Tracking) -> None:
    """Prints the frontier, and where its page, its pictures and its models are."""
    from jobs._describe import guessing
    from orchestrator import storage
    from orchestrator.output import redact_uri
    from orchestrator.runs.sweep_directory import SweepDir
    from orchestrator.sweeps.publish import PAGE, PNG
    from orchestrator.tracking.registry import registered_name

    own, uri = SweepDir.of(sweep.base), flags.run.places.uri()
    left = run.trials_left()
    if left or run.unpaid:
        what = f"{left} trials not finished" if left else f"{', '.join(run.unpaid)} not trained again"
        print(f"Budget exhausted: {what}. {with_flags(run.budget.way_out)}.")
    print_frontier(frontier)
    floor = guessing(sweep.base) if sweep.quality == sweep.base.task.quality else 0.0
    if poor := [point.arm for point in frontier.points if point.quality <= floor]:
        print(f"no better than always guessing the largest class, {floor:.4f}: {', '.join(poor)}")
    print(f"\npage     {own.file(PAGE)}\npicture  {own.file(PNG)}\nMLflow   {redact_uri(uri)}")
    aliases = own.summary().get("aliases", {})
    record, model = own.record(), None
    with suppress(UsageError):  # MLflow is away, which a line before this says
        model = registered_name(store, record.key) if record and store.has_models else None
    named = ", ".join(f"models:/{model}@{alias}" for alias in aliases if model)
    print(f"models   {named or 'none registered'}")
    if uri.startswith(("http://", "https://")):
        print(f"open     {redact_uri(uri)}, or the page in any browser")
    elif storage.is_local(sweep.base.storage):
        print(f"open     `MOE_FRONTIER_HOME={sweep.base.storage} make ui`, or the page in any browser")


def print_frontier(frontier: Frontier) -> None:
    from orchestrator.frontier.claims import check_claim
    from orchestrator.frontier.figure import SIZE_TITLE, cost_text
    from orchestrator.frontier.points import IN_BITS
    from orchestrator.units import unit_of

    listed = sorted(zip(frontier.all_points, frontier.statuses(), strict=True), key=lambda each: each[0].cost)
    doubt = {"frontier, knee": f" ({frontier.doubt})" if frontier.doubt else ""}
    several = any(point.together > 1 for point in frontier.all_points)
    unit = unit_of(frontier.cost_name, [point.cost for point in frontier.all_points])
    rows = [
        (
            *(p.arm, p.quality_text, cost_text(p, frontier.cost_name, unit.size), f"{p.size:g}"),
            *([str(p.together)] if several else []),
            status + doubt.get(status, ""),
        )
        for p, status in listed
    ]
    size = "slots/token" if frontier.size_title == SIZE_TITLE else frontier.size_title
    name = IN_BITS.get(frontier.quality_name, frontier.quality_name)
    columns = ("arm", name, unit.title, size, *(["images together"] if several else []), "status")
    title = f"{frontier.name}: {frontier.subtitle} Hypervolume {frontier.hypervolume:.4f}."
    print_table(columns, rows, title=title, left=len(columns))
    for line in frontier.verdict:
        print(line)
    for name, quality in frontier.baselines.items():
        unbeaten = ", and no arm is better" if frontier.none_beats(quality) else ""
        print(f"{name}: {frontier.quality_name} {frontier.baseline_text(quality)}{unbeaten}")
    for claim in frontier.claims:
        print(f"{claim}: {check_claim(claim, frontier.points)}")
    for note in frontier.notes:
        print(note)


if __name__ == "__main__":
    main()

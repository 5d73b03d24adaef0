"""The flags of `pareto_sweep.py`, and the sweep, search and budget that they describe."""

import argparse
from dataclasses import replace
from pathlib import Path

from jobs.command import run_config, run_parser
from orchestrator.codec import override
from orchestrator.config import UsageError
from orchestrator.sweeping.branches import Trunk
from orchestrator.sweeping.catalog import SWEEPS, make_sweep
from orchestrator.sweeping.catalog.scales import SCALES
from orchestrator.sweeping.prices import Budget, load_prices
from orchestrator.sweeping.search import OptunaSearch
from orchestrator.sweeping.sweep import Sweep
from orchestrator.tracking import Tracking, children, find_sweep

PRICES = Path(__file__).parents[1] / "cluster" / "prices.yaml"


def parse(doc: str | None, *more: argparse.ArgumentParser) -> argparse.Namespace:
    """Also `made`: the sweep as it is before the flags. `more`: flags of a job beside them."""
    which = argparse.ArgumentParser(add_help=False)
    which.add_argument(
        "--sweep",
        default="quickstart",
        help=f"{', '.join(SWEEPS)}, or a function of a file of yours: my_sweep.py:make (%(default)s)",
    )
    which.add_argument("--scale", default="tiny", choices=sorted(SCALES), help="its size (%(default)s)")
    chosen, _ = which.parse_known_args()
    try:
        sweep = make_sweep(chosen.sweep, chosen.scale)
    except UsageError as error:
        which.error(str(error))
    name = sweep.base.name if chosen.scale == "tiny" else f"{sweep.base.name}-{chosen.scale}"
    parser = run_parser(doc, name=name, base=sweep.base, parents=[which, *more])
    parser.add_argument(
        "--quality",
        help="metric to maximise, e.g. val/acc1 or fewshot/acc_10shot; default: that of the sweep",
    )
    parser.add_argument("--seeds", type=int, help="train every arm with seeds 0 .. N-1; default: once")
    parser.add_argument(
        "--max-concurrent", type=int, help="trials at once; default: as many as the cluster holds"
    )
    parser.add_argument(
        "--confirm", type=int, help="how many knees to train again on 2 workers; default: 1, of branches 0"
    )
    parser.add_argument(
        "--stop-early", action="store_true", help="train on only what may reach the frontier; the rest pauses"
    )
    parser.add_argument(
        "--search", choices=("random", "tpe", "nsga2"), help="draw arms from the sweep's space"
    )
    parser.add_argument("--trials", type=int, help="arms that a search draws; default: 20")
    parser.add_argument(
        "--warm-start",
        action="append",
        default=[],
        metavar="SWEEP",
        help="a search learns from it (repeatable)",
    )
    parser.add_argument(
        "--branch-at",
        metavar="STEP,STEP",
        help="train every arm once without cooldown, and cool it down from these steps",
    )
    parser.add_argument("--cooldown", type=int, help="steps of a branch; default: a fifth of its steps")
    parser.add_argument(
        "--branch-cost",
        choices=("full", "marginal"),
        help="of a branch: all steps since its trunk began (default), or only its own",
    )
    parser.add_argument(
        "--plan", action="store_true", help="only print what every trial needs, costs and does not fit"
    )
    parser.add_argument("--measure", action="store_true", help="plan from measured steps, then train")
    parser.add_argument(
        "--mfu", type=float, help="plan with this part of the device's peak, and measure nothing"
    )
    parser.add_argument("--device", help="kind, of the price table; default: CPU-core, with GPUs H100-80")
    parser.add_argument("--prices", default=str(PRICES), help="price table (cluster/prices.yaml)")
    parser.add_argument("--budget-hours", type=float, help="device-hours; what does not fit is not begun")
    parser.add_argument("--budget-usd", type=float, help="the same in money")
    args = parser.parse_args()
    args.made = sweep
    if args.confirm is None:
        args.confirm = 0 if args.branch_at else 1
    bounds = {"confirm": 0, "max_concurrent": 1, "seeds": 1, "trials": 1, "cooldown": 1}
    for flag, least in bounds.items():
        if (value := getattr(args, flag)) is not None and value < least:
            parser.error(f"--{flag.replace('_', '-')} must be at least {least}, got {value}")
    for flag, needs in {"cooldown": "branch_at", "branch_cost": "branch_at", "trials": "search"}.items():
        if getattr(args, flag) is not None and not getattr(args, needs):
            parser.error(f"--{flag.replace('_', '-')} does nothing without --{needs.replace('_', '-')}")
    if args.branch_at == "":
        parser.error("--branch-at: write steps, e.g. 100,200,400")
    args.trials = args.trials or 20
    if args.branch_at and (args.search or args.stop_early):
        parser.error("--branch-at plans every trial ahead: leave out --search and --stop-early")
    if args.warm_start and not args.search:
        parser.error("--warm-start is for a search: name one with --search")
    return args


def sweep_from(args: argparse.Namespace) -> Sweep:
    """Raises UsageError for what the flags ask of a sweep that cannot do it."""
    sweep = replace(args.made, base=run_config(args, args.made.base))
    if args.quality:
        sweep = replace(sweep, quality=args.quality)
        if args.quality.startswith("fewshot/") and sweep.base.train.fewshot is None:
            sweep = replace(sweep, base=override(sweep.base, {"train.fewshot": {}}))
    if args.seeds:
        sweep = replace(sweep, seeds=tuple(range(args.seeds)))
    if args.search:
        if sweep.space is None:
            raise UsageError(f"sweep {args.sweep} has no space to search: use --sweep pareto, or give it one")
        sweep = replace(sweep, arms={})
    if args.branch_at:
        try:
            at = tuple(sorted(int(step) for step in args.branch_at.split(",")))
        except ValueError:
            raise UsageError(f"--branch-at {args.branch_at!r}: write steps, e.g. 100,200,400") from None
        sweep = replace(sweep, trunk=Trunk(at=at, cooldown=args.cooldown or max(1, at[0] // 4)))
        if args.branch_cost == "marginal":
            sweep = replace(sweep, cost="cost/marginal_train_flops_6mac")
    args.devices = load_prices(args.prices)
    args.device = args.device or ("H100-80" if sweep.base.scale.use_gpu else "CPU-core")
    if args.device not in args.devices:
        raise UsageError(f"--device {args.device!r} is not in {args.prices}: {', '.join(args.devices)}")
    budget(args)
    return sweep


def budget(args: argparse.Namespace) -> Budget:
    price = args.devices[args.device].usd_per_hour
    return Budget(hours=args.budget_hours, usd=args.budget_usd, usd_per_hour=price)


def search_of(args: argparse.Namespace, sweep: Sweep, store: Tracking) -> OptunaSearch | None:
    """Warm, if it was asked for: every complete trial of those sweeps that the space has."""
    if not args.search or sweep.space is None:
        return None
    search = OptunaSearch(
        sweep.space, base=sweep.base, count=args.trials, sampler=args.search, seed=sweep.base.train.seed
    )
    for name in args.warm_start:
        found = [
            (run.config(), run.metrics[sweep.quality], run.metrics[sweep.cost])
            for run in children(store, find_sweep(store, name).run_id)
            if run.status == "FINISHED" and {sweep.quality, sweep.cost} <= run.metrics.keys()
        ]
        print(f"warm start: {search.warm_start(found)} of {len(found)} runs of {name} lie in the space")
    return search

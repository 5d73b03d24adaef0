"""The flags of `pareto_sweep.py`, and the sweep, search and budget that they describe."""

from __future__ import annotations

import argparse
import ast
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.usage import run_parser
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.sweeps.budget import Budget
    from orchestrator.sweeps.search import OptunaSearch
    from orchestrator.sweeps.sweep import Sweep

SWEEPS = (  # of orchestrator.sweeps.catalog, which takes long to load
    "quickstart",
    "routers",
    "slots_experts",
    "ablations",
    "pareto",
    "capacity",
    "expert_count",
    "softmax_combine",
)
SCALES = ("tiny", "cifar", "in1k")
PLAN_MFU = 0.3
PRICES = Path(__file__).parents[1] / "cluster" / "prices.yaml"


def parse(doc: str | None, *more: argparse.ArgumentParser) -> argparse.Namespace:
    """The checked flags. `more`: flags of a job beside them."""
    which = argparse.ArgumentParser(add_help=False)
    which.add_argument(
        "--sweep",
        default="quickstart",
        type=sweep_name,
        help=f"{', '.join(SWEEPS)}, or a function of a file of yours: my_sweep.py:make (%(default)s)",
    )
    which.add_argument("--scale", default="tiny", choices=SCALES, help="its size (%(default)s)")
    parser = run_parser(doc, name="that of the sweep", parents=[which, *more])
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
        "--stop-early",
        action="store_true",
        help="pause what is not expected to reach the frontier (docs/sweeps.md: what it saves)",
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
    parser.add_argument(
        "--mfu",
        type=float,
        help=f"part of the device's peak that training reaches; default of --plan: {PLAN_MFU}",
    )
    parser.add_argument("--device", help="kind, of the price table; default: CPU-core, with GPUs H100-80")
    parser.add_argument("--prices", default=str(PRICES), help="price table (cluster/prices.yaml)")
    parser.add_argument("--budget-hours", type=float, help="device-hours; what does not fit is not begun")
    parser.add_argument("--budget-usd", type=float, help="the same in money")
    args = parser.parse_args()
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


def sweep_name(text: str) -> str:
    """The type of --sweep."""
    path, colon, _ = text.rpartition(":")
    if not colon and text.endswith(".py") and Path(text).is_file():
        body = ast.parse(Path(text).read_text()).body
        functions = ", ".join(node.name for node in body if isinstance(node, ast.FunctionDef))
        raise argparse.ArgumentTypeError(
            f"{text!r} names no function: write {text}:FUNCTION; it has {functions or 'none'}"
        )
    if colon and not Path(path).is_file():
        raise argparse.ArgumentTypeError(f"no file {path}: a sweep of your own is path/to/file.py:function")
    if not colon and text not in SWEEPS:
        raise argparse.ArgumentTypeError(
            f"unknown sweep {text!r}; known: {', '.join(SWEEPS)}, or your own as path/to/file.py:function"
        )
    return text


def named_sweep(args: argparse.Namespace) -> Sweep:
    """The sweep before the flags change it, named after its scale too where that is not the smallest.

    Raises:
        UsageError: for a file or a function of the user's that makes no sweep.
    """
    from orchestrator.sweeps.catalog import make_sweep

    sweep = make_sweep(args.sweep, args.scale)
    name = sweep.base.name if args.scale == "tiny" else f"{sweep.base.name}-{args.scale}"
    return replace(sweep, base=replace(sweep.base, name=name))


def sweep_from(args: argparse.Namespace) -> Sweep:
    """Raises UsageError for what the flags ask of a sweep that cannot do it."""
    from jobs.command import run_config
    from orchestrator.codec import override
    from orchestrator.sweeps.budget import load_prices
    from orchestrator.sweeps.sweep import Trunk

    made = named_sweep(args)
    sweep = replace(made, base=run_config(args, made.base))
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
    if args.mfu is not None:
        args.devices[args.device].flops_per_s(args.mfu)
    return sweep


def budget(args: argparse.Namespace) -> Budget:
    from orchestrator.sweeps.budget import Budget

    price = args.devices[args.device].usd_per_hour
    return Budget(hours=args.budget_hours, usd=args.budget_usd, usd_per_hour=price)


def search_of(args: argparse.Namespace, sweep: Sweep) -> OptunaSearch | None:
    """The search, which has learned from every complete trial of the --warm-start sweeps in its space."""
    from jobs.command import root
    from orchestrator import storage
    from orchestrator.sweeps.build import read_trials
    from orchestrator.sweeps.search import OptunaSearch
    from orchestrator.training.run_directory import read_sweep

    if not args.search or sweep.space is None:
        return None
    search = OptunaSearch(
        sweep.space, base=sweep.base, count=args.trials, sampler=args.search, seed=sweep.base.train.seed
    )
    for name in args.warm_start:
        directory = storage.join(root(args), name)
        if (record := read_sweep(directory)) is None:
            raise UsageError(f"--warm-start {name}: no sweep in {directory}")
        found = [
            (trial.config, trial.metrics[sweep.quality], trial.metrics[sweep.cost])
            for trial in read_trials(directory, record)
            if trial.status == "finished" and {sweep.quality, sweep.cost} <= trial.metrics.keys()
        ]
        print(f"warm start: {search.warm_start(found)} of {len(found)} runs of {name} lie in the space")
    return search

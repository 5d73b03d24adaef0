"""Train the arms of a sweep, find the Pareto frontier of quality against cost, and confirm its knee.

  python jobs/pareto_sweep.py
  python jobs/pareto_sweep.py --sweep routers --seeds 3 --stop-early --budget-hours 2
  python jobs/pareto_sweep.py --sweep my_sweep.py:make --plan
  python jobs/pareto_sweep.py --sweep pareto --search tpe --trials 40 --warm-start quickstart
  ray job submit --working-dir . -- python jobs/pareto_sweep.py

The same command again continues: finished trials stay, interrupted ones go on from their checkpoints.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import TYPE_CHECKING

from jobs.sweep_flags import PLAN_MFU, budget, named_sweep, parse, search_of, sweep_from
from jobs.usage import command
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from jobs.progress import SweepProgress
    from orchestrator.frontier.frontier import Frontier
    from orchestrator.sweeps.sweep import Sweep


def main() -> None:
    args = parse(__doc__)
    doing = "fields of" if "help" in args.set else "planning" if args.plan else "training"
    with command(f"{doing} the sweep {args.name or args.sweep} (scale {args.scale})"):
        sweep(args)


def sweep(args: argparse.Namespace) -> None:
    from jobs.command import connect, open_store, print_fields, source_labels
    from jobs.progress import SweepProgress
    from jobs.show import print_sweep
    from orchestrator.sweeps.asha import MultiObjectiveASHA
    from orchestrator.sweeps.driver import SweepOptions, run_sweep
    from orchestrator.sweeps.preflight import check_sweep
    from orchestrator.sweeps.queue import RunToCompletion

    if "help" in args.set:
        return print_fields(named_sweep(args).base)
    sweep = sweep_from(args)
    if not args.plan:
        check_sweep(sweep, verify=args.verify)
        print_sweep(sweep)
    if not args.plan or args.mfu is None:  # an mfu plans for a cluster that may be elsewhere
        connect()
    if args.plan or args.mfu is not None:
        make_plan(args, sweep)
    if args.plan:
        return
    chance = 1 / sweep.base.model.num_classes
    store = open_store(args)
    options = SweepOptions(
        mode=args.mode,
        policy=MultiObjectiveASHA(chance=chance) if args.stop_early else RunToCompletion(),
        max_concurrent=args.max_concurrent,
        search=search_of(args, sweep),
        budget=budget(args),
        retrain=args.confirm,
        flops_per_s=args.devices[args.device].flops_per_s(args.mfu) if args.mfu is not None else math.inf,
        labels=source_labels(),
    )
    progress = SweepProgress(sweep, trials=args.trials if args.search else None)
    with progress:
        frontier = run_sweep(sweep, options, watch=progress, store=store)
    outcomes = progress.outcomes()
    show_end(args, sweep, frontier, progress)
    if failed := {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}:
        listed = "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
        sys.exit(f"error: {len(failed)} runs failed:\n{listed}")


def make_plan(args: argparse.Namespace, sweep: Sweep) -> None:
    """Prints what every trial needs, and which trials the device or the connected cluster cannot hold."""
    import ray

    from jobs.show import print_plan
    from orchestrator.sweeps.estimate import estimate, memory_problem
    from orchestrator.sweeps.preflight import unfit

    runs = sweep.runs()
    if not runs:
        raise UsageError("no arms to plan: a search draws them one by one; bound it with --budget-hours")
    device, mfu = args.devices[args.device], args.mfu or PLAN_MFU
    found = {name: estimate(run, flops_per_s=device.flops_per_s(mfu)) for name, run in runs.items()}
    problems = unfit(sweep) if ray.is_initialized() else {}
    if device.memory_gib:
        too_large = {name: memory_problem(e.memory_gib, device.memory_gib) for name, e in found.items()}
        problems |= {name: problem for name, problem in too_large.items() if problem}
    print_plan(
        found, problems, device=f"{args.device} at {mfu:.0%} of its peak", usd_per_hour=device.usd_per_hour
    )


def show_end(args: argparse.Namespace, sweep: Sweep, frontier: Frontier, progress: SweepProgress) -> None:
    from jobs.command import tracking_uri
    from jobs.show import print_frontier
    from orchestrator import storage
    from orchestrator.tracking.projection import SUMMARY
    from orchestrator.tracking.registry import model_name
    from orchestrator.tracking.store import redact_uri
    from orchestrator.training.run_directory import read_json, run_directory

    folder, uri = run_directory(sweep.base), tracking_uri(args)
    if left := progress.trials_left():
        print(
            f"Budget exhausted: {left} trials not finished. Run again with a larger --budget-hours or"
            " --budget-usd to continue."
        )
    if args.stop_early:
        print(f"early stopping: {progress.paused()} of {progress.trials()} trials stay paused")
    print_frontier(frontier)
    print(f"\npage     {folder}/frontier.html\npicture  {folder}/frontier.png\nMLflow   {redact_uri(uri)}")
    aliases = (read_json(storage.join(folder, SUMMARY)) or {}).get("aliases", {})
    named = ", ".join(f"models:/{model_name(sweep.base.name)}@{alias}" for alias in aliases)
    print(f"models   {named or 'none registered'}")
    if uri.startswith(("http://", "https://")):
        print(f"open     {redact_uri(uri)}, or the page in any browser")
    elif storage.is_local(sweep.base.storage):
        print(f"open     `MOE_FRONTIER_HOME={sweep.base.storage} make ui`, or the page in any browser")


if __name__ == "__main__":
    main()

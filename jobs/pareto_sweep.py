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
import sys
from typing import TYPE_CHECKING

from jobs.sweep_flags import budget, named_sweep, parse, search_of, sweep_from
from jobs.usage import command
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from jobs.progress import SweepProgress
    from orchestrator.frontier.frontier import Frontier
    from orchestrator.sweeps.budget import Plan
    from orchestrator.sweeps.sweep import Sweep


def main() -> None:
    args = parse(__doc__)
    doing = "fields of" if "help" in args.set else "planning" if args.plan else "training"
    with command(f"{doing} the sweep {args.name or args.sweep} (scale {args.scale})"):
        sweep(args)


def sweep(args: argparse.Namespace) -> None:
    from jobs.command import connect, open_store, print_fields, source_labels
    from jobs.progress import SweepProgress
    from jobs.show import print_compared, print_sweep
    from orchestrator.sweeps.agenda import ToTheEnd
    from orchestrator.sweeps.budget import predicted_against_actual
    from orchestrator.sweeps.check import check_sweep
    from orchestrator.sweeps.driver import SweepOptions, run_sweep
    from orchestrator.sweeps.scheduler import Halving
    from orchestrator.training.run_directory import Result

    if "help" in args.set:
        return print_fields(named_sweep(args).base)
    sweep = sweep_from(args)
    if not args.plan:
        check_sweep(sweep, verify=args.verify)
        print_sweep(sweep)
    if not args.plan or args.mfu is None:  # an mfu plans for a cluster that may be elsewhere
        connect()
    planned = make_plan(args, sweep) if args.plan or args.measure or args.mfu is not None else None
    if args.plan:
        return
    chance = 1 / sweep.base.model.num_classes
    store = open_store(args)
    options = SweepOptions(
        mode=args.mode,
        policy=Halving(chance=chance) if args.stop_early else ToTheEnd(),
        max_concurrent=args.max_concurrent,
        search=search_of(args, sweep),
        budget=budget(args),
        retrain=args.confirm,
        predicted={e.trial: e.device_s for e in planned.estimates if e.device_s} if planned else {},
        labels=source_labels(),
    )
    progress = SweepProgress(sweep, trials=args.trials if args.search else None)
    with progress:
        frontier = run_sweep(sweep, options, watch=progress, store=store)
    outcomes = progress.outcomes()
    show_end(args, sweep, frontier, progress)
    if planned:
        actual = {n: o.metrics["cost/device_s"] for n, o in outcomes.items() if isinstance(o, Result)}
        print_compared(predicted_against_actual(planned, actual))
    if failed := {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}:
        listed = "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
        sys.exit(f"error: {len(failed)} runs failed:\n{listed}")


def make_plan(args: argparse.Namespace, sweep: Sweep) -> Plan:
    """Prints and returns the plan. Trials that the cluster can never hold are not measured."""
    from jobs.show import print_plan
    from orchestrator.sweeps.budget import plan
    from orchestrator.sweeps.check import unfit
    from orchestrator.sweeps.measure import measured_steps

    runs = sweep.runs()
    if not runs:
        raise UsageError("no arms to plan: a search draws them one by one; bound it with --budget-hours")
    device = args.devices[args.device]
    if args.mfu is not None:
        made, how = plan(runs, device=device, mfu=args.mfu), f"at {args.mfu:.0%} of its peak"
    else:
        too_large = unfit(sweep)
        steps = measured_steps({name: run for name, run in runs.items() if name not in too_large})
        made, how = plan(runs, device=device, seconds_per_step=steps, unfit=too_large), "from measured steps"
    print_plan(made, kind=args.device, how=how)
    return made


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

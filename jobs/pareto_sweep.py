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
from functools import partial
from typing import TYPE_CHECKING

from jobs.sweep_flags import PLAN_MFU, budget_tracker, named_sweep, parse, search_of, sweep_from
from jobs.usage import command
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from jobs.progress import TrialProgress
    from orchestrator.frontier.points import Frontier
    from orchestrator.sweeps.run import SweepRun
    from orchestrator.sweeps.search import OptunaSearch
    from orchestrator.sweeps.sweep import Sweep
    from orchestrator.tracking import TrackedRun, Tracking


def main() -> None:
    args = parse(__doc__)
    doing = "fields of" if "help" in args.set else "planning" if args.plan else "training"
    with command(f"{doing} the sweep {args.name or args.sweep} (scale {args.scale})"):
        run_sweep(args)


def run_sweep(args: argparse.Namespace) -> None:
    from jobs.command import connect, print_fields, tracking
    from jobs.show import print_sweep
    from orchestrator.sweeps.check import claim_sweep
    from orchestrator.sweeps.preflight import preflight, require
    from orchestrator.tracking import SystemMetrics

    if "help" in args.set:
        return print_fields(named_sweep(args).base)
    sweep = sweep_from(args)
    if args.plan:
        if args.mfu is None:  # with --mfu the plan may be for a cluster that is elsewhere
            connect()
        return make_plan(args, sweep)
    store_of_sweep = partial(tracking, args, sweep.base.name)
    require(
        preflight(
            sweep,
            connect=connect,
            open_store=store_of_sweep,
            confirm=bool(args.confirm),
            verify=args.verify,
        )
    )
    print_sweep(sweep)
    if args.mfu is not None:
        make_plan(args, sweep)
    with store_of_sweep() as store:
        search = search_of(args, sweep, store)
        claim_sweep(sweep, args.mode)
        parent = open_parent(sweep, store)
        try:
            with SystemMetrics(parent):
                failed = train_and_report(args, sweep, store, parent, search)
        except BaseException as error:
            parent.finish("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            raise
        parent.finish("FINISHED" if not failed else "FAILED")
    if failed:
        listed = "\n".join(f"  {name}: {reason}" for name, reason in failed.items())
        sys.exit(f"error: {len(failed)} runs failed:\n{listed}")


def make_plan(args: argparse.Namespace, sweep: Sweep) -> None:
    """Prints what every trial needs, and which trials the device or the connected cluster cannot hold."""
    import ray

    from jobs.show import print_plan
    from orchestrator.sweeps.check import unfit
    from orchestrator.sweeps.estimate import estimate, memory_problem

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


def open_parent(sweep: Sweep, store: Tracking) -> TrackedRun:
    """The sweep's MLflow run. What still runs there of an earlier one that was moved aside is closed."""
    from orchestrator.tracking import close_orphans, track
    from orchestrator.training.worker import run_directory

    tags = {"role": "sweep", "objective.quality": sweep.quality, "objective.cost": sweep.cost}
    tags |= {"seeds": str(max(1, len(sweep.seeds)))}
    tags |= {"claims": "\n".join(sweep.claims)} if sweep.claims else {}
    directory = run_directory(sweep.base)
    parent = track(store, directory, sweep.base.name, tags=tags)
    close_orphans(store, directory, {parent.run_id()})
    return parent


def train_and_report(
    args: argparse.Namespace,
    sweep: Sweep,
    store: Tracking,
    parent: TrackedRun,
    search: OptunaSearch | None,
) -> dict[str, str]:
    """run -> why it failed."""
    from jobs.progress import TrialProgress
    from jobs.show import status_line
    from orchestrator.sweeps.agenda import ToTheEnd
    from orchestrator.sweeps.confirm import knees
    from orchestrator.sweeps.log import TrialLog
    from orchestrator.sweeps.progress import snapshot
    from orchestrator.sweeps.report import publish
    from orchestrator.sweeps.run import Options, SweepRun, keep_weights_only
    from orchestrator.sweeps.scheduler import Halving
    from orchestrator.training.worker import run_directory

    folder = run_directory(sweep.base)
    budget = budget_tracker(args, folder)
    chance = 1 / sweep.base.model.num_classes
    policy = Halving(chance=chance) if args.stop_early else ToTheEnd()
    options = Options(policy=policy, at_once=args.max_concurrent, search=search)
    run = SweepRun(sweep, TrialLog(sweep, store, parent), budget, options)
    run.recover()

    def total() -> int:
        return args.trials if args.search else len(run.agenda.standings)

    def status() -> str:
        return status_line(snapshot(sweep, list(run.agenda.standings.values()), budget))

    progress = TrialProgress(run, total=total, status=status)
    with progress:
        run.work(progress)
    outcomes = run.outcomes()
    failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
    standings = run.agenda.standings.values()
    left = sum(one.outcome is None for one in standings) if run.agenda.out_of_budget else 0
    if left:
        print(
            f"Budget exhausted: {left} trials not finished. Run again with a larger --budget-hours or"
            " --budget-usd to continue."
        )
        if not any(one.reached or one.outcome for one in standings):
            return {}
    if args.stop_early:
        paused = sum(one.outcome is None for one in standings)
        print(f"early stopping: {paused} of {len(standings)} trials stay paused")
    frontier = publish(store, sweep.base.name, folder)
    with progress:
        for point in knees(frontier, 0 if left else args.confirm):
            failed |= confirm_arm(sweep, run, point.arm, store, parent, progress)
    if args.confirm:
        frontier = publish(store, sweep.base.name, folder)
    show_end(sweep, frontier, store, folder)
    trials = [one.trial for one in run.agenda.standings.values()]
    if freed := keep_weights_only(trials, frontier):
        print(f"trials off the frontier keep their weights alone: {freed / 1e6:.1f} MB freed")
    return failed


def confirm_arm(
    sweep: Sweep, run: SweepRun, arm: str, store: Tracking, parent: TrackedRun, progress: TrialProgress
) -> dict[str, str]:
    """Why it failed, if it did."""
    from ray.exceptions import RayError
    from ray.train import TrainingFailedError

    from jobs.show import ended_line
    from orchestrator.sweeps.confirm import confirm, confirm_config, trial_of
    from orchestrator.sweeps.trial import reason_of

    trial = trial_of((one.trial for one in run.agenda.standings.values()), arm)
    config = confirm_config(sweep, trial)
    print(f"confirming {arm}: {config.train.steps} steps on {config.scale.workers} workers", flush=True)
    name = f"confirm/{arm}"
    progress.start(name, config.train.steps)
    try:
        result = confirm(sweep, trial, store, parent, partial(progress.report, name))
    except (UsageError, TrainingFailedError, RayError) as error:
        return {name: reason_of(error)}
    finally:
        progress.stop(name)
    print(f"        {arm:18} {ended_line(sweep, result)}", flush=True)
    return {}


def show_end(sweep: Sweep, frontier: Frontier, store: Tracking, folder: str) -> None:
    from jobs.show import print_frontier
    from orchestrator import storage
    from orchestrator.sweeps.models import register_frontier
    from orchestrator.tracking.store import shown

    versions = register_frontier(store, frontier)
    print_frontier(frontier)
    print(f"\npage     {folder}/frontier.html\npicture  {folder}/frontier.png\nMLflow   {shown(store.uri)}")
    named = ", ".join(f"{alias} (version {version})" for alias, version in versions.items())
    print(f"models   {named or 'none registered'}")
    if store.uri.startswith(("http://", "https://")):
        print(f"open     {store.uri}, or the page in any browser")
    elif storage.is_local(sweep.base.storage):
        print(f"open     `MOE_FRONTIER_HOME={sweep.base.storage} make ui`, or the page in any browser")


if __name__ == "__main__":
    main()

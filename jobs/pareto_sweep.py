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

from jobs.sweep_flags import budget, named_sweep, parse, search_of, sweep_from
from jobs.usage import command
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from jobs.progress import TrialProgress
    from orchestrator.frontier.points import Frontier
    from orchestrator.sweeps.budget import Plan
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
    from orchestrator.sweeps.check import check_fits, check_sweep, claim_sweep
    from orchestrator.sweeps.confirm import check_confirm
    from orchestrator.tracking import SystemMetrics
    from orchestrator.training.nodes import check_shared

    if "help" in args.set:
        return print_fields(named_sweep(args).base)
    sweep = sweep_from(args)
    if not args.plan:
        check_sweep(sweep, verify=args.verify)
        print_sweep(sweep)
    if not args.plan or args.mfu is None:  # an mfu plans for a cluster that may be elsewhere
        connect()
    planned = None
    if args.plan:
        make_plan(args, sweep)
        return
    check_shared(sweep.base.storage)
    check_fits(sweep)
    if args.confirm:
        check_confirm(sweep)
    if args.measure or args.mfu is not None:
        planned = make_plan(args, sweep)
    with tracking(args, sweep.base.name) as store:
        search = search_of(args, sweep, store)
        claim_sweep(sweep, args.mode)
        parent = open_parent(sweep, store)
        try:
            with SystemMetrics(parent):
                failed = train_and_report(args, sweep, store, parent, planned, search)
        except BaseException as error:
            parent.finish("KILLED" if isinstance(error, KeyboardInterrupt) else "FAILED")
            raise
        parent.finish("FINISHED" if not failed else "FAILED")
    if failed:
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
    planned: Plan | None,
    search: OptunaSearch | None,
) -> dict[str, str]:
    """run -> why it failed."""
    from jobs.progress import TrialProgress
    from jobs.show import print_compared, status_line
    from orchestrator.sweeps.asha import MultiObjectiveASHA
    from orchestrator.sweeps.budget import predicted_against_actual
    from orchestrator.sweeps.confirm import knees
    from orchestrator.sweeps.log import TrialLog
    from orchestrator.sweeps.progress import snapshot
    from orchestrator.sweeps.purse import Purse
    from orchestrator.sweeps.queue import RunToCompletion
    from orchestrator.sweeps.report import publish
    from orchestrator.sweeps.run import Options, SweepRun, keep_weights_only
    from orchestrator.training.worker import Result, run_directory

    folder = run_directory(sweep.base)
    predicted = {e.trial: e.device_s for e in planned.estimates if e.device_s} if planned else {}
    purse = Purse(budget(args), folder, predicted)
    chance = 1 / sweep.base.model.num_classes
    policy = MultiObjectiveASHA(chance=chance) if args.stop_early else RunToCompletion()
    options = Options(policy=policy, max_concurrent=args.max_concurrent, search=search)
    run = SweepRun(sweep, TrialLog(sweep, store, parent), purse, options)
    run.recover()

    def total() -> int:
        return args.trials if args.search else len(run.queue.states)

    def status() -> str:
        return status_line(snapshot(sweep, list(run.queue.states.values()), purse))

    progress = TrialProgress(run, total=total, status=status)
    with progress:
        run.work(progress)
    outcomes = run.outcomes()
    failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
    states = run.queue.states.values()
    left = sum(one.outcome is None for one in states) if run.queue.out_of_budget else 0
    if left:
        print(
            f"Budget exhausted: {left} trials not finished. Run again with a larger --budget-hours or"
            " --budget-usd to continue."
        )
        if not any(one.reached or one.outcome for one in states):
            return {}
    if args.stop_early:
        paused = sum(one.outcome is None for one in states)
        print(f"early stopping: {paused} of {len(states)} trials stay paused")
    frontier = publish(store, sweep.base.name, folder)
    with progress:
        for point in knees(frontier, 0 if left else args.confirm):
            failed |= confirm_arm(sweep, run, point.arm, store, parent, progress)
    if args.confirm:
        frontier = publish(store, sweep.base.name, folder)
    show_end(sweep, frontier, store, folder)
    trials = [one.trial for one in run.queue.states.values()]
    if freed := keep_weights_only(trials, frontier):
        print(f"trials off the frontier keep their weights alone: {freed / 1e6:.1f} MB freed")
    if planned:
        actual = {n: o.metrics["cost/device_s"] for n, o in outcomes.items() if isinstance(o, Result)}
        print_compared(predicted_against_actual(planned, actual))
    return failed


def confirm_arm(
    sweep: Sweep, run: SweepRun, arm: str, store: Tracking, parent: TrackedRun, progress: TrialProgress
) -> dict[str, str]:
    """Why it failed, if it did."""
    from ray.exceptions import RayError
    from ray.train import TrainingFailedError

    from jobs.show import ended_line
    from orchestrator.sweeps.confirm import confirm, confirm_config, trial_of
    from orchestrator.sweeps.engine import reason_of

    trial = trial_of((one.trial for one in run.queue.states.values()), arm)
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

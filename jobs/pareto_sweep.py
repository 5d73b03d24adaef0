"""Train the arms of a sweep, find the Pareto frontier of quality against cost, and confirm its knee.

  python jobs/pareto_sweep.py
  python jobs/pareto_sweep.py --sweep routers --seeds 3 --stop-early --budget-hours 2
  python jobs/pareto_sweep.py --sweep my_sweep.py:make --plan
  python jobs/pareto_sweep.py --sweep pareto --search tpe --trials 40 --warm-start quickstart
  ray job submit --working-dir . -- python jobs/pareto_sweep.py

The same command again continues: finished trials stay, interrupted ones go on from their checkpoints.
"""

import argparse
import sys

from ray.exceptions import RayError
from ray.train import TrainingFailedError

from jobs.command import connect, tracking
from jobs.show import ended_line, print_compared, print_frontier, print_plan, status_line
from jobs.sweep_flags import budget, parse, search_of, sweep_from
from jobs.usage import command
from orchestrator import storage
from orchestrator.config import UsageError
from orchestrator.frontier.points import Frontier
from orchestrator.sweeping.agenda import Outcome, ToTheEnd
from orchestrator.sweeping.budget import Plan, plan, predicted_against_actual
from orchestrator.sweeping.check import check_sweep, claim_sweep, unfit
from orchestrator.sweeping.confirm import check_confirm, confirm, confirm_config, knees, trial_of
from orchestrator.sweeping.log import TrialLog
from orchestrator.sweeping.measure import measured_steps
from orchestrator.sweeping.models import register_frontier
from orchestrator.sweeping.progress import snapshot
from orchestrator.sweeping.purse import Purse
from orchestrator.sweeping.report import publish
from orchestrator.sweeping.run import Options, SweepRun, keep_weights_only
from orchestrator.sweeping.scheduler import Halving
from orchestrator.sweeping.search import OptunaSearch
from orchestrator.sweeping.sweep import Sweep
from orchestrator.sweeping.trial import reason_of
from orchestrator.tracking import SystemMetrics, TrackedRun, Tracking, close_orphans, track
from orchestrator.tracking.store import shown
from orchestrator.training.nodes import check_shared
from orchestrator.training.worker import Result, run_directory


def main() -> None:
    args = parse(__doc__)
    with command():
        sweep = sweep_from(args)
        if not args.plan or args.mfu is None:  # an mfu plans for a cluster that may be elsewhere
            connect(show_workers=False)
        planned = None
        if args.plan:
            make_plan(args, sweep)
            return
        check_shared(sweep.base.storage)
        check_sweep(sweep, verify=args.verify)
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
    """Printed. What the cluster can never hold is not measured."""
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
    folder = run_directory(sweep.base)
    predicted = {e.trial: e.device_s for e in planned.estimates if e.device_s} if planned else {}
    purse = Purse(budget(args), folder, predicted)
    chance = 1 / sweep.base.model.num_classes
    policy = Halving(chance=chance) if args.stop_early else ToTheEnd()
    options = Options(policy=policy, at_once=args.max_concurrent, search=search)
    run = SweepRun(sweep, TrialLog(sweep, store, parent), purse, options)
    run.recover()

    def ended(name: str, outcome: Outcome) -> None:
        total = args.trials if args.search else len(run.agenda.standings)
        print(f"[{len(run.outcomes()):2}/{total}] {name:18} {ended_line(sweep, outcome)}", flush=True)

    def status() -> None:
        print(status_line(snapshot(sweep, list(run.agenda.standings.values()), purse)), flush=True)

    run.work(ended, status)
    outcomes = run.outcomes()
    failed = {name: outcome for name, outcome in outcomes.items() if isinstance(outcome, str)}
    standings = run.agenda.standings.values()
    left = sum(one.outcome is None for one in standings) if run.agenda.out_of_budget else 0
    if left:
        print(
            f"the budget holds no more, {left} trials are left; the same command with a larger one continues"
        )
        if not any(one.reached or one.outcome for one in standings):
            return {}
    frontier = publish(store, sweep.base.name, folder)
    for point in knees(frontier, 0 if left else args.confirm):
        failed |= confirm_arm(sweep, run, point.arm, store, parent)
    if args.confirm:
        frontier = publish(store, sweep.base.name, folder)
    show_end(sweep, frontier, store, folder)
    trials = [one.trial for one in run.agenda.standings.values()]
    if freed := keep_weights_only(trials, frontier):
        print(f"trials off the frontier keep their weights alone: {freed / 1e6:.1f} MB freed")
    if planned:
        actual = {n: o.metrics["cost/device_s"] for n, o in outcomes.items() if isinstance(o, Result)}
        print_compared(predicted_against_actual(planned, actual))
    return failed


def confirm_arm(sweep: Sweep, run: SweepRun, arm: str, store: Tracking, parent: TrackedRun) -> dict[str, str]:
    """Why it failed, if it did."""
    trial = trial_of((one.trial for one in run.agenda.standings.values()), arm)
    config = confirm_config(sweep, trial)
    print(f"confirming {arm}: {config.train.steps} steps on {config.scale.workers} workers", flush=True)
    try:
        result = confirm(sweep, trial, store, parent)
    except (UsageError, TrainingFailedError, RayError) as error:
        return {f"confirm/{arm}": reason_of(error)}
    print(f"        {arm:18} {ended_line(sweep, result)}", flush=True)
    return {}


def show_end(sweep: Sweep, frontier: Frontier, store: Tracking, folder: str) -> None:
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

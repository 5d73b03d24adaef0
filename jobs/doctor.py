"""Look at what a sweep would run on, before it does. Takes the flags of pareto_sweep.py, and --json.

  python jobs/doctor.py                                        # a laptop, or a head node
  python jobs/doctor.py --workers 8 --set scale.use_gpu=true   # as that sweep would run
  ray job submit --working-dir . -- python jobs/doctor.py --storage s3://bucket/prefix
  python jobs/doctor.py --json                                 # findings on stdout, progress on stderr

Nothing is trained, packed or left behind. Exit code 1 if a check fails. docs/doctor.md lists the checks.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from jobs.sweep_flags import parse
from jobs.usage import command
from orchestrator.doctor.report import (  # which imports no large library
    NODES_LIMIT_S,
    Examination,
    Finding,
    Skipped,
    as_json,
    fail,
    line,
    need,
    ok,
    summary,
)
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.doctor.facts import Machine
    from orchestrator.sweeps.sweep import Sweep

PROJECT = Path(__file__).parents[1]
SWEEP_LIMIT_S = 120.0  # reads others' shards once, to know what they hold
COLLECTIVES_LIMIT_S = 180.0  # has limits of its own
NAMED_NODES = 4


def main() -> None:
    own = argparse.ArgumentParser(add_help=False)
    own.add_argument("--json", action="store_true", help="findings as one document on stdout")
    args = parse(__doc__, own)
    with command("examining this machine and its cluster", to=sys.stderr if args.json else None):
        with stdout_kept() if args.json else nullcontext():
            doctor = Examination(lambda finding: print(line(finding), flush=True))
            with tempfile.TemporaryDirectory(prefix="doctor-") as scratch:
                examine_all(doctor, args, scratch)
            print(summary(doctor.findings), flush=True)
        if args.json:
            print(as_json(doctor.findings), flush=True)
    if doctor.stuck:
        os._exit(int(doctor.failed()))  # else the exit waits for what never answers
    sys.exit(int(doctor.failed()))


def examine_all(doctor: Examination, args: argparse.Namespace, scratch: str) -> None:
    """Runs all checks. `scratch`: a folder for the files that making a sweep from its flags writes."""
    from jobs.command import root, tracking_uri
    from orchestrator.doctor import environment, places

    with suppress(UsageError):  # the check of tracking reports it
        tracked = tracking_uri(args)
        doctor.check("proxies", lambda: environment.check_proxies(os.environ, tracked))
    doctor.check("variables", lambda: environment.check_variables(os.environ))
    doctor.check("home", lambda: environment.check_home(os.environ))
    doctor.check("token", lambda: environment.check_token(os.environ))
    doctor.check("upload", check_upload)
    sweep = doctor.obtain("sweep", lambda: sweep_of(args, scratch), told_sweep, limit_s=SWEEP_LIMIT_S)
    doctor.check(
        "data",
        lambda: places.check_run_data(need(sweep, "the sweep"), verify=args.verify),
        limit_s=None if args.verify else NODES_LIMIT_S,
    )
    doctor.check("storage", lambda: places.check_storage(root(args)))
    nodes = join(doctor)
    doctor.check("tracking", lambda: places.check_tracking(tracking_uri(args), nodes=len(nodes or {})))
    examine_machines(doctor, nodes, sweep)
    examine_cluster(doctor, args, nodes, sweep, scratch)


def join(doctor: Examination) -> dict[str, Machine] | None:
    """The nodes of the cluster that the sweep would run on; starts the cluster that it would start."""
    from jobs.command import connect
    from orchestrator.doctor import cluster

    def connected() -> bool:
        need(address, "an address")
        connect()
        return True

    def examined() -> dict[str, Machine]:
        need(joined, "a cluster")
        return cluster.examine_nodes()

    address = doctor.obtain("address", lambda: cluster.check_address(os.environ), lambda finding: finding)
    joined = doctor.obtain("cluster", connected, lambda _: cluster.told_nodes(), limit_s=None)
    return doctor.obtain(
        "nodes",
        examined,
        lambda nodes: ok(f"all {len(nodes)} answer: {', '.join(list(nodes)[:NAMED_NODES])}"),
        limit_s=NODES_LIMIT_S,
    )


def examine_machines(doctor: Examination, nodes: dict[str, Machine] | None, sweep: Sweep | None) -> None:
    """Runs the checks of each machine by what the machine reports."""
    from orchestrator.doctor import cluster, machine
    from orchestrator.doctor.facts import examine

    here = examine()
    every = nodes or {"this machine": here}
    gpus = bool(sweep and sweep.base.scale.use_gpu)
    doctor.check("versions", lambda: machine.check_versions(here, every, PROJECT))
    doctor.check("open files", lambda: machine.check_open_files(here, every))
    doctor.check("memory", lambda: machine.check_memory(every))
    doctor.check("disk", lambda: machine.check_disk(every))
    doctor.check("threads", lambda: machine.check_threads(every))
    doctor.check(
        "shared memory",
        lambda: machine.check_shared_memory(need(nodes, "nodes"), cluster.of_nodes("object_store_memory")),
    )
    doctor.check(
        "GPUs", lambda: machine.check_gpus(need(nodes, "nodes"), cluster.of_nodes("GPU"), wanted=gpus)
    )


def examine_cluster(
    doctor: Examination,
    args: argparse.Namespace,
    nodes: dict[str, Machine] | None,
    sweep: Sweep | None,
    scratch: str,
) -> None:
    """Runs the checks that need a cluster."""
    from jobs.command import root, tracking_uri
    from orchestrator.doctor import cluster, places
    from orchestrator.doctor.bandwidth import check_collectives

    def on_nodes(work: Callable[[], Finding]) -> Callable[[], Finding]:
        return lambda: work() if need(nodes, "nodes") else fail("the cluster has no nodes")

    def made() -> Sweep:
        need(nodes, "nodes")
        return need(sweep, "the sweep")

    def data_everywhere() -> Finding:
        if made().base.data.path.startswith(scratch):
            raise Skipped("the data set is packed below the storage when the sweep begins")
        return places.check_data_everywhere(made().base)

    def collectives() -> Finding:
        runs = made().runs() or {"": made().base}
        workers = max(run.scale.workers for run in runs.values())
        return check_collectives(made().base, max(workers, 2 if args.confirm else 1))

    doctor.check("one Ray", on_nodes(cluster.check_instances))
    doctor.check("dashboard", on_nodes(lambda: cluster.check_dashboard(os.environ)))
    doctor.check("resources", lambda: cluster.check_sweep_fits(made(), confirms=bool(args.confirm)))
    doctor.check("clocks", on_nodes(cluster.check_clocks), limit_s=NODES_LIMIT_S)
    doctor.check(
        "storage, nodes",
        on_nodes(lambda: places.check_storage_everywhere(root(args), nodes=len(nodes or {}))),
        limit_s=NODES_LIMIT_S,
    )
    doctor.check(
        "tracking, nodes",
        on_nodes(lambda: places.check_tracking_everywhere(tracking_uri(args))),
        limit_s=NODES_LIMIT_S,
    )
    doctor.check("data, nodes", data_everywhere, limit_s=NODES_LIMIT_S)
    doctor.check("collectives", collectives, limit_s=COLLECTIVES_LIMIT_S)


def sweep_of(args: argparse.Namespace, scratch: str) -> Sweep:
    """The sweep of the flags. What it would pack or index below the storage goes to `scratch`."""
    from jobs.command import root
    from jobs.sweep_flags import sweep_from
    from orchestrator import storage
    from orchestrator.data.manifest import has_manifest

    data = args.data
    if data is None and storage.is_local(root(args)):
        with suppress(OSError):  # the check of the storage reports it
            data = packed if has_manifest(packed := f"{root(args)}/data/digits") else None
    sweep = sweep_from(argparse.Namespace(**vars(args) | {"data": data, "storage": scratch}))
    return replace(sweep, base=replace(sweep.base, storage=root(args)))


def told_sweep(sweep: Sweep) -> Finding:
    return ok(
        f"{sweep.base.name}: {len(sweep.runs())} trials" if sweep.arms else f"{sweep.base.name}: a search"
    )


def check_upload() -> Finding:
    from orchestrator.doctor import cluster

    here = Path.cwd()
    if not (here / "jobs").is_dir():
        raise Skipped("jobs are submitted from the project's folder, and this is another")
    return cluster.check_upload(here)


@contextmanager
def stdout_kept() -> Iterator[None]:
    """Sends to stderr what is printed meanwhile, by Ray's own processes too."""
    sys.stdout.flush()
    kept = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        sys.stdout.flush()
        os.dup2(kept, 1)
        os.close(kept)


if __name__ == "__main__":
    main()

"""What Ray says: whether a cluster answers and lets us in, its nodes, its clocks, what a job would upload.

Private functions of Ray are used for what it only tells itself: whom it would join, and what it would upload.
"""

import ipaddress
import logging
import os
import socket
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services
from ray._private.authentication.authentication_token_setup import maybe_enable_token_auth_if_token_available
from ray._private.runtime_env.packaging import _dir_travel, _get_excludes
from ray._private.worker import get_dashboard_url
from ray._raylet import GcsClient  # pyright: ignore[reportAttributeAccessIssue]  # compiled
from ray.exceptions import AuthenticationError

from orchestrator.doctor.facts import Machine, examine, now
from orchestrator.doctor.report import Finding, by_node, fail, first_line, ok, warn
from orchestrator.sweeps.check import unfit
from orchestrator.sweeps.driver import check_retrain as check_confirm
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.resources import check_resources, most_resources, node_name, on_every_node

CONNECT_S = 5.0
SKEW_S = 1.0
UPLOAD_BYTES = 100 * 2**20  # above it, the head refuses what `ray job submit` sends
LARGEST_NAMED = 3
_SILENT = logging.Logger("silent", logging.CRITICAL)
CLOCK_ASKED = 5  # times; the shortest round trip tells most


def check_address(environ: Mapping[str, str]) -> Finding:
    """Whether somebody answers where Ray would be joined, and takes our token. `ray.init` itself would try
    for ever with a wrong one, and for minutes where nobody answers.
    """
    named = environ.get("RAY_ADDRESS", "")
    if named.startswith(("http://", "https://")):
        return fail(
            f"RAY_ADDRESS={named} is a dashboard, which takes jobs alone",
            "ray job submit --working-dir . -- python jobs/doctor.py; on the head itself: unset RAY_ADDRESS",
        )
    found = None if named == "local" else _joined_by_default()
    if found is None:
        return ok("none to join: a Ray is started on this machine alone")
    host, _, port = found.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=CONNECT_S).close()
    except (OSError, ValueError) as error:
        way_out = "correct RAY_ADDRESS, or unset it to start a Ray here" if named else "start the head anew"
        return fail(f"nobody answers at {found}: {error}", way_out)
    if not named:
        maybe_enable_token_auth_if_token_available(warn_if_disabled=False)  # as `ray.init` does then
    try:
        nodes = GcsClient(address=found).get_all_node_info(timeout=CONNECT_S)
    except AuthenticationError as error:
        return fail(
            f"{found} refuses the token: {first_line(error).partition('. ')[0]}",
            "export RAY_AUTH_MODE=token RAY_AUTH_TOKEN_PATH=<a copy of the head's token>, before Ray starts",
        )
    return ok(f"{found} answers, {len(nodes)} nodes registered")


def told_nodes() -> Finding:
    most = most_resources()
    have = ", ".join(f"{most[name]:g} {name}s" for name in ("CPU", "GPU") if most.get(name))
    up = sum(node["Alive"] for node in ray.nodes())
    return ok(f"Ray {ray.__version__}, {up} nodes up, at most {have or 'no CPUs'}")


def check_instances() -> Finding:
    """Ray Train's cleaner of a stopped trial's workers asks the one Ray of the machine, and dies of two."""
    found = services.find_gcs_addresses()
    if len(found) > 1:
        return warn(
            f"{len(found)} Rays run on this machine: {', '.join(sorted(found))}",
            "stop the others, or a stopped trial may keep its workers",
        )
    return ok("one Ray on this machine")


def check_dashboard(environ: Mapping[str, str]) -> Finding:
    """Without it a stopped trial keeps its workers; in public it starts jobs for anyone."""
    url = get_dashboard_url()
    if not url:
        return warn(
            "this Ray has no dashboard: a stopped trial may keep its workers for ever",
            "ray start --head --include-dashboard=true, with ray[default] installed",
        )
    host = url.removeprefix("http://").rpartition(":")[0].strip("[]")
    loopback = host == "localhost" or ipaddress.ip_address(host).is_loopback
    if loopback:
        return ok(f"at {url}, this machine alone")
    way_out = (
        "ray start --dashboard-host=127.0.0.1, and ssh -L 8265:127.0.0.1:8265; or close its port to others"
    )
    if environ.get("RAY_AUTH_MODE", "").lower() == "disabled":
        return fail(f"at {url}, without tokens: who reaches it runs code as you", way_out)
    return warn(f"at {url}, for all who reach this address and have the token", way_out)


def examine_nodes() -> dict[str, Machine]:
    """Every node that is up, by name. Raises RuntimeError if one cannot say."""
    found = on_every_node(examine)
    bad = {name: first_line(told) for name, told in found.items() if isinstance(told, Exception)}
    if bad:
        raise RuntimeError(f"{by_node(found, bad)}: is the code there (ray job submit --working-dir .)?")
    return found


def of_nodes(resource: str) -> dict[str, float]:
    """How much of it each node that is up has."""
    return {node_name(n): n["Resources"].get(resource, 0.0) for n in ray.nodes() if n["Alive"]}


def check_clocks() -> Finding:
    """Against this process: the middle of the shortest round trip, give or take half of it."""
    on_every_node(now)  # starts a worker process where there is none
    best = (float("inf"), dict[str, float]())
    for _ in range(CLOCK_ASKED):
        before = time.time()
        told = on_every_node(now)
        after = time.time()
        best = min(best, (after - before, {n: t - (before + after) / 2 for n, t in told.items()}), key=_first)
    half, skews = best[0] / 2, best[1]
    off = {n: f"{skew:+.2f} s" for n, skew in skews.items() if abs(skew) - half > SKEW_S}
    if off:
        way_out = "run chrony or ntpd there: times of checkpoints and metrics are compared"
        return warn(f"{by_node(skews, off)} from here, give or take {half:.2f} s", way_out)
    most = max(abs(skew) for skew in skews.values())
    return ok(f"at most {most + half:.2f} s from here, half a round trip counted")


def check_sweep_fits(sweep: Sweep, *, confirms: bool) -> Finding:
    """Workers of each trial, and a CPU for their data, against what the cluster may ever have."""
    problems = unfit(sweep)
    if problems:
        return fail(
            f"{len(problems)} of {len(sweep.runs())} trials: {next(iter(problems.values()))}",
            "fewer --workers, or more nodes",
        )
    check_resources(sweep.base)
    if confirms:
        check_confirm(sweep)
    return ok(f"{len(sweep.runs()) or 'all'} trials fit, with a CPU for data")


def check_upload(folder: Path) -> Finding:
    """What `ray job submit --working-dir .` would send from `folder`, as Ray itself leaves files out."""
    sizes: Counter[str] = Counter()

    def add(path: Path) -> None:
        if path.is_file():
            sizes[path.relative_to(folder).parts[0]] += path.stat().st_size

    gitignore = os.environ.get(ray_constants.RAY_RUNTIME_ENV_IGNORE_GITIGNORE, "0") != "1"
    left_out = [_get_excludes(folder, ray_constants.get_runtime_env_default_excludes())]
    _dir_travel(folder, left_out, add, include_gitignore=gitignore, logger=_SILENT)
    total = sizes.total()
    if total > UPLOAD_BYTES:
        largest = ", ".join(f"{n} {s / 2**20:.0f} MiB" for n, s in sizes.most_common(LARGEST_NAMED))
        return warn(
            f"--working-dir . holds {total / 2**20:.0f} MiB, the head takes 100 when packed: {largest}",
            "name them in .gitignore or .rayignore",
        )
    return ok(f"--working-dir . holds {total / 2**20:.1f} MiB")


def _joined_by_default() -> str | None:
    nobody: Any = None  # as `ray.init` says it
    return services.get_ray_address_from_environment(nobody, None)


def _first(pair: tuple[float, object]) -> float:
    return pair[0]

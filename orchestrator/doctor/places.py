"""Where files and runs go, and where data lies: seen from here and from every node."""

import shutil

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.doctor.facts import network_disk, try_storage
from orchestrator.doctor.report import Finding, Skipped, by_node, fail, first_line, ok, warn
from orchestrator.sweeps.sweep import Sweep
from orchestrator.tracking.health import Health, answers, has_user, look
from orchestrator.tracking.store import redact_uri
from orchestrator.training.fit import check_data
from orchestrator.training.resources import check_shared, on_every_node

FREE_BYTES = 2**30
FREE_FRAC = 0.05


def check_storage(root: str) -> Finding:
    """From this process."""
    try:
        try_storage(root)
    except OSError as error:
        way_out = "--storage, or MOE_FRONTIER_HOME, with a place that this user may write to"
        if not storage.is_local(root):
            way_out = "see the bucket, AWS_ENDPOINT_URL, the region and the credentials (AWS_ variables)"
        return fail(f"{root} cannot be used: {first_line(error)}", way_out)
    if not storage.is_local(root):
        return ok(f"{root}: written, read and deleted")
    disk = shutil.disk_usage(root)
    if disk.free < max(FREE_BYTES, FREE_FRAC * disk.total):
        return warn(
            f"{root}: {disk.free / 1e9:.1f} of {disk.total / 1e9:.0f} GB free", "free space, or move it"
        )
    if kind := network_disk(root):
        way_out = "keep MLflow off it (--tracking-uri); checkpoints may stay"
        return warn(f"{root} lies on a network disk ({kind})", way_out)
    return ok(f"{root}: written, read and deleted; {disk.free / 1e9:.0f} GB free")


def check_storage_everywhere(root: str, *, nodes: int) -> Finding:
    """From every node; and that all see the same files."""
    tried = on_every_node(try_storage, root)
    bad = {name: first_line(error) for name, error in tried.items() if error is not None}
    if bad:
        return fail(by_node(tried, bad), "mount it on every node, or --storage s3://bucket/prefix")
    check_shared(root)
    return ok(
        f"every node writes, reads and deletes; all {nodes} see the same files" if nodes > 1 else "one node"
    )


def check_tracking(uri: str, *, nodes: int) -> Finding:
    """From this process: the only one that writes there."""
    file = uri.removeprefix("sqlite:///") if uri.startswith("sqlite:") else None
    if file and (kind := network_disk(file)):
        return warn(f"{file} lies on a network disk ({kind}), where SQLite's locks fail", _SERVER)
    if file and nodes > 1:
        return warn(
            f"{redact_uri(uri)} is a file of this machine, and the cluster has {nodes} nodes", _SERVER
        )
    health = look(uri)
    if health.state != "ready":
        return _unready(uri, health)
    return ok(f"{redact_uri(uri)}: {health.detail}")


def check_tracking_everywhere(uri: str) -> Finding:
    """Whether nodes reach the server: a warning, for workers do not write there."""
    if not uri.startswith(("http://", "https://")):
        return ok("a database, which this process alone opens")
    if has_user(uri):
        raise Skipped("the URI holds a user")
    asked = on_every_node(answers, uri)
    bad = {name: first_line(error) for name, error in asked.items() if error is not True}
    if bad:
        return warn(
            by_node(asked, bad),
            "only the driver writes to MLflow; open the server's port where it may run",
        )
    return ok(f"{len(asked)} nodes reach it")


def check_run_data(sweep: Sweep, *, verify: bool) -> Finding:
    """Manifest, sizes and footers; `verify`: SHA-256 too."""
    check_data(sweep.base, verify=verify)
    manifest = open_manifest(sweep.base.data.path)
    rows = ", ".join(f"{manifest.rows(split)} {split}" for split in manifest.splits)
    return ok(f"{sweep.base.data.path}: {rows} images, {len(manifest.classes)} classes, shards whole")


def check_data_everywhere(run: RunConfig) -> Finding:
    """Every node reads the same manifest."""
    seen = on_every_node(digest_of, run.data.path)
    here = digest_of(run.data.path)
    bad = {
        name: first_line(found) if isinstance(found, Exception) else "another data set lies there"
        for name, found in seen.items()
        if found != here
    }
    if bad:
        return fail(by_node(seen, bad), "--data with a path or URI that every node has")
    return ok(f"{len(seen)} nodes read the same manifest")


def digest_of(data_set: str) -> str:
    return open_manifest(data_set).digest()


_SERVER = "start `mlflow server` and name it with --tracking-uri http://..."


def _unready(uri: str, health: Health) -> Finding:
    """What to do about it. A database that is to be made is made by the sweep, before any worker starts."""
    if health.state == "absent":
        return ok(f"{redact_uri(uri)}: {health.detail}, the sweep makes it")
    upgrade = f"back it up, then: mlflow db upgrade {redact_uri(uri)}"
    server = uri.startswith(("http://", "https://"))
    ways = {
        "empty": f"mlflow db upgrade {redact_uri(uri)}: two processes that make the tables at once break them",
        "half-made": f"restore a backup, or make a new one: {upgrade}",
        "foreign": "name a database of MLflow's own",
        "older": "upgrade the server's MLflow" if server else upgrade,
        "newer": "install the MLflow that made it, or a newer one",
        "down": "start the server, and see its address, port and firewall",
        "user": "leave it out, and set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD",
        "login": "MLFLOW_TRACKING_USERNAME and _PASSWORD (or _TOKEN) of an account that it knows",
        "host": "mlflow server --allowed-hosts with the name that is used here",
        "path": "see the path and port of --tracking-uri: MLflow itself must be there",
        "broken": "see its log; if that names a schema: mlflow db upgrade <its --backend-store-uri>",
    }
    says = {
        "user": "holds a user",
        "login": "refuses who asks",
        "host": "refuses the name that it is called by",
        "path": "has no MLflow there",
        "broken": "answers with an error",
    }
    found = f"{redact_uri(uri)} {says.get(health.state, f'is {health.state}')}: {health.detail}"
    server_differs = server and health.state in ("older", "newer")
    soft = health.state == "empty" or server_differs
    return warn(found, ways[health.state]) if soft else fail(found, ways[health.state])

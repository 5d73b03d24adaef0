"""Where the files and runs of a command lie, and the run that its flags describe."""

import argparse
import os
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any
from uuid import uuid4

import ray

from jobs.usage import assignment, run_name, stop_soon_on_signals
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.codec import describe, override
from orchestrator.config import RunConfig
from orchestrator.data.formats import index_external_shards
from orchestrator.data.manifest import has_manifest, open_manifest
from orchestrator.errors import UsageError
from orchestrator.evaluation.models import model_location
from orchestrator.sweeps import driver
from orchestrator.tracking.store import Tracking
from orchestrator.training.run_directory import CONFIG, SWEEP, read_run


def root(args: argparse.Namespace) -> str:
    """The directory or URI of all files of this user, absolute, the same for every process.

    Raises:
        UsageError: for a folder of Ray's copy of the code, which goes with the job.
    """
    location = args.storage or os.environ.get("MOE_FRONTIER_HOME") or "~/moe-frontier"
    found = storage.absolute(location).rstrip("/")
    if "working_dir_files" in found.split("/"):
        raise UsageError(f"--storage {location} of a submitted job goes with the job: name an absolute path")
    return found


def check_writable(flag: str, location: str) -> None:
    """Raises UsageError, naming the flag, if nothing can be written at `location`."""
    probe = storage.join(location, f".writable-{uuid4().hex}")
    try:
        storage.make_folder(location)
        storage.write_bytes(probe, b"")
        storage.delete(probe)
    except OSError as error:
        raise UsageError(f"{flag} {location} cannot be written to: {error.strerror or error}") from None


def check_file(flag: str, location: str) -> None:
    """Raises UsageError, naming the flag, if `location` lies in a run, a sweep, a data set or predictions, or
    cannot be written.
    """
    folder = location.rpartition("/")[0]
    above = folder
    while above.rpartition("://")[2].strip("/"):
        if results := results_in(above):
            raise UsageError(f"{flag} {location}: {above} holds {results}, choose another place")
        above = above.rpartition("/")[0]
    check_writable(flag, folder)


def results_in(folder: str) -> str:
    """Names the kind of results in `folder`, e.g. "a run or a sweep"; empty for files that are not ours."""
    if any(storage.size(storage.join(folder, name)) is not None for name in (CONFIG, SWEEP)):
        return "a run or a sweep"
    if storage.size(storage.join(folder, "_plan.json")) is not None:
        return "predictions"
    try:
        open_manifest(folder)  # other projects have a manifest.json too
    except UsageError:
        return ""
    return "a data set"


def check_storage(args: argparse.Namespace) -> None:
    """Raises UsageError if nothing can be written below the root of all files."""
    check_writable("--storage" if args.storage else "$MOE_FRONTIER_HOME", root(args))


def check_out(out: str, *, own: tuple[str, ...], apart: tuple[str, ...] = ()) -> None:
    """Checks a folder that results go to.

    Args:
        own: names of files of which one is there if the folder holds earlier results of the same command.
        apart: folders of sources, which results must neither lie in nor contain.

    Raises:
        UsageError: if the folder lies in a source or contains one, holds files of others, or cannot be
            written to.
    """
    for source in (place.rstrip("/") for place in apart):
        if f"{out}/".startswith(f"{source}/") or f"{source}/".startswith(f"{out}/"):
            raise UsageError(f"--out {out} and the source {source} lie in each other: choose another --out")
    there = storage.names(out)
    if there and not set(own) & set(there):
        listed = ", ".join(sorted(there)[:3]) + (f" and {len(there) - 3} others" if len(there) > 3 else "")
        raise UsageError(f"--out {out} holds other files ({listed}): choose a new or an empty folder")
    check_writable("--out", out)


def data_path(args: argparse.Namespace) -> str:
    """The shards that were asked for; else the digits, packed on first use."""
    if args.data:
        path = storage.absolute(args.data)
        return path if has_manifest(path) else index_external_shards(path, root(args))
    return driver.digits(root(args))


def run_config(args: argparse.Namespace, base: RunConfig) -> RunConfig:
    """`base` with what the flags say. The number of classes is the data's, unless it is set."""
    name = args.name or base.name
    try:
        run_name(name)
    except argparse.ArgumentTypeError as error:  # of a sweep of the user's own
        raise UsageError(f"name {error}") from None
    tracking_uri(args)  # before the digits are packed
    check_storage(args)
    path = data_path(args)
    changes: dict[str, Any] = {
        "name": name,
        "storage": root(args),
        "data.path": path,
        "model.num_classes": len(open_manifest(path).classes),
    }
    flags = {"scale.workers": args.workers, "scale.ep": args.ep, "train.seed": args.seed}
    flags["scale.profile_steps"] = args.profile
    changes |= {field: value for field, value in flags.items() if value is not None}
    if args.init_from is not None:
        changes["train.init_from"] = initial_weights(args, storage.join(root(args), name))
    assigned = dict(map(assignment, args.set))
    used = {"name": "--name", "storage": "--storage", "data.path": "--data", "train.init_from": "--init-from"}
    for field, flag in used.items():
        if field in assigned:
            raise UsageError(f"--set {field}: use {flag}")
    return override(base, changes | assigned)


def initial_weights(args: argparse.Namespace, directory: str) -> str:
    """The location of the weights that --init-from names.

    A run that has begun in `directory` does not need them any more: those of a path may be gone by then.

    Raises:
        UsageError: if there is no such model.
    """
    try:
        return model_location(args.init_from, root=root(args), tracking_uri=tracking_uri(args))
    except UsageError as error:
        if manifests.steps(storage.join(directory, "checkpoints")):
            record = read_run(directory)
            began = record.config["train"]["init_from"] if record else None
            places = (storage.absolute(args.init_from), storage.join(root(args), args.init_from))
            if began in (*places, *(storage.join(place, "checkpoints") for place in places)):
                return began
        raise UsageError(f"--init-from {args.init_from}: {error}") from None


def print_fields(base: RunConfig) -> None:
    """Prints every field that --set knows with its default."""
    print("fields for --set and their defaults here (of several kinds, one is active):")
    print("\n".join(f"  {line}" for line in describe(base)))


def open_store(args: argparse.Namespace) -> Tracking:
    """The MLflow store of the flags."""
    if storage.is_local(root(args)):
        check_storage(args)
    return driver.open_store(root(args), args.tracking_uri)


def tracking_uri(args: argparse.Namespace) -> str:
    """Raises UsageError if none is given and the storage cannot hold one."""
    return driver.tracking_uri(root(args), args.tracking_uri)


def source_labels() -> dict[str, str]:
    """The command and the commit of its code, as MLflow names them."""
    labels = {"mlflow.source.name": shlex.join(sys.argv), "mlflow.source.type": "LOCAL"}
    done = subprocess.run(
        ["git", "-C", str(Path(__file__).parent), "rev-parse", "HEAD"], capture_output=True, text=True
    )
    return labels | ({"mlflow.source.git.commit": done.stdout.strip()} if done.returncode == 0 else {})


def connect() -> None:
    """Joins the cluster of $RAY_ADDRESS or of this machine, else starts one here; once in a process."""
    if not ray.is_initialized():
        print("starting Ray, or joining the cluster of $RAY_ADDRESS ..", flush=True)
        driver.connect()
        stop_soon_on_signals()  # Ray has set a handler of its own

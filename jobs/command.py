"""What commands that train share: the flags of a run, and where things lie."""

import argparse
import hashlib
import logging
import os
import re
import tempfile
from collections.abc import Sequence
from typing import Any

import ray

from jobs.usage import assignment, stop_as_by_ctrl_c
from orchestrator import storage
from orchestrator.codec import describe, override
from orchestrator.config import RunConfig, UsageError
from orchestrator.data.adopt import adopt
from orchestrator.data.cache import FOLDER
from orchestrator.data.manifest import has_manifest, open_manifest
from orchestrator.data.packing import write_shards
from orchestrator.data.sources import open_source
from orchestrator.tracking import Tracking, open_tracking

RESERVED = ("data", "mlartifacts", "mlflow.db", "outbox")  # what else lies below the storage


def run_parser(
    doc: str | None, *, name: str, base: RunConfig, parents: Sequence[argparse.ArgumentParser] = ()
) -> argparse.ArgumentParser:
    """The flags of `train.py` and `pareto_sweep.py`; the help ends with every field that --set knows."""
    fields = "\n".join(f"  {line}" for line in describe(base))
    parser = argparse.ArgumentParser(
        description=doc,
        epilog=f"fields for --set and their defaults here (of several kinds, one is active):\n{fields}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        parents=list(parents),
    )
    parser.add_argument(
        "--name", default=name, help="of the run, its directory and its MLflow run (%(default)s)"
    )
    parser.add_argument(
        "--data",
        help="directory or URI of shards, or of WebDataset tars or parquet files that somebody else wrote;"
        " default: the digits, packed below the storage",
    )
    add_places(parser)
    parser.add_argument(
        "--init-from", help="start from these weights: checkpoints, or an exported file (train.init_from)"
    )
    parser.add_argument("--workers", type=int, help="processes that train one model together (scale.workers)")
    parser.add_argument("--ep", help="of them, those that share one set of experts, or auto (scale.ep)")
    parser.add_argument(
        "--profile",
        type=int,
        metavar="STEPS",
        help="where the time of a step goes, as an artifact (scale.profile_steps)",
    )
    parser.add_argument("--seed", type=int, help="train.seed")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="FIELD=VALUE",
        help="any field, e.g. train.lr=3e-4 (repeatable)",
    )
    parser.add_argument(
        "--verify", action="store_true", help="read all shards and check their SHA-256 before training"
    )
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument(
        "--resume", dest="mode", action="store_const", const="resume", help="insist on continuing"
    )
    mode.add_argument(
        "--fresh", dest="mode", action="store_const", const="fresh", help="move what is there aside"
    )
    parser.set_defaults(mode="auto")
    return parser


def add_places(parser: argparse.ArgumentParser) -> None:
    """Where files and runs lie: what `root` and `tracking` read."""
    parser.add_argument(
        "--storage", help="root of all files; default: $MOE_FRONTIER_HOME, else ~/moe-frontier"
    )
    parser.add_argument(
        "--tracking-uri", help="default: $MLFLOW_TRACKING_URI, else mlflow.db below the storage"
    )


def root(args: argparse.Namespace) -> str:
    """Where all files of this user lie: one directory or URI, absolute, the same for every process.

    Raises:
        UsageError: for a folder of Ray's copy of the code, which goes with the job.
    """
    location = args.storage or os.environ.get("MOE_FRONTIER_HOME") or "~/moe-frontier"
    found = storage.absolute(location).rstrip("/")
    if "working_dir_files" in found.split("/"):
        raise UsageError(f"--storage {location} of a submitted job goes with the job: name an absolute path")
    return found


def data_path(args: argparse.Namespace) -> str:
    """The shards that were asked for; else the digits, packed on first use."""
    if args.data:
        path = storage.absolute(args.data)
        return path if has_manifest(path) else adopt(path, root(args))
    path = f"{root(args)}/data/digits"
    if not has_manifest(path):
        digits = open_source("digits")
        write_shards(path, digits.classes, digits.splits)
    return path


def run_config(args: argparse.Namespace, base: RunConfig) -> RunConfig:
    """`base` with what the flags say. The number of classes is the data's, unless it is set."""
    if not re.fullmatch(r"[A-Za-z0-9][\w.-]*", args.name) or args.name in RESERVED:
        raise UsageError(
            f"--name {args.name!r}: use letters, digits, '.', '_' and '-', and none of {', '.join(RESERVED)}"
        )
    tracking_uri(args)  # before the digits are packed
    path = data_path(args)
    changes: dict[str, Any] = {
        "name": args.name,
        "storage": root(args),
        "data.path": path,
        "model.num_classes": len(open_manifest(path).classes),
    }
    flags = {"scale.workers": args.workers, "scale.ep": args.ep, "train.seed": args.seed}
    flags["scale.profile_steps"] = args.profile
    changes |= {field: value for field, value in flags.items() if value is not None}
    if args.init_from:
        changes["train.init_from"] = storage.absolute(args.init_from)
    assigned = dict(map(assignment, args.set))
    used = {"name": "--name", "storage": "--storage", "data.path": "--data", "train.init_from": "--init-from"}
    for field, flag in used.items():
        if field in assigned:
            raise UsageError(f"--set {field}: use {flag}")
    return override(base, changes | assigned)


def tracking(args: argparse.Namespace, name: str) -> Tracking:
    """`name`: of the run or sweep whose process this is."""
    return open_tracking(
        tracking_uri(args), artifacts=f"{root(args)}/mlartifacts", spool=spool_of(args, name)
    )


def spool_of(args: argparse.Namespace, name: str) -> str:
    """The local folder for what MLflow was not told yet, the same for every process of that name.

    Below the storage, or if that is remote beside this node's cache, which drops what it does not know.
    """
    if storage.is_local(root(args)):
        return f"{root(args)}/outbox/{name}"
    key = hashlib.sha256(f"{root(args)}/{name}".encode()).hexdigest()[:16]
    cache = os.environ.get(FOLDER) or f"{tempfile.gettempdir()}/moe-frontier-{os.getuid()}"
    return f"{cache.rstrip('/')}-outbox/{key}"


def tracking_uri(args: argparse.Namespace) -> str:
    """Raises UsageError if none is given and the storage cannot hold one."""
    if uri := args.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI"):
        return uri
    if not storage.is_local(root(args)):
        raise UsageError(f"--storage {root(args)} holds no MLflow store: name one with --tracking-uri")
    return f"sqlite:///{root(args)}/mlflow.db"


def connect(*, show_workers: bool) -> None:
    """Joins the cluster of $RAY_ADDRESS or of this machine, else starts one here.

    `show_workers`: what workers print appears here too.
    """
    ray.init(logging_level=logging.ERROR, log_to_driver=show_workers)
    stop_as_by_ctrl_c()  # Ray has set a handler of its own

"""Whose directory it is: a run starts, continues or steps aside, never resumes under another config."""

import json
import os
import socket
from collections.abc import Mapping
from typing import Any, Literal

from orchestrator import storage
from orchestrator.codec import changed_fields
from orchestrator.errors import UsageError

Mode = Literal["auto", "resume", "fresh"]


UNTRAINED = ("fields.json", "mlflow_run.json", "error.txt", "refused.txt")  # left by what never trained
DATA = "data.digest"


def claim(directory: str, fields: Mapping[str, Any], mode: Mode) -> None:
    """Makes `directory` that of the run or sweep with these flat fields.

    ``auto`` continues what is there if its fields are equal, else starts; ``resume`` insists that something
    is there; ``fresh`` moves it aside. A run that failed before it trained anything leaves its name free.

    Raises:
        UsageError: naming every field that changed; or that there is nothing to resume.
    """
    file = storage.join(directory, "fields.json")
    if storage.size(file) is not None:
        was, now = (_kind(one) for one in (_fields(file), fields))
        if was != now:
            raise UsageError(f"{directory} belongs to a {was}, and this is a {now}: use another --name")
    if mode == "fresh" and storage.names(directory):
        if not storage.is_local(directory):
            raise UsageError(f"--fresh cannot move {directory} aside: S3 has no rename; use another --name")
        os.rename(directory, _free_name(directory))
    if storage.size(file) is None:
        if mode == "resume":
            raise UsageError(f"nothing to resume at {directory}; leave out --resume to start")
        storage.write_bytes(file, json.dumps(fields, indent=1).encode())
        return
    if changes := changed_fields(_fields(file), json.loads(json.dumps(fields))):
        if mode == "auto" and not _trained(directory):
            for name in UNTRAINED:
                storage.delete(storage.join(directory, name))
            return claim(directory, fields, mode)
        if DATA in changes and "data.path" not in changes:
            raise UsageError(
                f"the data at {fields['data.path']} changed since {directory} was started: use another"
                " --name, or --fresh to start over"
            )
        listed = "; ".join(f"{name}: {before!r} -> {after!r}" for name, (before, after) in changes.items())
        raise UsageError(
            f"{directory} was started with another config ({listed}); use another --name,"
            " or --fresh to start over"
        )


def check_claimed(directory: str) -> None:
    """Raises UsageError where a worker does not see what its driver wrote."""
    if storage.size(storage.join(directory, "fields.json")) is None:
        raise UsageError(
            f"{socket.gethostname()} does not see {directory}: with several nodes use --storage"
            " s3://bucket/prefix, or a directory that every node mounts"
        )


def _fields(file: str) -> dict[str, Any]:
    try:
        return json.loads(storage.read_bytes(file))
    except ValueError:
        raise UsageError(f"{file} is damaged: delete it to start over, or use another --name") from None


def _kind(fields: Mapping[str, Any]) -> str:
    """Only a sweep has a metric that it judges by."""
    return "sweep" if "quality" in fields else "run"


def _trained(directory: str) -> bool:
    """Whether anything lies there but the records of an attempt, and Ray's own."""
    return any(
        name not in UNTRAINED and not name.startswith(("ray/", "tune/")) for name in storage.files(directory)
    )


def _free_name(directory: str) -> str:
    taken = (f"{directory}.old-{n}" for n in range(1, 1_000_000))
    return next(path for path in taken if not os.path.exists(path))

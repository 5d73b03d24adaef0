"""Whose directory it is: a run starts, continues or steps aside, never resumes under another config."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from orchestrator import storage
from orchestrator.codec import changed_fields
from orchestrator.config import UsageError

Mode = Literal["auto", "resume", "fresh"]


def claim(directory: Path, fields: Mapping[str, Any], mode: Mode) -> None:
    """Makes `directory` that of the run or sweep with these flat fields.

    ``auto`` continues what is there if its fields are equal, else starts; ``resume`` insists that something
    is there; ``fresh`` moves it aside.

    Raises:
        UsageError: naming every field that changed; or that there is nothing to resume.
    """
    file = directory / "fields.json"
    if mode == "fresh" and directory.exists():
        directory.rename(_free_name(directory))
    if not file.exists():
        if mode == "resume":
            raise UsageError(f"nothing to resume at {directory}; leave out --resume to start")
        storage.write_bytes(str(file), json.dumps(fields, indent=1).encode())
        return
    try:
        old = json.loads(file.read_text())
    except ValueError:
        raise UsageError(f"{file} is damaged; use --fresh to start over") from None
    if changes := changed_fields(old, json.loads(json.dumps(fields))):
        listed = "; ".join(f"{name}: {before!r} -> {after!r}" for name, (before, after) in changes.items())
        raise UsageError(
            f"{directory} was started with another config ({listed}); use another --name,"
            " or --fresh to start over"
        )


def _free_name(directory: Path) -> Path:
    taken = (directory.with_name(f"{directory.name}.old-{n}") for n in range(1, 1_000_000))
    return next(path for path in taken if not path.exists())

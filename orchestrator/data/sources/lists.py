"""A list of image files and their labels: CSV, JSON lines, or a parquet file with a column of paths."""

import csv
import io
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from orchestrator import storage
from orchestrator.data.sources.arrange import Found, arrange
from orchestrator.data.sources.files import read_files
from orchestrator.data.sources.listing import by_split
from orchestrator.data.sources.source import Source
from orchestrator.errors import UsageError

NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?")


def csv_list(path: str, val_frac: float) -> Source[str]:
    """Columns path, label and, if wanted, split, in a header."""
    location, text = _text(path)
    reader = csv.DictReader(io.StringIO(text, newline=""))
    fields = reader.fieldnames or []
    if not {"path", "label"} <= {*fields}:
        raise UsageError(f"{location} needs columns path and label; it has {', '.join(fields) or 'none'}")
    rows = [(f"line {reader.line_num}", row) for row in reader]
    return _listed(location, _checked(location, rows), val_frac)


def jsonl_list(path: str, val_frac: float) -> Source[str]:
    """An object a line, with fields path, label and, if wanted, split."""
    location, text = _text(path)
    rows = []
    for number, line in enumerate(text.splitlines(), start=1):
        if line.strip():
            try:
                row = json.loads(line)
            except ValueError as error:
                raise UsageError(f"{location} line {number} is no JSON object: {error}") from None
            if not isinstance(row, dict):
                raise UsageError(f"{location} line {number} is no JSON object")
            rows.append((f"line {number}", row))
    return _listed(location, _checked(location, rows), val_frac)


def listed(
    rows: Iterable[tuple[str, str, int | str, str | None]],
    *,
    where: str,
    val_frac: float,
    names: Sequence[str] | None = None,
) -> Source[str]:
    """`rows`: folder that a path starts from, path, label, split. Their order does not matter.

    Raises:
        UsageError: if a path is listed twice.
    """
    found: dict[str, Found[str]] = {}
    for base, path, label, split in rows:
        if path in found:
            raise UsageError(f"{where} lists {path} twice")
        location = path if path.startswith("/") or "://" in path else storage.join(base, path)
        size = (
            (storage.size(location) or 0) if storage.is_local(location) else 0
        )  # S3 would be asked for each
        found[path] = Found(location, label, path, size, split)
    if not found:
        raise UsageError(f"{where} lists no images")
    used = by_split({path: one.split for path, one in found.items()}, where)
    samples = [found[path]._replace(split=split) for path, split in used.items()]
    classes, splits = arrange(samples, val_frac=val_frac, order="hash", names=names)
    return Source(classes=classes, splits=splits, fetch=read_files)


def _text(path: str) -> tuple[str, str]:
    location = storage.absolute(path)
    try:
        return location, storage.read_bytes(location).decode("utf-8-sig")
    except FileNotFoundError:
        raise UsageError(f"no file {location}") from None
    except UnicodeDecodeError as error:
        raise UsageError(f"{location} is not UTF-8: {error}") from None


def _checked(location: str, rows: Iterable[tuple[str, Any]]) -> Iterator[tuple[str, Any, str | None]]:
    for where, row in rows:
        path, label, split = row.get("path"), row.get("label"), row.get("split")
        if not isinstance(path, str) or not path:
            raise UsageError(f"{location} {where} has no path; its fields are {', '.join(map(str, row))}")
        if label is None or label == "" or type(label) not in (str, int):
            raise UsageError(f"{location} {where}: label {label!r} is neither a whole number nor a name")
        yield path, label, str(split) if split else None


def _listed(location: str, rows: Iterable[tuple[str, int | str, str | None]], val_frac: float) -> Source[str]:
    taken = list(rows)
    labels = _numbers(location, [label for _, label, _ in taken])
    base = os.path.dirname(location)
    placed = [(base, path, label, split) for (path, _, split), label in zip(taken, labels, strict=True)]
    return listed(placed, where=location, val_frac=val_frac)


def _numbers(location: str, labels: Sequence[int | str]) -> Sequence[int | str]:
    """Numbers that are written as text, if all are; ``007`` is a name. Raises UsageError for fractions."""
    texts = [str(label) for label in labels]
    if not all(NUMBER.fullmatch(text) for text in texts):
        return texts
    if fraction := next((text for text in texts if "." in text), None):
        raise UsageError(f"{location}: label {fraction} is not a whole number")
    return [int(text) for text in texts]

"""Shards as other tools write them."""

import io
import json
import tarfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.orchestrator.data.images import numbered


def tar(path: Path, members: Sequence[tuple[str, bytes]], **options: Any) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w", **options) as file:
        for name, content in members:
            info = tarfile.TarInfo(name)
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return path


def samples(first: int, count: int, classes: int = 2) -> list[tuple[str, bytes]]:
    """Members of a tar: images `numbered` from `first`, whose label is their number."""
    return [
        member
        for n in range(first, first + count)
        for member in ((f"{n:04d}.png", numbered(n)), (f"{n:04d}.cls", str(n % classes).encode()))
    ]


def parquet(path: Path, columns: Mapping[str, Any], *, names: Sequence[str] | None = None, **options) -> Path:
    """`names`: of the labels, as the `datasets` library writes them into the file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    table = pa.table(dict(columns))
    if names:
        features = {"label": {"names": list(names), "_type": "ClassLabel"}, "image": {"_type": "Image"}}
        table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    pq.write_table(table, path, **options)
    return path

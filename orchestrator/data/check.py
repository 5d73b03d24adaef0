"""What is refused before training starts: shards that are missing, cut short, or not as the manifest says."""

import hashlib
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.parquet as pq

from orchestrator import storage
from orchestrator.data.manifest import Manifest, Shard, locate
from orchestrator.errors import UsageError

THREADS = 32  # most of a check is waiting for storage
PIECE_BYTES = 8 << 20


def check_shards(path: str, manifest: Manifest, *, verify: bool = False) -> None:
    """Checks every shard's size, the rows and labels in parquet footers, and with `verify` its SHA-256.

    Raises:
        UsageError: naming the first shard that is not as it should be.
    """
    sizes = storage.files(path)  # one listing instead of a request for each

    def check(shard: Shard) -> None:
        location = locate(path, shard)
        size = sizes[shard.path] if shard.path in sizes else storage.size(location)
        if size != shard.bytes:
            state = "is missing" if size is None else f"has {size} bytes"
            raise UsageError(
                f"shard {location} {state}, the manifest says {shard.bytes} bytes: copy it again"
            )
        if shard.format == "parquet":
            _check_footer(location, shard, len(manifest.classes))
        if verify:
            check_digest(location, shard, digest(location))

    with ThreadPoolExecutor(THREADS) as pool:
        for _ in pool.map(check, [shard for shards in manifest.splits.values() for shard in shards]):
            pass


def check_digest(location: str, shard: Shard, found: str) -> None:
    if found != shard.sha256:
        raise UsageError(
            f"shard {location} changed since it was packed (SHA-256 differs): copy it again, or pack anew"
        )


def digest(location: str) -> str:
    """SHA-256 of a file."""
    found = hashlib.sha256()
    with storage.open_to_read(location) as file:
        while piece := file.read(PIECE_BYTES):
            found.update(piece)
    return found.hexdigest()


def _check_footer(location: str, shard: Shard, classes: int) -> None:
    try:
        with storage.open_to_read(location) as file:
            footer = pq.read_metadata(file)
    except (pa.ArrowInvalid, OSError) as error:
        raise UsageError(f"shard {location} is no whole parquet file ({error}): copy it again") from None
    left_out = (
        location == shard.path
    )  # others' shards may hold rows without image or label, which are not read
    if footer.num_rows < shard.rows or (footer.num_rows > shard.rows and not left_out):
        raise UsageError(
            f"shard {location} has {footer.num_rows} rows, the manifest says {shard.rows}: copy it again"
        )
    for group in range(footer.num_row_groups):
        columns = (footer.row_group(group).column(i) for i in range(footer.num_columns))
        for column in columns:
            found = column.statistics
            if column.path_in_schema != "label" or not found or not found.has_min_max:
                continue
            for label in (found.min, found.max):
                if isinstance(label, int) and not 0 <= label < classes:
                    raise UsageError(
                        f"shard {location} has label {label}, the data set has {classes} classes:"
                        f" 0 to {classes - 1}"
                    )

"""Where images come from when they are packed. A kind of source is a function that returns a `Source`."""

from orchestrator.data.sources.arrange import check_val_frac
from orchestrator.data.sources.digits import digits
from orchestrator.data.sources.folder import folder
from orchestrator.data.sources.lists import csv_list, jsonl_list
from orchestrator.data.sources.source import Execute, Source
from orchestrator.data.sources.tables import parquet_files, webdataset
from orchestrator.data.sources.torchvision_sets import torchvision_set
from orchestrator.errors import UsageError

KINDS = "digits, folder:PATH, webdataset:PATH, parquet:PATH, csv:FILE, jsonl:FILE, torchvision:NAME"


def open_source(
    name: str, *, root: str = "data", download: bool = False, val_frac: float = 0.2, execute: Execute = map
) -> Source:
    """Lists what is to be packed, and reads no images.

    `root`, `download`: where torchvision has its files, and whether it may fetch them.
    `execute`: lists the contents of tars and parquet files.

    Raises:
        UsageError: for a source that is unknown, not there, or not made as its kind says.
    """
    check_val_frac(val_frac)
    kind, _, rest = name.partition(":")
    if name == "digits":
        return digits(val_frac)
    if rest:
        match kind:
            case "folder":
                return folder(rest, val_frac)
            case "webdataset":
                return webdataset(rest, val_frac, execute)
            case "parquet":
                return parquet_files(rest, val_frac, execute)
            case "csv":
                return csv_list(rest, val_frac)
            case "jsonl":
                return jsonl_list(rest, val_frac)
            case "torchvision":
                return torchvision_set(rest, root, download, val_frac)
    raise UsageError(f"unknown source {name!r}; known: {KINDS}")

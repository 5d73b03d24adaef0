"""The images that a csv or tsv file lists, with their labels and captions."""

import csv
import io
from typing import Any

from orchestrator import storage
from orchestrator.data.formats import CAPTION_COLUMNS, LABEL_COLUMNS, Columns, first_column, no_column
from orchestrator.data.samples import Part
from orchestrator.data.text import TEXT, captions_or_error
from orchestrator.errors import UsageError

PATH_COLUMNS = ("filepath", "path", "file", "filename", "file_name", "image", "img", "image_path")


def index_csv(columns: Columns, location: str, *, captions: bool = False) -> Part:
    """Lists the images of a csv or tsv file with a header: a path, relative to the file, a label, a caption.
    Rows of the same image add captions to it. Images with `captions` need no labels.

    Raises:
        UsageError: naming the file, if a column is missing.
    """
    text = storage.read_bytes(location).decode("utf-8-sig", "surrogateescape")
    delimiter = "\t" if "\t" in text.partition("\n")[0] else ","
    rows = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter)
    names = [*(rows.fieldnames or ())]

    def column(what: str, named: str | None, known: tuple[str, ...]) -> str | None:
        found = first_column(named, known, names)
        if found is None and not (what == "label" and captions):
            raise no_column(location, what, named, known, ", ".join(names))
        return found

    path = column("path", columns.image, PATH_COLUMNS)
    caption = column("caption", columns.caption, CAPTION_COLUMNS) if captions else None
    label = column("label", columns.label, LABEL_COLUMNS)
    labels: dict[str, Any] = {}
    texts: dict[str, list[Any]] = {}
    skipped = []
    try:
        for row in rows:
            if not (name := row.get(path)):
                skipped.append(f"{location}: line {rows.line_num}: no path")
                continue
            labels.setdefault(name, row.get(label) if label else None)
            texts.setdefault(name, []).append(row.get(caption))
    except csv.Error as error:
        raise UsageError(f"{location}, line {rows.line_num}: {error}") from None
    fields = {name: captions_or_error(found) for name, found in texts.items()} if captions else {}
    skipped += [f"{location}: {name}: {bad}" for name, bad in fields.items() if isinstance(bad, ValueError)]
    skipped += [f"{location}: {name}: no label" for name, found in labels.items() if label and not found]
    kept = [
        name
        for name in labels
        if (labels[name] or not label) and (not captions or isinstance(fields[name], bytes))
    ]
    folder = location.rpartition("/")[0]
    return Part(
        location,
        [_number_or_name(labels[name]) for name in kept],
        kept,
        [(0, 0)] * len(kept),
        [name if name.startswith("/") or "://" in name else storage.join(folder, name) for name in kept],
        skipped=skipped,
        fields={TEXT: [fields[name] for name in kept]} if captions else {},
    )


def _number_or_name(label: str | None) -> int | str | None:
    return int(label) if label and label.isdecimal() else label

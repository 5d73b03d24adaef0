"""The images that a csv, tsv or jsonl file lists, with their labels and captions."""

import csv
import io
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, ClassVar, Literal

from orchestrator import storage
from orchestrator.data.images import BadImage
from orchestrator.data.parquet import BY_NAME, CAPTION_COLUMNS, LABEL_COLUMNS, Columns, first_column
from orchestrator.data.text import TEXT, captions_or_error
from orchestrator.errors import UsageError
from orchestrator.packing.base import FilesConfig
from orchestrator.packing.labels import listed_labels, read_labels
from orchestrator.packing.listing import read_files
from orchestrator.packing.parquet import no_column
from orchestrator.packing.samples import Part
from orchestrator.packing.splits import split_column, split_named, splits_of_rows, splits_of_samples

LISTS = (".csv", ".tsv", ".jsonl")
PATH_COLUMNS = ("filepath", "path", "file", "filename", "file_name", "image", "img", "image_path")
DELIMITERS = ",\t;|"
EXCEL = re.compile(r"sep=(.)\r?\n")  # a first line that names the delimiter


@dataclass(frozen=True, kw_only=True)
class CsvConfig(FilesConfig):
    """Lists of images: csv, tsv or jsonl files with a column of paths and one of labels."""

    kind: Literal["csv"] = "csv"
    extensions: ClassVar[tuple[str, ...]] = LISTS

    columns: Columns = BY_NAME

    def index(self, location: str) -> Part:
        return index_csv(self.columns, location, captions=self.captions)

    def read(self, images: Sequence[Any]) -> Iterable[bytes | BadImage]:
        return read_files(images)


def index_csv(columns: Columns, location: str, *, captions: bool = False) -> Part:
    """Lists the images of a csv or tsv file with a header, or of a jsonl file: a path, relative to the file,
    a label, a caption. Several rows of an image are several labels, and several captions. Images with
    `captions` need no labels.

    Raises:
        UsageError: naming the file, if a column is missing.
    """
    text = _decoded(storage.read_bytes(location), location)
    is_json = location.lower().endswith(".jsonl")
    names, rows = _objects(text, location) if is_json else _table(text, location)

    def column(what: str, named: str | None, known: tuple[str, ...]) -> str | None:
        found = first_column(named, known, names)
        if found is None and not (what == "label" and captions):
            raise no_column(location, what, named, known, ", ".join(map(str, names)))
        return found

    try:
        path = column("path", columns.image, PATH_COLUMNS)
    except UsageError as error:
        if columns.image:
            raise
        return Part(location, [], [], [], skipped=[f"{error}: it is passed over"])
    caption = column("caption", columns.caption, CAPTION_COLUMNS) if captions else None
    label = column("label", columns.label, LABEL_COLUMNS)
    split, notes = split_column(names, [path, label, caption], location)
    sets: dict[str, list[Any]] = {}
    texts: dict[str, list[Any]] = {}
    words: dict[str, Any] = {}
    skipped, torn = [], ""
    for line, row in rows:
        name = row.get(path)
        if not isinstance(name, str) or not name.strip():
            skipped.append(f"{location}: line {line}: no path")
            continue
        if None in row:
            skipped.append(
                f"{location}: line {line}: {len(names) + len(row[None])} fields, but the header has"
                f" {len(names)}: put quotes around a text with a separator in it"
            )
            continue
        name = name.strip()
        try:
            found = listed_labels(row.get(label), typed=is_json) if label else [None]
        except UnicodeEncodeError as error:
            shown = str(error.object).encode("utf-8", "surrogateescape").decode("latin-1")
            raise UsageError(
                f"{location}, line {line}: label {shown!r} is not UTF-8: save the file as UTF-8"
            ) from None
        except ValueError as error:
            skipped.append(f"{location}: line {line}: {error}")
            continue
        already = sets.setdefault(name, [])
        if len(already) > 1 < len(found) and already != found and {*already, *found} <= {0, 1, "0", "1"}:
            skipped.append(f"{location}: line {line}: another list of 0 and 1 for {name}: the first is taken")
            continue
        # Rows that repeat a label, as those of several annotators, are no list with a number for each class.
        already += [each for each in found if each not in already] if already else found
        texts.setdefault(name, []).extend(_listed(row.get(caption)))
        said = {split_named(str(each)) for each in (words.setdefault(name, row.get(split)), row.get(split))}
        if len(said - {None}) > 1:
            torn = f"{name} is in {words[name]!r} and in {row.get(split)!r}, in column {split}: give it one"
    fields = {name: captions_or_error(found) for name, found in texts.items()} if captions else {}
    skipped += [f"{location}: {name}: {bad}" for name, bad in fields.items() if isinstance(bad, ValueError)]
    kept = [name for name in sets if not captions or isinstance(fields[name], bytes)]
    labels = read_labels([sets[name] for name in kept], kept, location)
    there = [bool(captions) or first is not None for first in labels.first]
    skipped += [f"{location}: {name}: no label" for name, has in zip(kept, there, strict=True) if not has]
    kept, first = _where(there, kept), _where(there, labels.first)
    folder = location.rpartition("/")[0]
    by_column, doubt = splits_of_rows(split, [words[name] for name in kept]) if split else ([], "")
    return Part(
        location,
        first,
        kept,
        [(0, 0)] * len(kept),
        [_place(name, folder) for name in kept],
        others=_where(there, labels.others) if labels.others else [],
        skipped=skipped,
        fields={TEXT: [fields[name] for name in kept]} if captions else {},
        hot=labels.hot,
        splits=by_column or splits_of_samples(kept),
        doubt=doubt or torn,
        unlabelled=there.count(False),
        notes=notes,
    )


def _decoded(content: bytes, location: str) -> str:
    """Decodes UTF-8, or UTF-16 with a mark of its byte order or without one."""
    try:
        if content.startswith((b"\xff\xfe", b"\xfe\xff")):
            return content.decode("utf-16")
        if content[1:200:2].count(0) > 20:
            return content.decode("utf-16-le")
    except UnicodeDecodeError as error:
        raise UsageError(f"{location} is not whole in UTF-16: {error}") from None
    # A text that is not UTF-8 is refused where it is read.
    return content.decode("utf-8-sig", "surrogateescape")


def _table(text: str, location: str) -> tuple[list[str], Iterator[tuple[int, Mapping[Any, Any]]]]:
    """Returns the names of the columns, and the rows with their lines; surplus fields are below None."""
    named = EXCEL.match(text)
    text = text[named.end() :] if named else text
    header = text.partition("\n")[0]
    # The separator that most of the header is made of.
    delimiter = named[1] if named else max(DELIMITERS, key=header.count)
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, skipinitialspace=True)
    reader.fieldnames = [name.strip() for name in reader.fieldnames or ()]

    def rows() -> Iterator[tuple[int, Mapping[Any, Any]]]:
        try:
            for row in reader:
                yield reader.line_num, row
        except csv.Error as error:
            raise UsageError(f"{location}, line {reader.line_num}: {error}") from None

    return [*reader.fieldnames], rows()


def _objects(text: str, location: str) -> tuple[list[str], Iterator[tuple[int, Mapping[Any, Any]]]]:
    """Returns the names of the fields of objects, one in a line, and the objects with their lines."""
    rows = []
    for line, content in enumerate(text.splitlines(), start=1):
        if content.strip():
            try:
                row = json.loads(content)
            except (ValueError, RecursionError) as error:
                raise UsageError(f"{location}, line {line}: {error}") from None
            if not isinstance(row, dict):
                raise UsageError(f"{location}, line {line}: an object is wanted, {{..}}")
            rows.append((line, row))
    return [*dict.fromkeys(chain.from_iterable(row for _, row in rows))], iter(rows)


def _place(name: str, folder: str) -> str:
    """Returns where an image is; a path of Windows has no other separators."""
    name = name if "/" in name else name.replace("\\", "/")
    return name if name.startswith("/") or "://" in name else storage.join(folder, name)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _where(there: list[bool], values: Any) -> list[Any]:
    return [value for value, has in zip(values, there, strict=True) if has]

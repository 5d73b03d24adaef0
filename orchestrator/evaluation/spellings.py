"""Classes that data and model spell differently: which output of the model means a class of the data.

A file of spellings is a CSV whose rows have the names of one class; its columns are ways to spell them. The
names of a data set, and those of a model, are all in one column. A name that several rows of a column have
stands for these in their order, if it comes as often.
"""

import csv
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from orchestrator import storage
from orchestrator.checkpoint.models import ModelRef
from orchestrator.data.batch import Batch
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError

# The spellings that come with the project: ImageNet-1k's as WordNet's id, in timm and Hugging Face, and in
# torchvision. Source: `bench/imagenet_names.py`.
SHIPPED = {"imagenet": str(Path(__file__).with_name("imagenet.csv"))}


def outputs_of_labels(model: ModelRef, path: str, spellings: str) -> tuple[int, ...]:
    """Returns the output of the model for each label of the data set at `path`.

    Args:
        spellings: a file, or a name of `SHIPPED`.

    Raises:
        UsageError: if the file is not such a CSV, the model has no names, or a class of the data is none of
            the model's.
    """
    if not model.classes:
        raise UsageError(
            f"{model.name} has no names of classes, so {spellings} cannot find them: without it labels are"
            " compared by number"
        )
    classes, columns = open_manifest(path).classes, _columns(spellings)
    here = _rows(classes, columns, f"{path}, by {spellings}")
    there = _rows(model.classes, columns, f"{model.name}, by {spellings}")
    output_of = {row: output for output, row in enumerate(there)}
    if lacking := [name for name, row in zip(classes, here, strict=True) if row not in output_of]:
        few = f"{len(lacking)} classes of {path}, such as {lacking[0]!r}"
        raise UsageError(f"{model.name} has no output for {few}, by {spellings}")
    return tuple(output_of[row] for row in here)


def relabelled(batches: Iterable[Batch], outputs: Sequence[int] | None) -> Iterator[Batch]:
    """Yields batches whose labels are `outputs` of a model, for each label of the data; None: as they are."""
    for batch in batches:
        if outputs:
            label = batch["label"]
            named = label.new_tensor(outputs)[label.clamp(min=0)]  # -1 stands for no label
            batch = replace(batch, fields={**batch.fields, "label": torch.where(label < 0, label, named)})
        yield batch


def _columns(spellings: str) -> list[tuple[str, ...]]:
    location = storage.absolute(SHIPPED.get(spellings, spellings))
    try:
        text = storage.read_bytes(location).decode("utf-8-sig")
        rows = [row for row in csv.reader(text.splitlines(), strict=True) if row]
        columns = [tuple(name.strip() for name in column) for column in zip(*rows, strict=True)]
    except OSError as error:
        raise UsageError(f"{spellings}: {error}") from None
    except (ValueError, csv.Error) as error:
        raise UsageError(f"{spellings} is no CSV whose rows have as many names each: {error}") from None
    if len(columns) < 2:
        raise UsageError(
            f"{spellings} has {len(columns)} columns: names of the data and of the model are two"
        )
    return columns


def _rows(names: Sequence[str], columns: Sequence[Sequence[str]], what: str) -> list[int]:
    """Returns the row of each name, in the first column that has them all. `what` they are, for an error."""
    counts, lacking = Counter(names), []
    for column in columns:
        places: dict[str, list[int]] = {}
        for row, name in enumerate(column):
            places.setdefault(name, []).append(row)
        lacking.append([name for name in counts if name not in places])
        if all(len(places.get(name, ())) == count for name, count in counts.items()):
            return [places[name].pop(0) for name in names]
    fewest = min(lacking, key=len)
    why = f"lacks {fewest[0]!r}" if fewest else "has a name more than once"
    raise UsageError(f"{what}: no column has all {len(counts)} names; the nearest {why}")

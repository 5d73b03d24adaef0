"""Text for decoders: cut into sequences of equal length, which are a field of samples without images.

Neighbours share a byte: the last of a sequence is the first of the next one, so that every byte but the first
of a split is predicted once. Files follow each other with a byte 0 between them, which no text has, and a
sequence may reach over it.
"""

import pydoc_data.topics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np

from orchestrator import storage
from orchestrator.data.images import BadImage
from orchestrator.data.index import sample_ids
from orchestrator.errors import UsageError
from orchestrator.packing.base import SourceConfig
from orchestrator.packing.listing import read_files, shards_at
from orchestrator.packing.samples import Execute, Sample, Source
from orchestrator.packing.splits import splits_of
from wings.language.sequences import LENGTH, SEQUENCE

BETWEEN = b"\0"  # texts
EXTENSIONS = (".txt", ".md", ".rst")  # of the files of a folder


@dataclass(frozen=True, kw_only=True)
class PythonTopicsConfig(SourceConfig):
    kind: Literal["python-topics"] = "python-topics"
    placed: ClassVar[str] = ""
    captioned: ClassVar[Literal["none", "all", "asked"]] = "none"

    def samples(self, execute: Execute) -> Source:
        return python_topics(self.val_frac)


@dataclass(frozen=True, kw_only=True)
class TextFilesConfig(SourceConfig):
    """A text file, the files of a folder, or those that match a pattern, perhaps with ``?length=BYTES``."""

    kind: Literal["text"] = "text"
    captioned: ClassVar[Literal["none", "all", "asked"]] = "none"

    def location(self) -> str | None:
        return storage.absolute(self.place.partition("?")[0]).rstrip("/")

    def samples(self, execute: Execute) -> Source:
        return text_files(self.place, self.val_frac, self.ignore_split_names)


def python_topics(val_frac: float) -> Source:
    """Returns the texts of Python's `help()` on its language, which are in its standard library: 0.5 MB, that
    differ between versions of Python.
    """
    texts = [text.encode() for _, text in sorted(pydoc_data.topics.topics.items())]
    return _source({None: texts}, LENGTH, val_frac)


def text_files(path: str, val_frac: float, ignore_split_names: bool = False) -> Source:
    """Returns the sequences of a text file, of the files of a folder, or of those that match a pattern. Its
    end may say the length: ``/data/books?length=256``.

    Raises UsageError if there is no text, or less than a sequence for each split.
    """
    path, _, query = path.partition("?")
    name, _, length = query.partition("=")
    if query and (name != "length" or not length.isdecimal() or int(length) < 1):
        raise UsageError(f"text:{path}?{query}: only ?length=BYTES is known, of at least 1")
    folder, names = shards_at(path, *EXTENSIONS)
    splits, notes = (dict.fromkeys(names), []) if ignore_split_names else splits_of(names, folder)
    skipped = []
    texts: dict[str | None, list[bytes]] = {split: [] for split in splits.values()}
    contents = read_files([storage.join(folder, name) for name in splits])
    for (name, split), content in zip(splits.items(), contents, strict=True):
        if problem := _problem(content):
            skipped.append(f"{folder}/{name}: {problem}")
        else:
            assert isinstance(content, bytes)
            texts[split].append(content)
    return replace(_source(texts, int(length or LENGTH), val_frac, tuple(skipped)), notes=tuple(notes))


def _problem(content: bytes | BadImage) -> str:
    """Returns why a file is no text; empty if it is."""
    if isinstance(content, BadImage):
        return str(content)
    try:
        content.decode()
    except UnicodeDecodeError:
        return "is not UTF-8"
    return "has a byte 0" if BETWEEN in content else "" if content else "is empty"


def _source(
    texts: Mapping[str | None, Sequence[bytes]], length: int, val_frac: float, skipped: tuple[str, ...] = ()
) -> Source:
    """Cuts the texts of each split; without splits, the last part of all is for validation."""
    joined = {split: BETWEEN.join(parts) for split, parts in texts.items()}
    if None in joined:
        whole = joined[None]
        middle = round((1 - val_frac) * len(whole))
        joined = {"train": whole[:middle], "val": whole[middle:]}
    splits = {}
    for split, text in joined.items():
        if len(text) <= length:
            reason = f"; {skipped[0]}" if skipped else ""
            raise UsageError(
                f"{len(text):,} bytes of text for {split}, and a sequence has {length + 1}: add text, or"
                f" choose a smaller length{reason}"
            )
        pieces = (text[at : at + length + 1] for at in range(0, len(text) - length, length))
        samples = [
            Sample(b"", 0, f"{split}-{number:09d}", length + 1, fields={SEQUENCE: piece})
            for number, piece in enumerate(pieces)
        ]
        # Neighbours are of one topic: they are spread.
        order = np.argsort(sample_ids(sample.key for sample in samples), kind="stable")
        splits[str(split)] = [samples[i] for i in order]
    return Source(classes=("text",), splits=splits, fetch=iter, images=False, skipped=skipped)

"""The table that packing starts from: samples with their labels, keys and splits.

Labels, splits and order depend on the names of files and samples, never on the order in which they were
listed.
"""

import logging
import pickle
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from orchestrator.data.images import BadImage
from orchestrator.data.index import Ints, sample_ids
from orchestrator.data.manifest import Shard
from orchestrator.errors import UsageError
from orchestrator.packing.labels import class_numbers, notes_on_classes, refuse_unlearnt
from orchestrator.packing.splits import meaning_of

ONE_CLASS = "image"  # the class of images without labels
NEIGHBOURS = 512  # samples whose classes are counted, to find samples sorted by class
SORTED = 0.5  # of the classes that samples in random order would hold
PROGRESS_EVERY_S = 5.0

# ``execute(work, tasks)`` yields the results of `work` for all tasks, in any order, on any machine.
Execute = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]

log = logging.getLogger(__name__)


class Sample(NamedTuple):
    """An image to be packed.

    image: the encoded bytes, or their place, which the source's `fetch` reads.
    label: the class's number or, of a function of your own, its name.
    size: bytes of the image, 0 if the listing does not say.
    others: the numbers of further classes that the image has.
    fields: further fields, bytes or numbers, of the same names for every sample.
    """

    image: Any
    label: int
    key: str
    size: int = 0
    others: tuple[int, ...] = ()
    fields: Mapping[str, bytes | float] = {}


@dataclass(frozen=True, kw_only=True)
class Source:
    """Samples to be packed, in their order.

    classes: names by label.
    splits: ``train`` and ``val`` -> samples.
    fetch: yields the encoded bytes of images, in order, or why they cannot be read; runs on any node.
    images: whether samples have images, else they have further fields alone.
    skipped: files and samples that the listing left out, with the reason.
    notes: what the listing found out about labels and splits, and may not be meant so.
    """

    classes: tuple[str, ...]
    splits: Mapping[str, Sequence[Sample]]
    fetch: Callable[[Sequence[Any]], Iterable[bytes | BadImage]]
    images: bool = True
    skipped: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()


class Part(NamedTuple):
    """Samples that are listed together: those of a tar or parquet file, or all that a source has for a split.

    labels: numbers or names, the first of each image; None for an image without a label.
    places: offset and size of each image.
    images: of each sample, as in `Sample`; none if (name, offset, size) locates them.
    others: the further labels of each sample; none if every sample has one label.
    names: the names of labels that are numbers, if the source has them.
    skipped: samples left out, with the reason.
    shard: the file.
    crcs: CRC-32 of each image of the file.
    fields: name -> the further field of each sample, None where a sample lacks it.
    hot: the length of the lists that labels come from, if they are a 0 or 1 for every class; else 0.
    splits: what names the split of each sample, if every sample has a name for it.
    doubt: what is wrong with the names of splits, if only some samples have one.
    unlabelled: how many samples were left out because they have no label.
    notes: what may not be meant so, in words.
    """

    name: str
    labels: Sequence[Any]
    keys: Sequence[str]
    places: Sequence[tuple[int, int]]
    images: Sequence[Any] = ()
    others: Sequence[tuple[Any, ...]] = ()
    names: Sequence[str] | None = None
    skipped: Sequence[str] = ()
    shard: Shard | None = None
    crcs: Sequence[int] = ()
    fields: Mapping[str, Sequence[Any]] = {}
    hot: int = 0
    splits: Sequence[str] = ()
    doubt: str = ""
    unlabelled: int = 0
    notes: Sequence[str] = ()


class Table:
    """The samples of a source: image, label, key and split of each, part after part in the order of names.

    It takes about 100 bytes of memory per sample while it is made; images, keys and further labels wait in a
    temporary file. What depends on the classes of samples, such as their split, goes by first labels.

    classes: names by label.
    shards: the files of the parts.
    skipped: samples left out, with the reason.
    notes: what was found out about labels and splits, in words.
    labels, is_val, is_used: first class number of every sample, whether it is for validation, and whether it
        is for training or validation at all, (samples,).
    most_labels: the most labels of a sample.
    """

    def __init__(self, parts: Iterable[Part], splits: Mapping[str, str | None], val_frac: float) -> None:
        """Takes parts in any order. `splits` maps the name of each to ``train`` or ``val``, or all to None:
        then the samples' own names decide (`Part.splits`), else `choose_validation`. If a sample has no
        label, all have the class `ONE_CLASS`.

        Raises:
            UsageError: for labels that are not those of classes, a single class of samples without further
                fields, a split without images, and validation images of a class without training images.
        """
        self._spool = tempfile.TemporaryFile()  # noqa: SIM115 (it is removed with the table)
        numbers: dict[int | str | None, int] = {}
        first: dict[int | str | None, str] = {}
        self.most_labels = 1
        listed = []
        has_all = True
        for part in parts:
            self.most_labels = max([self.most_labels, *(1 + len(others) for others in part.others)])
            has_all &= len(part.others) == len(part.keys) and all(part.others)
            further = ((n, key) for key, others in zip(part.keys, part.others, strict=False) for n in others)
            for label, key in chain(zip(part.labels, part.keys, strict=True), further):
                if label not in numbers:
                    numbers[label], first[label] = len(numbers), key
            labels = np.array([numbers[label] for label in part.labels], np.int64)
            light = part._replace(labels=(), keys=(), places=(), images=(), others=(), crcs=())
            listed.append((light, self._spool.tell(), sample_ids(part.keys), labels))
            pickle.dump(part, self._spool)
        files, self._begins, ids, labels = zip(*sorted(listed, key=lambda row: row[0].name), strict=True)
        self.shards = tuple(part.shard for part in files)
        self.skipped = tuple(line for part in files for line in part.skipped)
        self._starts = np.cumsum([0, *map(len, ids)])
        if not numbers:
            reason = "".join(f"; {line}" for line in self.skipped[:1])
            raise UsageError(f"no sample with an image and a label in {files[0].name}, ..{reason}")
        self.notes = [note for part in files for note in part.notes]
        if None in first:
            if len(first) > 1:
                self.notes.append(f"{first[None]} has no label: all images are of one class, {ONE_CLASS}")
            self.classes, self._class_of, self.most_labels = (ONE_CLASS,), dict.fromkeys(numbers, 0), 1
        else:
            kept = [part for part, each in zip(files, ids, strict=True) if len(each)]
            self.classes, self._class_of = class_numbers(first, _names_in(kept), _length_in(kept))
            self.notes += notes_on_classes(self.classes, kept[0].hot)
            if has_all and len(self.classes) == 2:
                self.notes.append(
                    "every image has both classes: if a list is a 0 or 1 for each class, give the class that"
                    " the image has instead"
                )
        if len({*self._class_of.values()}) < 2 and not any(part.fields for part in files):
            raise UsageError(f"only one class ({next(iter(first))}): there is nothing to learn")
        self.labels: Ints = np.array([*self._class_of.values()])[np.concatenate(labels)]
        ids = np.concatenate(ids)
        self._occurrence = _occurrences(ids)
        repeated = np.searchsorted(self._starts, np.flatnonzero(self._occurrence > 1), side="right") - 1
        for number in map(int, np.unique(repeated)):
            ids[self._rows(number)] = sample_ids(self._load(number).keys)
        self.is_val, self.is_used = self._split(files, splits, ids, val_frac)
        if self.is_val.all() or not self.is_val.any():
            empty = "train" if self.is_val.all() else "val"
            raise UsageError(
                f"none of the {len(self.is_val)} images is for {empty}: add images, or another `val_frac`"
            )
        self._refuse_unlearnt()

    def _split(
        self, files: Sequence[Part], splits: Mapping[str, str | None], ids: Ints, val_frac: float
    ) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Returns which samples are for validation, and which are used at all."""
        counts, everything = np.diff(self._starts), np.ones(len(ids), bool)
        if None not in splits.values():
            is_val = np.repeat([splits[part.name] == "val" for part in files], counts)
            unlabelled = sum(part.unlabelled for part in files if splits[part.name] == "val")
            if is_val.any() or not unlabelled:
                return is_val, everything
            self.notes.append(
                f"none of the {unlabelled} images for validation has a label: they are left out, and"
                f" {val_frac:.0%} of the others are for validation"
            )
        if doubt := next((f"{part.name}: {part.doubt}" for part in files if part.doubt), ""):
            raise UsageError(doubt)
        words = Counter(chain.from_iterable(part.splits for part in files))
        if "train" not in words or len(words) == 1:
            return choose_validation(ids, self.labels, val_frac), everything
        silent = [part.name for part, count in zip(files, counts, strict=True) if count and not part.splits]
        if silent:
            raise UsageError(f"{silent[0]} does not say for each image whether it is for training, others do")
        meaning, notes = meaning_of(words, "image")
        self.notes += notes
        found = [meaning.get(word) for part in files for word in part.splits]
        return np.array([split == "val" for split in found]), np.array([split is not None for split in found])

    def _refuse_unlearnt(self) -> None:
        """Raises UsageError for validation images of a class without training images."""
        trained, validated = (
            {*np.unique(self.labels[self.is_used & (self.is_val == is_val)])} for is_val in (False, True)
        )
        if alone := validated - trained:
            further = chain.from_iterable(part.others for part in self.parts("train"))
            alone -= {*chain.from_iterable(further)}
        if alone:
            refuse_unlearnt(
                *([self.classes[n] for n in sorted(found)] for found in (alone, trained, validated))
            )

    def parts(self, split: str) -> Iterator[Part]:
        """Yields the parts with their samples of a split; labels are class numbers, and keys unique."""
        for number in range(len(self.shards)):
            rows = self._rows(number)
            chosen = np.flatnonzero(self.is_used[rows] & (self.is_val[rows] == (split == "val"))).tolist()
            if chosen:
                part = self._load(number)
                fields = "labels", "keys", "places", "crcs", "images", "others"
                columns = {name: getattr(part, name) for name in fields}
                taken = {name: [column[i] for i in chosen] for name, column in columns.items()}
                further = {name: [column[i] for i in chosen] for name, column in part.fields.items()}
                yield part._replace(**taken, fields=further)

    def samples(self, split: str, *, mixed: bool) -> list[Sample]:
        """Returns the samples of a split, as they are listed or in the order of the hash of their keys."""
        samples = [
            Sample(image, label, key, size, others, fields)
            for part in self.parts(split)
            for image, label, key, (_, size), others, fields in zip(
                *(part.images, part.labels, part.keys, part.places, part.others, _by_sample(part)),
                strict=True,
            )
        ]
        order = np.argsort(sample_ids(sample.key for sample in samples), kind="stable")
        return [samples[i] for i in order] if mixed else samples

    def neighbours(self) -> list[Ints]:
        """Returns the class numbers of training samples that follow each other in a part."""
        blocks: list[Ints] = []
        for number in range(len(self.shards)):
            rows = self._rows(number)
            labels = self.labels[rows][self.is_used[rows] & ~self.is_val[rows]]
            blocks += [labels[first : first + NEIGHBOURS] for first in range(0, len(labels), NEIGHBOURS)]
        return blocks

    def _rows(self, number: int) -> slice:
        return slice(self._starts[number], self._starts[number + 1])

    def _load(self, number: int) -> Part:
        self._spool.seek(self._begins[number])
        part: Part = pickle.load(self._spool)
        rows = self._rows(number)
        # Keys may count from 0 in each file.
        numbered = zip(part.keys, self._occurrence[rows].tolist(), strict=True)
        keys = [key if occurrence == 1 else f"{key}#{occurrence}" for key, occurrence in numbered]
        images = part.images or [(part.name, *place) for place in part.places]
        several = part.others if self.most_labels > 1 else ()
        others = [tuple(self._class_of[label] for label in each) for each in several] or [()] * len(keys)
        labels, crcs = self.labels[rows].tolist(), part.crcs or [0] * len(keys)
        return part._replace(labels=labels, keys=keys, crcs=crcs, images=images, others=others)


def tabulated(
    parts: Iterable[Part],
    splits: Mapping[str, str | None],
    val_frac: float,
    fetch: Callable[[Sequence[Any]], Iterable[bytes | BadImage]],
    *,
    mixed: bool = True,
    skipped: Iterable[str] = (),
    notes: Iterable[str] = (),
) -> Source:
    """Returns the samples of parts as a source. Raises as `Table` does."""
    table = Table(parts, splits, val_frac)
    # Packing would unpack a compressed file for every shard that takes samples of it.
    mixed = mixed and not any(shard and shard.unpacked for shard in table.shards)
    samples = {split: table.samples(split, mixed=mixed) for split in ("train", "val")}
    return Source(
        classes=table.classes,
        splits=samples,
        fetch=fetch,
        skipped=(*skipped, *table.skipped),
        notes=(*notes, *table.notes),
    )


def _by_sample(part: Part) -> list[dict[str, Any]]:
    """Returns the further fields that each sample has."""
    rows = zip(*part.fields.values(), strict=True) if part.fields else ((),) * len(part.keys)
    return [{n: v for n, v in zip(part.fields, row, strict=True) if v is not None} for row in rows]


def _occurrences(ids: Ints) -> Ints:
    """Returns 1 for the first sample with an id, 2 for the second, .."""
    order = np.argsort(ids, kind="stable")
    begins = np.flatnonzero(np.diff(ids[order], prepend=-1))
    counts = np.diff(begins, append=len(ids))
    occurrence = np.empty(len(ids), np.int64)
    occurrence[order] = np.arange(1, len(ids) + 1) - np.repeat(begins, counts)
    return occurrence


def choose_validation(ids: Ints, labels: Ints, val_frac: float) -> NDArray[np.bool_]:
    """Returns which samples are for validation, by sample id and class number, each (samples,).

    A sample is for validation if its id, a hash of its key, is below `val_frac` of the largest, whatever
    other samples there are; but every class has at least one sample for training, and a class of two or more
    has one for validation.
    """
    is_val = ids < int(val_frac * 2**63)
    order = np.lexsort((ids, labels))
    first = np.flatnonzero(np.diff(labels[order], prepend=-1))
    last = np.append(first[1:], len(order)) - 1
    is_val[order[first]] = True
    is_val[order[last]] = False
    return is_val


def warn_if_sorted(blocks: Sequence[Ints], where: str, hint: str) -> None:
    """Logs a warning if the samples are sorted by class: if `blocks`, the class numbers of neighbouring
    training samples, hold far fewer classes than they would in random order.
    """
    if not blocks:
        return
    frequency = np.bincount(np.concatenate(blocks)) / sum(map(len, blocks))
    found = np.mean([len(np.unique(block)) for block in blocks])
    sizes, counts = np.unique([len(block) for block in blocks], return_counts=True)
    random = np.average([np.sum(1 - (1 - frequency) ** size) for size in sizes], weights=counts)
    if found < SORTED * random:
        log.warning(
            "%s is sorted by class: %d neighbouring samples hold %.1f classes on average, in random order"
            " they would hold %.1f, and batches of few classes train badly: %s",
            *(where, max(sizes), found, random, hint),
        )


def _names_in(files: Sequence[Part]) -> Sequence[str] | None:
    """Returns the names of classes that files have. Raises UsageError if they differ."""
    named = [part for part in files if part.names is not None]
    for part in named:
        if part.names != named[0].names:
            raise UsageError(f"{named[0].name} and {part.name} name their labels differently")
    return named[0].names if named else None


def _length_in(files: Sequence[Part]) -> int:
    """Returns the length of lists of a 0 or 1 for every class. Raises UsageError if files differ."""
    for part in files:
        if part.hot != files[0].hot:
            says = {each.name: f"lists of {each.hot} times 0 or 1" for each in (files[0], part) if each.hot}
            first, second = (says.get(name, "the numbers of classes") for name in (files[0].name, part.name))
            raise UsageError(f"labels are {first} in {files[0].name}, and {second} in {part.name}")
    return files[0].hot


def with_progress(
    results: Iterable[Any], tasks: int, done: str, images: Callable[[Any], int]
) -> Iterator[Any]:
    """Yields the results of `tasks` tasks, a shard each, and logs how many `images` they hold per second."""
    began = reported = time.monotonic()
    count = 0
    for number, result in enumerate(results, start=1):
        count += images(result)
        now = time.monotonic()
        if now - reported >= PROGRESS_EVERY_S:
            reported = now
            rate = count / (now - began)
            log.info("%s %d of %d shards, %d images, %.0f images/s", done, number, tasks, count, rate)
        yield result

"""Labels, split and order of samples: functions of what they are called, never of how they were listed."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Generic, Literal, NamedTuple

from orchestrator.data.sources.source import Image, Sample
from orchestrator.errors import UsageError

MOST_CLASSES = 1_000_000

Order = Literal["hash", "listed"]


class Found(NamedTuple, Generic[Image]):
    """Attributes:
    split: None if the source has none.
    """

    image: Image
    label: int | str
    key: str
    size: int = 0
    split: str | None = None


def arrange(
    found: Sequence[Found[Image]], *, val_frac: float, order: Order, names: Sequence[str] | None = None
) -> tuple[tuple[str, ...], dict[str, list[Sample[Image]]]]:
    """Classes, and the samples of ``train`` and ``val``.

    Without a split, a sample is in ``val`` if the hash of its key lies below `val_frac`, whatever else comes
    or goes; but every class of two images or more has one on either side. The order ``hash`` mixes classes.

    Raises:
        UsageError: for labels that are no class numbers, a single class, or a split without images.
    """
    classes = classes_of({one.label: one.key for one in found}, names)
    if len(classes) < 2:
        raise UsageError(f"only one class ({', '.join(classes) or 'no images'}): there is nothing to learn")
    numbers = {name: number for number, name in enumerate(classes)}
    splits: dict[str, list[Sample[Image]]] = {"train": [], "val": []}
    ordered = sorted(found, key=lambda one: digest(one.key)[8:]) if order == "hash" else found
    val_keys = _validation(found, val_frac) if all(one.split is None for one in found) else None
    for one in ordered:
        label = one.label if isinstance(one.label, int) else numbers[one.label]
        split = one.split if val_keys is None else "val" if one.key in val_keys else "train"
        splits[split or "train"].append(Sample(one.image, label, one.key, one.size))
    for split, samples in splits.items():
        if not samples:
            raise UsageError(
                f"none of the {len(found)} images is for {split}: add images, or another --val-frac"
            )
    return classes, splits


def classes_of(labels: Mapping[int | str, str], names: Sequence[str] | None = None) -> tuple[str, ...]:
    """Names by number: `names`, else the sorted names, else ``"0"`` to the largest number.

    `labels`: each with the key of a sample that has it.

    Raises:
        UsageError: for numbers below 0 or above what there are names for, and names beside numbers.
    """
    texts = [label for label in labels if isinstance(label, str)]
    if len(texts) == len(labels):
        return tuple(sorted(texts))
    if texts:
        number = next(label for label in labels if isinstance(label, int))
        raise UsageError(
            f"some labels are numbers ({number} of {labels[number]}),"
            f" some are names ({texts[0]!r} of {labels[texts[0]]})"
        )
    numbers = [label for label in labels if isinstance(label, int)]
    count = len(names) if names is not None else min(max(numbers) + 1, MOST_CLASSES)
    for number in numbers:
        if not 0 <= number < count:
            raise UsageError(f"label {number} of {labels[number]}: classes are numbered 0 to {count - 1}")
    return tuple(names) if names is not None else tuple(map(str, range(count)))


def check_val_frac(val_frac: float) -> None:
    if not 0 < val_frac < 1:
        raise UsageError(f"--val-frac {val_frac}: must lie between 0 and 1, both excluded")


def digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def below(key: str, frac: float) -> bool:
    """True for this part of all keys."""
    return int.from_bytes(digest(key)[:8], "big") < frac * 2**64


def _validation(found: Sequence[Found[Image]], val_frac: float) -> set[str]:
    by_class: dict[int | str, list[str]] = defaultdict(list)
    for one in found:
        by_class[one.label].append(one.key)
    chosen: set[str] = set()
    for keys in by_class.values():
        val = [key for key in keys if below(key, val_frac)]
        if len(keys) > 1 and not val:
            val = [min(keys, key=digest)]
        elif len(keys) > 1 and len(val) == len(keys):
            val.remove(max(keys, key=digest))
        chosen.update(val)
    return chosen

"""What is to be packed: samples, in their order, whose images are still where they come from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple, TypeVar

from orchestrator.data.decode import BadImage

Image = TypeVar("Image")

# ``execute(work, tasks)`` yields what `work` makes of each task, in any order, here or on other machines
Execute = Callable[[Callable[[Any], Any], Sequence[Any]], Iterable[Any]]


class Sample(NamedTuple, Generic[Image]):
    """Attributes:
    image: the encoded bytes, or where they lie.
    size: bytes of the image, where the listing tells.
    """

    image: Image
    label: int
    key: str
    size: int = 0


@dataclass(frozen=True, kw_only=True)
class Source(Generic[Image]):
    """Attributes:
    classes: names by label.
    splits: ``train`` and ``val`` -> samples in the order in which they are packed.
    fetch: the encoded bytes of each image, in order, or why there are none. Runs on any node.
    skipped: files that were left out already, with the reason.
    """

    classes: tuple[str, ...]
    splits: Mapping[str, Sequence[Sample[Image]]]
    fetch: Callable[[Sequence[Image]], Iterable[bytes | BadImage]]
    skipped: tuple[str, ...] = ()

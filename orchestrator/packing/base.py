"""The contract of a source: samples to pack by ``kind:PLACE``, and files that training reads in place.

Text names a source: ``folder:/data/flowers``, or ``digits`` where a kind needs no place. To add a source,
write its file and import it in this package, or give the file as a plugin.
"""

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, fields
from typing import Annotated, Any, ClassVar, Literal, SupportsIndex

from moe.codec import member_of
from moe.config import Bound, Family
from moe.guests import join_families
from orchestrator import storage
from orchestrator.data.images import BadImage
from orchestrator.data.parquet import BY_NAME, Columns
from orchestrator.errors import UsageError
from orchestrator.packing.listing import READERS, shards_at
from orchestrator.packing.samples import Execute, Part, Source, tabulated
from orchestrator.packing.splits import splits_of
from orchestrator.plugins import plugins_of, restored, shipped


@dataclass(frozen=True, kw_only=True)
class SourceConfig(Family, ABC, default="folder"):
    """Samples to pack.

    Attributes:
        placed: what follows the kind and a colon, in capitals as messages show it; empty: nothing does.
        captioned: whether samples have captions: none of them, all, or where they are asked for.
        place: what follows the colon.
        val_frac: part of the samples for validation, if the source has no split of its own.
        captions: whether samples have captions, which become their field `text`. Labels are optional then.
        ignore_split_names: whether words such as train and test, in names of folders, files and samples or in
            a column, say nothing about what an image is for.
    """

    placed: ClassVar[str] = "PATH"
    captioned: ClassVar[Literal["none", "all", "asked"]] = "asked"

    place: str = ""
    val_frac: Annotated[float, Bound(">", 0), Bound("<", 1)] = 0.2
    captions: bool = False
    ignore_split_names: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.captions and self.captioned == "none":
            have, may = (_spelled(lambda cls, way=way: cls.captioned == way) for way in ("all", "asked"))
            raise UsageError(f"{self} has no captions; {have} has, and these may: {may}")

    def __str__(self) -> str:
        return f"{self.kind}:{self.place}" if self.place else self.kind

    def __reduce_ex__(self, protocol: SupportsIndex) -> tuple[Any, ...]:
        # A class of a plugin is known in another process once its text is.
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return _rebuilt, (shipped(plugins_of(self)), values)

    @classmethod
    def place_in(cls, text: str) -> str | None:
        """Returns the place that a text names, None if it names a source of another kind."""
        kind, _, place = text.partition(":")
        return place if kind == cls.kind and bool(place) == bool(cls.placed) else None

    @classmethod
    def spelled(cls) -> str:
        return f"{cls.kind}:{cls.placed}" if cls.placed else cls.kind

    def location(self) -> str | None:
        """Returns the folder or file that is read, to which nothing may be packed; None: there is none."""
        return storage.absolute(self.place).rstrip("/") if self.placed == "PATH" else None

    @abstractmethod
    def samples(self, execute: Execute) -> Source:
        """Lists the samples, without reading images. `execute` runs the listing of many files.

        Raises:
            UsageError: if the source is missing or malformed, or has no captions.
        """


@dataclass(frozen=True, kw_only=True)
class FilesConfig(SourceConfig, ABC):
    """A source of files that each hold samples: a file, all files of a folder, or those that match a pattern.

    Attributes:
        extensions: of its files.
        in_place: whether training reads the files themselves, by the ranges of their images in `Part.places`
            and `Part.shard`.
    """

    extensions: ClassVar[tuple[str, ...]]
    in_place: ClassVar[bool] = False

    @classmethod
    def recognises(cls, location: str) -> bool:
        """Returns whether a file is one of this source."""
        return location.lower().endswith(cls.extensions)

    @abstractmethod
    def index(self, location: str) -> Part:
        """Returns the samples of a file, with the labels, splits and names of classes that it states.

        Raises:
            UsageError: naming the file, if it is damaged.
        """

    def read(self, images: Sequence[Any]) -> Iterable[bytes | BadImage]:
        """Yields the encoded bytes of `Part.images`, by default of ranges (location, offset, size)."""
        return read_ranges(images)

    def samples(self, execute: Execute) -> Source:
        folder, sizes = shards_at(self.place, *self.extensions)
        named, notes = (dict.fromkeys(sizes), []) if self.ignore_split_names else splits_of(sizes, folder)
        splits = {storage.join(folder, name): split for name, split in named.items()}
        parts = execute(self.index, list(splits))
        if self.ignore_split_names:
            parts = (part._replace(splits=(), doubt="") for part in parts)
        return tabulated(parts, splits, self.val_frac, self.read, notes=notes)


def in_place() -> list[FilesConfig]:
    """Returns the sources whose files training reads as they are."""
    members = [cls for cls in SourceConfig.kinds.values() if issubclass(cls, FilesConfig)]
    return [cls(place="/") for cls in members if cls.in_place]


def source_of(text: str, **options: Any) -> SourceConfig:
    """Returns the source that a text names, with those of the options that it has.

    Raises:
        UsageError: for an unknown source, and for an option that it refuses.
    """
    if not (found := _named(text)):
        join_families()
        found = _named(text)
    if not found:
        raise UsageError(f"unknown source {text!r}; known: {_spelled(lambda cls: True)}")
    member, place = found
    known = {field.name for field in fields(member)}
    try:
        return member(place=place, **{name: value for name, value in options.items() if name in known})
    except ValueError as error:
        # The field is what a command calls by its flag.
        raise UsageError(re.sub(r"^(\w+) must", r"`\1` must", str(error))) from None


def _named(text: str) -> tuple[type[Any], str] | None:
    """Returns the kind of source that a text names, and its place."""
    places = ((member, member.place_in(text)) for member in _members())
    return next(((member, place) for member, place in places if place is not None), None)


def open_source(
    name: str,
    *,
    root: str = "data",
    download: bool = False,
    val_frac: float = 0.2,
    columns: Columns = BY_NAME,
    captions: bool = False,
    caption_lines: bool = False,
    ignore_split_names: bool = False,
    execute: Execute = map,
) -> Source:
    """Lists the samples of the source that a text names. Options are those of its config, if it has them.

    Raises:
        UsageError: for a source that is unknown, missing or malformed, or has no captions.
    """
    source = source_of(
        name,
        root=root,
        download=download,
        val_frac=val_frac,
        columns=columns,
        captions=captions,
        caption_lines=caption_lines,
        ignore_split_names=ignore_split_names,
    )
    return source.samples(execute)


def read_ranges(places: Sequence[tuple[str, int, int]]) -> Iterator[bytes]:
    """Yields ranges of files, (location, offset, size), several at a time."""
    with ThreadPoolExecutor(READERS) as pool:
        yield from pool.map(_range, places)


def _range(place: tuple[str, int, int]) -> bytes:
    return storage.read_range(*place).content


def _members() -> list[type[Any]]:
    return [SourceConfig.kinds[kind] for kind in sorted(SourceConfig.kinds)]


def _spelled(wanted: Callable[[Any], bool]) -> str:
    return ", ".join(member.spelled() for member in _members() if wanted(member))


def _rebuilt(plugins: dict[str, bytes], values: dict[str, Any]) -> SourceConfig:
    restored(plugins)
    cls: Any = member_of(SourceConfig, values, "source")
    return cls(**values)

"""The samples of a tar in WebDataset's layout: each image's place, labels and key.

A file is read once, from front to back, and not kept in memory.
"""

import hashlib
import json
import re
import tarfile
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import IO, Any, ClassVar, Literal, cast

from orchestrator import storage
from orchestrator.data.manifest import Shard
from orchestrator.data.text import TEXT, captions_as_field, captions_in_file
from orchestrator.errors import UsageError
from orchestrator.packing.base import FilesConfig
from orchestrator.packing.labels import listed_labels, read_labels
from orchestrator.packing.samples import Part
from orchestrator.packing.splits import SPLIT_COLUMNS, splits_of_rows, splits_of_samples

# Members of tars, by extension, and fields of .json members.
TAR_IMAGES = (
    *("jpg", "jpeg", "png", "webp", "bmp", "gif", "tif", "tiff", "ppm", "avif", "jp2", "j2k", "jpx", "jpf"),
    *("j2c", "jpc"),
)
TAR_LABELS = ("cls", "cls.txt", "json")
TAR_CAPTION = "txt"
JSON_CAPTIONS = ("captions", "caption", "text")
JSON_LABELS = ("label", "cls", "class", "class_id", "target", "labels")
SHOWN = 5  # extensions of a sample without an image
MEMBER = re.compile(r"((?:.*/|)[^./]+)\.([^/]+)")  # WebDataset's rule: key, extension; no hidden files


class Forward:
    """A file that is read from front to back. `last` is what `read` returned last."""

    def __init__(self, location: str) -> None:
        self._location = location
        self._pieces = storage.pieces(location)
        self._piece, self._begin, self._at = b"", 0, 0
        self._digest = hashlib.sha256()
        self.last = b""

    def tell(self) -> int:
        return self._at

    def seek(self, position: int) -> None:
        if position < self._at:
            raise EOFError(f"byte {position} follows byte {self._at}")
        self._at = position

    def read_at(self, offset: int, size: int) -> bytes:
        self.seek(offset)
        return self.read(size)

    def read(self, size: int) -> bytes:
        parts = []
        while size:
            first = self._at - self._begin
            part = self._piece[first : first + size]
            if not part and not self._next_piece():
                break
            parts.append(part)
            size -= len(part)
            self._at += len(part)
        self.last = b"".join(parts)
        return self.last

    def crc32(self, size: int) -> int:
        """Reads so many bytes for their CRC-32."""
        crc = 0
        while size and (part := self.read(min(size, storage.PIECE_BYTES))):
            crc = zlib.crc32(part, crc)
            size -= len(part)
        return crc

    def skip_zeros(self) -> int | None:
        """Passes over zeros, and returns where other bytes begin, None at the end of the file."""
        while block := self.read(tarfile.BLOCKSIZE):
            if rest := block.lstrip(b"\0"):
                self._piece = rest + self._piece[self._at - self._begin :]
                self._at = self._begin = self._at - len(rest)
                return self._at
        return None

    def shard(self, rows: int, unpacked: int | None = None) -> Shard:
        """Reads what remains, and describes the file."""
        while self._next_piece():
            pass
        return Shard(
            path=self._location,
            rows=rows,
            bytes=self._begin + len(self._piece),
            sha256=self._digest.hexdigest(),
            unpacked=unpacked,
        )

    def _next_piece(self) -> bool:
        piece = next(self._pieces, b"")
        if piece:
            self._digest.update(piece)
            self._begin += len(self._piece)
            self._piece = piece
        return bool(piece)


@dataclass(frozen=True, kw_only=True)
class WebDatasetConfig(FilesConfig):
    """Tars: members .jpg .. beside .cls or .json, with a label or a list of them.

    Attributes:
        caption_lines: whether each line of a `.txt` member is a caption.
    """

    kind: Literal["webdataset"] = "webdataset"
    extensions: ClassVar[tuple[str, ...]] = (".tar",)
    in_place: ClassVar[bool] = True

    caption_lines: bool = False

    def index(self, location: str) -> Part:
        return index_tar(location, captions=self.captions, caption_lines=self.caption_lines)


def index_tar(location: str, *, captions: bool = False, caption_lines: bool = False) -> Part:
    """Indexes the samples of a tar, or of tars that were joined, in file order. Members whose names differ
    only in the extension are one sample. Samples with `captions` need no labels; a member `.txt` is a
    caption or, with `caption_lines`, one in each line.

    Raises:
        UsageError: if the tar is cut short, damaged, compressed or not a tar.
    """
    samples: list[tuple[str, dict[str, Any]]] = []
    problems: list[str] = []
    file: Any = Forward(location)
    begin: int | None = 0
    try:
        while begin is not None:
            with tarfile.open(fileobj=file, mode="r:", encoding="utf-8") as tar:
                if tar.firstmember:  # pyright: ignore[reportAttributeAccessIssue]
                    samples += _tar_samples(tar, problems, captions).items()
            # What was read last is a header: zeros at the end of a tar, else one that is cut off or damaged.
            if file.last == bytes(tarfile.BLOCKSIZE):
                begin = file.skip_zeros()
            elif begin and tar.offset == begin:
                break
            else:
                raise tarfile.ReadError(f"no end mark, it is cut short or damaged at byte {tar.offset}")
    except (tarfile.TarError, EOFError, ValueError) as error:
        raise UsageError(f"{location} is not a whole uncompressed tar: {error}") from None
    rows, unlabelled = [], 0
    words: dict[str, Any] = {}
    for key, parts in samples:
        try:
            place = _tar_image(parts)
            text = _tar_captions(parts, caption_lines) if captions else b""
            rows.append((key, place, text, _tar_labels(parts, optional=captions)))
            words[key] = _in_json(parts, SPLIT_COLUMNS)
        except (ValueError, RecursionError) as error:
            problems.append(f"{key}: {error}")
    labels = read_labels([found for *_, found in rows], [key for key, *_ in rows], location)
    chosen = [row for row, first in enumerate(labels.first) if captions or first is not None]
    for row, first in enumerate(labels.first):
        if first is None and not captions:
            problems.append(f"{rows[row][0]}: no label")
            unlabelled += 1
    shard = file.shard(len(chosen))
    if begin:
        problems.append(f"the {shard.bytes - begin} bytes from byte {begin} on are not a tar")
    keys = [rows[row][0] for row in chosen]
    by_field, doubt = splits_of_rows("split", [words[key] for key in keys])
    return Part(
        location,
        [labels.first[row] for row in chosen],
        keys,
        [rows[row][1][:2] for row in chosen],
        others=[labels.others[row] for row in chosen] if labels.others else [],
        skipped=[f"{location}: {problem}" for problem in problems],
        shard=shard,
        crcs=[rows[row][1][2] for row in chosen],
        fields={TEXT: [rows[row][2] for row in chosen]} if captions else {},
        hot=labels.hot,
        splits=by_field or splits_of_samples(keys),
        doubt=doubt,
        unlabelled=unlabelled,
    )


def _tar_samples(tar: tarfile.TarFile, problems: list[str], captions: bool) -> dict[str, dict[str, Any]]:
    """Reads a tar up to its end mark. Returns for each key its members by extension: the place of an image,
    the content of a label or caption, or a ValueError that says why it cannot be read.
    """
    texts = (*TAR_LABELS, TAR_CAPTION) if captions else TAR_LABELS
    file: Any = tar.fileobj
    samples: dict[str, dict[str, Any]] = {}
    read: dict[tuple[str, bool], Any] = {}  # what hard links may name
    while info := tar.next():
        tar.members = []  # pyright: ignore[reportAttributeAccessIssue] # else it grows with the file
        match = MEMBER.fullmatch(info.name)
        if not match or info.isdir():
            continue
        key, extension = _as_text(match[1]), _as_text(match[2].lower())
        parts, is_image = samples.setdefault(key, {}), extension in TAR_IMAGES
        if not is_image and extension not in texts:
            parts.setdefault(extension, None)
            continue
        if info.islnk():
            missing = ValueError(
                f".{extension} is a hard link to {_as_text(info.linkname)}, which is not read"
            )
            content = read.get((info.linkname, is_image), missing)
        elif info.issym():
            content = ValueError(f".{extension} is a symbolic link to {_as_text(info.linkname)}")
        elif not info.isreg():
            content = ValueError(f".{extension} is not a file (type {info.type!r})")
        elif is_image and not info.size:
            content = ValueError(f".{extension} is empty")
        elif is_image and info.issparse():
            content = ValueError(f".{extension} is a sparse file, which is not stored in one piece")
        elif is_image:
            content = info.offset_data, info.size, file.crc32(info.size)
        else:
            content = cast(IO[bytes], tar.extractfile(info)).read()
        if not isinstance(content, ValueError):
            read[info.name, is_image] = content
        if extension in parts:
            problems.append(f"{key}: two members .{extension}, the first is taken")
        else:
            parts[extension] = content
    return samples


def _as_text(name: str) -> str:
    """Returns a tar's name as it is if it is UTF-8; other bytes are taken for Latin-1, which has them all."""
    content = name.encode("utf-8", "surrogateescape")
    try:
        return content.decode()
    except UnicodeDecodeError:
        return content.decode("latin-1")


def _tar_image(parts: Mapping[str, Any]) -> tuple[int, int, int]:
    """Returns offset, size and CRC-32 of the sample's image. Raises ValueError if there is none to read."""
    extension = next((extension for extension in TAR_IMAGES if extension in parts), None)
    if extension is None:
        raise ValueError(f"no image (.{', .'.join(TAR_IMAGES)}), but .{', .'.join([*parts][:SHOWN])}")
    if isinstance(parts[extension], ValueError):
        raise parts[extension]
    return parts[extension]


def _tar_labels(parts: Mapping[str, Any], *, optional: bool) -> list[Any]:
    """Returns the sample's labels as `read_labels` takes them. Raises ValueError if it has none, unless
    `optional`.
    """
    found = next((parts[extension] for extension in TAR_LABELS if extension in parts), None)
    if isinstance(found, ValueError):
        raise found
    for extension in ("cls", "cls.txt"):
        if extension in parts:
            return listed_labels(parts[extension].decode(), typed=False)
    labels = listed_labels(_in_json(parts, JSON_LABELS))
    if not labels and not optional:
        raise ValueError(f"no label (.cls, .cls.txt, or one of {', '.join(JSON_LABELS)} in .json)")
    return labels


def _tar_captions(parts: Mapping[str, Any], lines: bool) -> bytes:
    """Returns the sample's captions as a field. Raises ValueError if it has none."""
    found = parts.get(TAR_CAPTION, parts.get("json"))
    if isinstance(found, ValueError):
        raise found
    if TAR_CAPTION in parts:
        return captions_in_file(parts[TAR_CAPTION], lines=lines)
    if not (captions := _in_json(parts, JSON_CAPTIONS)):
        raise ValueError(f"no caption (.txt, or one of {', '.join(JSON_CAPTIONS)} in .json)")
    return captions_as_field(captions)


def _in_json(parts: Mapping[str, Any], names: Sequence[str]) -> Any:
    """Returns the first of these fields of .json that has a value, an empty list if none has."""
    tree = json.loads(parts.get("json", b"{}"))
    fields = tree if isinstance(tree, dict) else {}
    return next((fields[name] for name in names if fields.get(name) is not None), [])

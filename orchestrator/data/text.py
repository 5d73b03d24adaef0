"""Captions: how a sample holds them, how a run reads them as ids, their tokenizer, and a report on them.

A sample's field `text` holds its captions in UTF-8, one per line. `tokenizer.json` beside the manifest of a
data set has the tokenizer that its training captions teach. It does not belong to the data: the manifest does
not list it, and a model may have another tokenizer, which its own config holds.
"""

import codecs
import gzip
import json
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe.codec import from_dict, to_dict
from moe.tokenizers import END, UNKNOWN, BPEConfig, TokenizerConfig, canonical
from orchestrator import storage
from orchestrator.data.fields import Stored
from orchestrator.data.images import BadImage
from orchestrator.errors import UsageError

TEXT = "text"  # the field of captions
ABSENT = -1  # in place of ids, in rows of captions that a sample does not have
TOKENIZER = "tokenizer.json"
GZIP = b"\x1f\x8b"


@dataclass(frozen=True, kw_only=True)
class TextField:
    """The first `captions` captions of each sample as ids, (B, captions, length) int32, with `ABSENT` in the
    rows of captions that it lacks. A slot without a sample has one empty caption, so that every slot has one.
    """

    tokenizer: TokenizerConfig
    length: int
    captions: int
    stored: Stored = "bytes"

    def empty(self, count: int) -> NDArray[np.int32]:
        rows = np.full((count, self.captions, self.length), ABSENT, np.int32)
        rows[:, 0] = END
        return rows

    def decode(self, value: bytes) -> NDArray[np.int32]:
        row = np.full((self.captions, self.length), ABSENT, np.int32)
        try:
            kept = captions_of(value)[: self.captions]
        except ValueError as error:
            raise BadImage(str(error)) from None
        row[: len(kept)] = self.tokenizer.encode(kept, self.length).numpy()
        return row


def captions_of(stored: bytes) -> list[str]:
    """Reads a field of captions. Raises ValueError if it holds none, or is not UTF-8."""
    try:
        captions = [line for line in stored.decode().split("\n") if line.strip()]
    except UnicodeDecodeError:
        raise ValueError("its caption is not UTF-8") from None
    if not captions:
        raise ValueError("it has no caption")
    return captions


def captions_as_field(captions: Any) -> bytes:
    """Returns a caption, or a list of them, of strings or bytes, as a field; line breaks inside a caption
    become spaces, and empty captions are left out. Raises ValueError if none remains, or one is not text or
    not UTF-8.
    """
    lines = []
    for caption in captions if isinstance(captions, list) else [captions]:
        if caption != caption or caption == "nan":  # what pandas writes where there is none
            continue
        if not isinstance(caption, str | bytes | None):
            raise ValueError(f"its caption {caption!r} is not text")
        text = caption.decode(errors="surrogateescape") if isinstance(caption, bytes) else caption or ""
        if line := " ".join(text.split()):
            lines.append(line)
    if not lines:
        raise ValueError("it has no caption")
    try:
        return "\n".join(lines).encode()
    except UnicodeEncodeError:
        raise ValueError("its caption is not UTF-8") from None


def captions_or_error(captions: Any) -> bytes | ValueError:
    """Returns captions as a field, or the error that `captions_as_field` raises."""
    try:
        return captions_as_field(captions)
    except ValueError as error:
        return error


def captions_in_file(content: bytes, *, lines: bool = True) -> bytes:
    """Returns a text file with a caption, or one in each of its lines, as a field. Raises as
    `captions_as_field` does.
    """
    content = content.removeprefix(codecs.BOM_UTF8)
    return captions_as_field(content.split(b"\n") if lines else content)


def tokenizer_of(text: str, captions: Iterable[bytes]) -> TokenizerConfig:
    """Returns the tokenizer that ``words``, ``words:SIZE`` or ``bpe:SIZE`` learns from fields of captions, or
    that of a file: `tokenizer.json`, or a list of merges as CLIP's. Raises UsageError for any other text.
    """
    kind, _, size = text.partition(":")
    if kind not in TokenizerConfig.kinds:
        return _tokenizer_in(text)
    family: Any = TokenizerConfig.kinds[kind]
    try:
        taught = (caption for field in captions for caption in captions_of(field))
        return family.learn(taught, int(size) if size else None)
    except ValueError as error:
        raise UsageError(f"tokenizer {text!r}: {error}") from None


def _tokenizer_in(path: str) -> TokenizerConfig:
    try:
        content = storage.read_bytes(storage.absolute(path))
    except OSError as error:
        kinds = ", ".join(f"{kind}:SIZE" for kind in TokenizerConfig.kinds)
        raise UsageError(f"tokenizer {path!r} is none of words, {kinds}, and no file: {error}") from None
    try:
        text = (gzip.decompress(content) if content.startswith(GZIP) else content).decode()
        return _from_json(text) if path.endswith(".json") else BPEConfig.of_merges(text)
    except (ValueError, OSError, EOFError) as error:
        raise UsageError(f"{path} is neither a tokenizer.json nor a list of merges: {error}") from None


def _from_json(text: str) -> TokenizerConfig:
    tree = json.loads(text)
    if not isinstance(tree, dict) or "vocabulary" not in tree:
        raise ValueError("it has no vocabulary")
    return from_dict(TokenizerConfig, tree)


def save_tokenizer(data_set: str, tokenizer: TokenizerConfig) -> None:
    storage.write_bytes(storage.join(data_set, TOKENIZER), json.dumps(to_dict(tokenizer)).encode())


def read_tokenizer(data_set: str) -> TokenizerConfig:
    """Reads the tokenizer of a data set. Raises UsageError if it has none."""
    location = storage.join(data_set, TOKENIZER)
    try:
        return _from_json(storage.read_bytes(location).decode())
    except OSError as error:
        raise UsageError(
            f"{data_set} has no tokenizer: {error}; pack it from images with captions, with `captions` of"
            " jobs/pack_shards.py"
        ) from None
    except ValueError as error:
        raise UsageError(f"{location} is damaged ({error}): pack the data set again") from None


@dataclass(frozen=True, kw_only=True)
class CaptionReport:
    """Numbers, lengths and unknown words of captions, to be read before training.

    images, captions, distinct: numbers of training images, of their captions, and of captions that differ
        after cleaning.
    most: captions of the image that has most.
    lengths: tokens of each training caption, with the end.
    unknown: share of the words of validation captions that the tokenizer does not know.
    batch, distinct_in_batch: images of a batch, and the expected number of distinct captions if each of them
        draws one of its own.
    """

    images: int
    captions: int
    distinct: int
    most: int
    lengths: NDArray[np.int64]
    unknown: float
    batch: int
    distinct_in_batch: float

    def cut(self, length: int) -> float:
        """Returns the share of captions that a text tower of so many tokens cuts."""
        return float((self.lengths > length).mean())


def caption_report(
    tokenizer: TokenizerConfig, train: Sequence[bytes], val: Iterable[bytes], *, batch: int
) -> CaptionReport:
    """Reads the fields of captions of both splits."""
    batch = min(batch, len(train))
    counts, lengths = [], []
    missed = defaultdict[str, float](float)  # log of the chance that no image of a batch draws the caption
    for field in train:
        captions = captions_of(field)
        counts.append(len(captions))
        lengths += [1 + len(tokenizer.pieces(caption)) for caption in captions]
        for caption, times in Counter(map(canonical, captions)).items():
            drawn = times / len(captions) * batch / len(train)
            missed[caption] += math.log1p(-drawn) if drawn < 1 else -math.inf
    words = [piece for field in val for text in captions_of(field) for piece in tokenizer.pieces(text)]
    return CaptionReport(
        images=len(train),
        captions=sum(counts),
        distinct=len(missed),
        most=max(counts),
        lengths=np.array(lengths),
        unknown=words.count(UNKNOWN) / max(1, len(words)),
        batch=batch,
        distinct_in_batch=sum(-math.expm1(chance) for chance in missed.values()),
    )

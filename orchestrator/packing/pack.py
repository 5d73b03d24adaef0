"""Packing: writes samples into shards, parquet files of encoded images, and a manifest that describes them.

A data set is a directory with `manifest.json`, `train/*.parquet` and `val/*.parquet`, of columns image
(encoded bytes), label (int32, or lists of them if an image has several), key (string) and those of further
fields. Images stay encoded until a worker decodes them. Beside the manifest of captioned images,
`tokenizer.json` has a tokenizer of their captions.
"""

import hashlib
import logging
import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from moe.tokenizers import TokenizerConfig
from orchestrator import storage
from orchestrator.data.fields import Stored, stored_as
from orchestrator.data.images import BadImage, Picture, decode, encode_png
from orchestrator.data.index import RECORD, IndexedShard, records_of, write_index
from orchestrator.data.manifest import UNFINISHED, Manifest, Shard, has_manifest, open_manifest, save_manifest
from orchestrator.data.preparation import AS_IT_IS, Preparation, is_transparent
from orchestrator.data.text import TEXT, captions_of, save_tokenizer, tokenizer_of
from orchestrator.errors import UsageError
from orchestrator.packing import open_source
from orchestrator.packing.labels import refuse_unlearnt
from orchestrator.packing.offsets import image_places
from orchestrator.packing.report import PackingReport, Pixels, choose_shown
from orchestrator.packing.samples import Execute, Sample, Source, warn_if_sorted, with_progress

ROWS_PER_SHARD = 512  # about 50 MB of ImageNet's JPEGs
SEQUENCES_PER_SHARD = 1 << 14  # of samples without images
SHARD_BYTES = 64 << 20  # a shard of larger images holds fewer rows
ROWS_PER_GROUP = 64  # other readers of parquet hold so many rows in memory
SCHEMA = pa.schema([("image", pa.binary()), ("label", pa.int32()), ("key", pa.string())])
SEVERAL_LABELS = pa.schema([("image", pa.binary()), ("label", pa.list_(pa.int32())), ("key", pa.string())])
ARROW = {"bytes": pa.binary(), "number": pa.float64()}
SORTED_HINT = "shuffle it first, or write its parquet files without compression, which lets packing mix them"
BESIDE = r"(train|val)\.(index|keys)|skipped\.txt|report\.(json|html)|tokenizer\.json"
OWN = rf"train|val|{BESIDE}|{re.escape(UNFINISHED)}|\..*"  # and hidden files
KEPT = re.compile(rb"\xff\xd8\xff|\x89PNG\r\n\x1a\n|RIFF....WEBP", re.DOTALL)


log = logging.getLogger(__name__)


class Encoded(NamedTuple):
    """The bytes of an image in a shard, its height and width, and what they were made from: whether it had
    transparent pixels, and the largest sample of 16 bits, None where it has fewer bits.
    """

    image: bytes
    size: tuple[int, int] = (0, 0)
    transparent: bool = False
    largest: int | None = None


def encode_for_shard(encoded: bytes, preparation: Preparation = AS_IT_IS) -> Encoded:
    """Returns JPEG, PNG and WebP as they are, and any other image as PNG of the pixels that training sees,
    after `preparation`.

    Raises:
        BadImage: for an image that training cannot decode.
    """
    samples = Picture(encoded).samples()
    largest = None if samples is None else int(samples.max())
    transparent = is_transparent(encoded)
    prepared = preparation.prepare(encoded)
    pixels = decode(prepared)
    kept = prepared if KEPT.match(prepared) else encode_png(pixels.permute(1, 2, 0).numpy())
    return Encoded(kept, (pixels.shape[1], pixels.shape[2]), transparent, largest)


class Packed(NamedTuple):
    """A packed shard (None if no image was valid), the samples skipped, the images of each label, what the
    images are, and the number of captions.
    """

    path: str
    shard: tuple[Shard, IndexedShard] | None
    skipped: tuple[str, ...]
    labels: Counter[int]
    pixels: Pixels
    captions: int

    @property
    def images(self) -> int:
        return self.shard[0].rows if self.shard else 0


def pack(
    out: str,
    source: Source,
    *,
    fresh: bool = False,
    execute: Execute = map,
    encode: Callable[..., Encoded] = encode_for_shard,
    preparation: Preparation = AS_IT_IS,
    tokenizer: TokenizerConfig | None = None,
) -> PackingReport:
    """Packs a source's valid images, and the tokenizer of their captions; the manifest is written last. The
    same source gives the same bytes. Returns what was packed, and what may not be meant so.

    encode: `Encoded` stores images without decoding them, and takes labels as they are.
    preparation: what is done to images; models of these data do it to every image.

    Raises:
        UsageError: if `out` holds a data set and is not to be overwritten, a split has no valid images, or
            validation has classes without training images.
        OSError: if storage fails.
    """
    if not fresh:
        check_free(out)
    storage.write_bytes(storage.join(out, UNFINISHED), b"")
    _make_room(out)
    rows = ROWS_PER_SHARD if source.images else SEQUENCES_PER_SHARD
    is_judged = encode is not Encoded
    encode = partial(encode, preparation=preparation) if is_judged and source.images else Encoded
    tasks = [
        (f"{split}/{number:06d}.parquet", samples)
        for split in source.splits
        for number, samples in enumerate(_chunked(source.splits[split], rows))
    ]
    labels_of = [np.array([s.label for s in samples]) for path, samples in tasks if path.startswith("train")]
    warn_if_sorted(labels_of, "the source", SORTED_HINT)
    most_labels = max((1 + len(s.others) for _, samples in tasks for s in samples), default=1)
    fields = _fields_of(sample for _, samples in tasks for sample in samples)
    work = partial(pack_shard, out, source.fetch, encode, most_labels=most_labels)
    results = with_progress(execute(work, tasks), len(tasks), "packed", lambda packed: packed.images)
    done = sorted(results, key=lambda packed: packed.path)
    skipped = (*source.skipped, *(line for packed in done for line in packed.skipped))
    if skipped:
        storage.write_bytes(storage.join(out, "skipped.txt"), "".join(f"{s}\n" for s in skipped).encode())
    splits, index, labels = {}, {}, {}
    for split in source.splits:
        mine = [packed for packed in done if packed.path.startswith(f"{split}/")]
        shards = [packed.shard for packed in mine if packed.shard]
        splits[split] = tuple(shard for shard, _ in shards)
        labels[split] = sum((packed.labels for packed in mine), Counter[int]())
        if not splits[split]:
            reason = f", see {out}/skipped.txt; the first: {skipped[0]}" if skipped else ""
            raise UsageError(f"no valid {split} images{reason}")
        index[split] = write_index(out, split, (indexed for _, indexed in shards))
    # The listing has judged labels; images that could not be decoded may have been the last of a class.
    if (alone := sorted({*labels["val"]} - {*labels["train"]})) and is_judged:
        known = (labels["train"], labels["val"])
        refuse_unlearnt(*([source.classes[n] for n in sorted(numbers)] for numbers in (alone, *known)))
    manifest = Manifest(
        classes=source.classes,
        splits=splits,
        index=index,
        val_majority=max(labels["val"].values()),
        labels=most_labels,
        fields=fields,
        **vars(preparation),
    )
    if tokenizer:
        save_tokenizer(out, tokenizer)
    save_manifest(out, manifest)
    storage.delete(storage.join(out, UNFINISHED))
    captions = dict.fromkeys(source.splits, 0)
    for packed in done:
        captions[packed.path.partition("/")[0]] += packed.captions
    return PackingReport(
        manifest=manifest,
        skipped=skipped,
        notes=source.notes,
        labels=labels,
        pixels=Pixels.joined([packed.pixels for packed in done]),
        captions=captions if TEXT in fields else {},
        shown=choose_shown(
            (packed.path.partition("/")[0], packed.path, packed.shard[1])
            for packed in done
            if packed.shard and source.images
        ),
    )


def _fields_of(samples: Iterable[Sample]) -> Mapping[str, Stored]:
    """Returns how the further fields of samples are stored. Raises UsageError if they differ."""
    found: Mapping[str, Stored] = {}
    for number, sample in enumerate(samples):
        fields: Mapping[str, Stored] = {name: stored_as(value) for name, value in sample.fields.items()}
        if number and fields != found:
            raise UsageError(f"{sample.key} has the fields {fields}, other samples have {found}")
        found = fields
    for name in found:
        if not name.isidentifier() or name in (*SCHEMA.names, "mix", *(RECORD.names or ())):
            raise UsageError(f"a field cannot be called {name!r}: use another word")
    return found


def pack_shard(
    out: str,
    fetch: Callable[[Sequence[Any]], Iterable[bytes | BadImage]],
    encode: Callable[[bytes], Encoded],
    task: tuple[str, Sequence[Sample]],
    *,
    most_labels: int = 1,
) -> Packed:
    """Reads, checks and writes the images of one shard, on any node.

    `most_labels`: the most labels of an image of the data set.
    """
    path, samples = task
    valid, skipped, images = [], [], []
    for sample, content in zip(samples, fetch([sample.image for sample in samples]), strict=True):
        try:
            if isinstance(content, BadImage):
                raise content
            encoded = encode(content)
            valid.append(sample._replace(image=encoded.image))
            images.append((encoded.size, encoded.transparent, encoded.largest))
        except BadImage as error:
            skipped.append(f"{sample.key}: {error}")
    shard = write_shard(out, path, valid, most_labels) if valid else None
    labels = Counter(label for sample in valid for label in (sample.label, *sample.others))
    captions = sum(len(captions_of(sample.fields[TEXT])) for sample in valid if TEXT in sample.fields)
    return Packed(path, shard, tuple(skipped), labels, Pixels.of(images), captions)


def write_shards(
    out: str,
    classes: Iterable[str],
    splits: Mapping[str, Iterable[Sample]],
    *,
    fresh: bool = False,
    tokenizer: TokenizerConfig | None = None,
) -> Manifest:
    """Packs images that are in memory, without decoding them. Raises as `pack` does."""
    samples = {split: list(samples) for split, samples in splits.items()}
    source = Source(classes=tuple(classes), splits=samples, fetch=iter)
    return pack(out, source, fresh=fresh, encode=Encoded, tokenizer=tokenizer).manifest


def write_shard(
    out: str, path: str, samples: Sequence[Sample], most_labels: int = 1
) -> tuple[Shard, IndexedShard]:
    images, labels, keys, _, others, _ = zip(*samples, strict=True)
    several = most_labels > 1
    sets = [(label, *further) for label, further in zip(labels, others, strict=True)]
    columns, schema = [images, sets if several else labels, keys], SEVERAL_LABELS if several else SCHEMA
    fields: dict[str, Any] = {name: [s.fields[name] for s in samples] for name in sorted(samples[0].fields)}
    for name, values in fields.items():
        schema = schema.append(pa.field(name, ARROW[stored_as(values[0])]))
        columns.append(values)
    sink = pa.BufferOutputStream()
    pq.write_table(
        pa.table(columns, schema=schema),
        sink,
        row_group_size=ROWS_PER_GROUP,
        compression="none",  # images are compressed already, and readers find them verbatim
        use_dictionary=False,
        write_statistics=["label"],  # pyright: ignore[reportArgumentType] # or columns
        write_page_checksum=True,
    )
    buffer = sink.getvalue()
    content = buffer.to_pybytes()
    storage.write_bytes(storage.join(out, path), content)
    view, metadata = memoryview(content), pq.read_metadata(pa.BufferReader(buffer))

    def places_of(column: str) -> tuple[Any, Any, Any]:
        places = image_places(lambda at, size: view[at : at + size], metadata, column)
        assert places, "an uncompressed column without nulls holds its values verbatim"
        return places

    further = {n: places_of(n) if isinstance(v[0], bytes) else v for n, v in fields.items()}
    shard = Shard(
        path=path, rows=len(samples), bytes=len(content), sha256=hashlib.sha256(content).hexdigest()
    )
    return shard, IndexedShard(
        records_of(*places_of("image"), labels, keys, others, most_labels, further), keys
    )


def check_free(out: str) -> None:
    """Raises UsageError if `out` holds a data set, or files of something else."""
    if has_manifest(out):
        raise UsageError(f"{out} already holds a data set: choose another place, or use `fresh`")
    if others := [name for name in storage.names(out) if not re.fullmatch(OWN, name)]:
        raise UsageError(f"{out} holds other files ({others[0]} ..): choose a new or an empty folder")


def _make_room(out: str) -> None:
    """Deletes a data set at `out`, its manifest first, so that the rest is never taken for a data set."""
    if has_manifest(out):
        storage.delete(storage.join(out, "manifest.json"))
        for name in storage.files(out):
            if re.fullmatch(rf"(train|val)/\d{{6}}\.parquet|{BESIDE}", name):
                storage.delete(storage.join(out, name))


def _chunked(samples: Iterable[Sample], rows: int) -> Iterator[list[Sample]]:
    """Cuts samples into shards of so many rows, or about `SHARD_BYTES` where sizes are known."""
    chunk: list[Sample] = []
    size = 0
    for sample in samples:
        if chunk and (len(chunk) == rows or size + sample.size > SHARD_BYTES):
            yield chunk
            chunk, size = [], 0
        chunk.append(sample)
        size += sample.size
    if chunk:
        yield chunk


def captions_of_split(source: Source, split: str) -> list[bytes]:
    """Returns the field `text` of each sample of a split."""
    fields = (sample.fields.get(TEXT) for sample in source.splits[split])
    return [field for field in fields if isinstance(field, bytes)]


def digits(root: str, source: str = "digits") -> str:
    """Packs data that need no download below a storage on first use; returns the path of the shards.

    source: scikit-learn's ``digits``, 1,797 images of 8 x 8 pixels; ``digits-captions``, the same with
    captions; ``cluttered-digits``, the 13,642 images of 16 x 16 pixels that the sweep `quickstart` is trained
    on; or ``python-topics``, the text of the sweep `language`.
    """
    path = storage.join(root, "data", source)
    try:
        open_manifest(path)
    except UsageError:
        # There are none, or those of another version in its format: they are made, so nothing is lost.
        found = open_source(source)
        captions = captions_of_split(found, "train")
        tokenizer = tokenizer_of("words", captions) if captions else None
        pack(path, found, fresh=True, encode=Encoded, tokenizer=tokenizer)
    return path

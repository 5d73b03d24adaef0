"""Pack images, or text, into shards that training can stream.

  python jobs/pack_shards.py --source folder:/data/flowers --out s3://bucket/flowers
  python jobs/pack_shards.py --source webdataset:'/data/shards/train-*.tar' --out /data/packed
  python jobs/pack_shards.py --source torchvision:CIFAR10 --root /data --download --out /data/cifar10
  python jobs/pack_shards.py --source csv:/data/photos.csv --captions --tokenizer bpe:8000 --out /data/photos

Sources; each PATH and --out is local or s3://bucket/prefix:

  digits            1,797 images of 8x8 pixels that ship inside scikit-learn
  digits-captions   the same images with five captions each
  cluttered-digits  13,642 images of 16x16 pixels: the same digits, anywhere among pieces of others
  folder:PATH       a folder per class, or train and val of them
  webdataset:PATH   a tar, a folder of tars, or a pattern; members .jpg .. beside .cls or .json,
                    with a label or a list of them
  parquet:PATH      a file, a folder of them, or a pattern: a column of encoded images and one of labels,
                    or of lists of them where images have several
  csv:PATH          a csv, tsv or jsonl file, a folder of them, or a pattern: a column of paths and one of
                    labels
  mds:PATH          a folder of mosaicml-streaming's MDSWriter, or train and val of them
  litdata:PATH      a folder of LitData's optimize, or train and val of them
  python-topics     0.5 MB of text about Python that ship inside Python, in sequences of 129 bytes
  text:PATH         a text file, a folder of .txt, .md and .rst files, or a pattern; longer sequences are
                    'text:PATH?length=256', of 257 bytes
  FILE.py:NAME      a function in a file of your own, which returns samples
  KIND:PATH         a format of your own, which --plugin FILE defines
  torchvision:NAME  a class of torchvision.datasets, below --root, fetched only with --download;
                    other arguments of the class follow: 'torchvision:EMNIST?split=letters'

With --captions, labels are optional, and captions come from .txt files beside the images of a folder (one
in a line), .txt or .json members of tars, or a column of parquet and csv files.

Beside the shards, report.html shows a few images of each class, and what may not be meant so: look at it.

All CPUs of the Ray cluster of $RAY_ADDRESS, or of this machine, pack at the same time; fewer than eight
shards are packed by this process. More: docs/data.md.
"""

from __future__ import annotations

import json
import os
import sys
from collections import Counter
from dataclasses import dataclass
from math import ceil, log
from typing import TYPE_CHECKING

from jobs._cli import check_writable, command, on_cluster
from jobs._flags import PLUGIN, flag, parse
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from moe.tokenizers import TokenizerConfig
    from orchestrator.data.text import CaptionReport
    from orchestrator.packing.pack import PackingReport

SHOWN = 20  # lines about skipped files
TOKENS, BATCH = (
    16,
    256,
)  # of the papers' text towers, and of a small run: what the report on captions is about
REPEATED = 0.9  # of a batch; a warning is printed if fewer captions are distinct


@dataclass(frozen=True, kw_only=True)
class PackFlags:
    source: str = flag(help="see above")
    out: str = flag(help="directory or URI for train/, val/ and manifest.json")
    val_frac: float = flag(0.2, "fraction for validation, of text its end, if the source has no split")
    fresh: bool = flag(False, "replace an earlier data set at --out")
    root: str = flag("data", "where torchvision keeps its files")
    download: bool = flag(False, "let torchvision fetch what is missing")
    image_column: str | None = flag(
        None, "column of parquet files; default: image, img, jpg, ..; of csv files: of paths"
    )
    label_column: str | None = flag(None, "column of parquet and csv files; default: label, cls, class, ..")
    captions: bool = flag(False, "images have captions, which are packed with them")
    caption_column: str | None = flag(None, "column of parquet and csv files; default: caption, text, ..")
    tokenizer: str | None = flag(
        None,
        "of captions: words, words:SIZE or bpe:SIZE, made from those for training, or a file, as another data"
        " set's tokenizer.json or CLIP's merges; default: words",
    )
    caption_lines: bool = flag(False, "each line of a .txt in a tar is a caption; default: the whole text is")
    background: str | None = flag(
        None, "colour under transparent pixels, as white or #808080; default: alpha is dropped"
    )
    white: int | None = flag(
        None, "sample of 16-bit images that becomes white, as 4095; default: 65535, by the high byte"
    )
    ignore_split_names: bool = flag(
        False, "train, val, test and the like, in names of folders, files and samples, are no splits"
    )
    json: bool = flag(False, "print the report as JSON")
    plugin: tuple[str, ...] = PLUGIN


def main() -> None:
    flags = parse(PackFlags, __doc__)
    with command(f"packing {flags.source} into {flags.out}", to=sys.stderr if flags.json else None):
        pack_source(flags)


def pack_source(flags: PackFlags) -> None:
    """Packs the source and prints a report. Raises UsageError for an --out that cannot be used."""
    from orchestrator import storage
    from orchestrator.data.parquet import Columns
    from orchestrator.packing import source_of
    from orchestrator.plugins import load_plugins

    if not flags.out:
        raise UsageError("--out is empty: name a directory or URI")
    out = storage.absolute(flags.out).rstrip("/")
    load_plugins(flags.plugin)
    source = source_of(
        flags.source,
        root=flags.root,
        download=flags.download,
        val_frac=flags.val_frac,
        columns=Columns(flags.image_column, flags.label_column, flags.caption_column),
        captions=flags.captions or bool(flags.caption_column),
        caption_lines=flags.caption_lines,
        ignore_split_names=flags.ignore_split_names,
    )
    place = source.location()
    if place and (f"{out}/".startswith(f"{place}/") or f"{place}/".startswith(f"{out}/")):
        # --fresh could delete the source.
        raise UsageError(f"--out {out} and the source {place} lie in each other: choose another place")
    captions = source.captions or source.captioned == "all"
    if flags.tokenizer and not captions:
        raise UsageError("--tokenizer is that of captions: give --captions too")
    check_writable("--out", out)

    from orchestrator.data.preparation import Preparation
    from orchestrator.data.text import caption_report, tokenizer_of
    from orchestrator.packing.pack import captions_of_split, check_free, pack

    if not flags.fresh:
        check_free(out)
    preparation = Preparation(background=flags.background, white=flags.white)
    listed = source.samples(on_cluster)
    train, val = (captions_of_split(listed, split) if captions else [] for split in ("train", "val"))
    tokenizer = tokenizer_of(flags.tokenizer or "words", train) if captions else None
    more = {"preparation": preparation, "tokenizer": tokenizer}
    report = pack(out, listed, fresh=flags.fresh, execute=on_cluster, **more)
    report.save(out)
    if flags.json:
        print(json.dumps(report.to_json(), indent=1))
        return
    if tokenizer:
        print_captions(tokenizer, caption_report(tokenizer, train, val, batch=BATCH))
    print_report(out, report, "images" if listed.images else "sequences")


def print_report(out: str, report: PackingReport, noun: str) -> None:
    manifest, pixels = report.manifest, report.pixels
    print_skipped(report)
    for split, shards in manifest.splits.items():
        size = sum(shard.bytes for shard in shards) / 1e6
        print(f"{split}: {manifest.rows(split)} {noun}, {size:.1f} MB in {len(shards)} shards")
    for number, name in enumerate(manifest.classes[:SHOWN]):
        counts = " and ".join(f"{report.labels[split][number]:,} {split}" for split in manifest.splits)
        print(f"class {number}, {name}: {counts}")
    if len(manifest.classes) > SHOWN:
        print(f".. and {len(manifest.classes) - SHOWN} more classes, see {out}/report.html")
    total = sum(manifest.rows(split) for split in manifest.splits)
    if pixels.transparent and manifest.background:
        shown = f"{pixels.transparent:,} of {total:,} images"
        print(f"{shown} have transparency and were put on {manifest.background}")
    for line in report.warnings():
        print(f"warning: {line}")
    several = f", up to {manifest.labels} labels per image" if manifest.labels > 1 else ""
    print(
        f"{out}: {manifest.rows('train')} training and {manifest.rows('val')} validation {noun},"
        f" {len(manifest.classes)} classes{several}, {len(report.skipped)} skipped"
    )


def print_skipped(report: PackingReport) -> None:
    from orchestrator.packing.report import NOT_AN_IMAGE

    others = [line.removesuffix(NOT_AN_IMAGE) for line in report.skipped if line.endswith(NOT_AN_IMAGE)]
    if others:
        extensions = Counter(os.path.splitext(name)[1].lower() for name in others).most_common(SHOWN)
        listed = ", ".join(f"{count:,} {extension}" for extension, count in extensions)
        print(f"skipped {len(others):,} files that are not images: {listed}")
    reasons = [found for found in report.reasons() if NOT_AN_IMAGE[2:] not in found[0]]
    for why, count, first in reasons[:SHOWN]:
        print(f"skipped {first}: {why}" if count == 1 else f"skipped {count:,}: {why}, such as {first}")
    if len(reasons) > SHOWN:
        print(f".. for {len(reasons) - SHOWN} more reasons, see skipped.txt")


def print_captions(tokenizer: TokenizerConfig, report: CaptionReport) -> None:
    lengths = sorted(report.lengths.tolist())
    middle, most = (lengths[ceil(share * len(lengths)) - 1] for share in (0.5, 0.95))
    print(
        f"captions: {report.captions:,} of {report.images:,} training images, at most {report.most} of an"
        f" image; {report.distinct:,} are distinct"
    )
    print(
        f"tokens of a caption, with its end: median {middle}, 95 % at most {most}, longest"
        f" {lengths[-1]}; {report.cut(TOKENS):.1%} are cut at {TOKENS}"
    )
    print(
        f"tokenizer: {tokenizer.kind}, {tokenizer.size():,} ids; it does not know {report.unknown:.1%} of the"
        " words of validation"
    )
    distinct, batch = report.distinct_in_batch, report.batch
    print(f"a batch of {batch} images has about {distinct:.0f} distinct captions")
    if distinct < REPEATED * batch:
        print(
            "warning: equal captions of a batch count as wrong pairs, unless the task takes them for right;"
            f" a loss that stays at ln {batch} = {log(batch):.2f} (softmax) or about {log(batch) + 1:.2f}"
            " (sigmoid) means that nothing is learnt"
        )


if __name__ == "__main__":
    main()

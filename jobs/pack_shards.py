"""Pack images into shards that training can stream.

  python jobs/pack_shards.py --source folder:/data/flowers --out s3://bucket/flowers
  python jobs/pack_shards.py --source webdataset:'/data/shards/train-*.tar' --out /data/packed
  python jobs/pack_shards.py --source torchvision:CIFAR10 --root /data --download --out /data/cifar10

Sources; each PATH and --out is local or s3://bucket/prefix:

  digits            1,797 images of 8x8 pixels that ship inside scikit-learn
  cluttered-digits  13,642 images of 16x16 pixels: the same digits, anywhere among pieces of others
  folder:PATH       a folder per class, or train and val of them
  webdataset:PATH   a tar, a folder of tars, or a pattern; members .jpg .. beside .cls or .json,
                    with a label or a list of them
  parquet:PATH      a file, a folder of them, or a pattern: a column of encoded images and one of labels,
                    or of lists of them where images have several
  FILE.py:NAME      a function in a file of your own, which returns samples
  torchvision:NAME  a class of torchvision.datasets, below --root, fetched only with --download;
                    other arguments of the class follow: 'torchvision:EMNIST?split=letters'

All CPUs of the Ray cluster of $RAY_ADDRESS, or of this machine, pack at the same time; fewer than eight
shards are packed by this process. More: docs/data.md.
"""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from jobs._cli import check_writable, command, on_cluster
from jobs._flags import flag, parse
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.data.packing import PackingReport

KINDS = ("folder", "webdataset", "parquet", "torchvision")  # of sources with a path
SHOWN = 20  # lines about skipped files


def source_name(text: str) -> str:
    """Reads --source. Raises UsageError for a kind of path that does not exist."""
    kind, colon, _ = text.partition(":")
    if colon and kind not in KINDS and not kind.endswith(".py"):
        known = ("digits", "cluttered-digits", *KINDS, "your own FILE.py:NAME")
        raise UsageError(f"unknown kind {kind!r} of sources; known: {', '.join(known)}")
    return text


@dataclass(frozen=True, kw_only=True)
class PackFlags:
    source: str = flag(help="see above", read=source_name)
    out: str = flag(help="directory or URI for train/, val/ and manifest.json")
    val_frac: float = flag(0.2, "fraction of images for validation, if the source has no split")
    fresh: bool = flag(False, "replace an earlier data set at --out")
    root: str = flag("data", "where torchvision keeps its files")
    download: bool = flag(False, "let torchvision fetch what is missing")
    image_column: str | None = flag(None, "column of parquet files; default: image, img, jpg, ..")
    label_column: str | None = flag(None, "column of parquet files; default: label, cls, class, ..")
    background: str | None = flag(
        None, "colour under transparent pixels, as white or #808080; default: alpha is dropped"
    )


def main() -> None:
    flags = parse(PackFlags, __doc__)
    with command(f"packing {flags.source} into {flags.out}"):
        pack_source(flags)


def pack_source(flags: PackFlags) -> None:
    """Packs the source and prints a report. Raises UsageError for an --out that cannot be used."""
    from orchestrator import storage

    if not flags.out:
        raise UsageError("--out is empty: name a directory or URI")
    out = storage.absolute(flags.out).rstrip("/")
    kind, _, path = flags.source.partition(":")
    place = storage.absolute(path).rstrip("/")
    apart = not f"{out}/".startswith(f"{place}/") and not f"{place}/".startswith(f"{out}/")
    if kind in ("folder", "webdataset", "parquet") and not apart:  # --fresh could delete the images
        raise UsageError(f"--out {out} and the source {place} lie in each other: choose another place")
    check_writable("--out", out)

    from orchestrator.data.formats import Columns
    from orchestrator.data.packing import check_free, encode_for_shard, pack
    from orchestrator.data.sources import open_source
    from orchestrator.data.transparency import colour

    if not flags.fresh:
        check_free(out)
    encode = partial(encode_for_shard, background=colour(flags.background) if flags.background else None)
    source = open_source(
        flags.source,
        root=flags.root,
        download=flags.download,
        val_frac=flags.val_frac,
        columns=Columns(flags.image_column, flags.label_column),
        execute=on_cluster,
    )
    report = pack(out, source, fresh=flags.fresh, execute=on_cluster, encode=encode)
    print_report(out, report, flags.background)


def print_report(out: str, report: PackingReport, background: str | None) -> None:
    from orchestrator.data.sources import NOT_AN_IMAGE

    manifest = report.manifest
    others = [line.removesuffix(NOT_AN_IMAGE) for line in report.skipped if line.endswith(NOT_AN_IMAGE)]
    if others:
        extensions = Counter(os.path.splitext(name)[1].lower() for name in others).most_common(SHOWN)
        listed = ", ".join(f"{count:,} {extension}" for extension, count in extensions)
        print(f"skipped {len(others):,} files that are not images: {listed}")
    skipped = [line for line in report.skipped if not line.endswith(NOT_AN_IMAGE)]
    for line in skipped[:SHOWN]:
        print(f"skipped {line}")
    if len(skipped) > SHOWN:
        print(f".. and {len(skipped) - SHOWN} more, see {out}/skipped.txt")
    for split, shards in manifest.splits.items():
        size = sum(shard.bytes for shard in shards) / 1e6
        print(f"{split}: {manifest.rows(split)} images, {size:.1f} MB in {len(shards)} shards")
        missing = [name for number, name in enumerate(manifest.classes) if not report.labels[split][number]]
        if missing:
            print(f"warning: {split} has no image of {len(missing)} classes: {', '.join(missing[:SHOWN])}")
    rows = {split: manifest.rows(split) for split in manifest.splits}
    if report.transparent:
        done = f"were put on {background}" if background else "are trained on without their alpha"
        hint = "" if background else ": --background white, here and in predict.py, puts them on a colour"
        print(f"{report.transparent:,} of {sum(rows.values()):,} images have transparency and {done}{hint}")
    if len(report.skipped) > sum(rows.values()):
        print(f"warning: more than half of all files were skipped, see {out}/skipped.txt")
    several = f", up to {manifest.labels} labels per image" if manifest.labels > 1 else ""
    print(
        f"{out}: {rows['train']} training and {rows['val']} validation images,"
        f" {len(manifest.classes)} classes{several}, {len(report.skipped)} skipped"
    )


if __name__ == "__main__":
    main()

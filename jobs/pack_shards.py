"""Pack images into shards that training can stream.

  python jobs/pack_shards.py --source folder:/data/flowers --out s3://bucket/flowers
  python jobs/pack_shards.py --source webdataset:'/data/shards/train-*.tar' --out /data/packed
  python jobs/pack_shards.py --source torchvision:CIFAR10 --root /data --download --out /data/cifar10

Sources; each PATH, FILE and --out is local or s3://bucket/prefix:

  digits            1,797 images of 8x8 pixels that ship inside scikit-learn
  folder:PATH       a folder per class, or train and val of them
  webdataset:PATH   a tar, a folder of tars, or a pattern; members .jpg .. beside .cls or .json
  parquet:PATH      a file, or a folder of them: a column of encoded images or of paths, one of labels
  csv:FILE          columns path, label and perhaps split; paths are relative to the file
  jsonl:FILE        the same as an object a line
  torchvision:NAME  a class of torchvision.datasets, below --root, fetched only with --download;
                    other arguments of the class follow: 'torchvision:EMNIST?split=letters'

All CPUs of the Ray cluster of $RAY_ADDRESS, or of this machine, pack at the same time; fewer than eight
shards are packed by this process. More: docs/data.md.
"""

from __future__ import annotations

import argparse
import logging
import os
import pickle
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from jobs.usage import command, plain_parser
from orchestrator.errors import UsageError

if TYPE_CHECKING:
    from orchestrator.data.packing import Report

SHOWN = 20  # lines about skipped files
WORTH_A_CLUSTER = 8  # tasks: Ray's processes need longer to start than a few shards to be packed


def main() -> None:
    parser = plain_parser(__doc__)
    parser.add_argument("--source", required=True, help="see above")
    parser.add_argument("--out", required=True, help="directory or URI for train/, val/ and manifest.json")
    parser.add_argument(
        "--val-frac", type=float, default=0.2, help="validation, of a source without a split (%(default)s)"
    )
    parser.add_argument("--overwrite", action="store_true", help="replace the data set that is there")
    parser.add_argument("--root", default="data", help="where torchvision keeps its files (%(default)s)")
    parser.add_argument("--download", action="store_true", help="let torchvision fetch what is missing")
    args = parser.parse_args()
    with command(f"packing {args.source} into {args.out}"):
        pack_source(args)


def pack_source(args: argparse.Namespace) -> None:
    """Packs the source and prints what became of it.

    Raises:
        UsageError: for an --out that lies in the source, holds a data set, or cannot be written to.
    """
    from jobs.command import check_writable
    from orchestrator import storage
    from orchestrator.data.packing import check_free, pack
    from orchestrator.data.sources import open_source

    if not args.out:
        raise UsageError("--out is empty: name a directory or URI")
    out = storage.absolute(args.out).rstrip("/")
    kind, _, path = args.source.partition(":")
    place = storage.absolute(path).rstrip("/")
    apart = not f"{out}/".startswith(f"{place}/") and not f"{place}/".startswith(f"{out}/")
    if kind in ("folder", "webdataset", "parquet") and not apart:  # --overwrite could delete the images
        raise UsageError(f"--out {out} and the source {place} lie in each other: choose another place")
    if not args.overwrite:
        check_free(out)
    check_writable("--out", out)
    source = open_source(
        args.source, root=args.root, download=args.download, val_frac=args.val_frac, execute=on_cluster
    )
    print_report(out, pack(out, source, overwrite=args.overwrite, execute=on_cluster))


def on_cluster(work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
    """The result of `work` for each task, as Ray Data's tasks get ready on any CPU; a few are done here."""
    if len(tasks) < WORTH_A_CLUSTER:
        yield from map(work, tasks)
        return

    import ray.data

    from jobs.command import connect

    connect()

    def run(row: dict[str, Any]) -> dict[str, Any]:
        try:
            result = work(pickle.loads(row["task"]))
        except (UsageError, OSError) as error:
            result = error
        return {"result": pickle.dumps(result)}

    rows = [{"task": pickle.dumps(task)} for task in tasks]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map(run)
    dataset.context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it explains each execution at length
    for row in dataset.iter_rows():
        result = pickle.loads(row["result"])
        if isinstance(result, Exception):
            raise result
        yield result


def print_report(out: str, report: Report) -> None:
    from orchestrator.data.sources.folder import NOT_AN_IMAGE

    manifest = report.manifest
    others = [line.removesuffix(NOT_AN_IMAGE) for line in report.skipped if line.endswith(NOT_AN_IMAGE)]
    if others:
        extensions = Counter(os.path.splitext(name)[1].lower() for name in others).most_common()
        listed = [f"{count:,} {extension}" for extension, count in extensions[:SHOWN]]
        listed += [".."] if len(extensions) > SHOWN else []
        print(f"skipped {len(others):,} files that are not images: {', '.join(listed)}")
    skipped = [line for line in report.skipped if not line.endswith(NOT_AN_IMAGE)]
    for line in skipped[:SHOWN]:
        print(f"skipped {line}")
    if len(skipped) > SHOWN:
        print(f".. and {len(skipped) - SHOWN} more, see {out}/skipped.txt")
    for split, shards in manifest.splits.items():
        size = sum(shard.bytes for shard in shards)
        missing = [name for number, name in enumerate(manifest.classes) if not report.labels[split][number]]
        print(f"{split}: {manifest.rows(split)} images, {size / 1e6:.1f} MB in {len(shards)} shards")
        if missing:
            print(f"warning: {split} has no image of {len(missing)} classes: {', '.join(missing[:SHOWN])}")
    if len(report.skipped) > sum(map(manifest.rows, manifest.splits)):
        print(f"warning: more than half of all files were skipped, see {out}/skipped.txt")
    print(
        f"{out}: {manifest.rows('train')} training and {manifest.rows('val')} validation images,"
        f" {len(manifest.classes)} classes, {len(report.skipped)} skipped"
    )


if __name__ == "__main__":
    main()

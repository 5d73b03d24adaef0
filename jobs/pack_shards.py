"""Pack images into shards that training can stream.

  python jobs/pack_shards.py --source digits --out runs/data/digits
  python jobs/pack_shards.py --source folder:/data/flowers --out s3://bucket/flowers
  python jobs/pack_shards.py --source torchvision:CIFAR10 --root /data --out /data/cifar10-shards

A folder has one folder per class, or `train` and `val` with one folder per class each.
"""

import argparse

from jobs.usage import command
from orchestrator import storage
from orchestrator.data.packing import write_shards
from orchestrator.data.sources import open_source


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--source", required=True, help="digits | folder:PATH | torchvision:NAME")
    parser.add_argument("--out", required=True, help="directory or URI for train/, val/ and manifest.json")
    parser.add_argument("--root", default="data", help="where torchvision keeps or downloads its files")
    args = parser.parse_args()
    with command():
        source = open_source(args.source, root=args.root)
        out = storage.absolute(args.out)
        manifest = write_shards(out, source.classes, source.splits)
        for line in source.skipped:
            print(f"skipped {line}")
        print(
            f"{out}: {manifest.rows('train')} training and {manifest.rows('val')} validation images,"
            f" {len(manifest.classes)} classes, {len(source.skipped)} skipped"
        )


if __name__ == "__main__":
    main()

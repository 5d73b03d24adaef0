"""Find images that two splits or data sets have in common: a table, a CSV of pairs, and a page to look at.

python papers/jobs/duplicates.py /data/flowers
python papers/jobs/duplicates.py /data/pretraining /data/flowers s3://bucket/pets --out /tmp/duplicates

Compares train with val of each data set, and every split with those of the others. Two images whose hashes
differ by at most 4 of 64 bits are duplicates, up to 8 they are to be looked at; mirror images count. Images
below 32 pixels are compared pixel by pixel. Nothing is removed: leave out the keys that the CSV lists.
"""

from __future__ import annotations

import base64
import csv
import io
from dataclasses import dataclass
from html import escape
from itertools import combinations, islice
from typing import TYPE_CHECKING

from jobs._cli import Storage, check_out, command, print_table
from jobs._flags import flag, parse

if TYPE_CHECKING:
    from orchestrator.data.shards import DataSet
    from papers.duplicates import HashedSplit, Pair

CSV, PAGE = "duplicates.csv", "duplicates.html"
COLUMNS = ("verdict", "distance", "mirrored", "one", "one_key", "other", "other_key")
SHOWN = 100  # pairs on the page, the nearest first
MOST = 100_000  # pairs of two splits that are listed
STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
  color: light-dark(#222, #ddd); background: light-dark(#fff, #181818); color-scheme: light dark; }
figure { display: inline-block; margin: .5rem; width: 20rem; vertical-align: top; overflow-wrap: anywhere; }
img { width: 9.5rem; height: 9.5rem; object-fit: contain; background: #8882; }
figcaption { font-size: .8rem; }
"""


@dataclass(frozen=True, kw_only=True)
class DuplicatesFlags:
    data: tuple[str, ...] = flag(
        help="packed images, or shards of other projects", positional=True, nargs="+"
    )
    out: str | None = flag(
        None, f"folder or URI for {CSV} and {PAGE}; default: duplicates/ below the storage"
    )
    cache_gb: float = flag(20.0, "the most that images from elsewhere take of this machine's disk")
    storage: Storage


def main() -> None:
    flags = parse(DuplicatesFlags, __doc__)
    with command(f"looking for duplicates in {', '.join(flags.data)}", None):
        find_duplicates(flags)


def find_duplicates(flags: DuplicatesFlags) -> None:
    """Hashes every split, compares them in pairs, and writes what is near."""
    from orchestrator import storage
    from orchestrator.data.manifest import open_manifest
    from orchestrator.data.shards import DataSet
    from papers.duplicates import SAME, hash_split, pairs

    out = storage.absolute(flags.out) if flags.out else flags.storage.below("duplicates")
    check_out(out, own=(CSV, PAGE))
    opened: dict[str, tuple[DataSet, str]] = {}
    hashed: list[HashedSplit] = []
    for path in dict.fromkeys(map(flags.storage.shards, flags.data)):
        data = DataSet(path=path, manifest=open_manifest(path), cache_bytes=int(flags.cache_gb * 1e9))
        for split in data.manifest.splits:
            name = f"{path} {split}"
            print(f"hashing {data.manifest.rows(split):,} images of {name}", flush=True)
            opened[name] = data, split
            hashed.append(hash_split(data, split, name))
    found: list[tuple[HashedSplit, HashedSplit, Pair]] = []
    rows = []
    for one, other in combinations(hashed, 2):
        near = sorted(islice(pairs(one, other), MOST), key=lambda pair: pair.distance)
        same = [pair for pair in near if pair.distance <= SAME]
        share = len({pair.other for pair in same}) / max(1, len(other.keys))
        rows.append((one.name, other.name, len(same), len(near) - len(same), f"{share:.2%}"))
        found += [(one, other, pair) for pair in near]
        if len(near) == MOST:
            print(f"note: the first {MOST:,} pairs of {one.name} and {other.name} are listed")
    found.sort(key=lambda each: each[2].distance)
    columns = ("one", "other", "duplicates", "to look at", "of the other")
    print_table(columns, rows, title="pairs of images", left=2)
    storage.write_bytes(storage.join(out, CSV), as_csv(found, SAME).encode())
    storage.write_bytes(storage.join(out, PAGE), as_page(found[:SHOWN], len(found), opened).encode())
    print(f"{out}/{{{CSV},{PAGE}}}")


def as_csv(found: list[tuple[HashedSplit, HashedSplit, Pair]], same: int) -> str:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    for one, other, (i, j, distance, mirrored) in found:
        verdict = "duplicate" if distance <= same else "look at"
        writer.writerow((verdict, distance, mirrored, one.name, one.keys[i], other.name, other.keys[j]))
    return text.getvalue()


def as_page(
    shown: list[tuple[HashedSplit, HashedSplit, Pair]], count: int, opened: dict[str, tuple[DataSet, str]]
) -> str:
    """Returns HTML with both images of each pair beside each other."""
    import numpy as np

    from orchestrator.data.images import decode, encode_png

    def picture(of: HashedSplit, place: int) -> str:
        data, split = opened[of.name]
        (read,) = data.readers(split, np.array([of.number[place]]))
        png = encode_png(decode(read()).permute(1, 2, 0).numpy())
        return f'<img alt="" src="data:image/png;base64,{base64.b64encode(png).decode()}">'

    figures = [
        f"<figure>{picture(one, i)} {picture(other, j)}<figcaption>{distance} bits"
        f"{', mirrored' if mirrored else ''}<br>{escape(one.name)}: {escape(one.keys[i])}<br>"
        f"{escape(other.name)}: {escape(other.keys[j])}</figcaption></figure>"
        for one, other, (i, j, distance, mirrored) in shown
    ]
    title = "Images in common"
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}</title><style>{STYLE}</style>'
        f"<h1>{title}</h1><p>{count:,} pairs, the nearest {len(shown):,} of them here; all are in {CSV}. Flat"
        f" images are near to each other whatever they show.</p>{''.join(figures)}</html>"
    )


if __name__ == "__main__":
    main()

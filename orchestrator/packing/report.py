"""The meaning of packed data: a report in words, as JSON and as a page with a few images of each class.

It shows what people see at a glance and numbers hide: classes that are splits or folders of something else,
images that are black, labels that are off by one.
"""

import base64
import html
import io
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from statistics import median
from typing import Any, NamedTuple

from PIL import Image

from orchestrator import storage
from orchestrator.data.images import BadImage, Transform
from orchestrator.data.index import IndexedShard
from orchestrator.data.manifest import Manifest

DARK = 1 << 14  # samples of 16 bits: an image of none above is at most 63 of 255
FEW = 5  # training images of a class
MOST_COMMON = 0.5  # of the validation images
SHOWN = 20  # classes, and reasons, in words
FOLDERS = 5  # of files that are no images
CLASSES = 200  # on the page
PER_CLASS = 8  # images of a class on the page
SIDE = 72  # pixels of an image on the page
NOT_AN_IMAGE = ": is not an image by its name"  # the end of such lines about skipped files
IN_FILES = (".tar", ".parquet", ".csv", ".tsv", ".jsonl")  # of which lines name a sample too
REPORT, PAGE = "report.json", "report.html"

STYLE = """body { font: 15px/1.45 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem; padding: 0 1rem;
  color: light-dark(#222, #ddd); background: light-dark(#fff, #181818); color-scheme: light dark; }
td { padding: .2rem .8rem .2rem 0; vertical-align: middle; } td.n { text-align: right; }
th { text-align: left; }
img { width: 4.5rem; height: 4.5rem; margin-right: 2px; image-rendering: pixelated; }
img.val { outline: 2px solid #c80; outline-offset: -2px; } li { margin: .2rem 0; }"""


class Pixels(NamedTuple):
    """Properties of images, as counted while they are packed.

    sizes: (height, width) -> images.
    transparent: images with transparent pixels.
    deep, dark: images of 16 bits, and those of them that have no sample of `DARK` or above.
    largest, largest_dark: the largest sample of the images of 16 bits, and of those that are dark.
    """

    sizes: Counter[tuple[int, int]]
    transparent: int
    deep: int
    dark: int
    largest: int
    largest_dark: int

    @classmethod
    def of(cls, images: Sequence[tuple[tuple[int, int], bool, int | None]]) -> "Pixels":
        """Counts images by their size, whether they are transparent, and the largest of their samples if they
        have 16 bits.
        """
        deep = [largest for *_, largest in images if largest is not None]
        dark = [largest for largest in deep if largest < DARK]
        return cls(
            Counter(size for size, *_ in images),
            sum(transparent for _, transparent, _ in images),
            len(deep),
            len(dark),
            max(deep, default=0),
            max(dark, default=0),
        )

    @classmethod
    def joined(cls, parts: Sequence["Pixels"]) -> "Pixels":
        sizes = sum((part.sizes for part in parts), Counter[tuple[int, int]]())
        _, transparent, deep, dark, largest, largest_dark = zip(*parts, strict=True)
        return cls(sizes, sum(transparent), sum(deep), sum(dark), max(largest), max(largest_dark))


class Shown(NamedTuple):
    """The place of an image on the page."""

    split: str
    key: str
    path: str
    offset: int
    size: int


@dataclass(frozen=True, kw_only=True)
class PackingReport:
    """The data set that was packed, and what it means.

    skipped: all files and samples left out, with the reason; also in `skipped.txt` beside the manifest.
    notes: what may not be meant so, in words.
    labels: split -> how many images have each label.
    pixels: what the images are; empty if samples have none.
    captions: split -> how many captions there are.
    shown: the places of a few images of each label.
    """

    manifest: Manifest
    skipped: tuple[str, ...]
    notes: tuple[str, ...]
    labels: Mapping[str, Counter[int]]
    pixels: Pixels
    captions: Mapping[str, int] = field(default_factory=dict)
    shown: Mapping[int, Sequence[Shown]] = field(default_factory=dict)

    def warnings(self) -> list[str]:
        """Returns what may not be meant so, in words: the notes, and what the counts show."""
        found = [*self.notes]
        manifest, pixels = self.manifest, self.pixels
        trained = self.labels["train"]
        total = sum(manifest.rows(split) for split in manifest.splits)
        for split, counts in self.labels.items():
            if missing := [name for number, name in enumerate(manifest.classes) if not counts[number]]:
                found.append(f"{split} has no image of {len(missing)} classes: {_listed(missing)}")
        few = [f"{n} ({trained[i]})" for i, n in enumerate(manifest.classes) if 0 < trained[i] < FEW]
        if few and len(manifest.classes) > 1:
            found.append(f"{len(few)} classes have fewer than {FEW} training images: {_listed(few)}")
        share = manifest.val_majority / manifest.rows("val")
        if share > MOST_COMMON and len(manifest.classes) > 2:
            name = manifest.classes[self.labels["val"].most_common(1)[0][0]]
            found.append(f"{share:.0%} of the validation images are of {name}: guessing it is as often right")
        if pixels.dark and 2 * pixels.dark >= pixels.deep and manifest.white is None:
            bright = f"; with `white` {pixels.largest_dark} they are bright" if pixels.largest_dark else ""
            found.append(
                f"{pixels.dark:,} of {total:,} images have samples of 16 bits, none above"
                f" {pixels.largest_dark}: they are packed nearly black{bright}"
            )
        if pixels.transparent and manifest.background is None:
            found.append(
                f"{pixels.transparent:,} of {total:,} images have transparency and are trained on without"
                " their alpha: `background` white puts them on a colour"
            )
        if manifest.white and pixels.largest > manifest.white:
            found.append(f"samples of 16 bits reach {pixels.largest}, and {manifest.white} is white already")
        if len(self.skipped) > total:
            found.append("more than half of all files were skipped, see skipped.txt")
        return found

    def reasons(self) -> list[tuple[str, int, str]]:
        """Counts the reasons why files and samples were skipped, and names the first of each, the most
        frequent reason first. Files that are no images are told apart by their extension.
        """
        found: dict[str, list[str]] = {}
        for line in self.skipped:
            what, reason = _parted(line)
            if line.endswith(NOT_AN_IMAGE):
                reason = f"{PurePosixPath(what).suffix.lower()} {reason}"
            found.setdefault(reason, []).append(what)
        by_count = sorted(found.items(), key=lambda item: -len(item[1]))
        return [(_with_folders(why, what), len(what), what[0]) for why, what in by_count]

    def to_json(self) -> dict[str, Any]:
        manifest, pixels = self.manifest, self.pixels
        heights, widths = self._sides()
        return {
            "images": {split: manifest.rows(split) for split in manifest.splits},
            "classes": [
                {"name": name, **{split: counts[number] for split, counts in self.labels.items()}}
                for number, name in enumerate(manifest.classes)
            ],
            "labels_per_image": manifest.labels,
            "fields": dict(manifest.fields),
            "captions": dict(self.captions),
            "background": manifest.background,
            "white": manifest.white,
            "height": _spread(heights),
            "width": _spread(widths),
            "transparent": pixels.transparent,
            "sixteen_bits": {"images": pixels.deep, "dark": pixels.dark, "largest": pixels.largest},
            "warnings": self.warnings(),
            "skipped": [{"reason": why, "count": n, "first": first} for why, n, first in self.reasons()],
        }

    def _sides(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sizes = [size for size in self.pixels.sizes.elements() if size != (0, 0)]
        return (tuple(height for height, _ in sizes), tuple(width for _, width in sizes))

    def save(self, out: str) -> None:
        """Writes `report.json` and `report.html` beside the manifest. Raises OSError if storage fails."""
        storage.write_bytes(storage.join(out, REPORT), json.dumps(self.to_json(), indent=1).encode())
        storage.write_bytes(storage.join(out, PAGE), self._page(out).encode())

    def _page(self, out: str) -> str:
        manifest, esc = self.manifest, html.escape
        rows = []
        for number, name in enumerate(manifest.classes[:CLASSES]):
            images = "".join(_picture(out, shown) for shown in self.shown.get(number, ()))
            counts = "".join(f'<td class="n">{self.labels[s][number]:,}</td>' for s in ("train", "val"))
            rows.append(f"<tr><td>{number}</td><td>{esc(name)}</td>{counts}<td>{images}</td></tr>")
        if len(manifest.classes) > CLASSES:
            rows.append(f"<tr><td></td><td>.. {len(manifest.classes) - CLASSES} more classes</td></tr>")
        warned = "".join(f"<li>{esc(line)}</li>" for line in self.warnings())
        reasons = (f"{count:,}: {why}, such as {first}" for why, count, first in self.reasons()[:SHOWN])
        height, width = (_spread([*each]) for each in self._sides())
        medians = (height["median"], width["median"]) if height and width else None
        size = f", of {medians[1]:g} x {medians[0]:g} pixels (medians)" if medians else ""
        left_out = "".join(f"<li>{esc(line)}</li>" for line in reasons)
        return f"""<!doctype html><html lang="en"><meta charset="utf-8">
<title>{esc(out)}</title><style>{STYLE}</style>
<h1>{esc(out.rpartition("/")[2])}</h1>
<p>{manifest.rows("train"):,} images for training and {manifest.rows("val"):,} for validation, of
{len(manifest.classes):,} classes{size}. The middle of some images of each class is shown; a frame marks
those for validation.</p>
{f"<h2>Look at this</h2><ul>{warned}</ul>" if warned else ""}
<h2>Classes</h2><table><tr><th></th><th>class</th><th>training</th><th>validation</th><th></th></tr>
{"".join(rows)}</table>
{f"<h2>Left out</h2><ul>{left_out}</ul>" if left_out else ""}</html>
"""


def choose_shown(places: Iterable[tuple[str, str, IndexedShard]]) -> dict[int, list[Shown]]:
    """Chooses a few images of each label: the first of training, then of validation.

    places: the split, the path and the index of each shard.
    """
    limit = {"train": PER_CLASS - 2, "val": PER_CLASS}
    found: dict[int, list[Shown]] = {}
    for split, path, (records, keys) in places:
        columns = (records[name].tolist() for name in ("label", "offset", "size"))
        for label, offset, size, key in zip(*columns, keys, strict=True):
            if label < CLASSES and len(mine := found.setdefault(label, [])) < limit[split]:
                mine.append(Shown(split, key, path, offset, size))
    return found


def _picture(out: str, shown: Shown) -> str:
    try:
        encoded = storage.read_range(storage.join(out, shown.path), shown.offset, shown.size).content
        pixels = Transform(size=SIDE).central(encoded)
    except (BadImage, OSError):
        return ""
    buffer = io.BytesIO()
    Image.fromarray(pixels.permute(1, 2, 0).contiguous().numpy()).save(buffer, "JPEG", quality=85)
    content = base64.b64encode(buffer.getvalue()).decode()
    key = html.escape(shown.key, quote=True)
    return f'<img class="{shown.split}" alt="{key}" title="{key}" src="data:image/jpeg;base64,{content}">'


def _parted(line: str) -> tuple[str, str]:
    """Returns the file or sample that a line is about, and the reason."""
    what, _, reason = line.partition(": ")
    # A file, and the sample in it.
    if "/" in what and what.endswith(IN_FILES) and ": " in reason:
        sample, _, reason = reason.partition(": ")
        what = f"{what}: {sample}"
    return what, reason


def _with_folders(reason: str, files: Sequence[str]) -> str:
    """Adds the folders of files that are no images, which may have been meant as classes."""
    if not reason.endswith(NOT_AN_IMAGE[2:]):
        return reason
    folders = sorted({PurePosixPath(file).parent.name for file in files})
    return f"{reason}, in {', '.join(folders[:FOLDERS])}{' ..' * (len(folders) > FOLDERS)}"


def _spread(values: Sequence[int]) -> dict[str, float] | None:
    return {"least": min(values), "median": median(values), "most": max(values)} if values else None


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names[:SHOWN]) + (" .." if len(names) > SHOWN else "")

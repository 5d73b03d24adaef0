"""Emoji in four drawing styles with captions, for models of images and texts (docs/texts.md).

  python bench/emoji.py OUT

It needs npm, which fetches the drawings and their names (100 MB), and `pip install resvg_py`, which draws.
OUT gets a picture of 32 x 32 pixels of each emoji in each style, on white, and three folders that
`jobs/pack_shards.py --source csv:OUT/NAME --captions` reads. A fifth of all emoji is never in training:

  drawings   train: other emoji in three styles; val: the same emoji in the fourth, Fluent
  captions   train: as above, all with the one label "training"; val: the fifth in three styles
  unseen     train: the fifth in the fourth style; val: as in captions

Licences of the drawings: Noto Apache-2.0, Twemoji CC-BY-4.0, OpenMoji CC-BY-SA-4.0, Fluent MIT; of the names
(emojibase): MIT.
"""

import csv
import hashlib
import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

NAMES = "emojibase-data@17.0.0"
STYLES = {  # set of Iconify -> version
    "noto": "1.2.9",
    "twemoji": "1.2.5",
    "openmoji": "1.2.29",
    "fluent-emoji-flat": "1.2.6",
}
TRAIN_STYLES, NEW_STYLE = [*STYLES][:3], [*STYLES][3]
PIXELS = 32
TRAINING = "training"  # label of all pictures whose words alone are of use


@dataclass(frozen=True)
class Emoji:
    """An emoji that all styles have; `code` is its code points in hexadecimal."""

    code: str
    label: str
    tags: tuple[str, ...]
    subgroup: str

    def captions(self) -> list[str]:
        """Returns texts that describe the emoji, its label first."""
        texts = [self.label, f"{self.subgroup} {self.label}"]
        if self.tags:
            texts += [" ".join((self.label, *self.tags[:3])), " ".join(self.tags[:5])]
        return texts


def main() -> None:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit(__doc__)
    out = Path(sys.argv[1])
    try:
        importlib.import_module("resvg_py")
    except ImportError:
        sys.exit("emoji: drawing needs resvg_py: pip install resvg_py")
    packages = fetch(out / "npm")
    emoji = common_emoji(packages)
    with ProcessPoolExecutor() as pool:
        list(pool.map(partial(draw_style, packages, out, emoji), STYLES))  # raises what a process raised
    unseen, seen = split(emoji)
    write(out / "drawings", train=rows(seen, TRAIN_STYLES), val=rows(seen, [NEW_STYLE]))
    held_out = list(rows(unseen, TRAIN_STYLES))
    write(out / "captions", train=rows(seen, TRAIN_STYLES, label=TRAINING), val=held_out)
    write(out / "unseen", train=rows(unseen, [NEW_STYLE]), val=held_out)
    for name, chosen in {"drawings": seen, "unseen": unseen}.items():
        labels = sorted(each.label for each in chosen)
        classes = "".join(f"  {json.dumps(label)},\n" for label in labels)
        (out / f"{name}.toml").write_text(f'templates = ["{{}}"]\nclasses = [\n{classes}]\n')
    print(f"{out}: {len(emoji):,} emoji in {len(STYLES)} styles; {len(unseen):,} are not in training")


def fetch(folder: Path) -> Path:
    """Fetches all packages, which are files without code that runs, and returns where they lie."""
    if not shutil.which("npm"):
        sys.exit("emoji: npm fetches the drawings: install Node.js (Debian: apt-get install npm)")
    wanted = [f"@iconify-json/{style}@{version}" for style, version in STYLES.items()]
    quiet = ("--ignore-scripts", "--no-audit", "--no-fund", "--silent")
    command = ["npm", "install", *quiet, "--prefix", str(folder), NAMES, *wanted]
    if code := subprocess.run(command, check=False).returncode:
        sys.exit(f"emoji: npm ended with {code}: is its registry in reach? The command: {' '.join(command)}")
    return folder / "node_modules"


def common_emoji(packages: Path) -> list[Emoji]:
    """Returns the emoji that every style draws, without variants of skin and hair."""
    listed = json.loads((packages / "emojibase-data/en/data.json").read_text())
    groups = json.loads((packages / "emojibase-data/meta/groups.json").read_text())["subgroups"]
    icons = [icons_of(packages, style) for style in STYLES]
    found = []
    for entry in listed:
        code = "-".join(part for part in entry["hexcode"].lower().split("-") if part != "fe0f")
        if "group" in entry and all(code in each for each in icons):
            subgroup = groups[str(entry["subgroup"])].replace("-", " ")
            found.append(Emoji(code, entry["label"].lower(), tuple(entry.get("tags", ())), subgroup))
    return found


@cache
def icons_of(packages: Path, style: str) -> dict[str, str]:
    """Returns the SVG of each emoji of a style, by its code."""
    folder = packages / "@iconify-json" / style
    known, names = (json.loads((folder / f"{file}.json").read_text()) for file in ("icons", "chars"))
    return {code: svg for code, name in names.items() if (svg := svg_of(known, name))}


def svg_of(known: dict[str, Any], name: str) -> str | None:
    """Returns the SVG of an icon, which may be another one's mirror image; None if the style lacks it."""
    alias = known.get("aliases", {}).get(name, {})
    icon = known["icons"].get(alias.get("parent", name))
    if icon is None or alias.keys() - {"parent", "hFlip", "hidden"}:
        return None
    width, height = (icon.get(side, known[side]) for side in ("width", "height"))
    mirror = f' transform="translate({width} 0) scale(-1 1)"' if alias.get("hFlip") else ""
    view = f'xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    return f"<svg {view}><g{mirror}>{icon['body']}</g></svg>"


def draw_style(packages: Path, out: Path, emoji: Iterable[Emoji], style: str) -> None:
    resvg, icons = importlib.import_module("resvg_py"), icons_of(packages, style)
    (out / "pictures" / style).mkdir(parents=True, exist_ok=True)
    for each in emoji:
        png = resvg.svg_to_bytes(
            svg_string=icons[each.code],
            width=PIXELS,
            height=PIXELS,
            background="#ffffff",
            skip_system_fonts=True,
        )
        (out / "pictures" / style / f"{each.code}.png").write_bytes(bytes(png))


def split(emoji: Sequence[Emoji]) -> tuple[list[Emoji], list[Emoji]]:
    """Returns a fifth of the emoji, drawn by the hash of their codes, and the others."""
    drawn = sorted(emoji, key=lambda each: hashlib.sha256(each.code.encode()).digest())
    return drawn[: len(drawn) // 5], drawn[len(drawn) // 5 :]


def rows(
    emoji: Iterable[Emoji], styles: Sequence[str], label: str | None = None
) -> Iterator[tuple[str, ...]]:
    """Yields a row of a csv file for each caption of each picture."""
    for each in emoji:
        for style in styles:
            for caption in each.captions():
                yield f"../pictures/{style}/{each.code}.png", label or each.label, caption


def write(folder: Path, **splits: Iterable[tuple[str, ...]]) -> None:
    """Writes `train.csv` and `val.csv`, from which packing takes the split."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in splits.items():
        with (folder / f"{name}.csv").open("w", newline="") as file:
            csv.writer(file).writerows([("path", "label", "caption"), *lines])


if __name__ == "__main__":
    main()

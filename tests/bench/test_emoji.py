"""The data of images and texts, without fetching or drawing: which emoji, which words, which split."""

import csv
import json
import sys
from pathlib import Path

import pytest

from bench import emoji
from bench.emoji import Emoji, common_emoji, rows, split, svg_of, write

ICONS = {"width": 10, "height": 10, "icons": {"left": {"body": "<path/>", "width": 20}}}
ALIASES = {"right": {"parent": "left", "hFlip": True}, "up": {"parent": "left", "rotate": 1}}


def test_an_icon_may_be_the_mirror_image_of_another() -> None:
    known = ICONS | {"aliases": ALIASES}
    assert svg_of(known, "left") == (
        '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 20 10"><g><path/></g></svg>'
    )
    assert '<g transform="translate(20 0) scale(-1 1)"><path/></g>' in (svg_of(known, "right") or "")
    assert svg_of(known, "up") is None  # of no emoji today
    assert svg_of(known, "down") is None


def test_emoji_are_those_that_all_styles_have(tmp_path: Path) -> None:
    names = tmp_path / "emojibase-data"
    (names / "en").mkdir(parents=True)
    (names / "meta").mkdir()
    (names / "meta/groups.json").write_text(json.dumps({"subgroups": {"3": "arrow-like"}}))
    words = {"group": 1, "subgroup": 3, "tags": ["a", "b", "c", "d", "e", "f"]}
    listed = [
        words | {"hexcode": "2B05-FE0F", "label": "Left"},
        words | {"hexcode": "27A1", "label": "right", "tags": []},
        words | {"hexcode": "2B06", "label": "up"},
        {"hexcode": "1F1EB", "label": "regional indicator F"},
    ]
    (names / "en/data.json").write_text(json.dumps(listed))
    for number, style in enumerate(emoji.STYLES):
        folder = tmp_path / "@iconify-json" / style
        folder.mkdir(parents=True)
        (folder / "icons.json").write_text(json.dumps(ICONS | {"aliases": ALIASES}))
        chars = {"2b05": "left", "27a1": "right", "1f1eb": "left"} | ({"2b06": "left"} if number else {})
        (folder / "chars.json").write_text(json.dumps(chars))
    left, right = common_emoji(tmp_path)
    assert left.captions() == ["left", "arrow like left", "left a b c", "a b c d e"]
    assert (right.code, right.captions()) == ("27a1", ["right", "arrow like right"])


def test_a_fifth_is_held_out_and_pictures_have_a_row_per_caption(tmp_path: Path) -> None:
    every = [Emoji(f"1f6{number:02x}", f"emoji {number}", (), "group") for number in range(50)]
    unseen, seen = split(every)
    assert (len(unseen), len(seen)) == (10, 40)
    assert {*unseen} | {*seen} == {*every}
    assert split(every[::-1]) == (unseen, seen)
    write(tmp_path, train=rows(unseen[:1], ["noto", "twemoji"], label="training"), val=[])
    first, *others = csv.DictReader((tmp_path / "train.csv").open())
    assert first["path"] == f"../pictures/noto/{unseen[0].code}.png"
    assert first["label"] == "training"
    assert [row["caption"] for row in [first, *others]] == 2 * unseen[0].captions()


def test_what_is_missing_is_said_with_the_way_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SystemExit, match="install Node"):
        emoji.fetch(tmp_path)
    (tmp_path / "npm").write_text("#!/bin/sh\nexit 3\n")
    (tmp_path / "npm").chmod(0o755)
    with pytest.raises(SystemExit, match="npm ended with 3"):
        emoji.fetch(tmp_path)
    monkeypatch.setattr(sys, "argv", ["emoji.py", str(tmp_path)])
    monkeypatch.setitem(sys.modules, "resvg_py", None)
    with pytest.raises(SystemExit, match="pip install resvg_py"):
        emoji.main()

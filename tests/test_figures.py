"""Measured figures of README and docs say where they come from: a file, a test, or a row of by_hand.csv.

docs/trust.md has the rule. Pages that are made by a program or a lane of tests are left out, and so are
blocks between `<!-- name -->` and `<!-- end -->`, which other tests recompute from a file.
"""

import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from bench.answer import table as answer_table
from bench.graphs import table as graphs_table
from bench.harness import RESULTS, ROOT, with_block
from bench.pixels import with_tables
from bench.study_page import BLOCKS, EARLIER, differences_block
from bench.study_table import TABLE, read_table

MADE = ("papers.md", "faults.md")
PAGES = [
    ROOT / "README.md",
    *(page for page in sorted((ROOT / "docs").glob("*.md")) if page.name not in MADE),
]
RECOMPUTED = {
    "study.md": {*BLOCKS, *EARLIER},
    "scale.md": {"layouts", "models"},
    "data.md": {"decoding", "operations"},
    "answer.md": {"answer"},
    "weights.md": {"graphs"},
}
BLOCK = re.compile(r"^<!-- ([\w-]+) -->$.*?^<!-- end -->$", re.MULTILINE | re.DOTALL)
CODE = re.compile(r"^( *)```.*?^\1```$", re.MULTILINE | re.DOTALL)
NUMBER = r"(?<![\w.])\.?\d[\d.,]*"
FIGURE = re.compile(
    rf"±|\+-|\bmeasured\b|{NUMBER} ?(ms|us|images/s|blocks/s|s of CPU|(percentage )?points)\b|\d\.\d+ times\b"
    r"|\b(takes?|took|reach(es|ed)?|needs?|ended at|failed after)\b[^.|]{0,60}?"
    rf"{NUMBER} ?(s|min|MB|GB|MiB|%)(?!\w)",
    re.IGNORECASE,
)
FILE = re.compile(r"`bench/results/([\w.-]+)`")
TEST = re.compile(r"`(tests/[\w/]+\.py)`")


class Passage(NamedTuple):
    """A paragraph, an item of a list, or a table, without code; and the section that it stands in."""

    text: str
    section: str


class Origin(NamedTuple):
    page: str
    words: str
    date: str
    machine: str
    how: str


def passages(page: Path) -> Iterator[Passage]:
    for section in re.split(r"^(?=#)", CODE.sub("", BLOCK.sub("", page.read_text())), flags=re.MULTILINE):
        for text in re.split(r"\n\s*\n|\n(?=\s*(?:[-*]|\d+\.) )", section):
            if text.strip() and not text.startswith("#"):
                yield Passage(" ".join(text.split()), section)


def has_figure(passage: Passage) -> bool:
    """Whether a sentence has a measured figure, or a table three cells with decimal fractions or units."""
    text = re.sub(r"`[^`]*`|\]\([^)]*\)|(arXiv|sections?|figures?) [\d., and]+", "", passage.text)
    if text.startswith("|"):
        cells = [re.search(rf"(?<![\w.])\d*\.\d|±|{NUMBER} (ms|us|MiB|GiB)\b", c) for c in text.split("|")]
        return len([*filter(None, cells)]) >= 3
    sentences = re.split(r"(?<=[.;]) ", text)
    return any(re.search(r"\d", sentence) and FIGURE.search(sentence) for sentence in sentences)


def by_hand() -> list[Origin]:
    with (RESULTS / "by_hand.csv").open() as file:
        return [Origin(**row) for row in csv.DictReader(file)]


def test_a_figure_has_a_file_a_test_or_a_row() -> None:
    origins, used = by_hand(), set[Origin]()
    for page in PAGES:
        for passage in passages(page):
            if not has_figure(passage):
                continue
            known = [each for each in origins if each.page == page.name and each.words in passage.text]
            if FILE.search(passage.section) or TEST.search(passage.text):
                used |= {*known}
                continue
            assert len(known) == 1, (
                f"{page.name}: {passage.text!r}: name the file in bench/results/ that has this, the test that"
                " checks it, or how it was measured in bench/results/by_hand.csv"
            )
            used |= {*known}
    assert [*used.symmetric_difference(origins)] == [], "rows whose words are on no page, or at no figure"


@pytest.mark.guests  # tests of theirs are named too
def test_what_is_named_is_there() -> None:
    for page in PAGES:
        text = page.read_text()
        for file in [f"bench/results/{name}" for name in FILE.findall(text)] + TEST.findall(text):
            assert (ROOT / file).is_file(), f"{page.name}: {file}"
        assert {*BLOCK.findall(text)} <= RECOMPUTED.get(page.name, set()), page.name


def test_rows_say_when_and_where() -> None:
    """A row without a date is no measurement: a setting, arithmetic, or a figure that a paper printed."""
    for row in by_hand():
        assert row.words, row
        assert row.how, row
        assert bool(row.date) == bool(row.machine), row
        assert re.fullmatch(r"(\d{4}-\d\d-\d\d)?", row.date), row


def test_figures_that_pages_copy() -> None:
    """Those of the study in README, and what the text about the quickstart says."""
    table = differences_block(read_table(TABLE) or {})
    (row,) = [line for line in table.splitlines() if line.startswith("| soft-e16 |")]
    gain, low, high = (float(number) for number in re.findall(r"[+-][\d.]+", row.split("|")[2]))
    text = " ".join((ROOT / "README.md").read_text().split())
    assert f"gains {gain:.1f} points" in text
    assert f"(95 % interval: {low:.1f} to {high:.1f})" in text

    sweeps = json.loads((RESULTS / "quickstart.json").read_text())["sweeps"]
    means = [{arm: 100 * np.mean(found) for arm, found in sweep["arms"].items()} for sweep in sweeps]
    gains = {
        family: [mean[f"w{w}-{family}"] - mean[f"w{w}-dense"] for mean in means for w in (16, 24, 32)]
        for family in ("soft", "expert")
    }
    soft, expert = ((round(min(found)), round(max(found))) for found in gains.values())
    text = " ".join((ROOT / "docs/first_frontier.md").read_text().split())
    assert f"above the dense model, by {soft[0]} to {soft[1]} percentage points" in text
    assert f"too, by {expert[0]} to {expert[1]} points" in text
    assert all(mean["w16-soft"] > mean["w24-dense"] for mean in means)
    (pixels,) = {f"{100 * found:.1f}" for sweep in sweeps for found in sweep["baselines"].values()}
    assert f"reaches {pixels} %" in text
    index = " ".join((ROOT / "docs/index.md").read_text().split())
    assert f"by {soft[0]} to {soft[1]} percentage points" in index


def test_tables_of_times_are_those_of_their_files() -> None:
    page = (ROOT / "docs/data.md").read_text()
    assert with_tables(page, json.loads((RESULTS / "pixels.json").read_text())) == page
    page = (ROOT / "docs/weights.md").read_text()
    assert with_block(page, "graphs", graphs_table(json.loads((RESULTS / "graphs.json").read_text()))) == page
    page = (ROOT / "docs/answer.md").read_text()
    assert with_block(page, "answer", answer_table(json.loads((RESULTS / "answer.json").read_text()))) == page
    page = (ROOT / "docs/evaluation.md").read_text()
    for record in json.loads((RESULTS / "sharded.json").read_text())["records"]:
        name = f"{record['workers'] or 'the whole model'}" + ", bfloat16" * (record["dtype"] == "bfloat16")
        assert f"| {name} | {record['memory_gb']:.2f} | {record['ms_per_image']:.1f} |" in page
    page = (ROOT / "docs/data.md").read_text()
    rounds = json.loads((RESULTS / "ranges.json").read_text())["rounds"]
    for found in rounds.values():
        low, high = (
            [f(each[key] for each in found) for key in ("images/s", "CPU ms/image")] for f in (min, max)
        )
        assert f"| {low[0]:.0f} to {high[0]:.0f} | " in page
    driver = json.loads((RESULTS / "control-plane.json").read_text())
    seconds, gb = driver["seconds per trial"], driver["driver MiB at most, after the kill"] / 1024
    said = f"{seconds:.2f} s per trial and {gb:.1f} GB"
    assert said in (ROOT / "docs/scale.md").read_text()

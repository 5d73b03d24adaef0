"""Every row of the papers has a state, and what it names is there; the page is made from the rows."""

import re
from itertools import groupby, pairwise
from pathlib import Path
from typing import get_args

import pytest

from jobs._main import FILES
from moe.codec import dataclasses_of, hints_of
from orchestrator.config import RunConfig
from orchestrator.frontier.published import DRAWABLE
from orchestrator.sweeps.catalog import SCALES, SWEEPS
from papers import STUDIES
from papers.rows import PAPERS, Row, State, count, page, rows

ROOT = Path(__file__).parents[2]
ROWS = rows()
JOBS = {path.name for path in FILES.values()}


def test_the_page_is_made_from_the_rows() -> None:
    """`python -c "from papers.rows import page; print(page(), end='')" > docs/papers.md` makes it anew."""
    assert (ROOT / "docs" / "papers.md").read_text() == page()


def test_every_paper_has_all_its_rows() -> None:
    numbers = {letter: [row.id for row in of] for letter, of in groupby(ROWS, lambda row: row.id[0])}
    assert {letter: len(ids) for letter, ids in numbers.items()} == {
        "A": 51,
        "B": 22,
        "C": 21,
        "D": 16,
        "E": 42,
    }
    for letter, ids in numbers.items():
        assert ids == [f"{letter}{i:02}" for i in range(1, len(ids) + 1)]
    assert numbers.keys() == PAPERS.keys()
    assert count(ROWS).startswith("152 rows: ")


def fields() -> set[str]:
    """The names of all fields, of every kind of a group."""
    found, seen = set[str](), set[type]()
    waiting: list[type] = [RunConfig]
    while waiting:
        of = waiting.pop()
        if of not in seen:
            seen.add(of)
            for name, hint in hints_of(of).items():
                found.add(name)
                waiting += dataclasses_of(hint)
    return found


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.id)
def test_what_a_row_names_is_there(row: Row) -> None:
    assert row.state in get_args(State)
    assert row.what
    assert row.how
    assert "|" not in row.what + row.how
    known = {"--sweep": SWEEPS, "--scale": SCALES, "--published": DRAWABLE, "study.py": STUDIES}
    for code in re.findall(r"`([^`]+)`", row.how):
        words = code.split()
        for flag, names in known.items():
            after = [b for a, b in pairwise(words) if a.endswith(flag)]
            assert all(name in names for name in after if not name.startswith("--")), code
        if re.match(r"(jobs|tests|docs|bench|moe)/\w.*\.(py|md)", code):
            assert (ROOT / words[0]).is_file(), code
            assert not code.startswith("jobs/") or words[0].removeprefix("jobs/") in JOBS, code
        elif re.match(r"(model|train|task|data)\.", code):
            names = code.partition("=")[0].split(".")[1:]
            assert {*names} <= fields(), code

"""The page of scale says what the dry runs found."""

import json

import pytest

from bench.harness import RESULTS
from bench.layouts import PAGE, with_tables
from moe.presets import PRESETS


@pytest.mark.guests
def test_the_page_has_every_model() -> None:
    rows = json.loads((RESULTS / "layouts.json").read_text())["rows"]
    page = PAGE.read_text()
    assert with_tables(page, rows) == page
    assert list(dict.fromkeys(row["model"] for row in rows)) == list(PRESETS)
    assert max(row["dry run s"] for row in rows) < 600

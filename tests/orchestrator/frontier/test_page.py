"""The page as text. `test_page_in_browser.py` opens it."""

import json
import re
from dataclasses import replace

import pytest

from orchestrator.frontier.page import frontier_page
from orchestrator.frontier.style import TIMES
from tests.orchestrator.frontier.samples import EVIL, FRONTIER, many, point


def loads(page: str) -> set[str]:
    """Addresses that tags outside scripts would load."""
    markup = re.sub(r"<script.*?</script>", "", page, flags=re.DOTALL)
    return set(
        re.findall(r"""<(?:script|link|img|iframe|source)[^>]*?(?:src|href)\s*=\s*["']?([^"'\s>]+)""", markup)
    )


def text(html: str) -> str:
    return re.sub("<[^>]+>", "", html)


def test_page_loads_nothing() -> None:
    page = frontier_page(FRONTIER)
    assert loads(page) == {"data:,"}
    assert not re.findall(r"<script[^>]*\bsrc\b", page)
    assert "@import" not in page.split("</style>")[0]
    assert "default-src 'none'" in page


def test_summary_counts() -> None:
    """Area: .7 x log10(50) + .1 x log10(33.3) + .03 x log10(11.1) + .02 x log10(1.25) = 1.37488."""
    summary = text(frontier_page(FRONTIER).split("<p>")[1].split("</p>")[0])
    for fact in (
        "11 trials",
        "7 finished",
        "1 stopped",
        "1 failed",
        "1 diverged",
        "1 running",
        "4 on the frontier",
        "1 confirm",
    ):
        assert fact in summary
    reference = f"(1.00{TIMES}10¹²,&nbsp;0.1)"
    assert f"hypervolume 1.3749 in (log10 cost, 1 - quality) to the reference {reference}" in summary


def data_of(page: str) -> dict[str, list[dict[str, object]]]:
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


def test_the_points_stand_in_the_page_once() -> None:
    page = frontier_page(replace(many(20), note="Branches pay for <themselves>."))
    data = data_of(page)
    assert [point["arm"] for point in data["points"]] == [point.arm for point in many(20).points]
    assert len(data["panels"]) == 3  # two costs, and the hypervolume against the budget
    assert len(data_of(frontier_page(FRONTIER))["panels"]) == 1  # nothing says when its trials ended
    assert page.count(many(20).points[0].run_id) == 1
    assert "<p>Branches pay for &lt;themselves&gt;.</p>" in page


def test_claims_are_checked_and_their_failures_named() -> None:
    """Soft, .90 and .93, beats dense, .80 and .88, in each pair; expert choice, .95, beats both."""
    claims = (
        "family=soft beats family=dense",
        "family=soft beats family=expert_choice at equal capacity",
        "family=soft beats family=mixture",
    )
    section = (
        frontier_page(replace(FRONTIER, claims=claims))
        .split('class="claims">')[1]
        .split('<div class="wide')[0]
    )
    items = re.findall(
        r'<li class="(\w+)"><span class="mark">(.)</span><div>([^<]+): <b>([^<]+)</b>', section
    )
    assert items == [
        ("holds", "✓", claims[0], "4/4 cells"),
        ("fails", "✗", claims[1], "0/2 cells"),
        ("open", "\N{EN DASH}", claims[2], "0/0 cells"),
    ]
    assert "<li>capacity=2: soft-1 0.9000, ec-2 0.9500</li>" in section
    with pytest.raises(ValueError, match="is not of the form"):
        frontier_page(replace(FRONTIER, claims=("soft is better",)))


def test_text_of_users_is_escaped() -> None:
    evil = replace(
        point(EVIL, EVIL, 1e10, 0.9),
        run_url="javascript:alert(3)",
        details={EVIL: EVIL},
        settings={EVIL: EVIL},
    )
    page = frontier_page(
        replace(
            FRONTIER,
            name=EVIL,
            note=EVIL,
            cost_name=EVIL,
            quality_name=EVIL,
            points=(evil,),
            rest=(evil,),
            panels=(EVIL + "2",),
        )
    )
    assert "<img src=x" not in page
    assert "<script>alert" not in page
    assert "javascript:alert" not in page
    assert "&lt;img src=x" in page

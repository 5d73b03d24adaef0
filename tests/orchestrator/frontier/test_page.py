"""The page as text. `test_page_in_browser.py` opens it."""

import json
import re
from dataclasses import replace
from typing import Any

import pytest

from orchestrator.costs import TIMES
from orchestrator.frontier.frontier import Frontier, gains
from orchestrator.frontier.page import frontier_page
from orchestrator.output import UNKNOWN
from tests.orchestrator.frontier.samples import EVIL, FRONTIER, SECONDS, many, point
from tests.orchestrator.frontier.test_frontier import POINTS, timed, times


def plots(page: str) -> list[dict[str, Any]]:
    return json.loads(page.split('id="data">')[1].split("</script>")[0])


def markup(page: str) -> str:
    return re.sub(r"<script.*?</script>|<style.*?</style>", "", page, flags=re.DOTALL)


def test_page_loads_nothing() -> None:
    page = frontier_page(FRONTIER)
    tags = r"""<(?:script|link|img|iframe|source)[^>]*?(?:src|href)\s*=\s*["']?([^"'\s>]+)"""
    assert re.findall(tags, markup(page)) == ["data:,"]
    assert not re.findall(r"<script[^>]*\bsrc\b", page)
    assert "@import" not in page.split("</style>")[0]
    assert "default-src 'none'" in page


def summary(frontier: Frontier) -> list[str]:
    """The paragraphs above the plots."""
    return paragraphs(frontier_page(frontier).split("</h1>")[1].split('<form id="filters"')[0])


def counted(frontier: Frontier) -> str:
    """The last paragraph below the table."""
    *_, found = paragraphs(frontier_page(frontier).split("</table>")[1].split("<script")[0])
    return found


def paragraphs(text: str) -> list[str]:
    text = re.sub(
        '<form id="bound".*?</form>', "", text.replace('<p class="verdict">', "<p>"), flags=re.DOTALL
    )
    return [" ".join(part.split()) for part in re.sub("<(?!p>)[^>]+>", "", text).split("<p>")[1:]]


def test_head_counts_trials_as_trials_and_arms_as_arms() -> None:
    states = (*[("a", "finished")] * 2, ("b", "finished"), ("b", "failed"), *[("c", "not started")] * 2)
    seeded = replace(FRONTIER, trials=states, data="367 images of digits (val split)")
    *verdict, subtitle = summary(seeded)
    counts = counted(seeded)
    assert subtitle == (
        f"3 arms {TIMES} 2 seeds = 6 trials. Validation accuracy @1 on 367 images of digits (val split): mean"
        " of 2 seeds; ± and bars: standard error by seeds."
    )
    assert verdict == [
        "Best: ec-2, accuracy @1 0.9500.",
        "Knee, the best trade on the frontier: soft-1, accuracy @1 0.9000, 5.0 points worse for 4% of the"
        f" cost, Training (FLOP, 6 {TIMES} MAC).",
        "No error is known of these qualities, so no difference is significant: take several seeds.",
    ]
    assert counts.startswith("Trials: 3 finished, 1 failed, 0 diverged, 2 not started &middot; 4 arms on")
    assert "1 retrained &middot; knee soft-1 (one seed, not decided) &middot;" in counts
    reference = "(1 TFLOP, 0.1)"
    area = f"hypervolume 1.3749 in (log10 cost, 1 - quality) to the reference {reference}"
    rises = "which rises if an arm is added that costs more than all before: hypervolumes compare only with"
    assert counts.endswith(f"{area}, {rises} the same reference")
    counts = counted(FRONTIER)
    assert counts.startswith("4 of 11 points on the frontier")
    assert counts.endswith(area)
    *_, single = summary(replace(FRONTIER, trials=states[:1]))
    assert single == (
        f"1 arm {TIMES} 1 seed = 1 trial. Validation accuracy @1: one seed, whose error is not known."
    )
    judged = replace(FRONTIER, points=tuple(replace(point, images=100) for point in FRONTIER.points))
    best, knee, doubt = summary(judged)
    assert best.startswith("Best: ec-2, accuracy @1 0.9500 ± 0.0246. Not significantly worse (95%): ")
    assert "5.0 points worse, a difference that is not significant, for 4% of the cost" in knee
    assert re.match(
        r"Differences below \d+\.\d points are not significant \(standard errors of 100 images; of one", doubt
    )


def test_a_baseline_that_no_arm_beats_is_named_as_such() -> None:
    best = max(point.quality for point in FRONTIER.front)
    said = "Baseline, which is no arm and does not count: linear"
    for quality, end in ((best - 0.01, ""), (best, ". No arm is better.")):
        line = summary(replace(FRONTIER, baselines={"linear": quality}))[-1]
        assert line == f"{said} {quality:.4f}{end}"
    assert (
        replace(FRONTIER, points=(replace(FRONTIER.points[0], images=100),)).baseline_text(0.5)
        == "0.5000 ± 0.0490"
    )  # sqrt(.25 / 104)


def without_error(page: str) -> list[str]:
    """The figures of a page that have neither an error nor a reason for having none: qualities of the table,
    of baselines and of the verdict, and costs, which are exact, measured once, or have quartiles.
    """
    text, found = markup(page), list[str]()
    quality, rest = re.compile(r"\d\.\d{4}(?! ±)"), "Costs without brackets are computed, or of a single"
    if "No error is known of these qualities" not in text:
        cells = re.findall(r'<td class="arm">([^<]*)</td>\s*<td class="number"[^>]*>([^<]*)<', text)
        found += [" ".join(cell) for cell in cells if cell[1] != UNKNOWN and "±" not in cell[1]]
        above = re.findall(r'<p class="verdict">(.*?)</p>|does not count: (.*?)</p>', text, flags=re.DOTALL)
        judged = (re.sub(r"± \d\.\d+|<[^>]+>", "±", part) for line in above for part in line)
        found += [line for line in judged if quality.search(re.sub(r"±+", "±", line))]
    costs = re.findall(r'<td class="number"[^>]*>([^<]*)<', text)
    return found + ([] if rest in text or not costs else ["costs"])


def test_every_figure_has_an_error_or_a_reason() -> None:
    judged = tuple(replace(each, images=200) for each in FRONTIER.points)
    sure = replace(FRONTIER, points=judged, retrained=(), baselines={"linear": 0.5})
    assert without_error(frontier_page(sure)) == []
    assert without_error(frontier_page(FRONTIER)) == [], "no error is known, which the verdict says"
    one = replace(sure, points=(replace(judged[0], images=0), *judged[1:]))
    assert without_error(frontier_page(one)) == ["dense-s 0.8000"]


def test_a_plot_for_each_cost_and_one_for_the_budget() -> None:
    found = many(20)
    page = frontier_page(replace(found, note="Branches pay for <themselves>."))
    titles = [plot["layout"]["xaxis"]["title"]["text"] for plot in plots(page)]
    assert titles == [f"Training (GFLOP, 6 {TIMES} MAC)", "Device time (s)", "Device hours spent"]
    (budget,) = plots(page)[2]["data"]
    assert (budget["line"]["shape"], len(budget["x"])) == ("hv", 21)
    assert len(plots(frontier_page(FRONTIER))) == 1  # what was spent is unknown
    assert "<p>Branches pay for &lt;themselves&gt;.</p>" in page
    assert markup(page).count("<tr") == 21


def test_a_row_has_numbers_texts_and_links() -> None:
    seeds = replace(FRONTIER.points[0], qualities=(0.7, 0.9), runs=(("second", "javascript:alert(1)"),))
    found = replace(FRONTIER, points=(seeds,), retrained=(), reference={**FRONTIER.reference, SECONDS: 1.0})
    (row,) = re.findall('<tr class="frontier".*?</tr>', frontier_page(found), flags=re.DOTALL)
    assert 'data-role="frontier" data-family="dense"' in row
    numbers = re.findall('<td class="number" data-key="([^"]*)">([^<]*)<', row)
    assert numbers == [
        ("0.8", "0.8000 ± 0.1000"),
        ("20000000000.0", "20"),
        ("50.0", "50"),
        ("1", "1"),
    ]
    assert '<td class="status">frontier, knee</td>' in row
    assert "affinity&nbsp;softmax" in row
    assert "seeds&nbsp;2, from 0.7000 to 0.9000" in row
    assert re.findall('href="([^"]*)"', row) == [seeds.run_url]
    assert re.findall('<code title="([^"]*)">([^<]*)<', row) == [
        ("dense-s-0123456789abcdef", "0123456789abcdef"),
        ("second", "second"),
    ]


def test_images_that_are_routed_together_are_said() -> None:
    """In a column and a sentence, which has the quality with each image by itself where it was measured."""
    assert "together" not in frontier_page(FRONTIER).partition("<script")[0]
    arm = point("tc", "token_choice", 4e10, 0.85, settings={"images_per_group": 8.0})
    frontier = replace(FRONTIER, points=(FRONTIER.points[0], arm))
    page = frontier_page(frontier)
    assert "Images routed together" in page
    assert '<td class="number" data-key="8">8</td>' in page
    assert "it is not measured: evaluate.py, routing.images_per_group=1." in page
    alone = replace(arm, arm="tc: images_per_group=1", quality=0.8, settings={"images_per_group": 1.0})
    assert "With each image routed by itself it is: tc 0.8000." in frontier_page(
        replace(frontier, operating=(alone,))
    )


def test_claims_are_checked_and_other_cells_are_named() -> None:
    """Soft, .90 and .93, beats dense, .80 and .88, in each pair; expert choice, .95, beats both."""
    claims = (
        "family=soft beats family=dense",
        "family=soft beats family=expert_choice at equal capacity",
        "family=soft beats family=mixture",
    )
    page = frontier_page(replace(FRONTIER, claims=claims))
    items = re.findall(r'<li class="(\w+)">\n<span class="mark">(.+)</span>\n<div>([^<]+): <b>([^<(]+)', page)
    undecided = "comparisons have one seed, so they are not decided"
    assert items == [
        ("open", "(✓)", claims[0], f"true of the mean values: 4 of 4 comparisons hold; 4 {undecided}"),
        ("open", "(✗)", claims[1], f"false of the mean values: 0 of 2 comparisons hold; 2 {undecided}"),
        ("open", "\N{EN DASH}", claims[2], "no complete comparison yet"),
    ]
    assert "<li>does not hold: capacity=2, soft-1 0.9000, ec-2 0.9500</li>" in page
    seeded = [replace(each, qualities=(each.quality, each.quality)) for each in FRONTIER.points]
    page = frontier_page(replace(FRONTIER, claims=claims[:1], points=tuple(seeded)))
    assert '<li class="holds">\n<span class="mark">✓</span>' in page
    with pytest.raises(ValueError, match="is not of the form"):
        frontier_page(replace(FRONTIER, claims=("soft is better",)))


def test_the_page_states_the_gain_of_operating_points() -> None:
    page = frontier_page(POINTS)
    assert "<h2>Operating points</h2>" in page
    assert f"all models: <b>{gains(POINTS)[0]}</b>" in page
    assert "A gain in time counts only if" not in page
    assert "<h2>Operating points</h2>" not in frontier_page(FRONTIER)
    page = frontier_page(times(timed("soft: experts=2", 0.8, 70, 85, 90)))
    assert "all models: <b>none: within the spread of the times</b>" in page
    assert "A gain in time counts only if" in page


def test_text_of_users_is_escaped() -> None:
    evil = point(
        EVIL,
        EVIL,
        1e10,
        0.9,
        run_id=EVIL,
        run_url="javascript:alert(3)",
        runs=((EVIL, 'https://x.test/"onmouseover="alert(4)'),),
        details={EVIL: EVIL},
        settings={EVIL: EVIL},
        costs={EVIL + "2": 1.0},
    )
    page = frontier_page(
        replace(
            FRONTIER,
            name=EVIL,
            note=EVIL,
            cost_name=EVIL,
            quality_name=EVIL + "3",
            points=(evil,),
            retrained=(evil,),
            operating=(replace(evil, cost=1e9),),
            reference={EVIL: 1e12, EVIL + "2": 1e12, EVIL + "3": 0.1},
            claims=("arm=<img beats arm=<b>x</b>",),
        )
    )
    assert "<img" not in page
    assert "<script>alert" not in page
    assert "javascript:alert" not in page
    assert '"onmouseover=' not in page
    assert "&lt;img src=x" in page

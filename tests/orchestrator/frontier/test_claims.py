"""Claims: their form, their cells by hand, and those of the paper on its 34 published runs."""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from scipy.stats import ttest_ind

from orchestrator.frontier.claims import check_claim, compare, comparisons, parse_claim, why_nothing
from orchestrator.frontier.points import Point, Status
from tests.orchestrator.frontier import samples

FIXTURE = Path(__file__).parents[2] / "fixtures" / "paper001_runs.csv"
AT_EQUAL = "at equal size, capacity"


def paper_points(quality: str) -> list[Point]:
    """`capacity` is k of token choice and c of the others, as the paper sets them against each other."""
    points = []
    with FIXTURE.open() as file:
        for run in csv.DictReader(file):
            affinity, _, family = run["router"].partition("_")
            settings = {"family": family or affinity, "router": run["router"], "size": run["architecture"]}
            settings |= {"capacity": int(run["capacity"])} | ({"affinity": affinity} if family else {})
            arm = " ".join([run["architecture"], run["router"], run["capacity"]])
            cost, percent = float(run["train_tpuv3_days"]), float(run[quality])
            points.append(samples.point(arm, run["router"], cost, percent / 100, settings=settings))
    return points


def test_published_claims() -> None:
    """Held cells on JFT and in 10-shot: 24/24 together, 10/10, and 9/12."""
    for claim, cells, on_jft, on_10shot in (
        ("family=expert_choice beats family=token_choice at equal size, capacity, affinity", 12, 12, 12),
        (f"family=soft beats best family!=soft {AT_EQUAL}", 5, 5, 5),
        (f"router=sinkhorn_token_choice beats router=softmax_token_choice {AT_EQUAL}", 6, 5, 4),
    ):
        for quality, held in (("jft_prec_at_1_percent", on_jft), ("imagenet_10shot_percent", on_10shot)):
            verdict = check_claim(claim, paper_points(quality))
            word = "true" if held == cells else "false"
            assert str(verdict) == (
                f"{word} of the mean values: {held} of {cells} comparisons hold;"
                f" {cells} comparisons have one seed, so they are not decided"
            )


def point(arm: str, quality: float, status: Status = "finished", **settings: str | float) -> Point:
    return samples.point(arm, arm.split("-")[0], 1, quality, status, settings=settings)


POINTS = [
    point("soft-a", 0.9, experts=8, seed=1),
    point("soft-b", 0.7, experts=8.0, seed="2"),
    point("soft-c", 0.9, experts=16),
    point("hash-a", 0.8, experts="8"),
    point("hash-b", 0.6, experts=8),
    point("hash-c", 0.95, "stopped", experts=16),
    point("dense", 0.65),
]


@pytest.mark.parametrize(
    ("claim", "held", "failing", "undecided"),
    [
        ("family=soft beats family=hash at equal experts", 3, 1, 0),  # all pairs at 8 experts; .7 < .8
        ("best family=soft beats family=hash at equal experts", 2, 0, 0),
        ("best of family=soft beats best of family=hash at equal experts", 1, 0, 0),
        ("family=hash beats family=dense at equal experts", 0, 0, 0),  # dense has no experts
        ("family=hash beats arm=dense", 1, 1, 0),
        ("family=soft, experts=8 , seed!=2 beats family!=soft", 3, 0, 0),
        ("family=soft beats family=soft", 2, 2, 2),  # no point meets itself; .9 against .9 is undecided
        ("width=3 beats family=soft at equal depth", 0, 0, 0),
        ("family=soft beats family=hash|dense", 8, 1, 0),
        ("family=soft beats best family=hash | dense", 2, 1, 0),
        ("family=soft beats family!=soft|dense", 5, 1, 0),
        ("family=soft, seed=1|2 beats experts=8|16, family=hash", 3, 1, 0),
    ],
)
def test_cells_by_hand(claim: str, held: int, failing: int, undecided: int) -> None:
    verdict = check_claim(claim, POINTS)
    assert [len(verdict.of(o)) for o in ("better", "worse", "undecided")] == [held, failing, undecided]
    assert verdict.single_seeds == held + failing + undecided


def test_a_failing_cell_names_its_settings_and_arms() -> None:
    verdict = check_claim("family=soft beats family=hash at equal experts", POINTS)
    assert verdict.of("worse") == ("experts=8, soft-b 0.7000, hash-a 0.8000",)


@pytest.mark.parametrize(
    ("soft", "sparse", "met"),
    [
        # Of 49 tokens, 32 experts: one and two slots are .653 and 1.306; in groups of 8 images .49 and .98.
        ((0.653, 1.306, 1.959), (0.49, 0.98, 1.959), [(0.653, 0.49), (1.306, 0.98), (1.959, 1.959)]),
        ((0.98,), (0.98, 1.0), [(0.98, 0.98), (0.98, 1.0)]),
        ((1,), (0.5, 2), []),
        ((0.5, 1), (0.98,), [(1, 0.98)]),
        ((1, 1.25), (1, 1.25), [(1, 1), (1.25, 1.25)]),  # a nearer one is there
        ((1, 4), (2,), []),
        ((0.9, 1.1), ((0.9 * 1.1) ** 0.5,), [(0.9, 0.994987)]),  # as near to both: the smaller
        ((1,), (1.4, 0.7, 1.39), [(1, 1.39)]),
    ],
)
def test_capacities_meet_the_nearest(
    soft: tuple[float, ...], sparse: tuple[float, ...], met: list[tuple[float, float]]
) -> None:
    points = [point(f"soft-{c}", 0.9, capacity=c, size="S") for c in soft]
    points += [point(f"hash-{c:g}", 0.8, capacity=c, size="S") for c in sparse]
    found = comparisons(parse_claim("family=soft beats family=hash at equal size, capacity"), points)
    arms = [(each.more[0].arm, each.less[0].arm) for each in found]
    assert arms == [(f"soft-{a}", f"hash-{b:g}") for a, b in met]


def test_both_numbers_of_a_cell_are_named() -> None:
    points = [point("soft-a", 0.7, capacity=1.306), point("hash-a", 0.8, capacity=0.98)]
    verdict = check_claim("family=soft beats family=hash at equal capacity", points)
    assert verdict.of("worse") == ("capacity=1.306 ~ 0.98, soft-a 0.7000, hash-a 0.8000",)


def test_losses_from_the_highest_value() -> None:
    """At k=1 the sorted arm loses .1 and .4 from capacity 1, the plain one .2 and .3; at k=2 .1 and .3."""
    qualities = {
        ("sorted", 1): {1: 0.8, 0.5: 0.7, 0.25: 0.4},
        ("plain", 1): {1: 0.7, 0.5: 0.5, 0.25: 0.4},
        ("sorted", 2): {1: 0.7, 0.5: 0.6},
        ("plain", 2): {1: 0.9, 0.5: 0.6},
    }
    points = [
        point(f"{arm}-k{k}-c{c}", quality, k=k, capacity=c)
        for (arm, k), levels in qualities.items()
        for c, quality in levels.items()
    ]
    text = "family=sorted loses less than family=plain at equal k as capacity falls"
    verdict = check_claim(text, points)
    assert verdict.of("worse") == (
        "k=1, capacity from 1 to 0.25, sorted-k1-c0.25 0.4000, plain-k1-c1 0.7000,"
        " plain-k1-c0.25 0.4000, sorted-k1-c1 0.8000",
    )
    assert len(verdict.of("better")) == 2
    assert parse_claim(text).settings() == {"family", "k", "capacity"}
    with pytest.raises(ValueError, match="is not of the form"):
        parse_claim("family=sorted loses less than family=plain at equal k")


def test_why_a_claim_compares_nothing() -> None:
    for text, why in (
        ("family=soft,family=hash beats family=dense", "no arm has family=soft,family=hash"),
        ("family=soft beats family=mixture", "no arm has family=mixture"),
        ("family=soft beats family=dense at equal experts", "no arm with family=dense has experts"),
        ("family=soft beats arm=hash-c at equal experts, seed", "no arm with arm=hash-c has seed"),
        ("arm=soft-a beats arm=hash-c at equal experts", "no two arms of its sides are equal in experts"),
        ("arm=soft-a beats arm=soft-a", "no two arms of its sides are equal in anything"),
        ("arm=soft-a loses less than arm=hash-a as experts falls", "experts has one value alone"),
    ):
        assert comparisons(parse_claim(text), POINTS) == []
        assert why_nothing(parse_claim(text), POINTS) == why


def seeds(arm: str, *qualities: float) -> Point:
    return replace(point(arm, fmean(qualities)), qualities=qualities)


@pytest.mark.parametrize(
    ("soft", "dense", "outcome"),
    [
        ((0.8, 0.81, 0.82), (0.9, 0.91, 0.92), "worse"),
        ((0.9, 0.9), (0.8, 0.8), "better"),
        ((0.9, 0.9), (0.9, 0.9), "undecided"),
        ((0.9, 0.8), (0.84,), "undecided"),  # the error of the first point alone is larger
        ((0.9, 0.9), (0.84,), "better"),
        ((0.9,), (0.84,), "better"),  # no error is known: the values decide
    ],
)
def test_a_difference_within_the_error_of_the_seeds_is_undecided(
    soft: tuple[float, ...], dense: tuple[float, ...], outcome: str
) -> None:
    assert compare([seeds("soft", *soft)], [seeds("dense", *dense)]) == outcome


def test_comparison_is_welchs_test() -> None:
    """The outcome changes where scipy's two-sided p value passes 5 %."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = rng.normal(0.8, 0.02, 3), rng.normal(0.83, 0.01, 5)
        significant = ttest_ind(a, b, equal_var=False).pvalue < 0.05
        assert (compare([seeds("a", *a)], [seeds("b", *b)]) != "undecided") == significant


def test_a_verdict_says_what_is_undecided_and_what_has_single_seeds() -> None:
    points = [seeds("soft-a", 0.8, 0.9, 0.852), seeds("dense-a", 0.8, 0.9, 0.85), seeds("hash-a", 0.7)]
    verdict = check_claim("family=soft beats family!=soft", points)
    assert str(verdict) == (
        "undecided: 1 of 2 comparisons hold, 1 undecided; 1 comparison has one seed, so it is not decided"
    )
    assert verdict.of("undecided") == ("soft-a 0.8507 ± 0.0289, dense-a 0.8500 ± 0.0289",)
    assert verdict.holds is None
    assert check_claim("family=soft beats family=hash", points).holds is True
    assert check_claim("family=hash beats family!=hash", points).holds is False
    nothing = check_claim("family=soft beats family=hash", [])
    assert (nothing.holds, str(nothing)) == (None, "no complete comparison yet")


@pytest.mark.parametrize(
    ("claim", "verdict"),
    [
        ("family=soft beats family=tokens at equal size, capacity", "true: 4 of 4 comparisons hold"),
        ("family=dense beats family=soft at equal size", "false: 0 of 4 comparisons hold"),
        (
            "family=experts beats family=tokens at equal size, capacity",
            "undecided: 0 of 4 comparisons hold, 4 undecided",
        ),
        (
            "best family=tokens|experts loses less than family=soft at equal size as capacity falls",
            "true: 2 of 2 comparisons hold",
        ),
    ],
)
def test_verdicts_of_planted_results(claim: str, verdict: str) -> None:
    """Soft is the best by .1 and by .2 where the capacity is high, tokens and experts differ by .001, and
    dense is the worst; three seeds differ by .01.
    """
    planted = {"dense": -0.1, "tokens": 0.0, "experts": 0.001, "soft": 0.1}
    points = [
        replace(
            seeds(
                f"{family}-{size}-c{c}",
                *(0.5 + gain + (family == "soft") * c / 10 + e for e in (-0.01, 0, 0.01)),
            ),
            settings={"size": size, "capacity": c},
        )
        for family, gain in planted.items()
        for size in ("S", "B")
        for c in ((0.5, 1) if family != "dense" else (1,))
    ]
    found = check_claim(claim, points)
    assert (str(found), found.by_values_alone) == (verdict, False)
    single = [replace(each, qualities=()) for each in points]
    assert check_claim(claim, single).by_values_alone == (check_claim(claim, single).holds is not None)


def test_a_failure_beyond_the_error_of_seeds_is_not_by_the_values_alone() -> None:
    points = [seeds("soft-a", 0.5, 0.51), seeds("dense-a", 0.8, 0.81), seeds("dense-b", 0.9)]
    assert not check_claim("family=soft beats family=dense", points).by_values_alone
    assert check_claim("family=soft beats arm=dense-b", points).by_values_alone


@pytest.mark.parametrize(
    "claim",
    [
        "family=soft",
        "soft beats family=hash",
        "family=soft, beats family=hash",
        "family=a=b beats family=hash",
        "family=soft beats family=hash at equal experts=8",
        "family=soft beats family=hash at equal size,",
    ],
)
def test_other_statements_are_refused(claim: str) -> None:
    with pytest.raises(ValueError, match=r"is not of the form: \[best\] NAME=VALUE"):
        parse_claim(claim)


def test_settings_of_a_claim() -> None:
    claim = parse_claim("width=3, k!=1 beats best of family=hash at equal depth , size")
    assert claim.settings() == {"width", "k", "family", "depth", "size"}
    assert (claim.better.best, claim.worse.best) == (False, True)

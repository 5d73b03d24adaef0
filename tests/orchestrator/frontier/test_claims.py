"""Claims: their form, their cells by hand, and those of the paper on its 34 published runs."""

import csv
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from scipy.stats import ttest_ind

from orchestrator.frontier.claims import check_claim, compare, parse_claim
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
            assert (
                str(verdict)
                == f"{held} of {cells} comparisons hold ({cells} with a single seed, error unknown)"
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
    ],
)
def test_cells_by_hand(claim: str, held: int, failing: int, undecided: int) -> None:
    verdict = check_claim(claim, POINTS)
    assert (verdict.held, len(verdict.failing), len(verdict.undecided)) == (held, failing, undecided)
    assert verdict.single_seeds == held + failing + undecided


def test_a_failing_cell_names_its_settings_and_arms() -> None:
    verdict = check_claim("family=soft beats family=hash at equal experts", POINTS)
    assert verdict.failing == ("experts=8: soft-b 0.7000, hash-a 0.8000",)


def seeds(arm: str, *qualities: float) -> Point:
    return replace(point(arm, fmean(qualities)), qualities=qualities)


@pytest.mark.parametrize(
    ("soft", "dense", "outcome"),
    [
        ((0.8, 0.81, 0.82), (0.9, 0.91, 0.92), "worse"),
        ((0.9, 0.9), (0.8, 0.8), "better"),
        ((0.9, 0.9), (0.9, 0.9), "undecided"),
        ((0.9, 0.8), (0.84,), "better"),  # one point has no error: the means decide
    ],
)
def test_a_difference_within_the_error_of_the_seeds_is_undecided(
    soft: tuple[float, ...], dense: tuple[float, ...], outcome: str
) -> None:
    assert compare(seeds("soft", *soft), seeds("dense", *dense)) == outcome


def test_comparison_is_welchs_test() -> None:
    """The outcome changes where scipy's two-sided p value passes 5 %."""
    rng = np.random.default_rng(0)
    for _ in range(50):
        a, b = rng.normal(0.8, 0.02, 3), rng.normal(0.83, 0.01, 5)
        significant = ttest_ind(a, b, equal_var=False).pvalue < 0.05
        assert (compare(seeds("a", *a), seeds("b", *b)) != "undecided") == significant


def test_a_verdict_says_what_is_undecided_and_what_has_single_seeds() -> None:
    points = [seeds("soft-a", 0.8, 0.9, 0.852), seeds("dense-a", 0.8, 0.9, 0.85), seeds("hash-a", 0.7)]
    verdict = check_claim("family=soft beats family!=soft", points)
    assert str(verdict) == "1 of 2 comparisons hold, 1 undecided (1 with a single seed, error unknown)"
    assert verdict.undecided == ("soft-a 0.8507 ± 0.0289, dense-a 0.8500 ± 0.0289",)
    assert verdict.holds is None
    assert check_claim("family=soft beats family=hash", points).holds is True
    assert check_claim("family=hash beats family!=hash", points).holds is False
    assert check_claim("family=soft beats family=hash", []).holds is None


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

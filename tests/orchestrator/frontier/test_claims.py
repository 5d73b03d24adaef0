"""Claims: their form, their cells by hand, and those of the paper on its 34 published runs."""

import csv
from pathlib import Path

import pytest

from orchestrator.frontier.claims import check_claim, parse_claim
from orchestrator.frontier.points import Point, Status

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
            point = Point(
                arm=arm,
                family=run["router"],
                cost=float(run["train_tpuv3_days"]),
                quality=float(run[quality]) / 100,
                size=float(run["capacity"]),
                run_id=arm,
                status="finished",
                settings=settings,
            )
            points.append(point)
    return points


@pytest.mark.parametrize(
    ("claim", "on_jft", "on_10shot"),
    [
        (
            "family=expert_choice beats family=token_choice at equal size, capacity, affinity",
            (12, 12),
            (12, 12),
        ),
        (f"family=soft beats best family!=soft {AT_EQUAL}", (5, 5), (5, 5)),
        (
            f"router=sinkhorn_token_choice beats router=softmax_token_choice {AT_EQUAL}",
            (5, 6),
            (4, 6),
        ),
    ],
)
def test_published_claims(claim: str, on_jft: tuple[int, int], on_10shot: tuple[int, int]) -> None:
    """Both metrics together: 24/24 cells, 10/10, and 9/12."""
    for quality, expected in (("jft_prec_at_1_percent", on_jft), ("imagenet_10shot_percent", on_10shot)):
        verdict = check_claim(claim, paper_points(quality))
        assert (verdict.held, verdict.cells) == expected
        assert str(verdict) == f"{expected[0]}/{expected[1]} cells"


def test_published_failures_are_named() -> None:
    """The three cells where Sinkhorn loses: B32 k2 and L16 k1 in 10-shot, L16 k2 on JFT."""
    claim = f"router=sinkhorn_token_choice beats router=softmax_token_choice {AT_EQUAL}"
    jft, shots = (
        check_claim(claim, paper_points(q)).failing
        for q in ("jft_prec_at_1_percent", "imagenet_10shot_percent")
    )
    assert [cell.split(":")[0] for cell in jft] == ["size=L16, capacity=2"]
    assert [cell.split(":")[0] for cell in shots] == ["size=B32, capacity=2", "size=L16, capacity=1"]


def point(arm: str, quality: float, status: Status = "finished", **settings: str | float) -> Point:
    return Point(
        arm=arm,
        family=arm.split("-")[0],
        cost=1,
        quality=quality,
        size=1,
        run_id=arm,
        status=status,
        settings=settings,
    )


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
    ("claim", "held", "cells"),
    [
        ("family=soft beats family=hash at equal experts", 3, 4),  # all pairs at 8 experts; .7 < .8
        ("best family=soft beats family=hash at equal experts", 2, 2),
        ("best of family=soft beats best of family=hash at equal experts", 1, 1),
        ("family=hash beats family=dense at equal experts", 0, 0),  # dense has no experts
        ("family=hash beats arm=dense", 1, 2),
        ("family=soft, experts=8 , seed!=2 beats family!=soft", 3, 3),
        ("family=soft beats family=soft", 2, 6),  # no point meets itself; .9 against .9 is no win
        ("family=nowhere beats family=soft", 0, 0),
    ],
)
def test_cells_by_hand(claim: str, held: int, cells: int) -> None:
    verdict = check_claim(claim, POINTS)
    assert (verdict.held, verdict.cells) == (held, cells)
    assert len(verdict.failing) == cells - held


def test_a_failing_cell_says_who_met_whom() -> None:
    assert check_claim("family=soft beats family=hash at equal experts", POINTS).failing == (
        "experts=8: soft-b 0.7000, hash-a 0.8000",
    )
    assert check_claim("arm=dense beats arm=hash-a", POINTS).failing == ("dense 0.6500, hash-a 0.8000",)


def test_nothing_is_claimed_of_no_points() -> None:
    assert str(check_claim("family=soft beats family=hash at equal experts", [])) == "0/0 cells"


@pytest.mark.parametrize(
    ("claim", "message"),
    [
        ("family=soft", "is not of the form: .*beats"),
        ("beats family=soft", "is not of the form"),
        ("soft beats family=hash", "'soft' is no NAME=VALUE or NAME!=VALUE"),
        ("family=soft, beats family=hash", "'' is no NAME=VALUE"),
        ("family=a=b beats family=hash", "'family=a=b' is no NAME=VALUE"),
        ("family=soft beats family=hash at equal experts,", "names of settings after 'at equal'"),
        (
            "family=soft beats family=hash at equal experts=8",
            "names of settings after 'at equal', got 'experts=8'",
        ),
    ],
)
def test_other_statements_are_refused(claim: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_claim(claim)


def test_what_no_point_has_makes_no_cell() -> None:
    claim = "width=3 beats family=hash at equal depth"
    assert parse_claim(claim).settings() == {"width", "family", "depth"}
    assert str(check_claim(claim, POINTS)) == "0/0 cells"

"""The band of the seeds, by hand."""

import pytest

from orchestrator.frontier.points import Point
from orchestrator.frontier.seeds import seed_band


def point(cost: float, *qualities: float) -> Point:
    quality = sum(qualities) / len(qualities)
    named = {"arm": "x", "family": "soft", "size": 1, "run_id": "x", "status": "finished"}
    return Point(**named, cost=cost, quality=quality, qualities=qualities)


def test_band_by_hand() -> None:
    """Four seeds. At cost 1 one reaches .4 and three .2; at 10 one reaches .8 and three .6; below .1 none is.

    Up the best quarter and to the right, back on the three quarters. The third arm has too few seeds.
    """
    points = [point(1, 0.1, 0.2, 0.3, 0.4), point(10, 0.5, 0.6, 0.7, 0.8), point(5, 0.9, 0.9)]
    upper = [(1, 0.1), (1, 0.4), (10, 0.4), (10, 0.8), (10, 0.8)]
    lower = [(1, 0.1), (1, 0.2), (10, 0.2), (10, 0.6), (10, 0.6)]
    assert seed_band(points).ravel().tolist() == pytest.approx([v for xy in upper + lower[::-1] for v in xy])


@pytest.mark.parametrize("points", [[], [point(1, 0.5)]])
def test_one_seed_has_no_band(points: list[Point]) -> None:
    assert seed_band(points).shape == (0, 2)

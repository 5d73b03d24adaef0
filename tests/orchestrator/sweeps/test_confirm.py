"""Which points are confirmed."""

from orchestrator.frontier.points import Frontier
from orchestrator.sweeps.confirm import knees
from tests.orchestrator.frontier.samples import point

DENSE = point("dense", "dense", 1e9, 0.99)
SOFT = [
    point(f"soft-{n}", "soft", cost, quality)
    for n, cost, quality in ((0, 1e9, 0.2), (1, 2e9, 0.8), (2, 4e9, 0.9))
]
BURNT = point("burnt", "soft", 1e9, 0.99, "diverged")


def names(*points, count: int) -> list[str]:
    frontier = Frontier(name="x", cost_name="cost", quality_name="acc", points=points, reference=(1e10, 0.1))
    return [p.arm for p in knees(frontier, count)]


def test_knees_of_moe_points_that_are_complete():
    """The best dense point and a diverged one are not asked for; then the knee of those that are left."""
    assert names(DENSE, BURNT, *SOFT, count=1) == ["soft-1"]
    assert set(names(DENSE, BURNT, *SOFT, count=9)) == {"soft-0", "soft-1", "soft-2"}


def test_knees_where_all_is_dense():
    assert names(DENSE, BURNT, count=2) == ["dense"]

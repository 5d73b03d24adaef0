"""What `--set routing.*` and `--grid` say, and what points are called."""

import pytest

from moe.overrides import AS_TRAINED, RoutingOverrides
from orchestrator.errors import UsageError
from orchestrator.evaluation.point import parse_grid, parse_point, point_key, point_name

BPR = RoutingOverrides(k=1, capacity_factor=0.3, priority="max")


def test_a_point_by_its_settings():
    assert parse_point([]) == AS_TRAINED
    assert parse_point(["routing.k=1", "routing.capacity=0.3", "routing.priority=max"]) == BPR
    assert parse_point(["routing.experts=[0,5]"]) == RoutingOverrides(experts=(0, 5))
    assert parse_point(["routing.random_blocks=[1]"]) == RoutingOverrides(random_blocks=(1,))
    assert parse_point(["routing.random_blocks=1"]) == RoutingOverrides(random_blocks=(1,))


def test_names_for_tables_and_for_metrics():
    assert point_name(AS_TRAINED) == "as trained"
    assert point_name(BPR) == "k=1 capacity=0.3 priority=max"
    assert point_key(BPR) == "k-1_capacity-0.3_priority-max"
    assert point_key(RoutingOverrides(experts=(0, 5))) == "experts-0.5"
    assert point_key(AS_TRAINED) == "as_trained"


def test_a_grid_is_a_product():
    grid = parse_grid(["routing.k=1,2", "routing.experts=[0,1],3"])
    assert [point_name(point) for point in grid] == [
        "k=1 experts=0,1",
        "k=1 experts=3",
        "k=2 experts=0,1",
        "k=2 experts=3",
    ]


def test_a_setting_is_named_once():
    with pytest.raises(UsageError, match=r"routing.k is named twice"):
        parse_point(["routing.k=1", "routing.k=2"])
    with pytest.raises(UsageError, match=r"write the values of routing.k in one, as 1,2"):
        parse_grid(["routing.k=1", "routing.k=2"])


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("k=1", "an operating point has routing.k=1"),
        ("train.lr=1", "an operating point has routing.k=1"),
        ("routing.kk=1", "an operating point has routing.k=1"),
        ("routing.k", "an operating point has routing.k=1"),
        ("routing.k=many", "routing.k=many: write a number, or a list"),
        ("routing.k=1.5", "k must be an integer, got 1.5"),
        ("routing.priority=best", r"priority must be one of \('none', 'max', 'sum'\), got 'best'"),
        ("routing.experts=[1,1]", "experts must be a number or a tuple of distinct indices"),
    ],
)
def test_what_is_no_point(text: str, message: str):
    with pytest.raises(UsageError, match=message):
        parse_point([text])

"""The interval of a mean, by tables and by hand."""

import math

import pytest

from orchestrator.evaluation.interval import interval


def test_three_seeds_by_the_table() -> None:
    """Values 1, 2, 3: mean 2, standard deviation 1. Student's t for 2 degrees of freedom is 4.303."""
    found = interval([1.0, 2.0, 3.0])
    assert found.mean == 2
    assert found.half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)


def test_two_values_and_another_level() -> None:
    """Of 1 degree of freedom, 90 %: 6.314; values 0 and 2 deviate by sqrt(2)."""
    assert interval([0.0, 2.0], level=0.9).half == pytest.approx(6.313752, rel=1e-6)


def test_one_value_has_none() -> None:
    found = interval([0.5])
    assert math.isnan(found.half)
    assert str(found) == "0.5000"
    assert str(interval([0.5, 0.5])) == "0.5000 +- 0.0000"

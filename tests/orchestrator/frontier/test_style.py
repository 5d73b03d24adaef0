"""Looks, sizes, numbers and titles."""

import pytest

from orchestrator.frontier.points import Point
from orchestrator.frontier.style import (
    TIMES,
    UNKNOWN,
    axis_title,
    family_styles,
    key_sizes,
    marker_px,
    number,
    web_link,
)


def point(size: float) -> Point:
    return Point(arm="x", family="soft", cost=1, quality=0.5, size=size, run_id="x", status="finished")


def test_sizes_are_areas_within_bounds() -> None:
    assert marker_px(2) ** 2 == pytest.approx(2 * marker_px(1) ** 2)
    assert marker_px(float("nan")) == marker_px(0) == marker_px(0.01) < marker_px(1)
    assert marker_px(100) == marker_px(200)


def test_key_has_at_most_four_sizes() -> None:
    assert key_sizes([point(size) for size in (1, 1)]) == ()
    assert key_sizes([point(size) for size in (4, 0.5, 1)]) == (0.5, 1, 4)
    assert key_sizes([point(size) for size in range(1, 11)]) == (1, 4, 7, 10)


def test_later_families_get_their_own_look() -> None:
    styles = family_styles(("zeta", "soft", "hash", "dense", "mixture"))
    assert list(styles) == ["dense", "soft", "hash", "mixture", "zeta"]
    assert len({style.colour for style in styles.values()}) == 5
    assert len({style.symbol for style in styles.values()}) == 5


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1.234e10, f"1.23{TIMES}10¹⁰"),
        (-2e-7, f"-2.00{TIMES}10⁻⁷"),
        (9.999e9, f"1.00{TIMES}10¹⁰"),
        (818.95, "819"),
        (43590.0, "43590"),
        (0.0, "0"),
        (1.25, "1.25"),
        (float("nan"), UNKNOWN),
        (float("inf"), UNKNOWN),
    ],
)
def test_numbers(value: float, text: str) -> None:
    assert number(value) == text


def test_axis_titles() -> None:
    assert axis_title("cost/train_flops_6mac") == f"Training FLOPs (6 {TIMES} MAC)"
    assert axis_title("val/acc1") == "Validation accuracy @1"
    assert axis_title("cost/price_usd") == "cost/price_usd"


@pytest.mark.parametrize("url", ["http://mlflow.test/#/runs/1", "https://mlflow.test"])
def test_only_web_addresses_are_links(url: str) -> None:
    assert web_link(url) == url
    assert web_link("javascript:alert(1)") is web_link(None) is None

"""Looks, sizes, numbers and titles."""

import pytest

from orchestrator.frontier.points import Point
from orchestrator.frontier.published import published
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
from orchestrator.sweeps.catalog import make_sweep
from orchestrator.sweeps.settings import settings


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


def test_families_of_the_routers_and_of_the_papers_have_the_same_looks() -> None:
    """No family gets a spare style, so that our arms look like the paper's points of the same router."""
    ours = {run.model.family() for run in make_sweep("routers", "tiny").runs().values()}
    theirs = {row.family for row in published("jft300m/prec1", "cost/tpuv3_days")}
    assert len(ours) == 7
    assert ours <= theirs
    styles = family_styles(ours | theirs | {"spare"})
    assert list(styles)[-1] == "spare"
    assert {style.colour for style in family_styles({"spare"}).values()} == {styles["spare"].colour}


def test_settings_tell_the_family_from_its_router() -> None:
    runs = make_sweep("routers", "tiny").runs()
    arm = next(name for name in runs if name.endswith("sinkhorn-ec-c1"))
    found = settings(runs[arm])
    assert (found["family"], found["router"], found["affinity"]) == (
        "sinkhorn_expert_choice",
        "expert_choice",
        "sinkhorn",
    )


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

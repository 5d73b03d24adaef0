"""The picture as a file, and its labels as boxes."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from matplotlib.transforms import Bbox

from orchestrator.frontier.picture import free_box, frontier_picture
from orchestrator.frontier.points import Frontier, Point
from orchestrator.frontier.style import (
    TIMES,
    UNKNOWN,
    axis_title,
    family_styles,
    key_sizes,
    marker_px,
    number,
)

FRAME = Bbox.from_extents(0, 0, 1000, 1000)
FAR = np.array([(0.0, 0.0)])


def point(family: str, cost: float = 1e10, quality: float = 0.9, size: float = 1) -> Point:
    name = "$x^{$ & <b> " + family
    return Point(
        arm=name, family=family, cost=cost, quality=quality, size=size, run_id=name, status="finished"
    )


def frontier(*points: Point) -> Frontier:
    names = {"name": "$\\frac{$", "cost_name": "cost/$^{$_s", "quality_name": "val/acc1"}
    return Frontier(**names, points=points, rest=points[:1], reference=(1e12, 0.1))


def colours(path: Path) -> set[tuple[int, ...]]:
    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    return set(map(tuple, pixels.reshape(-1, 3).tolist()))


def test_picture_shows_each_family_in_its_colour(tmp_path: Path) -> None:
    points = (point("dense", 1e10, 0.8), point("soft", 2e10, 0.9, 2), point("hash $^{$", 4e10, 0.95))
    frontier_picture(frontier(*points), tmp_path / "frontier.png")
    assert imread(tmp_path / "frontier.png").shape == (1000, 1600, 4)
    wanted = {tuple(bytes.fromhex(style.colour[1:])) for style in family_styles(points).values()}
    assert wanted <= colours(tmp_path / "frontier.png")


@pytest.mark.parametrize("points", [(), (point("soft", float("nan")),), (point("soft"),)])
def test_picture_of_few_points(tmp_path: Path, points: tuple[Point, ...]) -> None:
    frontier_picture(frontier(*points), tmp_path / "frontier.png")
    assert imread(tmp_path / "frontier.png").shape == (1000, 1600, 4)


def test_label_stands_above_and_left_of_its_marker() -> None:
    box = free_box(Bbox.from_bounds(500, 500, 20, 20), (100, 15), [], FAR, FRAME)
    assert box is not None
    assert (box.x1, box.y0, box.height) == (500, 522, 15)


def test_label_avoids_boxes_line_and_frame() -> None:
    marker = Bbox.from_bounds(500, 500, 20, 20)
    taken = Bbox.from_bounds(400, 520, 100, 15)
    higher = free_box(marker, (100, 15), [marker, taken], FAR, FRAME)
    assert higher is not None
    assert higher.y0 > taken.y1
    under_line = np.stack([np.linspace(390, 510, 50), np.linspace(515, 700, 50)], axis=1)
    below = free_box(marker, (100, 15), [marker], under_line, FRAME)
    assert below is not None
    assert (below.x0, below.y1) == (520, 498)
    at_the_left = free_box(Bbox.from_bounds(50, 500, 20, 20), (100, 15), [], FAR, FRAME)
    assert at_the_left is not None
    assert (at_the_left.x0, at_the_left.y0) == (2, 522)
    assert free_box(marker, (2000, 15), [], FAR, FRAME) is None


def test_sizes_are_areas_within_bounds() -> None:
    assert marker_px(2) ** 2 == pytest.approx(2 * marker_px(1) ** 2)
    assert marker_px(float("nan")) == marker_px(0) == marker_px(0.01) < marker_px(1)
    assert marker_px(100) == marker_px(200)


def test_key_has_at_most_four_sizes() -> None:
    assert key_sizes([point("soft", size=size) for size in (1, 1)]) == ()
    assert key_sizes([point("soft", size=size) for size in (4, 0.5, 1)]) == (0.5, 1, 4)
    assert key_sizes([point("soft", size=size) for size in range(1, 11)]) == (1, 4, 7, 10)


def test_later_families_get_their_own_look() -> None:
    styles = family_styles([point(family) for family in ("zeta", "soft", "hash", "dense", "mixture")])
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

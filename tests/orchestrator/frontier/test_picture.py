"""The picture as a file, with all that may be in it."""

from dataclasses import replace
from pathlib import Path
from xml.etree import ElementTree

import pytest
from matplotlib.image import imread

from orchestrator.frontier.picture import frontier_picture
from orchestrator.frontier.points import Frontier, Point
from orchestrator.frontier.style import family_styles


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
    return set(map(tuple, pixels[::3].reshape(-1, 3).tolist()))  # every third row has all of them


def test_picture_shows_each_family_in_its_colour(tmp_path: Path) -> None:
    points = (point("dense", 1e10, 0.8), point("soft", 2e10, 0.9, 2), point("hash $^{$", 4e10, 0.95))
    frontier_picture(frontier(*points), tmp_path / "frontier.png")
    assert imread(tmp_path / "frontier.png").shape == (1000, 1600, 4)
    wanted = {
        tuple(bytes.fromhex(style.colour[1:])) for style in family_styles([p.family for p in points]).values()
    }
    assert wanted <= colours(tmp_path / "frontier.png")


@pytest.mark.parametrize("points", [(), (point("soft", float("nan")),), (point("soft"),)])
def test_picture_of_few_points(tmp_path: Path, points: tuple[Point, ...]) -> None:
    frontier_picture(frontier(*points), tmp_path / "frontier.png")
    assert imread(tmp_path / "frontier.png").shape == (1000, 1600, 4)


def test_picture_as_svg_of_all_there_is(tmp_path: Path) -> None:
    """Seeds, a diverged point, a dense front of its own and the papers' points, at the size of the PNG."""
    dense = (point("dense", 100, 0.6), point("dense", 200, 0.7))
    seeds = replace(point("soft", 150, 0.75), qualities=(0.7, 0.8), arm="soft of two seeds")
    burnt = replace(point("soft", 300, float("nan")), status="diverged")
    days = replace(
        frontier(*dense, seeds, burnt), cost_name="cost/tpuv3_days", quality_name="imagenet/acc_10shot"
    )
    frontier_picture(days, tmp_path / "frontier.svg")
    drawn = ElementTree.parse(tmp_path / "frontier.svg").getroot()
    assert (drawn.get("width"), drawn.get("height")) == ("720pt", "450pt")
    comments = [line for line in (tmp_path / "frontier.svg").read_text().splitlines() if "<!--" in line]
    legend = " ".join(comments)
    for entry in ("Frontier", "Dense alone", "Published", "Diverged", "Knee: soft of two seeds"):
        assert entry in legend

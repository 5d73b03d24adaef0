"""A frontier as a picture."""

from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.text import Text

from orchestrator.frontier import drawing
from orchestrator.frontier.drawing import frontier_picture, new_figure, save_column
from orchestrator.frontier.figure import family_styles
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import Point
from tests.orchestrator.frontier.samples import EVIL, FRONTIER, NAN, many, point
from tests.orchestrator.frontier.test_figure import DAYS


def small(*points: Point) -> Frontier:
    reference = {EVIL: 1e12, "val/acc1": 0.1}
    return replace(
        FRONTIER, name=EVIL, cost_name=EVIL, points=points, retrained=points[:1], reference=reference
    )


def colours(path: Path) -> set[tuple[int, ...]]:
    pixels = (imread(path)[..., :3] * 255).round().astype(int)
    return set(map(tuple, pixels[::3].reshape(-1, 3).tolist()))  # every third row has all of them


def test_picture_shows_each_family_in_its_colour(tmp_path: Path) -> None:
    """Names that matplotlib would read as formulas are drawn as they are."""
    points = (
        point(EVIL, "dense", 1e10, 0.8),
        point("b2", "soft", 2e10, 0.9),
        point("c", "_$x^{$", 4e10, 0.95),
    )
    small(*points).save_picture(tmp_path / "frontier.png")
    assert imread(tmp_path / "frontier.png").shape == (1000, 1600, 4)
    styles = family_styles([p.family for p in points]).values()
    assert {tuple(bytes.fromhex(style.colour[1:])) for style in styles} <= colours(tmp_path / "frontier.png")


@pytest.mark.parametrize("points", [(), (point("a", "soft", 1e10, NAN),), (point("a", "soft", 1e10, 0.9),)])
def test_picture_of_few_points(tmp_path: Path, points: tuple[Point, ...]) -> None:
    small(*points).save_picture(tmp_path / "frontier.png")
    assert imread(tmp_path / "frontier.png").shape == (1000, 1600, 4)


def test_picture_as_svg_of_all_there_is(tmp_path: Path) -> None:
    """Seeds, a diverged point, a dense front of its own and the papers' points, at the size of the PNG."""
    dense = (point("d1", "dense", 100, 0.6), point("d2", "dense", 200, 0.7))
    seeds = replace(point("soft of two seeds", "soft", 150, 0.75), qualities=(0.7, 0.8))
    burnt = point("burnt", "soft", 300, NAN, "diverged")
    linear = {"linear": 0.65}
    states = (("d1", "finished"), ("d2", "failed"))
    everything = replace(DAYS, points=(*dense, seeds, burnt), baselines=linear, trials=states)
    everything.save_picture(tmp_path / "frontier.svg")
    drawn = ElementTree.parse(tmp_path / "frontier.svg").getroot()
    assert (drawn.get("width"), drawn.get("height")) == ("720pt", "450pt")
    lines = (tmp_path / "frontier.svg").read_text().splitlines()
    comments = "".join(line for line in lines if "<!--" in line)
    for entry in (
        "1 seed = 2 trials. ",
        "linear: 0.650",
        "Frontier",
        "Dense alone",
        "Published",
        "Diverged",
        "Knee: soft of two seeds",
    ):
        assert entry in comments


def test_the_front_is_a_staircase_over_ticks_with_whole_numbers() -> None:
    axes = frontier_picture(FRONTIER.plot()).axes[0]
    (front,) = [line for line in axes.lines if line.get_label() == "Frontier"]
    corners = [(20, 0.8), (30, 0.8), (30, 0.9), (90, 0.9), (90, 0.93), (800, 0.93), (800, 0.95)]  # GFLOP
    assert [*zip(*front.get_data(), strict=True)] == corners
    assert {"20", "200", "1000"} <= {tick.get_text() for tick in axes.get_xticklabels()}
    assert "Dominated" in [text.get_text() for text in axes.figure.legends[0].get_texts()]


def column(path: Path, frontier: Frontier, **options: Any) -> ElementTree.Element:
    save_column(frontier.plot(), path, **{"width": 3.25, "font": 8.0, **options})
    return ElementTree.parse(path).getroot()


def test_a_figure_for_a_column_is_as_wide_as_asked(tmp_path: Path) -> None:
    for width in (3.25, 6.75):
        drawn = column(tmp_path / "frontier.svg", FRONTIER, width=width)
        assert drawn.get("width") == f"{72 * width:g}pt"
    assert column(tmp_path / "titled.svg", FRONTIER, title="Ours").get("width") == "234pt"
    assert "<!-- Ours -->" in (tmp_path / "titled.svg").read_text()
    assert "<!-- routers -->" not in (tmp_path / "frontier.svg").read_text(), "the name of the sweep"


def test_a_column_has_text_of_one_size_and_its_legend_above_the_axes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many arms as well. Nothing that is drawn is cut off."""
    made: list[Figure] = []
    monkeypatch.setattr(
        drawing, "new_figure", lambda *size, **options: made.append(new_figure(*size, **options)) or made[-1]
    )
    for frontier in (FRONTIER, many(100), replace(FRONTIER, baselines={"linear": 0.84})):
        column(tmp_path / "frontier.svg", frontier, font=7.0)
        (axes,), (legend,) = made[-1].axes, made[-1].legends
        texts = [
            *axes.texts,
            *axes.get_xticklabels(),
            axes.xaxis.label,
            axes.yaxis.label,
            *legend.get_texts(),
        ]
        assert {text.get_fontsize() for text in texts} == {7.0}
        box = legend.get_window_extent()
        assert box.y0 >= axes.bbox.y1
        assert (box.x0 >= 0, box.x1 <= made[-1].bbox.x1) == (True, True)


def test_names_in_the_picture_do_not_overlap() -> None:
    axes = frontier_picture(many(300).plot()).axes[0]
    texts = [text for text in axes.texts if isinstance(text, Text) and text.get_text()]
    boxes = [text.get_window_extent() for text in texts]
    assert len(boxes) > 3
    assert sum(text.get_text().startswith("Knee: ") for text in texts) == 1
    for i, box in enumerate(boxes):
        assert box.count_overlaps(boxes[:i]) == 0
        assert axes.bbox.contains(box.x0, box.y0)
        assert axes.bbox.contains(box.x1, box.y1)

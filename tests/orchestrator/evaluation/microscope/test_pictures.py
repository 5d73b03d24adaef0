"""The parts of pictures that can be said in numbers, and a page that keeps to itself."""

import re

import numpy as np
import pytest
import torch

from moe.presets import PRESETS
from moe.routers import ROUTERS, ExpertChoiceConfig, SoftConfig, TokenChoiceConfig
from orchestrator.evaluation.microscope.discarded import drops, settings
from orchestrator.evaluation.microscope.draw_images import mosaic, squared
from orchestrator.evaluation.microscope.drawing import borders, expert_colours
from orchestrator.evaluation.microscope.examples import examples, pick
from orchestrator.evaluation.microscope.page import page, png
from orchestrator.evaluation.microscope.sections import multiplicity_at_random, sections
from orchestrator.evaluation.microscope.survey import survey
from orchestrator.evaluation.microscope.tables import layer_table, tables
from tests.lanes import mostly_slow

NAMES = ("cat", "<b>dog</b>", "$x$")


def test_borders_of_one_patch():
    """The lower right of 2x2: its four sides."""
    found = {tuple(line) for line in borders(np.array([[False, False], [False, True]]))}
    assert found == {(0.5, 0.5, 0.5, 1), (1, 0.5, 1, 1), (0.5, 0.5, 1, 0.5), (0.5, 1, 1, 1)}


def test_mosaic_by_hand():
    """Four patches with one expert of two slots each: pairs in their places, gaps between."""
    found = mosaic(torch.arange(8.0).view(4, 1, 2))
    gap = np.nan
    np.testing.assert_array_equal(found, [[0, 1, gap, 2, 3], [gap] * 5, [4, 5, gap, 6, 7]])


def test_squared_by_hand():
    """Five slots in 3x3, four places empty."""
    found = squared(torch.arange(5.0).view(1, 5))[0]
    np.testing.assert_array_equal(found, [[0, 1, 2], [3, 4, np.nan], [np.nan] * 3])


def test_first_of_every_class_then_the_rest():
    assert pick([2, 2, 0, 2, 1, 0], 3) == [0, 2, 4]
    assert pick([2, 2, 0, 2, 1, 0], 4) == [0, 1, 2, 4]
    assert pick([1, 1], 5) == [0, 1]


def test_expert_colours_differ():
    assert len(np.unique(expert_colours(30), axis=0)) == 30


def test_multiplicity_at_random(build_vit):
    """16 tokens, 4 experts with 4 slots each: none with (3 / 4) ** 4."""
    found = multiplicity_at_random(build_vit(ExpertChoiceConfig()).config)
    assert found[0] == pytest.approx(0.75**4)
    assert sum(found) == pytest.approx(1)
    assert len(found) == 5
    assert PRESETS["debug"].grid() == 4


KINDS = [kind() for kind in ROUTERS]


@pytest.mark.parametrize(
    "router", mostly_slow(KINDS, fast=[SoftConfig(), TokenChoiceConfig()]), ids=lambda r: r.kind
)
def test_every_section_of_every_router(build_vit, noise_batch, router):
    """The page asks for nothing from outside, names of classes end no markup, and pictures are pictures."""
    model, batch = build_vit(router), noise_batch(6, valid=5)
    blocks = model.config.moe_blocks()
    found = survey(model, [batch], blocks=blocks, classes=3, report=lambda images: None)
    points = settings(model, [0.5])[0] if drops(router) else []
    drawn = examples(model, batch, count=3, blocks=blocks, points=points)
    parts = [
        (section.title, section.text, {name: png(figure) for name, figure in section.pictures.items()})
        for section in sections(found, drawn, model.config, NAMES)
    ]
    assert all(content.startswith(b"\x89PNG") for _, _, contents in parts for content in contents.values())
    html = page("<Routers>", "facts", layer_table(found), parts)
    assert "&lt;Routers&gt;" in html
    assert "default-src 'none'" in html
    assert not re.search(r"(src|href)=\"(?!data:|#)", html)
    says_nothing_is_discarded = any("discards nothing" in text for _, text, _ in parts)
    assert says_nothing_is_discarded != drops(router)
    for table in tables(found, drawn, NAMES).values():
        assert len({len(column) for column in table.values()}) == 1

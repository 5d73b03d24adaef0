"""Where labels stand, as boxes."""

import numpy as np
from matplotlib.transforms import Bbox

from orchestrator.frontier.labels import free_box

FRAME = Bbox.from_extents(0, 0, 1000, 1000)
FAR = np.array([(0.0, 0.0)])


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

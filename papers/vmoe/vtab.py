"""The label rules of VTAB-1k: how distances, counts and places become classes.

Source: Zhai et al., 2019 (arXiv 1910.04867), and the code of task_adaptation. `vtab1k.toml` beside this file
has the 19 data sets.
"""

from collections.abc import Sequence

CLEVR_DISTANCES = (0.0, 8.0, 8.5, 9.0, 9.5, 10.0)
KITTI_DISTANCES = (-100.0, 8.0, 20.0, 999.0)
VEHICLES = (0, 1, 2)  # types of KITTI: car, van, truck


def _last_below(value: float, thresholds: Sequence[float]) -> int:
    """Returns the number of the last threshold that is smaller; equal is not."""
    return sum(threshold < value for threshold in thresholds) - 1


def clevr_count(objects: int) -> int:
    """Returns the class of an image with 3 to 10 objects."""
    return objects - 3


def clevr_distance(distances: Sequence[float]) -> int:
    """Returns the class of the nearest of the objects."""
    return _last_below(min(distances), CLEVR_DISTANCES)


def kitti_vehicle(objects: Sequence[tuple[int, float]]) -> int:
    """Returns the class of the nearest vehicle of (type, distance); without any, the last class."""
    distances = [distance for kind, distance in objects if kind in VEHICLES]
    return _last_below(min(distances, default=1000.0), KITTI_DISTANCES)


def dsprites_x(value: int) -> int:
    """Returns the class, of 16, of one of 32 places."""
    return value // 2


def dsprites_orientation(value: int) -> int:
    """Returns the class, of 16, of one of 40 orientations."""
    return int(value // 2.5)

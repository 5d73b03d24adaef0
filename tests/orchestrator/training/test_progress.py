"""The best evaluations that a run's checkpoints remember."""

import math
from typing import Any

import pytest

from orchestrator.training.progress import Progress


def test_the_best_is_finite_and_the_first() -> None:
    progress = Progress()
    for step, quality in enumerate((math.nan, 0.5, 0.9, math.inf, 0.9, 0.7), start=1):
        progress = progress.after(step, {"q": quality}, "q", k=2)
    assert (progress.best, progress.best_k) == ((0.9, 3), [(0.9, 3), (0.9, 5)])
    assert progress.after(7, {}, "q", k=2).best_k == progress.best_k


@pytest.mark.parametrize(("best", "best_k"), [(None, []), ([0.5, 10], [(0.5, 10)]), ([math.nan, 10], [])])
def test_progress_of_older_checkpoints(best: Any, best_k: list[tuple[float, int]]) -> None:
    assert Progress.read({"reported": 20, "metrics": {}, "best": best}).best_k == best_k

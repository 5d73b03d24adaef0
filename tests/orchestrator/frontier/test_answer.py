"""The best within bounds, what is not significantly worse, and what other bounds buy: by hand, and a law."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from orchestrator.costs import FORWARD, MS_P95
from orchestrator.errors import UsageError
from orchestrator.frontier.answer import Answer, answer, difference_text, errors_of, image_error
from orchestrator.frontier.frontier import Frontier
from orchestrator.frontier.points import Point

ACC = "val/acc1"


def arm(
    name: str, ms: float, *qualities: float, high: float = 0.0, gflops: float = 1.0, images: int = 0
) -> Point:
    return Point(
        arm=name,
        family="dense",
        cost=1.0,
        quality=sum(qualities) / len(qualities),
        size=1.0,
        run_id=f"{name}-0",
        status="finished",
        costs={MS_P95: ms, FORWARD: gflops},
        spreads={MS_P95: (ms, max(ms, high))},
        images=images,
        qualities=qualities if len(qualities) > 1 else (),
        runs=tuple((f"{name}-{seed}", None) for seed in range(1, len(qualities))),
    )


def asked(points: Sequence[Point], **bounds: float) -> Answer:
    names = {"ms": MS_P95, "gflops": FORWARD}
    given = {names[name]: most for name, most in bounds.items()}
    return answer(points, given, quality_name=ACC)


SURE = (
    arm("small", 1.0, 0.60, 0.61, 0.59),
    arm("middle", 2.0, 0.70, 0.71, 0.69, high=2.5),
    arm("large", 4.0, 0.80, 0.81, 0.79),
)


def names(points: Sequence[Point]) -> list[str]:
    return [point.arm for point in points]


def test_the_upper_end_of_a_cost_keeps_the_bound() -> None:
    found = asked(SURE, ms=2.5)
    assert found.best is SURE[1]
    assert (found.tied, found.others, found.looser, found.tighter) == ((), 1, SURE[2], SURE[0])
    assert asked(SURE, ms=2.4).best is SURE[0], "2 ms, but up to 2.5"
    words = "\n".join(found.lines())
    assert "Best within 2.5 ms (95th percentile of a call): middle, accuracy @1 0.7000" in words
    assert "A looser bound, 4 ms, admits large" in words
    assert "is not significant" not in words
    assert "Within the bound, 1 other arm is significantly worse." in words
    assert "A tighter bound, 1 ms, still admits small" in words


def test_a_bound_that_nothing_keeps() -> None:
    found = asked(SURE, ms=0.5)
    assert (found.best, found.nearest) == (None, SURE[0])
    words = "\n".join(found.lines())
    assert "No arm is within 0.5 ms" in words
    assert "a bound of 1 ms" in words


def test_several_bounds_hold_together() -> None:
    points = (arm("a", 1.0, 0.6, gflops=5.0), arm("b", 3.0, 0.5, gflops=1.0), arm("c", 1.0, 0.4, gflops=1.0))
    assert names([asked(points, ms=2.0, gflops=2.0).best or points[0]]) == ["c"]
    looser = asked(points, ms=2.0, gflops=2.0).looser
    assert looser is points[1], "of the other bounds none is loosened"
    words = "\n".join(asked(points, ms=1.0, gflops=2.0).lines())
    assert "A looser bound, 3 ms, admits b" in words
    words = "\n".join(asked(points[::2], ms=1.0, gflops=2.0).lines())
    assert "A looser bound, 5 GFLOP, admits a" in words, "no other bound keeps it out"
    words = "\n".join(asked(points[1:2], ms=4.0, gflops=0.5).lines())
    assert "a bound of 1 GFLOP; or" in words, "only what it exceeds has to change"


def test_errors_by_hand() -> None:
    """Seeds .60 and .62 have a variance of .0002, as .70 and .72 do; pooled with two degrees of freedom. Half
    of it is that of a mean; 100 images, of which 61 are right, add .606 x .394 / 104.
    """
    points = [arm("a", 1.0, 0.60, 0.62, images=100), arm("b", 1.0, 0.70, 0.72, images=100)]
    errors = errors_of(points, 2)
    assert (errors.seed_sd**2, errors.freedom) == (pytest.approx(0.0002), 2)
    assert errors.of(points[0]) == pytest.approx(math.sqrt(0.0001 + 63 / 104 * 41 / 104 / 104))
    assert errors.critical == pytest.approx(2.920, abs=1e-3), "Student's t at 95 %, 2 degrees of freedom"
    assert image_error(0.5, 0) == 0.0
    alone = errors_of([arm("a", 1.0, 0.6), arm("b", 1.0, 0.7), arm("c", 1.0, 0.8)], 3)
    assert math.isnan(alone.seed_sd)
    assert alone.critical == pytest.approx(1.960, abs=1e-3), "5 % shared by two others"
    assert not alone.known
    words = "\n".join(asked([arm("a", 1.0, 0.6), arm("b", 1.0, 0.7)], ms=2.0).lines())
    assert "1 other arm is worse, by an unknown error." in words
    assert "no difference is significant: take several seeds" in words


def test_what_one_seed_and_few_images_cannot_tell() -> None:
    qualities = {"a": (1.0, 0.60), "b": (0.5, 0.55), "c": (2.0, 0.30)}
    points = [arm(name, *found, images=128) for name, found in qualities.items()]
    found = asked(points, ms=3.0)
    assert (found.best, names(found.tied), found.others) == (points[0], ["b"], 1)
    assert found.cheapest is points[1]
    words = "\n".join(found.lines())
    assert "Not significantly worse (95%): b, accuracy @1 0.5500 ± 0.0433" in words
    assert "The cheapest of these is b." in words


def test_the_true_best_is_named_in_19_of_20() -> None:
    """Arms of known quality, judged by random seeds and images that all arms share."""
    rng, images, seeds, missed, trials = np.random.default_rng(0), 200, 3, 0, 400
    truth = np.array([0.50, 0.53, 0.55, 0.56, 0.565])
    for _ in range(trials):
        hard = rng.normal(0, 0.5, images)  # how hard each image is, for all arms
        points = []
        for number, quality in enumerate(truth):
            means = [
                float((rng.normal(quality + rng.normal(0, 0.01), 0.5, images) + hard > 0.5).mean())
                for _ in range(seeds)
            ]
            points.append(arm(str(number), 1.0, *means, images=images))
        found = asked(points, ms=2.0)
        assert found.best
        missed += str(len(truth) - 1) not in names((found.best, *found.tied))
    assert missed <= trials / 20


def test_a_frontier_says_what_was_not_measured() -> None:
    bare = Point(arm="a", family="dense", cost=1.0, quality=0.5, size=1.0, run_id="a", status="finished")
    frontier = Frontier(
        name="s", cost_name="c", quality_name=ACC, points=(bare,), reference={"c": 2.0, ACC: 0.1}
    )
    with pytest.raises(UsageError, match=r"infer/ms_p95 was not measured: jobs/answer.py s"):
        frontier.answer(max_ms=5)
    with pytest.raises(UsageError, match="at least one bound"):
        frontier.answer()
    whole = Frontier(name="s", cost_name="c", quality_name=ACC, points=SURE, reference={"c": 2.0, ACC: 0.1})
    assert whole.answer(max_ms=5).best is SURE[2]
    for wrong in (-1, math.inf, math.nan, "5"):
        with pytest.raises(UsageError, match=f"must be a number above 0, got {wrong!r}"):
            whole.answer(max_ms=wrong)  # pyright: ignore[reportArgumentType]
    assert names(whole.within(MS_P95, 2.4).points) == ["small"], "the upper end counts"


def test_printed_bounds_admit_what_they_name() -> None:
    """They are rounded up; of two looser bounds the second buys a significant difference."""
    points = (*SURE[:1], arm("near", 2.00004, 0.601, 0.611, 0.591), arm("far", 3.00004, 0.8, 0.81, 0.79))
    found = asked(points, ms=1.5)
    assert (found.looser, found.better) == (points[1], points[2])
    words = found.lines()
    assert any(line.startswith("A looser bound, 2.001 ms, admits near, ") for line in words)
    assert any(line.startswith("Significantly better, with 3.001 ms, is far, ") for line in words)
    (line,) = (line for line in asked(points, ms=0.5).lines() if "What would have to change" in line)
    assert "a bound of 1 ms" in line
    assert asked(points, ms=2.001).best == points[1]


def test_operating_points_are_candidates_if_a_file_holds_them() -> None:
    points = tuple(arm(f"token: {name}", 1.0, 0.9, gflops=0.5) for name in ("k=1", "experts=2"))
    named = tuple(
        replace(point, settings={"operating point": point.arm.partition(": ")[2]}, load_run=None)
        for point in points
    )
    frontier = Frontier(
        name="s",
        cost_name="c",
        quality_name=ACC,
        points=(arm("token", 2.0, 0.8),),
        operating=named,
        reference={"c": 2.0, ACC: 0.1},
    )
    found = frontier.answer(max_gflops=2.0)
    assert found.best
    assert (found.best.arm, found.others) == ("token: k=1", 1)
    assert "token: k=1 is an operating point, chosen on the images that judge it." in found.lines()


def test_images_that_are_routed_together_are_said() -> None:
    """The quality of such an arm is not that of single images."""
    grouped = replace(arm("a", 1.0, 0.6, images=100), settings={"images_per_group": 8})
    words = asked([grouped, arm("b", 1.0, 0.2, images=100)], ms=2.0).lines()
    assert words[-1].startswith("a routes 8 images together: its quality is that of images in such groups")


def test_differences_of_a_likelihood_are_in_bits() -> None:
    assert difference_text("val/acc1", 0.5, 0.1) == "10.0 points"
    assert difference_text("val/likelihood", 0.5, 0.1) == "0.289 bits", "0.1 / (0.5 ln 2)"

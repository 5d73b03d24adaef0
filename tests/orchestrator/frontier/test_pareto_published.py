"""Fronts, hypervolumes, ties and knees of the 34 runs that "Routers in Vision MoE" printed."""

import csv
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from orchestrator.frontier.pareto import hypervolume_2d, knee, pareto_front

FIXTURE = Path(__file__).parents[2] / "fixtures" / "paper001_runs.csv"
RUNS = list(csv.DictReader(FIXTURE.open()))


def published(quality: str, family: str = "") -> tuple[list[str], NDArray[np.float64]]:
    """Names, and (runs, 2) of TPUv3-days and quality in percent, of routers whose name ends in `family`."""
    runs = [run for run in RUNS if run["router"].endswith(family)]
    names = [f"{run['architecture']} {run['router']} {run['capacity']}" for run in runs]
    return names, np.array([(run["train_tpuv3_days"], run[quality]) for run in runs], dtype=np.float64)


@pytest.mark.parametrize("log_cost", [True, False])
@pytest.mark.parametrize(
    ("quality", "front"),
    [
        (
            "jft_prec_at_1_percent",
            {
                "B32 softmax_expert_choice 1",
                "B32 soft 1",
                "B32 soft 2",
                "B16 soft 1",
                "B16 soft 2",
                "L16 soft 1",
                "L16 sinkhorn_expert_choice 2",
            },
        ),
        (
            "imagenet_10shot_percent",
            {
                "B32 softmax_expert_choice 1",
                "B32 sinkhorn_expert_choice 1",
                "B32 soft 1",
                "B32 soft 2",
                "B16 soft 1",
                "B16 soft 2",
                "L16 soft 1",
            },
        ),
    ],
)
def test_published_fronts(quality: str, front: set[str], log_cost: bool) -> None:
    names, runs = published(quality)
    assert len(runs) == 34
    days = np.log10(runs[:, 0]) if log_cost else runs[:, 0]
    on_front = pareto_front(np.stack([days, -runs[:, 1]], axis=1))
    assert {name for name, on in zip(names, on_front, strict=True) if on} == front


@pytest.mark.parametrize(
    ("quality", "worst_percent", "family", "log_cost", "expected", "digits"),
    [
        ("jft_prec_at_1_percent", 40, "", True, 19.053822, 6),
        ("jft_prec_at_1_percent", 40, "token_choice", True, 16.78703, 5),
        ("jft_prec_at_1_percent", 40, "expert_choice", True, 18.2496, 4),
        ("jft_prec_at_1_percent", 40, "soft", True, 18.79523, 5),
        ("jft_prec_at_1_percent", 40, "", False, 30260.1015, 4),
        ("imagenet_10shot_percent", 60, "", True, 22.621250, 6),
        ("imagenet_10shot_percent", 60, "token_choice", True, 19.9094, 4),
        ("imagenet_10shot_percent", 60, "expert_choice", True, 21.21399, 5),
        ("imagenet_10shot_percent", 60, "soft", True, 22.41279, 5),
        ("imagenet_10shot_percent", 60, "", False, 32204.4591, 4),
    ],
)
def test_published_hypervolumes(
    quality: str, worst_percent: float, family: str, log_cost: bool, expected: float, digits: int
) -> None:
    """To the printed digits, reference 2000 days."""
    _, runs = published(quality, family)
    costs, reference = runs * (1, -1), np.array([2000.0, -worst_percent])
    if log_cost:
        costs[:, 0], reference[0] = np.log10(costs[:, 0]), np.log10(reference[0])
    assert hypervolume_2d(costs, reference) == pytest.approx(expected, abs=0.5 * 10**-digits)


@pytest.mark.parametrize(
    ("cheaper", "dearer", "percent"),
    [
        ("B16 softmax_expert_choice 1", "B16 sinkhorn_expert_choice 1", 48.64),
        ("B32 sinkhorn_expert_choice 2", "B32 sparse_expert_choice 2", 44.30),
    ],
)
def test_published_ties_in_quality_go_to_the_cheaper(cheaper: str, dearer: str, percent: float) -> None:
    names, runs = published("jft_prec_at_1_percent")
    pair = runs[[names.index(cheaper), names.index(dearer)]]
    assert pair[:, 1].tolist() == [percent, percent]
    assert pareto_front(pair * (1, -1)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("quality", "expected"),
    [("jft_prec_at_1_percent", "B32 soft 1"), ("imagenet_10shot_percent", "B16 soft 1")],
)
def test_published_knees(quality: str, expected: str) -> None:
    """In log10 cost: .066 below the chord against .052 (L16 Soft c1), and .179 against .144 (B32 Soft c1)."""
    names, runs = published(quality)
    assert names[knee(np.stack([np.log10(runs[:, 0]), -runs[:, 1]], axis=1))] == expected

"""Whether experts specialise: as many expert weights in more, smaller experts, at the same accuracy.

`PatchNet` on digits: four patches of 4x4, one Soft MoE layer, 256 hidden units in all experts together.
Training stops where the full model reaches the accuracy that all are compared at. Which k experts do best for
an image is asked of every subset; algorithm 1 guesses them from the router alone; random ones are drawn for
each image.

Source: Chung et al. 2024, "Beyond Parameter Count: Implicit Bias in Soft Mixture of Experts", sections
4.2-4.4, tables 1-2, figures 1-3 and 5. Ours are the digits of scikit-learn, and the accuracy to stop at is
that of the images that subsets are judged on.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev

import torch
import torch.nn.functional as F

from moe.patch_net import PatchNet, PatchNetConfig
from orchestrator.errors import UsageError
from orchestrator.evaluation.studies.digits import TESTED, correct, descend, digits
from orchestrator.evaluation.studies.found import Curve, Found, Panel, Say, band
from orchestrator.evaluation.studies.subsets import (
    Exhaustive,
    chosen_accuracy,
    exhaustive,
    random_accuracies,
    terms_of,
)

EXPERTS = (2, 4, 8, 16)
TOTAL_HIDDEN, EPOCHS, PEAK = 256, 40, 5e-3
STOP_AT = 0.95


@dataclass(frozen=True, kw_only=True)
class Point:
    """Accuracies with k experts of a net. `spread`: deviation of `random`'s mean over seeds."""

    k: int
    chosen: float
    random: float
    spread: float

    def z(self) -> float:
        """How many deviations algorithm 1 is above random experts."""
        return (self.chosen - self.random) / self.spread


@dataclass(frozen=True, kw_only=True)
class Judged:
    """Attributes:
    full: accuracy of all experts, where training stopped after `steps`.
    best: of all subsets of half the experts.
    points: k from 1 to one less than all.
    """

    num_experts: int
    full: float
    steps: int
    best: Exhaustive
    points: Sequence[Point]

    def half(self) -> Point:
        return self.points[self.num_experts // 2 - 1]


def train(num_experts: int, *, seed: int, stop_at: float) -> tuple[PatchNet, int]:
    """Stops as soon as the accuracy of all experts reaches `stop_at`; also the steps that took.

    Raises:
        UsageError: if it does not in `EPOCHS`.
    """
    sizes = PatchNetConfig(image_size=8, patch_size=4, num_experts=num_experts, total_hidden=TOTAL_HIDDEN)
    net, data = PatchNet(sizes, seed=seed), digits()
    steps = descend(
        net,
        lambda index_B, _: F.cross_entropy(net(data.grey[index_B]), data.labels[index_B]),
        epochs=EPOCHS,
        peak=PEAK,
        seed=seed,
        stop=lambda: full_accuracy(net) >= stop_at,
    )
    if (reached := full_accuracy(net)) < stop_at:
        raise UsageError(
            f"--stop-at {stop_at}: {num_experts} experts with seed {seed} end at {reached:.4f} after {EPOCHS}"
            " epochs; the nets are to be compared at one accuracy, so use a lower one"
        )
    return net, steps


@torch.no_grad()
def full_accuracy(net: PatchNet) -> float:
    return correct(net(digits().grey[TESTED])).float().mean().item()


def judge(net: PatchNet, steps: int) -> Judged:
    images, labels_B, n = digits().grey[TESTED], digits().labels[TESTED], net.config.num_experts
    terms = terms_of(net, images)
    points = []
    for k in range(1, n):
        random = random_accuracies(terms, labels_B, k)
        chosen = chosen_accuracy(net, images, labels_B, k)
        points.append(Point(k=k, chosen=chosen, random=fmean(random), spread=stdev(random)))
    best = exhaustive(terms, labels_B, n // 2)
    return Judged(num_experts=n, full=full_accuracy(net), steps=steps, best=best, points=points)


def nets(seeds: int, stop_at: float, say: Say) -> Iterator[Judged]:
    for n in EXPERTS:
        for seed in range(seeds):
            judged = judge(*train(n, seed=seed, stop_at=stop_at))
            half = judged.half()
            say(
                f"{n} experts, seed {seed}: {judged.full:.4f} after {judged.steps} steps; with half of them"
                f" best {judged.best.solved:.4f}, algorithm 1 {half.chosen:.4f}, random {half.random:.4f}"
            )
            yield judged


def found(judged: Sequence[Judged], stop_at: float) -> Found:
    by_n = {n: [one for one in judged if one.num_experts == n] for n in EXPERTS}
    halves = {n: [one.half() for one in ones] for n, ones in by_n.items()}
    seeds = len(by_n[EXPERTS[0]])
    columns = {
        "experts": list(EXPERTS),
        "k": [n // 2 for n in EXPERTS],
        "all": [fmean(one.full for one in ones) for ones in by_n.values()],
        "best-k": [fmean(one.best.solved for one in ones) for ones in by_n.values()],
        "algorithm 1": [fmean(half.chosen for half in ones) for ones in halves.values()],
        "random-k": [fmean(half.random for half in ones) for ones in halves.values()],
        "z": [fmean(half.z() for half in ones) for ones in halves.values()],
        "unique best": [fmean(one.best.unique for one in ones) for ones in by_n.values()],
        "of at most": [ones[0].best.cap for ones in by_n.values()],
    }
    figures = {
        f"{name}/n-{n}": columns[column][i]
        for i, n in enumerate(EXPERTS)
        for name, column in (
            ("best_k", "best-k"),
            ("algorithm_1", "algorithm 1"),
            ("random_k", "random-k"),
            ("z", "z"),
        )
    }
    return Found(
        title=f"Subsets of experts at accuracy {stop_at}, {TOTAL_HIDDEN} hidden units in all ({seeds} seeds)",
        table=columns,
        panels=[_panel(n, ones) for n, ones in by_n.items()],
        figures=figures,
        details={"every_k": every_k(judged)},
        notes=[
            f"all: accuracy where training stopped, --stop-at {stop_at}; best-k: share of images that some"
            " subset gets right",
            "z: (algorithm 1 - mean of random-k) / deviation over 10 draws of a subset for each image;"
            " unique best: different subsets of least loss",
        ],
    )


def every_k(judged: Sequence[Judged]) -> dict[str, list[float]]:
    """A row per number of experts and k: means over seeds (tables 10-13 of the paper)."""
    rows = []
    for n in EXPERTS:
        ones = [one for one in judged if one.num_experts == n]
        for points in zip(*(one.points for one in ones), strict=True):
            means = [
                fmean(getattr(point, name) for point in points) for name in ("chosen", "random", "spread")
            ]
            rows.append([n, points[0].k, *means, fmean(point.z() for point in points)])
    names = ("experts", "k", "algorithm 1", "random-k", "deviation", "z")
    return {name: list(column) for name, column in zip(names, zip(*rows, strict=True), strict=True)}


def _panel(n: int, ones: Sequence[Judged]) -> Panel:
    ks = list(range(1, n + 1))
    chosen, random = (
        [[*(getattr(point, name) for point in one.points), one.full] for one in ones]
        for name in ("chosen", "random")
    )
    best = fmean(one.best.solved for one in ones)
    full = fmean(one.full for one in ones)
    return Panel(
        curves=[
            band("algorithm 1", ks, chosen),
            band("random", ks, random),
            Curve(label=f"best {n // 2}", x=[n // 2], y=[best]),
            Curve(label="all", x=[1, n], y=[full, full], reference=True),
        ],
        title=f"{n} experts",
        x_title="Experts that run, k",
        y_title="Accuracy on unseen digits",
        x_ticks=ks if n < 16 else [1, 4, 8, 12, 16],
        y_range=(0.0, 1.02),
    )

"""Whether experts specialise: the same expert weights in more, smaller experts, at the same accuracy.

`PatchNet` on digits: four patches of 4x4, one Soft MoE layer, 256 hidden units in all experts together; or on
images of the user's, as MNIST, in four patches, with a hidden unit for every pixel, as in section 4.2.
Training stops where the full model reaches the accuracy at which all are compared. Every subset of k experts
is tried to find the best for each image; algorithm 1 chooses a subset by the router alone; random subsets are
drawn for each image.

Source: Chung et al. 2024, "Beyond Parameter Count: Implicit Bias in Soft Mixture of Experts", sections
4.1-4.4, tables 1-2 and 10-13, figures 1-3 and 5. Ours are the digits of scikit-learn, and the accuracy to
stop at is measured on the images that subsets are judged on.
"""

from dataclasses import dataclass
from itertools import combinations

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from moe import RoutingOverrides, SoftConfig
from moe.experts import Experts, chosen_alone, run_chosen
from moe.init import init_weights
from moe.overrides import AS_TRAINED
from moe.routers.soft import SoftRouter
from orchestrator.data.images import decode
from orchestrator.data.manifest import open_manifest
from orchestrator.data.shards import DataSet
from orchestrator.errors import UsageError
from orchestrator.frontier.drawing import COLOURS
from papers.digits import TESTED, TRAIN, descend, digits
from papers.results import ProgressFn, StudyResult, draw_reference, draw_seeds, finish, panels

EXPERTS = (2, 4, 8, 16)
TOTAL_HIDDEN, EPOCHS, PEAK = 256, 40, 5e-3
PAPERS_EPOCHS, JUDGED = (
    15,
    2000,
)  # of images of the user's: section 4.2, and the most that subsets are tried on
STOP_AT = 0.95
CHUNK = 256  # subsets at a time: 256 x 790 images x 10 classes are 8 MB


@dataclass(frozen=True, kw_only=True)
class Greys:
    """Grey images to learn and to judge on: (N, 1, size, size) in 0..1, and their labels (N,).

    Attributes:
        hidden: hidden units of all experts together.
        epochs: the most that a net is trained for.
    """

    learned: Tensor
    learned_labels: Tensor
    judged: Tensor
    labels: Tensor
    hidden: int
    epochs: int

    @property
    def size(self) -> int:
        return self.learned.shape[-1]

    @property
    def classes(self) -> int:
        return int(torch.cat([self.learned_labels, self.labels]).max()) + 1

    def accuracy(self, logits: Tensor) -> float:
        return (logits.argmax(-1) == self.labels).float().mean().item()


def grey_digits() -> Greys:
    """Returns the digits of scikit-learn."""
    grey, _, labels = digits()
    learned, judged = (grey[:TRAIN], labels[:TRAIN]), (grey[TESTED], labels[TESTED])
    return Greys(
        learned=learned[0],
        learned_labels=learned[1],
        judged=judged[0],
        labels=judged[1],
        hidden=TOTAL_HIDDEN,
        epochs=EPOCHS,
    )


def grey_images(path: str) -> Greys:
    """Returns the images of packed shards, which are decoded into memory, all of one even size.

    Raises:
        UsageError: if they are not square, differ in size, or their side is odd.
    """
    data, found = DataSet(path=path, manifest=open_manifest(path), cache_bytes=0), []
    for split, most in (("train", None), ("val", JUDGED)):
        images = np.arange(data.manifest.rows(split))[:most]
        pixels = [decode(read()).float().mean(0) / 255 for read in data.readers(split, images)]
        shapes = {tuple(each.shape) for each in pixels}
        (height, width), *others = shapes
        if others or height != width or height % 2:
            raise UsageError(f"{path}: patches need square images of one even size, got {sorted(shapes)[:3]}")
        found += [torch.stack(pixels).unsqueeze(1), torch.tensor(data.labels(split)[images])]
    learned, learned_labels, judged, labels = found
    hidden = learned.shape[-1] ** 2
    return Greys(
        learned=learned,
        learned_labels=learned_labels,
        judged=judged,
        labels=labels,
        hidden=hidden,
        epochs=PAPERS_EPOCHS,
    )


class PatchNet(nn.Module):
    """One Soft MoE layer over the patches of a grey image, and a linear head that reads all its outputs.

    There is no residual connection, and each expert has one slot. All experts together have `hidden` units
    with ReLU, so the number of experts does not change the number of their weights. Section 4.2 of the paper:
    MNIST, patches of 14x14, 784 hidden units.
    """

    def __init__(
        self,
        num_experts: int,
        *,
        size: int = 8,
        patch: int = 4,
        hidden: int = TOTAL_HIDDEN,
        classes: int = 10,
        seed: int = 0,
    ) -> None:
        super().__init__()
        self.num_experts, self.patch, width = num_experts, patch, patch**2
        self.router = SoftRouter(SoftConfig(normalize="none"), dim=width, num_experts=num_experts)
        self.experts = Experts(num_experts, width, hidden // num_experts, activation="relu")
        self.head = nn.Linear(size**2, classes)
        init_weights(self, seed)

    def forward(self, images: Tensor, routing_overrides: RoutingOverrides = AS_TRAINED) -> Tensor:
        """(B, 1, H, W) -> logits (B, classes)."""
        x_BSD = F.unfold(images, self.patch, stride=self.patch).transpose(1, 2)
        routing = self.router(x_BSD, x_BSD.new_ones(x_BSD.shape[:2]), overrides=routing_overrides)
        if k := chosen_alone(self.experts, routing, routing_overrides):
            y_BSD = run_chosen(self.experts, routing, x_BSD, k)
        else:
            y_BSD = routing.combine(self.experts(routing.dispatch(x_BSD)))
        return self.head(y_BSD.flatten(1))


def train(images: Greys, num_experts: int, *, seed: int, stop_at: float) -> tuple[PatchNet, int]:
    """A net whose accuracy with all experts has just reached `stop_at`, and the steps that it took.

    Raises:
        UsageError: if the accuracy is not reached in the epochs of the images.
    """
    net = PatchNet(
        num_experts,
        size=images.size,
        patch=images.size // 2,
        hidden=images.hidden,
        classes=images.classes,
        seed=seed,
    )

    def loss(index_B: Tensor, _: int) -> Tensor:
        return F.cross_entropy(net(images.learned[index_B]), images.learned_labels[index_B])

    def stop() -> bool:
        return accuracy_with(net, images) >= stop_at

    steps = descend(
        net,
        loss,
        epochs=images.epochs,
        peak=PEAK,
        seed=seed,
        stop=stop,
        images=len(images.learned),
    )
    if (reached := accuracy_with(net, images)) < stop_at:
        raise UsageError(
            f"--stop-at {stop_at}: {num_experts} experts with seed {seed} end at {reached:.4f} after"
            f" {images.epochs} epochs; all nets are compared at the same accuracy, so choose a lower one"
        )
    return net, steps


@torch.no_grad()
def accuracy_with(net: PatchNet, images: Greys, overrides: RoutingOverrides = AS_TRAINED) -> float:
    """The accuracy on unseen images. `experts=k`: the k experts of largest weight per image (algorithm 1)."""
    return images.accuracy(net(images.judged, overrides))


@torch.no_grad()
def expert_terms(net: PatchNet, images: Greys) -> Tensor:
    """(E, B, classes): what each expert adds to the logits of each unseen image.

    The head is linear and there is no residual connection, so the logits of a subset are the head's bias and
    the sum of the terms of its experts.
    """
    alone = [net(images.judged, RoutingOverrides(experts=(e,))) for e in range(net.num_experts)]
    return torch.stack(alone) - net.head.bias


def subset_logits(terms_EBL: Tensor, bias: Tensor, mask_MBE: Tensor) -> Tensor:
    """(M, B, classes): the logits of M choices of experts, for each image or (M, 1, E) for all images."""
    if mask_MBE.shape[1] == 1:
        return bias + torch.einsum("me,ebl->mbl", mask_MBE[:, 0], terms_EBL)
    return bias + torch.einsum("mbe,ebl->mbl", mask_MBE, terms_EBL)


def best_subsets(terms_EBL: Tensor, bias: Tensor, labels_B: Tensor, k: int) -> tuple[float, int, int]:
    """Tries every subset of k experts on every image.

    Returns:
        The share of images that at least one subset gets right; the number of different subsets that have the
        least loss on an image; and its upper bound, the number of images or subsets.
    """
    E, B, _ = terms_EBL.shape
    subsets_MK = torch.tensor(list(combinations(range(E), k)))
    solved_B, least_B = torch.zeros(B, dtype=torch.bool), torch.full((B,), torch.inf)
    best_B = torch.zeros(B, dtype=torch.long)
    for start in range(0, len(subsets_MK), CHUNK):
        chunk_MK = subsets_MK[start : start + CHUNK]
        mask_ME = torch.zeros(len(chunk_MK), E).scatter(1, chunk_MK, 1.0)
        logits_MBL = subset_logits(terms_EBL, bias, mask_ME.unsqueeze(1))
        solved_B |= (logits_MBL.argmax(-1) == labels_B).any(0)
        label_MB = labels_B.expand(len(chunk_MK), -1)
        loss_B, index_B = F.cross_entropy(logits_MBL.mT, label_MB, reduction="none").min(0)
        best_B = torch.where(loss_B < least_B, index_B + start, best_B)
        least_B = torch.minimum(least_B, loss_B)
    return solved_B.float().mean().item(), len(best_B.unique()), min(B, len(subsets_MK))


def random_accuracies(
    terms_EBL: Tensor, bias: Tensor, images: Greys, k: int, *, draws: int = 10
) -> list[float]:
    """The accuracy of k experts that are drawn for each image, for each draw."""
    E, B, _ = terms_EBL.shape
    found = []
    for seed in range(draws):
        drawn_BE = torch.rand(B, E, generator=torch.Generator().manual_seed(seed))
        mask_BE = torch.zeros(B, E).scatter(1, drawn_BE.argsort(1)[:, :k], 1.0)
        found.append(images.accuracy(subset_logits(terms_EBL, bias, mask_BE.unsqueeze(0))[0]))
    return found


@dataclass(frozen=True, kw_only=True)
class Judged:
    """The accuracies of a net with subsets of its experts. Arrays are for k = 1 .. E - 1."""

    full: float  # with all experts
    best: float  # of `best_subsets` with half the experts, as the next two
    unique: int
    cap: int
    chosen: np.ndarray  # by algorithm 1
    random: np.ndarray  # mean of `random_accuracies`
    deviation: np.ndarray  # their standard deviation

    @property
    def z(self) -> np.ndarray:
        """The number of deviations by which algorithm 1 exceeds random experts."""
        return (self.chosen - self.random) / self.deviation


def judge(net: PatchNet, images: Greys) -> Judged:
    n, terms_EBL, bias = net.num_experts, expert_terms(net, images), net.head.bias.detach()
    best, unique, cap = best_subsets(terms_EBL, bias, images.labels, n // 2)
    random = np.array([random_accuracies(terms_EBL, bias, images, k) for k in range(1, n)])
    return Judged(
        full=accuracy_with(net, images),
        best=best,
        unique=unique,
        cap=cap,
        chosen=np.array([accuracy_with(net, images, RoutingOverrides(experts=k)) for k in range(1, n)]),
        random=random.mean(1),
        deviation=random.std(1, ddof=1),
    )


def specialise(seeds: int, progress: ProgressFn, *, stop_at: float = STOP_AT, data: str = "") -> StudyResult:
    """Compares nets of each number of experts and seed that all reach the accuracy `stop_at`, on the images
    of packed shards at `data`, or on digits.
    """
    images = grey_images(data) if data else grey_digits()
    judged: dict[int, list[Judged]] = {n: [] for n in EXPERTS}
    for n, nets in judged.items():
        for seed in range(seeds):
            net, steps = train(images, n, seed=seed, stop_at=stop_at)
            nets.append(found := judge(net, images))
            half = n // 2 - 1
            progress(
                f"{n} experts, seed {seed}: {found.full:.4f} after {steps} steps; with half of them best"
                f" {found.best:.4f}, algorithm 1 {found.chosen[half]:.4f}, random {found.random[half]:.4f}"
            )
    return summarise(judged, stop_at, images.hidden)


def summarise(judged: dict[int, list[Judged]], stop_at: float, hidden: int) -> StudyResult:
    """A table for half of the experts; a picture and a further table for any number. Means over seeds."""

    def with_k(n: int, k: int) -> dict[str, float]:
        values = [(net.chosen, net.random, net.deviation, net.z) for net in judged[n]]
        means = np.mean(values, axis=0)[:, k - 1].tolist()
        names = ("algorithm 1", "random-k", "deviation", "z")
        return {"experts": n, "k": k, **dict(zip(names, means, strict=True))}

    half = []
    for n, nets in judged.items():
        means = np.mean([(net.full, net.best, net.unique) for net in nets], axis=0).tolist()
        row = with_k(n, n // 2) | dict(zip(("all", "best-k", "unique best"), means, strict=True))
        half.append(row | {"of at most": nets[0].cap})
    every_k = [with_k(n, k) for n in judged for k in range(1, n)]
    seeds = len(judged[EXPERTS[0]])
    title = f"Subsets of experts at accuracy {stop_at}, {hidden} hidden units in all ({seeds} seeds)"
    figure, axes_of = panels(title, len(judged))
    for axes, row, (n, nets) in zip(axes_of, half, judged.items(), strict=True):
        for what, label in (("chosen", "algorithm 1"), ("random", "random")):
            draw_seeds(axes, range(1, n + 1), [[*vars(net)[what], net.full] for net in nets], label=label)
        axes.plot([n // 2], [row["best-k"]], "o", color=COLOURS[2], label=f"best {n // 2}")
        draw_reference(axes, [1, n], [row["all"]] * 2, "all")
        axes.set_ylim(0.0, 1.02)
        ticks = range(1, n + 1, max(1, n // 8))
        heading = f"{n} experts; z of half of them: {row['z']:.1f}"
        finish(axes, "Experts that run, k", "Accuracy on unseen images", ticks, heading)
    return StudyResult(
        title=title,
        table={name: [row[name] for row in half] for name in half[0]},
        figure=figure,
        metrics={
            f"{name.replace('-', '_').replace(' ', '_')}/n-{row['experts']}": row[name]
            for row in half
            for name in ("best-k", "algorithm 1", "random-k", "z")
        },
        details={"every_k": {name: [row[name] for row in every_k] for name in every_k[0]}},
        notes=[
            f"all: accuracy where training stopped, --stop-at {stop_at}; best-k: share of images that at"
            " least one subset gets right",
            "deviation: of random-k over 10 draws of a subset for each image; z: (algorithm 1 - random-k) /"
            " deviation; unique best: number of different subsets with the least loss on an image",
        ],
    )

"""Few-shot classification of frozen features by ridge regression in closed form, for every strength at once.

Source: the few-shot evaluator of V-MoE (section 3.4) and Soft MoE, as in the authors' code: images are
resized to squares and their middle is kept, features are standardised by the training images, targets are -1
and +1, a bias feature of 100 is regularised like the others, and each number of shots has one strength,
chosen by its mean rank over the data sets' test accuracy. The choice is made on the test images: figures are
comparable with the papers', and slightly optimistic. Of an image with several labels, the first counts.

Several workers call it together, each with its part of the images, and all get the same figures.
Dimensions: N training images, M test images, D features, C classes, R = min(N, D + 1).
"""

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from statistics import fmean

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from moe.model import Model
from moe.parallel import sum_over_ranks, this_rank
from orchestrator import storage
from orchestrator.config import FewShotConfig, RunConfig
from orchestrator.data.batch import normalize
from orchestrator.data.plan import Ints
from orchestrator.data.stream import Stream, in_order, in_process, prefetched
from orchestrator.errors import UsageError

Floats = NDArray[np.float64]

BIAS = 100.0
STRENGTHS: tuple[float, ...] = tuple(2.0**power for power in range(-10, 20))


def choose_shots(labels: Ints, *, shots: int, seed: int) -> Ints:
    """Returns indices of `shots` images of each class, class after class; of smaller classes all images.

    A larger number of shots begins with the same images.
    """
    rng = np.random.default_rng(seed)
    chosen = [rng.permutation(np.flatnonzero(labels == label))[:shots] for label in np.unique(labels)]
    return np.concatenate(chosen)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ridge:
    """The solution for every strength: a decomposition, to whose spectrum the strength is added.

    Attributes:
        mean, scale: (D,), of the training features.
        basis: (D + 1, R); spectrum: (R,); target: (R, C).
    """

    mean: Floats
    scale: Floats
    basis: Floats
    spectrum: Floats
    target: Floats

    def weights(self, strength: float) -> Floats:
        """Returns the weights (D + 1, C) for standardised features and the bias feature."""
        return self.basis @ (self.target / (self.spectrum + strength)[:, None])

    def answers(self, x_MD: NDArray[np.floating]) -> Ints:
        """Returns the class with the largest score for every strength, (strengths, M)."""
        projected = augmented(x_MD, self.mean, self.scale) @ self.basis
        scores = ((projected / (self.spectrum + strength)) @ self.target for strength in STRENGTHS)
        return np.stack([scores_MC.argmax(-1) for scores_MC in scores])


def fit_ridge(x_ND: NDArray[np.floating], labels_N: Ints, num_classes: int) -> Ridge:
    """Decomposes the smaller of the Gram matrix and the kernel, in float64."""
    mean = x_ND.mean(0, dtype=np.float64)
    scale = x_ND.std(0, dtype=np.float64) + 1e-5
    x = augmented(x_ND, mean, scale)
    y = np.where(labels_N[:, None] == np.arange(num_classes), 1.0, -1.0)
    if len(x) >= x.shape[1]:
        spectrum, basis = np.linalg.eigh(x.T @ x)
        target = basis.T @ (x.T @ y)
    else:
        spectrum, vectors = np.linalg.eigh(x @ x.T)
        basis, target = x.T @ vectors, vectors.T @ y
    return Ridge(mean=mean, scale=scale, basis=basis, spectrum=spectrum, target=target)


def augmented(x_ND: NDArray[np.floating], mean: Floats, scale: Floats) -> Floats:
    return np.pad((x_ND - mean) / scale, ((0, 0), (0, 1)), constant_values=BIAS)


def best_strength(accuracies: Floats) -> int:
    """Returns the index of the strength with the best mean rank; accuracies are (data sets, strengths).

    Equal accuracies rank as in the authors' unstable sort. A heap sort gives one order on every machine.
    """
    order = np.argsort(accuracies, axis=1, kind="heapsort")
    return int(np.argsort(order, axis=1, kind="heapsort").mean(0).argmax())


@dataclass(frozen=True, kw_only=True)
class FewShotResult:
    """`strength`: shots -> strength for all data sets; `accuracy`: (data set, shots) -> with each seed."""

    strength: Mapping[int, float]
    accuracy: Mapping[tuple[str, int], tuple[float, ...]]

    def names(self) -> list[str]:
        return list(dict.fromkeys(name for name, _ in self.accuracy))

    def mean(self, shots: int, name: str | None = None) -> float:
        """Returns the mean over seeds, for one data set or over all of them."""
        return fmean(fmean(self.accuracy[data, shots]) for data in ([name] if name else self.names()))

    def metrics(self) -> dict[str, float]:
        """Returns means over seeds and data sets, by the names of `FewShotConfig.metrics`."""
        return {f"fewshot/acc_{shots}shot": self.mean(shots) for shots in self.strength}


class FewShot:
    """The data sets of a `FewShotConfig`, read as `run` reads its own; each worker reads its part.

    Raises:
        UsageError: if a data set is missing or incomplete, or the model reads no images.
    """

    def __init__(self, run: RunConfig, config: FewShotConfig, rank: int = 0, workers: int = 1) -> None:
        if not run.model.image_side():
            raise UsageError(f"few shots are of images, and a model of kind {run.model.kind!r} reads none")
        self.config = config
        paths = [storage.absolute(path) for path in config.paths] or [run.data.path]
        self.sets = {
            name: _Shots(
                replace(run, data=replace(run.data, path=path, eval_resize="square")), config, rank, workers
            )
            for name, path in short_names(paths).items()
        }

    def measure(self, model: nn.Module, device: torch.device) -> FewShotResult:
        """Returns the figures of a model; NaN if features are not finite."""
        by_set = {name: shots.accuracies(model, device) for name, shots in self.sets.items()}
        strength, accuracy = {}, {}
        for shots in self.config.shots:
            best = best_strength(np.stack([by_shots[shots].mean(0) for by_shots in by_set.values()]))
            strength[shots] = STRENGTHS[best]
            for name, by_shots in by_set.items():
                accuracy[name, shots] = tuple(by_shots[shots][:, best].tolist())
        return FewShotResult(strength=strength, accuracy=accuracy)


def few_shots(model: Model, run: RunConfig, config: FewShotConfig) -> FewShotResult:
    """Returns the figures of a model; all workers that hold it together call this together. Raises UsageError
    as `FewShot`, and if features are not finite.
    """
    result = FewShot(run, config, *this_rank()).measure(model, next(model.parameters()).device)
    if not all(map(math.isfinite, result.metrics().values())):
        raise UsageError(
            "the model's features are not finite: its weights overflow or are damaged, and accuracies would"
            " mean nothing"
        )
    return result


class _Shots:
    """The drawn training images and the test images of one data set."""

    def __init__(self, run: RunConfig, config: FewShotConfig, rank: int, workers: int) -> None:
        all_images = in_order(run, "train", rank, workers, fields={})
        labels = all_labels(all_images)
        draws = {
            shots: [choose_shots(labels, shots=shots, seed=seed) for seed in range(config.seeds)]
            for shots in config.shots
        }
        # `train` has the images of all draws, which become indices into it.
        chosen = np.unique(np.concatenate([draw for drawn in draws.values() for draw in drawn]))
        self.train = Selection(**vars(all_images), indices=chosen)
        self.test = in_order(run, "val", rank, workers, fields={})
        self.draws = {n: [np.searchsorted(chosen, draw) for draw in drawn] for n, drawn in draws.items()}

    def accuracies(self, model: nn.Module, device: torch.device) -> dict[int, Floats]:
        """Returns shots -> accuracies (seeds, strengths)."""
        train, test = (frozen_features(model, stream, device) for stream in (self.train, self.test))
        return {
            shots: np.stack([accuracies(train, test, draw) for draw in drawn])
            for shots, drawn in self.draws.items()
        }


@dataclass(frozen=True, kw_only=True, eq=False)
class Selection(Stream):
    """Some images of a split in its order; `indices` are their places in the split."""

    indices: Ints

    def epoch(self) -> int:
        return len(self.indices)

    def in_split(self, images: Ints) -> Ints:
        return self.indices[images]


@dataclass(frozen=True, kw_only=True, eq=False)
class Frozen:
    """Features x (N, D) float32, label (N,), and `valid` (N,): whether the image could be decoded."""

    x: np.ndarray
    label: Ints
    valid: np.ndarray


@torch.no_grad()
def frozen_features(model: nn.Module, stream: Stream, device: torch.device) -> Frozen:
    """Returns the input of the head for every image, in evaluation mode. All workers call it together."""
    seen: list[Tensor] = []
    # A hook, because a sharded model gathers its weights only in `forward`.
    head = model.get_submodule(stream.run.model.head)
    hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
    training, size = model.training, stream.run.images_per_pass()
    model.eval()
    rows, places = [], []
    try:
        for batch in prefetched(in_process(stream, stream.steps()), device):
            for part in batch.split(size):
                model(normalize(part["image"]), part.valid)
            about = torch.stack([batch["label"][:, 0].float(), batch.valid], 1)
            rows.append(torch.cat([torch.cat(seen).float(), about], 1).cpu())
            places.append(batch.key.cpu())
            seen.clear()
    finally:
        hook.remove()
        model.train(training)
    mine = torch.cat(rows)
    whole = mine.new_zeros(len(stream.steps()) * stream.run.data.batch_size, mine.shape[1])
    whole[torch.cat(places)] = mine
    whole = sum_over_ranks(whole)[: stream.epoch()].numpy()
    return Frozen(x=whole[:, :-2], label=whole[:, -2].astype(np.int64), valid=whole[:, -1] > 0)


def accuracies(train: Frozen, test: Frozen, chosen: Ints | None = None) -> Floats:
    """Returns the accuracy on the test images with every strength, (strengths,), after fitting the chosen
    training images, or all. Images that could not be decoded are left out. NaN if a feature is not finite.
    """
    if not (np.isfinite(train.x).all() and np.isfinite(test.x).all()):
        return np.full(len(STRENGTHS), np.nan)
    chosen = np.arange(len(train.x)) if chosen is None else chosen
    chosen = chosen[train.valid[chosen]]
    num_classes = int(max(train.label[train.valid].max(), test.label[test.valid].max())) + 1
    ridge = fit_ridge(train.x[chosen], train.label[chosen], num_classes)
    return (ridge.answers(test.x[test.valid]) == test.label[test.valid]).mean(-1)


def all_labels(stream: Stream) -> Ints:
    return stream.data.labels(stream.split)


def rare_classes(run: RunConfig, shots: int) -> str:
    """Returns a sentence about classes with fewer training images than `shots`; empty if there are none."""
    labels = all_labels(in_order(run, "train"))
    counts = np.bincount(labels)
    counts = counts[counts > 0]
    rare = int((counts < shots).sum())
    if not rare:
        return ""
    images = len(choose_shots(labels, shots=shots, seed=0))
    return (
        f"{rare} of {len(counts)} classes have fewer than {shots} training images, the rarest {counts.min()}:"
        f" all images of these classes are used, {images} images in all"
    )


def short_names(paths: Iterable[str]) -> dict[str, str]:
    """Returns name -> path. A name is the last part of a path, or as many parts as make it unique.

    Characters that directories and metrics may not have become dashes.

    Raises:
        UsageError: for paths that differ only in such characters.
    """
    paths = list(dict.fromkeys(path.rstrip("/") for path in paths))
    parts = {path: re.sub(r"[^A-Za-z0-9_./-]+", "-", path).split("/") for path in paths}
    names = dict[str, str]()
    for path in paths:
        length = 1
        while any(parts[path][-length:] == parts[other][-length:] for other in paths if other != path):
            length += 1
            if length > len(parts[path]):
                raise UsageError(f"{path} has the same name as another data set: rename it")
        name = "-".join(part for part in parts[path][-length:] if part)
        names[name.strip("-.") or "data"] = path
    return names

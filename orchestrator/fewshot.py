"""Few-shot classification of frozen features: closed-form ridge regression, every strength at once.

Source: the few-shot evaluator of V-MoE (section 3.4) and Soft MoE as the authors' code has it: features
standardised by the training images, targets -1 and +1, a bias feature of 100 that is regularised like the
others, one strength for each number of shots, chosen by its mean rank over the data sets' test accuracy. That
is a choice on what is tested: figures are comparable with the papers', and a little optimistic.

N training images of D features, M test images, C classes.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

BIAS = 100.0
STRENGTHS: tuple[float, ...] = tuple(2.0**power for power in range(-10, 20))


def choose_shots(labels: Ints, *, shots: int, seed: int) -> Ints:
    """Indices of `shots` images of each class, class after class; of a class with fewer, all of them.

    With more shots the same ones come first.
    """
    rng = np.random.default_rng(seed)
    chosen = [rng.permutation(np.flatnonzero(labels == label))[:shots] for label in np.unique(labels)]
    return np.concatenate(chosen)


@dataclass(frozen=True, kw_only=True, eq=False)
class Ridge:
    """Solved for every strength: a decomposition whose spectrum the strength is added to.

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
        """(D + 1, C), of standardised features and the bias feature."""
        return self.basis @ (self.target / (self.spectrum + strength)[:, None])

    def answers(self, x_MD: NDArray[np.floating]) -> Ints:
        """(strengths, M): the class of the largest score."""
        projected = augmented(x_MD, self.mean, self.scale) @ self.basis
        scores = ((projected / (self.spectrum + strength)) @ self.target for strength in STRENGTHS)
        return np.stack([one.argmax(-1) for one in scores])


def fit_ridge(x_ND: NDArray[np.floating], labels_N: Ints, num_classes: int) -> Ridge:
    """By the smaller of the Gram matrix and the kernel, in float64."""
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
    """(N, D + 1): standardised, with the bias feature last."""
    return np.pad((x_ND - mean) / scale, ((0, 0), (0, 1)), constant_values=BIAS)


@dataclass(frozen=True, kw_only=True, eq=False)
class Features:
    """Frozen features of a data set with their labels: training images x (N, D) and test images."""

    x_train: NDArray[np.floating]
    y_train: Ints
    x_test: NDArray[np.floating]
    y_test: Ints

    def accuracies(self, train: Ints | None = None) -> Floats:
        """(strengths,): on the test images, having seen the training images that are named, or all; nan if a
        feature is not finite.
        """
        if not (np.isfinite(self.x_train).all() and np.isfinite(self.x_test).all()):
            return np.full(len(STRENGTHS), np.nan)
        x, y = (self.x_train, self.y_train) if train is None else (self.x_train[train], self.y_train[train])
        ridge = fit_ridge(x, y, int(max(self.y_train.max(), self.y_test.max())) + 1)
        return (ridge.answers(self.x_test) == self.y_test).mean(-1)


def best_strength(accuracies: Floats) -> int:
    """Index of the strength for (data sets, strengths): the best mean rank, of several the first.

    Equals rank as an unstable sort leaves them, as the authors' do; a heap sort leaves them alike on every
    machine, and gives the golden case's choices.
    """
    order = np.argsort(accuracies, axis=1, kind="heapsort")
    return int(np.argsort(order, axis=1, kind="heapsort").mean(0).argmax())

"""Figures of all answers against scikit-learn, scipy and loops, by batches of any size."""

import csv
import math
from importlib import import_module
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from scipy.optimize import minimize_scalar
from sklearn import metrics as sk
from torch import Tensor

from orchestrator.data.batch import Batch
from orchestrator.evaluation import answers
from orchestrator.evaluation.answers import AnswerFigures, KeptAnswers, average_precision, best_temperature
from orchestrator.tasks import ClassificationConfig

IMAGES, CLASSES = 203, 6


def figures_of(logits: Tensor, labels: Tensor, sizes: int = 64, **task: Any) -> AnswerFigures:
    """Every batch ends with padding, whose logits and labels are of no image."""
    kept = KeptAnswers(ClassificationConfig(**task), images=len(logits))
    for first in range(0, len(logits), sizes):
        rows = slice(first, first + sizes)
        padded = F.pad(logits[rows], (0, 0, 0, 1), value=9.0), F.pad(labels[rows], (0, 0, 0, 1))
        place, valid = torch.arange(len(padded[0])) + first, torch.ones(len(padded[0]))
        valid[-1] = 0
        kept.add(
            {"logits": padded[0]}, Batch(fields={"label": padded[1]}, valid=valid, key=place, sample=place)
        )
    return kept.figures()


def some(seed: int = 0, several: bool = False) -> tuple[Tensor, Tensor]:
    """Logits that know something, some of them equal, and labels; class 4 has no image."""
    rng = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES - 1, (IMAGES, 3 if several else 1), generator=rng)
    labels[labels == 4] = 5
    logits = torch.randn(IMAGES, CLASSES, generator=rng)
    logits.scatter_add_(1, labels, torch.ones(labels.shape))
    logits = 3 * logits.mul(2).round().div(2)
    if several:  # an image has one to three labels, each once
        labels[::3, 2] = labels[1::3, 1] = labels[1::3, 2] = -1
        labels[:, 1][labels[:, 1] == labels[:, 0]] = -1
    return logits, labels


@pytest.mark.parametrize("sizes", [1000, 64, 7])
def test_one_label_against_scikit_learn(sizes: int) -> None:
    logits, labels = some()
    label, answer = labels[:, 0].numpy(), logits.argmax(1).numpy()
    found, known = figures_of(logits, labels, sizes), [0, 1, 2, 3, 5]
    assert found.confusion_CC is not None
    expected = sk.confusion_matrix(label, answer, labels=range(CLASSES))
    assert (found.confusion_CC.numpy() == expected).all()
    rows = [*csv.reader(found.confusion_csv(["a", "b", "c", "d"]).splitlines())]
    assert rows[0] == ["label", "a", "b", "c", "d", "4", "5"]
    assert [row[0] for row in rows[1:]] == rows[0][1:]
    assert [[int(cell) for cell in row[1:]] for row in rows[1:]] == expected.tolist()
    with pytest.warns(UserWarning, match="y_pred contains classes not in y_true"):
        balanced = sk.balanced_accuracy_score(label, answer)
    assert found.metrics["balanced_acc"] == pytest.approx(balanced, rel=1e-12)
    f1 = sk.f1_score(label, answer, labels=known, average=None)
    assert found.metrics["f1_macro"] == pytest.approx(np.mean(f1), rel=1e-12)
    assert found.columns["f1"] == [*map(pytest.approx, f1[:4]), None, pytest.approx(f1[4])]
    assert "1 of 6 classes have no images: no mean counts them" in found.notes


@pytest.mark.parametrize("sizes", [1000, 64, 7])
def test_several_labels_against_scikit_learn(sizes: int) -> None:
    """Scores are equal for many images. A softmax has no F1, and the order of its probabilities."""
    logits, labels = some(several=True)
    present = np.array([[c in row for c in range(CLASSES)] for row in labels.tolist()])
    found, known = figures_of(logits, labels, sizes, loss="sigmoid"), [0, 1, 2, 3, 5]
    ap = sk.average_precision_score(present[:, known], logits[:, known].numpy(), average=None)
    assert found.metrics["mean_ap"] == pytest.approx(np.mean(ap), rel=1e-9)
    assert found.columns["ap"] == [*map(pytest.approx, ap[:4]), None, pytest.approx(ap[4])]
    said = logits.sigmoid().numpy() >= 0.5
    for average, columns in (("micro", range(CLASSES)), ("macro", known)):
        expected = sk.f1_score(present[:, columns], said[:, columns], average=average)
        assert found.metrics[f"f1_{average}"] == pytest.approx(expected, rel=1e-9)
    assert found.columns["f1"][4] is None
    assert found.notes[0].startswith("1 of 6 classes have no images")
    assert "f1: a class is said to be there if its probability is at least 0.5" in found.notes
    softmax, p = figures_of(logits, labels, sizes), logits.log_softmax(1).numpy()
    expected = sk.average_precision_score(present[:, known], p[:, known])
    assert softmax.metrics == {"mean_ap": pytest.approx(expected, rel=1e-9)}
    assert softmax.notes[1].startswith("no F1")


def test_saturated_sigmoids_keep_their_order() -> None:
    """Probabilities of 30 and 40 are 1 in float32."""
    logits, labels = torch.tensor([[30.0], [40.0]]), torch.tensor([[-1, -1], [0, -1]])
    assert figures_of(logits, labels, loss="sigmoid").metrics["mean_ap"] == 1
    assert average_precision(torch.zeros(4), torch.tensor([True, False, False, False])) == 0.25
    assert average_precision(torch.zeros(4), torch.zeros(4, dtype=torch.bool)).isnan()


def error_by_loop(confidence: list[float], right: list[bool], bins: int) -> float:
    total = 0.0
    for m in range(1, bins + 1):
        inside = [i for i, p in enumerate(confidence) if (m - 1) / bins < p <= m / bins]
        if inside:
            accuracy = sum(right[i] for i in inside) / len(inside)
            total += len(inside) * abs(accuracy - sum(confidence[i] for i in inside) / len(inside))
    return total / len(confidence)


@pytest.mark.parametrize("loss", ["softmax", "sigmoid"])
def test_the_calibration_error_by_a_loop(loss: Any) -> None:
    logits, labels = some()
    probabilities = logits.sigmoid() if loss == "sigmoid" else logits.softmax(1)
    right = (logits.argmax(1) == labels[:, 0]).tolist()
    expected = error_by_loop(probabilities.amax(1).tolist(), right, answers.BINS)
    found = figures_of(logits, labels, loss=loss)
    assert 0.01 < found.metrics["ece"] == pytest.approx(expected, rel=1e-6)
    assert ("temperature" in found.metrics) == bool(found.calibration) == (loss == "softmax")


def test_the_temperature_is_fitted_on_one_half_and_judged_on_the_other() -> None:
    """Against scipy; the halves are those of the images' places, whatever the batches are."""
    logits, labels = some()
    found, other = figures_of(logits, labels), figures_of(logits, labels, 7)
    place = torch.arange(IMAGES)
    drawn = (answers.mix(place, answers.HALVES_SALT) & 1).bool()
    assert 80 < drawn.sum() < 120

    def nll(temperature: float, rows: Tensor) -> float:
        return float(F.cross_entropy(logits[rows].double() / temperature, labels[rows, 0]))

    best = minimize_scalar(nll, bounds=(0.1, 20), args=(drawn,), method="bounded", options={"xatol": 1e-10})
    calibration, left = found.calibration, ~drawn
    assert calibration["temperature"] == found.metrics["temperature"] == pytest.approx(best.x, rel=1e-6)
    assert calibration["nll"] == pytest.approx(nll(1, left))
    assert calibration["nll_scaled"] == pytest.approx(nll(best.x, left))
    assert calibration["nll_scaled"] < calibration["nll"]
    p = (logits[left].double() / best.x).softmax(1).amax(1)
    right = (logits[left].argmax(1) == labels[left, 0]).tolist()
    assert calibration["ece_scaled"] == pytest.approx(error_by_loop(p.tolist(), right, answers.BINS))
    assert calibration["ece_scaled"] < calibration["ece"]
    assert (calibration["fitted_on"], calibration["judged_on"]) == (int(drawn.sum()), int(left.sum()))
    assert other.calibration == pytest.approx(calibration, rel=1e-9)


def test_what_is_undefined_is_said() -> None:
    """Answers that are all right, and answers by chance, have no temperature; nor has a single image."""
    logits, labels = some()
    right, none = 5.0 * F.one_hot(labels[:, 0], CLASSES), torch.zeros(IMAGES, CLASSES)
    for other, count in ((right, IMAGES), (none, IMAGES), (-right, IMAGES), (logits, 1)):
        found = figures_of(other[:count].float(), labels[:count])
        assert "temperature" not in found.metrics
        assert found.calibration == {}
        assert any(note.startswith("no temperature: none of 0.01 to 100.0") for note in found.notes)
        assert all(map(math.isfinite, found.metrics.values()))
    assert best_temperature(logits, labels[:, 0]) == pytest.approx(
        10 * best_temperature(logits / 10, labels[:, 0])
    )


def test_what_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    """A task without classes has no such figures, and more answers than fit into memory are none."""
    own = import_module("tests.own.brightness")  # not at import, since laws are collected over all kinds
    kept = KeptAnswers(own.BrightnessConfig(), images=4)
    place = torch.arange(4)
    kept.add({}, Batch(fields={}, valid=torch.ones(4), key=place, sample=place))
    assert vars(kept.figures()) == vars(AnswerFigures())
    monkeypatch.setattr(answers, "MOST", 1000)
    found = figures_of(*some())
    assert (found.metrics, found.confusion_CC) == ({}, None)
    (note,) = found.notes
    assert note.startswith(
        "no figures of all answers together: 203 images and 6 classes make 1.3e+03 numbers"
    )

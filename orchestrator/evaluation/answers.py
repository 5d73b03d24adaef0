"""Figures of the answers to all images of a split, which no sum over images gives: average precision, F1, the
confusion matrix, calibration. A figure that is undefined is left out, and a note says so.

Sources: scikit-learn's definitions, of the classes that have images; Guo et al. 2017, "On calibration of
modern neural networks", https://arxiv.org/abs/1706.04599: section 3 for the expected calibration error,
section 4.2 for the temperature.

Dimensions: N images, M labels of an image, C classes.
"""

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from moe.init import mix
from moe.parallel import gather
from orchestrator.data.batch import Batch
from orchestrator.tasks import TaskConfig
from orchestrator.tasks.base import Heads
from orchestrator.tasks.classification import soft_targets

MOST = 5e8  # numbers that are kept: 2 GB
BINS = 15  # of equal width, as in section 5 of Guo et al.
PRESENT = 0.5  # the least probability of a class that counts as present
HALVES_SALT = 0x4A1F
COLDEST, HOTTEST, HALVINGS = 0.01, 100.0, 30  # of the search for the temperature
ROUNDING = 1e-12  # of a slope


class Answers(NamedTuple):
    """The answers to images: logits_NC; label_NM, -1 for none; and whether an image is of the half that fits
    the temperature, drawn_N.
    """

    logits_NC: Tensor
    label_NM: Tensor
    drawn_N: Tensor

    @classmethod
    def of(cls, logits: Tensor, batch: Batch) -> "Answers":
        """Takes the valid images of all workers, which call this together, to the CPU."""
        key = gather(batch.key)
        valid = gather(batch.valid) > 0
        every = gather(logits.detach().float()), gather(batch["label"]), (mix(key, HALVES_SALT) & 1).bool()
        return cls(*(each[valid].cpu() for each in every))


@dataclass(frozen=True, kw_only=True, eq=False)
class AnswerFigures:
    """Figures of the answers.

    Attributes:
        metrics: name -> figure.
        columns: name -> figure of each class, None where it is undefined.
        confusion_CC: images by label and answer; None if images have several labels.
        calibration: how the temperature was fitted and judged; empty if there is none.
        notes: how figures are meant, and what is left out and why, in words.
    """

    metrics: dict[str, float] = field(default_factory=dict)
    columns: dict[str, list[float | None]] = field(default_factory=dict)
    confusion_CC: Tensor | None = None
    calibration: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

    def confusion_csv(self, names: Sequence[str]) -> str:
        """Returns the confusion matrix as text: a row for each label, and in it a number for each answer.
        Classes beyond `names` are called by their number.
        """
        assert self.confusion_CC is not None
        names = [*names, *map(str, range(len(names), len(self.confusion_CC)))]
        text = io.StringIO()
        rows = ([name, *row] for name, row in zip(names, self.confusion_CC.tolist(), strict=True))
        csv.writer(text).writerows([["label", *names], *rows])
        return text.getvalue()


class KeptAnswers:
    """The answers of a task's model to the images of a split, whose number is `images`. If they and a
    confusion matrix do not fit into memory, none are kept.
    """

    def __init__(self, task: TaskConfig, images: int) -> None:
        self.task, self.images, self.why_not = task, images, ""
        self.parts: list[Answers] = []

    def add(self, heads: Heads, batch: Batch) -> None:
        """Keeps the answers to a batch. All workers call it together."""
        if not self.task.classifies:
            return
        classes = heads["logits"].shape[1]
        if (numbers := (self.images + classes) * classes) <= MOST:
            self.parts.append(Answers.of(heads["logits"], batch))
        else:
            self.why_not = (
                f"no figures of all answers together: {self.images:,} images and {classes:,} classes make"
                f" {numbers:.2g} numbers, more than {MOST:.2g}"
            )

    def figures(self) -> AnswerFigures:
        """Returns the figures of a classifier's answers to images that have one label or several."""
        if not self.parts:
            return AnswerFigures(notes=[self.why_not] if self.why_not else [])
        answers = Answers(*map(torch.cat, zip(*self.parts, strict=True)))
        of = _of_one_label if answers.label_NM.shape[1] == 1 else _of_several_labels
        return of(answers, self.task)


def _of_one_label(answers: Answers, task: TaskConfig) -> AnswerFigures:
    label_N, answer_N = answers.label_NM[:, 0], answers.logits_NC.argmax(1)
    confusion_CC = confusion(label_N, answer_N, answers.logits_NC.shape[1])
    right_C, images_C, answers_C = confusion_CC.diagonal(), confusion_CC.sum(1), confusion_CC.sum(0)
    f1_C, known_C = f1(right_C, images_C, answers_C), images_C > 0
    metrics = {
        "balanced_acc": float((right_C.double() / images_C)[known_C].mean()),
        "f1_macro": float(f1_C[known_C].mean()),
    }
    notes, calibration = _about_classes(known_C), dict[str, Any]()
    metrics["ece"] = calibration_error(task.probabilities(answers.logits_NC).amax(1), answer_N == label_N)
    notes.append(f"ece: {BINS} bins of confidence")
    if task.output == "softmax":
        calibration, note = _calibration(answers.logits_NC, label_N, answers.drawn_N)
        notes.append(note)
        if calibration:
            metrics["temperature"] = calibration["temperature"]
    return AnswerFigures(
        metrics=metrics,
        columns={"f1": _known(f1_C, known_C)},
        confusion_CC=confusion_CC,
        calibration=calibration,
        notes=notes,
    )


def _of_several_labels(answers: Answers, task: TaskConfig) -> AnswerFigures:
    classes, sigmoid = answers.logits_NC.shape[1], task.output == "sigmoid"
    present_NC = soft_targets(answers.label_NM, classes) > 0
    # The order of logits is that of their sigmoids, without those that round to 1.
    score_NC = answers.logits_NC if sigmoid else answers.logits_NC.log_softmax(1)
    ap_C = torch.stack([average_precision(score_NC[:, c], present_NC[:, c]) for c in range(classes)])
    images_C = present_NC.sum(0)
    known_C = images_C > 0
    metrics, columns = {"mean_ap": float(ap_C[known_C].mean())}, {"ap": _known(ap_C, known_C)}
    notes = _about_classes(known_C)
    if not sigmoid:
        notes.append("no F1: a softmax says which class is likeliest, and not whether one is there")
        return AnswerFigures(metrics=metrics, columns=columns, notes=notes)
    said_NC = task.probabilities(answers.logits_NC) >= PRESENT
    counts_3C = torch.stack([(said_NC & present_NC).sum(0), images_C, said_NC.sum(0)])
    f1_C = f1(*counts_3C)
    metrics["f1_micro"] = float(f1(*counts_3C.sum(1)))
    metrics["f1_macro"] = float(f1_C[known_C].mean())
    notes.append(f"f1: a class is said to be there if its probability is at least {PRESENT}")
    return AnswerFigures(metrics=metrics, columns=columns | {"f1": _known(f1_C, known_C)}, notes=notes)


def _about_classes(known_C: Tensor) -> list[str]:
    without = int((~known_C).sum())
    return [f"{without} of {len(known_C)} classes have no images: no mean counts them"] if without else []


def _known(figure_C: Tensor, known_C: Tensor) -> list[float | None]:
    pairs = zip(figure_C.tolist(), known_C.tolist(), strict=True)
    return [value if known else None for value, known in pairs]


def confusion(label_N: Tensor, answer_N: Tensor, classes: int) -> Tensor:
    """Returns the number of images by label (rows) and answer (columns), (C, C) int64."""
    return torch.bincount(label_N * classes + answer_N, minlength=classes**2).view(classes, classes)


def f1(right: Tensor, images: Tensor, answers: Tensor) -> Tensor:
    """Returns the harmonic mean of precision and recall by counts: of images that are rightly said to be of a
    class, that are, and that are said to be.
    """
    return 2 * right.double() / (images + answers)


def average_precision(score_N: Tensor, present_N: Tensor) -> Tensor:
    """Returns the sum over scores, from the highest, of the precision at this score or above, times what it
    adds to the recall; NaN if no image has the class.
    """
    score_N, order = score_N.sort(descending=True)
    right_N = present_N[order].double().cumsum(0)
    # Images of an equal score are found together.
    last_N = F.pad(score_N.diff() != 0, (0, 1), value=True)
    found = right_N[last_N]
    precision = found / (last_N.nonzero()[:, 0] + 1)
    return (precision * found.diff(prepend=found.new_zeros(1))).sum() / right_N[-1]


def calibration_error(confidence_N: Tensor, right_N: Tensor) -> float:
    """Returns the expected calibration error: the mean over bins of confidence ((m - 1) / M, m / M], weighted
    by their images, of the distance between accuracy and mean confidence.
    """
    bin_N = ((confidence_N.double() * BINS).ceil().long() - 1).clamp(0, BINS - 1)
    off_N = right_N.double() - confidence_N.double()
    return float(torch.zeros(BINS).double().index_add_(0, bin_N, off_N).abs().sum() / len(bin_N))


def best_temperature(logits_NC: Tensor, label_N: Tensor) -> float | None:
    """Returns the temperature T that minimises the mean cross-entropy of softmax(logits / T), which is convex
    in 1 / T; None if that is out of bounds, as of answers that are all right.
    """
    logits_NC = logits_NC.double()
    own_N = logits_NC.gather(1, label_N[:, None])[:, 0]

    def slope(temperature: float) -> float:
        """The derivative by 1 / T."""
        weight_NC = (logits_NC / temperature).softmax(1)
        return float(((weight_NC * logits_NC).sum(1) - own_N).mean())

    cold, hot = math.log(COLDEST), math.log(HOTTEST)
    if not slope(COLDEST) > ROUNDING > -ROUNDING > slope(HOTTEST):
        return None
    for _ in range(HALVINGS):
        middle = (cold + hot) / 2
        cold, hot = (middle, hot) if slope(math.exp(middle)) > 0 else (cold, middle)
    return math.exp((cold + hot) / 2)


def _calibration(logits_NC: Tensor, label_N: Tensor, drawn_N: Tensor) -> tuple[dict[str, Any], str]:
    """Returns the temperature of the drawn half, its figures on the other half, and a sentence about them."""
    fitted, judged = int(drawn_N.sum()), int((~drawn_N).sum())
    temperature = best_temperature(logits_NC[drawn_N], label_N[drawn_N]) if fitted and judged else None
    if temperature is None:
        return {}, (
            f"no temperature: none of {COLDEST} to {HOTTEST} minimises the cross-entropy of the {fitted} of"
            f" {fitted + judged} images that it is fitted on"
        )
    found: dict[str, Any] = {
        "temperature": temperature,
        "fitted_on": fitted,
        "judged_on": judged,
        "bins": BINS,
    }
    logits_NC, label_N = logits_NC[~drawn_N].double(), label_N[~drawn_N]
    for suffix, scaled_NC in (("", logits_NC), ("_scaled", logits_NC / temperature)):
        confidence_N, answer_N = scaled_NC.softmax(1).max(1)
        found[f"nll{suffix}"] = float(F.cross_entropy(scaled_NC, label_N))
        found[f"ece{suffix}"] = calibration_error(confidence_N, answer_N == label_N)
    note = (
        f"temperature {temperature:.3f} is fitted on {fitted} images; on the other {judged} it changes the"
        f" NLL from {found['nll']:.4f} to {found['nll_scaled']:.4f}, the ECE from {found['ece']:.4f} to"
        f" {found['ece_scaled']:.4f}"
    )
    return found, note

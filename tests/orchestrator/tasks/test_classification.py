"""Losses and hits against definitions over soft labels."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from orchestrator.data.batch import Batch
from orchestrator.tasks.classification import (
    ClassificationConfig,
    dominant_labels,
    hits,
    image_losses,
    mixed_losses,
)

LABELS = torch.tensor([[0, 3, -1], [4, -1, -1], [2, 1, 0], [-1, -1, -1]])
DRAWS = torch.tensor([[0.75, 0, 0, 0, 0]] * 2 + [[0.25, 0, 0, 0, 0]] * 2)


def logits_of(images: int = 4, classes: int = 5) -> Tensor:
    return 3 * torch.randn(images, classes, generator=torch.Generator().manual_seed(0)).double()


def multi_hot(labels: Tensor, classes: int = 5) -> Tensor:
    """By a loop."""
    targets = torch.zeros(len(labels), classes).double()
    for row, of_image in zip(targets, labels.tolist(), strict=True):
        for label in of_image:
            if label >= 0:
                row[label] = 1
    return targets


def defined(kind: str, logits: Tensor, targets: Tensor) -> Tensor:
    if kind == "softmax":
        return -(targets * logits.softmax(-1).log()).sum(-1)
    p = torch.sigmoid(logits)
    return -(targets * p.log() + (1 - targets) * (1 - p).log()).sum(-1)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("labels", [LABELS, LABELS[:3, :1]], ids=["several", "one"])
def test_losses_are_defined_by_targets(kind, labels):
    logits = logits_of(len(labels))
    found = image_losses(kind, logits, labels)
    torch.testing.assert_close(found, defined(kind, logits, multi_hot(labels)))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_mixed_losses_are_those_of_soft_targets(kind):
    logits, targets, weight = logits_of(), multi_hot(LABELS), DRAWS[:, :1].double()
    soft = weight * targets + (1 - weight) * targets[[1, 0, 3, 2]]
    torch.testing.assert_close(
        mixed_losses(kind, logits, LABELS, DRAWS.double()), defined(kind, logits, soft)
    )


@pytest.mark.parametrize(
    ("loss", "smoothing", "binary"), [("softmax", 0.1, False), ("sigmoid_mean", 0.0, True)]
)
def test_a_step_has_the_losses_of_its_targets(loss, smoothing, binary):
    """By a loop over images and classes, of images that are mixed in pairs."""
    task = ClassificationConfig(loss=loss, smoothing=smoothing, binarised=binary)
    logits, hot = logits_of(), multi_hot(LABELS) * (1 - smoothing) + smoothing / 5
    mixed = [
        [0.75, 0.75, 0.25, 0.25][i] * hot[i] + [0.25, 0.25, 0.75, 0.75][i] * hot[i ^ 1] for i in range(4)
    ]
    targets = torch.stack([(row > 0).double() if binary else row for row in mixed])
    expected = defined(loss, logits, targets).mean() / (5 if loss == "sigmoid_mean" else 1)
    fields = {"label": LABELS, "mix": DRAWS}
    key = torch.arange(4)
    batch = Batch(fields=fields, valid=torch.ones(4), key=key, sample=key)
    found, _ = task.loss_share({"logits": logits}, batch, 4)
    torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("changes", [{"smoothing": 0.1, "loss": "sigmoid"}, {"loss": "softmax"}])
def test_binarised_targets_are_not_smoothed_and_need_a_sigmoid(changes):
    with pytest.raises(ValueError, match="binarised targets are 0 or 1 for a sigmoid loss"):
        ClassificationConfig(binarised=True, **changes)


def test_one_label_has_torchs_cross_entropy():
    logits, label = logits_of(), torch.tensor([1, 4, 0, 2])
    expected = F.cross_entropy(logits, label, reduction="none")
    assert torch.equal(image_losses("softmax", logits, label[:, None]), expected)


def test_an_answer_is_right_if_it_is_one_of_the_labels():
    assert hits(F.one_hot(torch.tensor([3, 0, 0, 2]), 5), LABELS).tolist() == [True, False, True, False]


def test_the_dominant_labels_are_those_of_the_image_that_weighs_more():
    assert torch.equal(dominant_labels(LABELS, DRAWS), LABELS[[0, 1, 3, 2]])


def test_a_sigmoid_loss_survives_large_logits():
    losses = image_losses("sigmoid", torch.tensor([[1e4, -1e4], [-1e4, 1e4]]), torch.tensor([[0], [0]]))
    assert losses.tolist() == [0, 2e4]

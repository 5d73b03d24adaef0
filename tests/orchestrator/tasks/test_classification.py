"""Losses and hits against definitions over soft labels."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.utils.class_weight import compute_class_weight
from torch import Tensor

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch
from orchestrator.data.manifest import open_manifest
from orchestrator.data.shards import DataSet
from orchestrator.errors import UsageError
from orchestrator.tasks.classification import (
    ClassificationConfig,
    dominant_labels,
    hits,
    image_losses,
    mixed_losses,
)
from orchestrator.training.fit import decided_by_data

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


def share_of(task: ClassificationConfig, logits: Tensor, **fields: Tensor) -> Tensor:
    key = torch.arange(len(logits))
    batch = Batch(fields=fields, valid=torch.ones(len(logits)), key=key, sample=key)
    return task.loss_share({"logits": logits}, batch, 2 * len(logits))[0]


def test_weights_of_classes_are_those_of_torch() -> None:
    """A share of a batch of eight. Torch divides by the sum of a batch's weights, and ours is a sum over
    images, so that shares and microbatches add up. Validation is not weighed.
    """
    weights, logits, label = (0.5, 2.0, 1.0, 0.0, 4.0), logits_of(), torch.tensor([1, 4, 0, 2])
    tensor = torch.tensor(weights).double()
    for smoothing in (0.0, 0.1):
        task = ClassificationConfig(class_weights=weights, smoothing=smoothing)
        options = {"weight": tensor, "label_smoothing": smoothing, "reduction": "sum"}
        expected = F.cross_entropy(logits, label, **options) / 8
        torch.testing.assert_close(share_of(task, logits, label=label[:, None]), expected)
    task = ClassificationConfig(class_weights=weights)
    soft = multi_hot(LABELS)
    share = share_of(task, logits, label=LABELS)
    torch.testing.assert_close(share, F.cross_entropy(logits, soft, weight=tensor, reduction="sum") / 8)
    mixed = DRAWS[:, :1].double() * soft + (1 - DRAWS[:, :1].double()) * soft[[1, 0, 3, 2]]
    expected = F.cross_entropy(logits, mixed, weight=tensor, reduction="sum") / 8
    torch.testing.assert_close(share_of(task, logits, label=LABELS, mix=DRAWS.double()), expected)
    batch = Batch(fields={"label": label[:, None]}, valid=torch.ones(4), key=label, sample=label)
    plain = ClassificationConfig().scores({"logits": logits.float()}, batch)
    assert task.scores({"logits": logits.float()}, batch) == plain


def test_balanced_weights_are_those_of_scikit_learn(few_digits: str, pack_greys: Any) -> None:
    """They become numbers of the config, once; over the training images their mean is 1."""
    run = override(RunConfig(), {"data.path": few_digits, "task.class_weights": "balanced"})
    decided = decided_by_data(run)
    manifest = open_manifest(few_digits)
    label = DataSet(path=few_digits, manifest=manifest, cache_bytes=0).labels("train")
    expected = compute_class_weight("balanced", classes=np.arange(10), y=label)
    task = decided.task
    assert isinstance(task, ClassificationConfig)
    assert task.class_weights == pytest.approx(tuple(expected), rel=1e-12)
    assert np.array(task.class_weights)[label].mean() == pytest.approx(1)
    assert len({*task.class_weights}) > 1
    assert decided_by_data(decided) == decided
    assert decided_by_data(replace(run, task=ClassificationConfig())).task == ClassificationConfig()
    path, _ = pack_greys(train=7, val=3)
    with pytest.raises(UsageError, match="3 of 10 classes, such as number 7, have no training images in"):
        decided_by_data(override(run, {"data.path": path}))
    with pytest.raises(UsageError, match="are known with the training images"):
        share_of(ClassificationConfig(class_weights="balanced"), logits_of(), label=LABELS)


def test_weights_that_mean_nothing() -> None:
    for changes, message in (
        ({"task.class_weights": (1.0, 2.0)}, "2 class_weights, but 10 num_classes"),
        ({"task.class_weights": "balanced", "task.loss": "sigmoid"}, "class_weights are of a softmax loss"),
        ({"task.class_weights": (-1.0,) * 10}, "class_weights must be .* must not be negative"),
        ({"task.class_weights": "even"}, "class_weights must be 'none', 'balanced' or a tuple of numbers"),
    ):
        with pytest.raises(UsageError, match=message):
            override(RunConfig(), changes)


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

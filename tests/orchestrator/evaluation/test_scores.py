"""Scores by hand, on four images."""

import math

import pytest
import torch

from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.presets import PRESETS
from moe.vit import ViT
from orchestrator.data.batch import Batch, DecodeError
from orchestrator.errors import UsageError
from orchestrator.evaluation.scores import Tally, evaluate_at


def tally(logits: list[list[float]], label: list[int], valid: list[float]) -> Tally:
    found = Tally(len(logits[0]), torch.device("cpu"))
    found.add(torch.tensor(logits), torch.tensor(label), torch.tensor(valid))
    return found


def test_four_images_by_hand():
    """Seven classes: the best five leave two out. Image 0: class 0, right. Image 1: class 0, taken for 1, its
    own class second. Image 2: class 1, taken for 0, its own class last of all. Image 3 is padding.
    """
    right = [6.0, 5, 4, 3, 2, 1, 0]
    second = [5.0, 6, 4, 3, 2, 1, 0]
    last = [6.0, 0, 5, 4, 3, 2, 1]
    scores = tally([right, second, last, right], [0, 0, 1, 0], [1, 1, 1, 0]).scores()
    zero, one, *others = scores.classes
    assert (zero.images, zero.hits, zero.hits5, zero.answers) == (2, 1, 2, 2)
    assert (one.images, one.hits, one.hits5, one.answers) == (1, 0, 0, 1)
    assert all(other.images == other.answers == 0 for other in others)
    assert zero.recall() == zero.precision() == 0.5
    assert one.precision() == 0
    assert math.isnan(others[0].recall())
    assert math.isnan(others[0].precision())
    log_sum = math.log(sum(math.exp(x) for x in range(7)))
    metrics = scores.metrics()
    assert (metrics["acc1"], metrics["acc5"], metrics["prec1"]) == (1 / 3, 2 / 3, 1 / 3)
    assert metrics["loss"] == pytest.approx(((log_sum - 6) + (log_sum - 5) + log_sum) / 3, rel=1e-6)


def test_of_equal_answers_the_first_counts():
    """As in training's validation; the best five hold it too, whichever `topk` takes of eight equals."""
    scores = tally([[0.0] * 8, [0.0] * 8], [0, 7], [1, 1]).scores()
    assert scores.classes[0].hits == scores.classes[0].hits5 == 1
    assert scores.classes[7].hits == 0


def test_fewer_than_five_classes():
    assert tally([[1.0, 2.0]], [0], [1]).scores().metrics()["acc5"] == 1


def test_batches_add_up():
    logits = torch.randn(12, 6, generator=torch.Generator().manual_seed(0))
    label, valid = torch.arange(12) % 6, torch.ones(12)
    at_once, by_parts = (Tally(6, torch.device("cpu")) for _ in range(2))
    at_once.add(logits, label, valid)
    for part in torch.arange(12).split(5):
        by_parts.add(logits[part], label[part], valid[part])
    torch.testing.assert_close(at_once.counts, by_parts.counts, rtol=0, atol=1e-6)


def batch(label: int, bad: tuple[DecodeError, ...] = ()) -> Batch:
    image = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    valid = torch.tensor([1.0, 0.0]) if bad else torch.ones(2)
    one = torch.zeros(2, dtype=torch.int64)
    return Batch(image, torch.full((2,), label), valid, one, one, torch.zeros(2, 5), bad)


def test_what_cannot_be_evaluated():
    model = ViT(PRESETS["debug"]).eval()
    with pytest.raises(UsageError, match="class 10 in the data, but the model has 10 outputs"):
        evaluate_at(model, [batch(10)])
    with pytest.raises(UsageError, match="a dense model has no routing to override"):
        evaluate_at(model, [batch(0)], [AS_TRAINED, RoutingOverrides(experts=1)])
    (scores,) = evaluate_at(model, [batch(3, (DecodeError("shard", 1, "key", "torn"),))])
    assert (scores.images(), scores.unread) == (1, 1)

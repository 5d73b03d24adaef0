"""Scores by hand, and what has none."""

from dataclasses import replace
from math import exp, log
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from moe.models.vit import ViT
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.presets import PRESETS
from moe.routers import ExpertChoiceConfig
from orchestrator.data.batch import Batch, DecodeError
from orchestrator.errors import UsageError
from orchestrator.evaluation import scores
from orchestrator.evaluation.scores import Scores, evaluate_at
from orchestrator.tasks import ClassificationConfig
from tests.moe.parts import vit_config
from tests.orchestrator.training.batches import make_batch, with_fields


def counted(logits: list[list[float]], label: list[int], valid: list[float]) -> Scores:
    return scored(torch.tensor(logits), torch.tensor(label).unsqueeze(1), torch.tensor(valid))


def scored(logits: torch.Tensor, labels: torch.Tensor, valid: torch.Tensor) -> Scores:
    scores, place = Scores(ClassificationConfig()), torch.arange(len(logits))
    batch = Batch(fields={"label": labels}, valid=valid, key=place, sample=place)
    scores.add({"logits": logits}, batch)
    return scores


def test_four_images_by_hand():
    """Seven classes: the best five leave two out. Image 0: class 0, right. Image 1: class 0, taken for 1, its
    own class second. Image 2: class 1, taken for 0, its own class last of all. Image 3 is padding.
    """
    right = [6.0, 5, 4, 3, 2, 1, 0]
    second = [5.0, 6, 4, 3, 2, 1, 0]
    last = [6.0, 0, 5, 4, 3, 2, 1]
    scores = counted([right, second, last, right], [0, 0, 1, 0], [1, 1, 1, 0])
    zero, one, *others = scores.sums["classes"][:, :4].tolist()
    assert (zero, one) == ([2, 1, 2, 2], [1, 0, 0, 1])
    assert others == [[0, 0, 0, 0]] * 5
    log_sum = log(sum(exp(x) for x in range(7)))
    metrics = scores.metrics()
    assert (metrics["acc1"], metrics["acc5"], metrics["prec1"]) == (1 / 3, 2 / 3, 1 / 3)
    assert metrics["loss"] == pytest.approx(((log_sum - 6) + (log_sum - 5) + log_sum) / 3, rel=1e-6)
    table = scores.table(["zero", "one", "two"])
    assert table["class"] == ["zero", "one", "two"]
    assert table["acc1"] == table["precision"] == [0.5, 0, None]
    assert (table["acc5"], table["images"]) == ([1, 0, None], [2, 1, 0])


def test_label_sets_by_hand():
    """Seven classes. The answer to images 0 to 2 is class 0, and 5 and 6 are not among the best five.

    Image 0: classes 2 and 0, right. Image 1: class 0, right. Image 2: classes 1, 5 and 6, wrong, but class 1
    is among the five. Image 3: classes 5 and 6, wrong, the answer is 3. Image 4 is padding. An image counts
    in the row of its first class; of three answers 0 two are right, one of them in the row of class 2.
    """
    logits = torch.arange(6.0, -1, -1).expand(5, 7).clone()
    labels = torch.tensor([[2, 0, -1], [0, -1, -1], [1, 5, 6], [5, 6, -1], [0, -1, -1]])
    logits[3] = torch.tensor([5.0, 4, 3, 6, 2, 1, 0])
    scores = scored(logits, labels, torch.tensor([1.0, 1, 1, 1, 0]))
    metrics = scores.metrics()
    assert (metrics["acc1"], metrics["acc5"], metrics["prec1"]) == (2 / 4, 3 / 4, 2 / 4)
    log_sum = log(sum(exp(x) for x in range(7)))
    assert metrics["loss"] == pytest.approx(log_sum - (4 + 6 + 5 + 1) / 4, rel=1e-6)
    table = scores.table([str(n) for n in range(7)])
    assert table["images"] == [1, 1, 1, 0, 0, 1, 0]
    assert table["acc1"] == [1, 0, 1, None, None, 0, None]
    assert table["acc5"] == [1, 1, 1, None, None, 0, None]
    assert table["precision"] == [pytest.approx(2 / 3), None, None, 0, None, None, None]


def test_the_first_of_equal_answers_counts():
    """As in training's validation; the best five hold it too, whichever `topk` takes of eight equals."""
    scores = counted([[0.0] * 8, [0.0] * 8], [0, 7], [1, 1])
    assert scores.sums["classes"][0, 1:3].tolist() == [1, 1]
    assert scores.sums["classes"][7, 1] == 0
    assert counted([[1.0, 2.0]], [0], [1]).metrics()["acc5"] == 1, "fewer than five classes"


def batch(label: int, bad: tuple[DecodeError, ...] = ()) -> Batch:
    image = torch.zeros(2, 3, 8, 8, dtype=torch.uint8)
    return replace(make_batch(image, torch.full((2,), label), valid=1 if bad else 2), bad=bad)


def test_what_cannot_be_evaluated():
    model = ViT(PRESETS["debug"]).eval()
    with pytest.raises(UsageError, match="class 10 in the data, but the model has 10 outputs"):
        evaluate_at(model, ClassificationConfig(), [batch(10)])
    further = with_fields(batch(0), label=torch.tensor([[0, -1], [0, 11]]))
    with pytest.raises(UsageError, match="class 11 in the data, but the model has 10 outputs"):
        evaluate_at(model, ClassificationConfig(), [further])
    with pytest.raises(UsageError, match="a dense model has no routing to override"):
        evaluate_at(model, ClassificationConfig(), [batch(0)], [AS_TRAINED, RoutingOverrides(experts=1)])
    (scores,) = evaluate_at(
        model, ClassificationConfig(), [batch(3, (DecodeError("shard", 1, "key", "torn"),))]
    )
    assert (scores.images(), scores.unread) == (1, 1)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_outputs_that_are_not_finite_are_no_scores(number: float):
    """Padding may be anything."""
    logits, labels = torch.zeros(4, 3), torch.zeros(4, 1, dtype=torch.int64)
    logits[1:3, 2] = number
    with pytest.raises(UsageError, match="not finite for 2 of 3 images"):
        scored(logits, labels, torch.tensor([1.0, 1, 1, 0])).of_all_ranks()
    assert scored(logits, labels, torch.tensor([1.0, 0, 0, 1])).of_all_ranks().images() == 2


def test_drawn_experts_of_a_later_rank_in_groups_of_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scores, "first_row", lambda images: images)
    model: Any = SimpleNamespace(config=vit_config(ExpertChoiceConfig(), images_per_group=2))
    point = RoutingOverrides(experts=2, subset_seed=3, images_per_group=1)
    assert scores.on_this_rank(point, model, 8).first_group == 8

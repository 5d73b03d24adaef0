"""Scores by hand, times by a clock that the test sets, and which results are kept."""

from collections.abc import Iterator
from dataclasses import replace
from math import exp, log
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.models.vit import ViT
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.presets import PRESETS
from orchestrator.checkpoint.models import read_model
from orchestrator.data.batch import Batch, DecodeError
from orchestrator.errors import UsageError
from orchestrator.evaluation import evaluate
from orchestrator.evaluation.evaluate import (
    WARM_UP,
    EvalTask,
    Latency,
    latencies,
)
from orchestrator.evaluation.scores import Scores, evaluate_at
from orchestrator.evaluation.sharded import Sharding
from orchestrator.tasks import ClassificationConfig
from tests.orchestrator.training.batches import make_batch, with_fields

POINTS = (RoutingOverrides(experts=1), RoutingOverrides(experts=2))


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


class Clock:
    """A model whose passes take these seconds, in turns, and the clock that sees them."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.now = iter(seconds), 0.0
        self.points: list[Any] = []
        self.threads: list[int] = []

    def __call__(self, images: torch.Tensor, *, routing_overrides: RoutingOverrides) -> None:
        self.now += next(self.seconds)
        self.points.append(routing_overrides.experts)
        self.threads.append(torch.get_num_threads())


@pytest.fixture
def three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def timed(monkeypatch: pytest.MonkeyPatch, seconds: list[float], repeats: int) -> tuple[Clock, list[Latency]]:
    model: Any = Clock(seconds)
    monkeypatch.setattr(evaluate.time, "perf_counter", lambda: model.now)
    return model, latencies(model, torch.zeros(4, 3, 2, 2), POINTS, repeats=repeats)


def test_median_and_quartiles_by_hand(three_threads: None, monkeypatch: pytest.MonkeyPatch):
    """Batches of 4 that take 4, 8, 12, 16, 20 s are 1000 .. 5000 ms per image; the warm-up does not count."""
    seconds = [99.0] * 2 * WARM_UP + [4, 1, 20, 1, 8, 1, 16, 1, 12, 1]
    model, (first, second) = timed(monkeypatch, seconds, repeats=5)
    assert (*second.quartiles, second.median) == (250, 250, 250, 250)
    assert first.summary() == {
        "median": 3000,
        "low": 2000,
        "high": 4000,
        "batch": 4,
        "repeats": 5,
        "device": "CPU, 1 thread",
    }
    assert model.points == [1, 2] * (WARM_UP + 5), "points take turns"
    assert set(model.threads) == {1}
    assert torch.get_num_threads() == 3
    with pytest.raises(StopIteration):
        timed(monkeypatch, [1.0], repeats=1)
    assert torch.get_num_threads() == 3, "after an error too"


def test_results_hold_for_the_weights_and_images_that_they_were_found_for(trained_home: Path, digits: str):
    model = read_model(f"{trained_home}/tiny/trials/soft/checkpoints")
    task = EvalTask(model=model, points=(), path=digits, split="val", batch_size=8, results="")
    others = [replace(task, split="train"), replace(task, points=POINTS), replace(task, batch_size=4)]
    keys = {task.key("other weights"), *(one.key("weights") for one in (task, *others))}
    assert len(keys) == 5
    together = Sharding(workers=2, root="")
    for same in (replace(task, results="/elsewhere"), replace(task, sharding=together)):
        assert same.key("weights") == task.key("weights")
    rounded = replace(task, sharding=replace(together, dtype="bfloat16"))
    assert rounded.key("weights") not in keys


def test_a_digest_sees_every_bit():
    model = torch.nn.Linear(2, 2)
    before = evaluate.hash_of_bits(model)
    assert evaluate.hash_of_bits(model) == before
    with torch.no_grad():
        model.weight[1, 1] = torch.nextafter(model.weight[1, 1], torch.tensor(9.0))
    assert evaluate.hash_of_bits(model) != before


def test_models_take_turns_in_rounds(trained_home: Path, digits: str):
    """Each is timed once a round; medians and quartiles are those of the passes of all rounds so far.

    The first model's passes take 1 and 2 ms in round 1, 3 and 4 in round 2, 5 and 6 in round 3: the quartiles
    of 1 .. 6 are 2.25, 3.5 and 4.75.
    """
    model = read_model(f"{trained_home}/tiny/trials/soft/checkpoints")
    tasks = [
        EvalTask(
            model=replace(model, name=name), points=(), path=digits, split="val", batch_size=8, results=""
        )
        for name in ("a", "b")
    ]
    order: list[str] = []

    def measured(task: EvalTask) -> list[Latency]:
        order.append(task.model.name)
        start = order.count(task.model.name) * 2.0 - 1
        passes = (start, start + 1) if task.model.name == "a" else (7.0, 7.0)
        return [Latency(ms=passes, batch=8, device="CPU, 1 thread")]

    found = [(task.model.name, rows) for task, rows in evaluate.in_rounds(tasks, measured)]
    assert order == ["a", "b"] * 3 == [name for name, _ in found]
    (first,), (last,) = found[0][1], found[-2][1]
    assert (first["perf/ms_per_image"], first["rounds"], first["repeats"]) == (1.5, 1, 2)
    assert last == {
        "perf/ms_per_image": 3.5,
        "perf/ms_per_image_q25": 2.25,
        "perf/ms_per_image_q75": 4.75,
        "batch": 8,
        "device": "CPU, 1 thread",
        "rounds": 3,
        "repeats": 2,
    }
    assert found[-1][1][0]["perf/ms_per_image_q25"] == 7.0

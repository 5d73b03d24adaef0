"""Times by a clock that the test sets, and which results are kept."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from moe.overrides import RoutingOverrides
from orchestrator.checkpoint.models import read_model
from orchestrator.evaluation import evaluate
from orchestrator.evaluation.evaluate import (
    WARM_UP,
    EvalTask,
    Latency,
    latencies,
)
from orchestrator.evaluation.sharded import Sharding

POINTS = (RoutingOverrides(experts=1), RoutingOverrides(experts=2))


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

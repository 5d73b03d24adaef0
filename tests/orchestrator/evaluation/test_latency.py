"""Times by a clock that the test sets, and the threads that they are taken with."""

from typing import Any

import pytest
import torch

from moe.overrides import RoutingOverrides
from orchestrator.evaluation import latency
from orchestrator.evaluation.latency import WARM_UP, Latency, device_name, latencies

POINTS = (RoutingOverrides(experts=1), RoutingOverrides(experts=2))
IMAGES = torch.zeros(4, 3, 2, 2)


class Clock:
    """A model whose passes take these seconds, in turns, and the clock that sees them."""

    def __init__(self, seconds: list[float]) -> None:
        self.seconds, self.now = iter(seconds), 0.0
        self.points: list[int] = []
        self.threads: list[int] = []

    def __call__(self, images: torch.Tensor, *, routing_overrides: RoutingOverrides) -> None:
        self.now += next(self.seconds)
        assert isinstance(routing_overrides.experts, int)
        self.points.append(routing_overrides.experts)
        self.threads.append(torch.get_num_threads())


def timed(monkeypatch: pytest.MonkeyPatch, seconds: list[float], repeats: int) -> tuple[Clock, list[Latency]]:
    model: Any = Clock(seconds)
    monkeypatch.setattr(latency.time, "perf_counter", lambda: model.now)
    return model, latencies(model, IMAGES, POINTS, repeats=repeats)


def test_median_and_quartiles_by_hand(monkeypatch: pytest.MonkeyPatch):
    """Batches of 4 that take 4, 8, 12, 16, 20 s are 1000 .. 5000 ms per image; the warm-up does not count."""
    model, (first, second) = timed(
        monkeypatch, [99.0] * 2 * WARM_UP + [4, 1, 20, 1, 8, 1, 16, 1, 12, 1], repeats=5
    )
    assert (first.low, first.median, first.high) == (2000, 3000, 4000)
    assert (second.low, second.median, second.high) == (250, 250, 250)
    assert model.points == [1, 2] * (WARM_UP + 5), "points take turns"
    assert first.summary() == {
        "median": 3000,
        "low": 2000,
        "high": 4000,
        "batch": 4,
        "repeats": 5,
        "device": "CPU, 1 thread",
    }


def test_a_single_pass_is_its_own_quartiles(monkeypatch: pytest.MonkeyPatch):
    _, (first, _) = timed(monkeypatch, [2.0] * 2 * (WARM_UP + 1), repeats=1)
    assert (first.low, first.median, first.high) == (500, 500, 500)


@pytest.fixture
def three_threads() -> Any:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


def test_one_thread_while_it_measures(three_threads: None, monkeypatch: pytest.MonkeyPatch):
    model, _ = timed(monkeypatch, [1.0] * 2 * (WARM_UP + 2), repeats=2)
    assert set(model.threads) == {1}
    assert torch.get_num_threads() == 3
    assert device_name(torch.device("cpu")) == "CPU, 1 thread", "of whoever asks, whenever"


def test_the_threads_come_back_after_an_error(three_threads: None, monkeypatch: pytest.MonkeyPatch):
    with pytest.raises(StopIteration):
        timed(monkeypatch, [1.0], repeats=1)
    assert torch.get_num_threads() == 3

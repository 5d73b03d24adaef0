"""Seconds by what they were spent on. Sleeps are short, and only lower bounds and orders are asserted."""

import time
from collections.abc import Iterator

import pytest
import torch

from orchestrator.data.batch import Batch
from orchestrator.training.metrics import Meter
from tests.orchestrator.training.batches import make_batch


def batches(count: int, *, wait_s: float) -> Iterator[Batch]:
    for _ in range(count):
        time.sleep(wait_s)
        yield make_batch(torch.zeros(5, 3, 2, 2), torch.zeros(5))


def test_waiting_and_computing() -> None:
    meter = Meter()
    for _ in meter.timed(batches(4, wait_s=0.03)):
        time.sleep(0.01)
    with meter.paused():
        first = meter.read()
    assert 0.16 <= meter.device_s < 1
    assert 0.5 < first["data/wait_frac"] < 0.95
    assert first["perf/images_per_s"] == pytest.approx(20 / meter.device_s)
    assert first["cost/device_s"] == meter.device_s


def test_pauses_are_no_training() -> None:
    meter = Meter()
    began = time.perf_counter()
    for _ in meter.timed(batches(3, wait_s=0.0)):
        time.sleep(0.01)
        with meter.paused():
            time.sleep(0.05)
    with meter.paused():
        values = meter.read()
    assert 0.03 <= meter.device_s < time.perf_counter() - began - 0.14
    assert values["data/wait_frac"] < 0.5  # a pause is no waiting for data either


def test_rates_are_since_the_last_reading_and_costs_since_the_start() -> None:
    meter = Meter(workers=2, device_s=100.0)
    for _ in meter.timed(batches(2, wait_s=0.02)):
        pass
    with meter.paused():
        first = meter.read()
    before = meter.device_s
    for _ in meter.timed(batches(4, wait_s=0.01)):
        time.sleep(0.01)
    with meter.paused():
        second = meter.read()
    assert first["perf/images_per_s"] == pytest.approx(2 * 10 / ((before - 100) / 2))
    assert second["perf/images_per_s"] == pytest.approx(2 * 20 / ((meter.device_s - before) / 2))
    assert first["cost/device_s"] == before
    assert second["cost/device_s"] == meter.device_s
    assert second["data/wait_frac"] < first["data/wait_frac"] <= 1


def test_batches_are_handed_on() -> None:
    given = list(batches(3, wait_s=0.0))
    assert [id(batch) for batch in Meter().timed(given)] == [id(batch) for batch in given]

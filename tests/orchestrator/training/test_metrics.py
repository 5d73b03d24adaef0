"""Speed, load, and which samples were read."""

import mmap
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pynvml
import pytest
import torch

from orchestrator.data.batch import Batch, DecodeError, Traffic
from orchestrator.errors import UsageError
from orchestrator.training import metrics
from orchestrator.training.metrics import (
    GIB,
    Meter,
    SampleTracker,
    UtilizationMonitor,
    check_bad,
    device_sync,
    fingerprint_metric,
    write_csv,
)
from tests.orchestrator.training.batches import make_batch


class Clock:
    """What the meter reads in place of the time."""

    now = 100.0

    def advance(self, seconds: float) -> None:
        self.now += seconds

    def batches(self, count: int, *, wait_s: float) -> Iterator[Batch]:
        for _ in range(count):
            self.advance(wait_s)
            yield make_batch(torch.zeros(5, 3, 2, 2), torch.zeros(5))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(metrics.time, "perf_counter", lambda: clock.now)
    return clock


def test_waiting_and_computing(clock: Clock) -> None:
    meter = Meter()
    for _ in meter.timed(clock.batches(4, wait_s=3.0)):
        clock.advance(1.0)
    with meter.paused():
        first = meter.read()
    assert first["cost/device_s"] == meter.device_s == 16
    assert first["data/wait_frac"] == 12 / 16
    assert first["perf/images_per_s"] == 20 / 16


def test_pauses_are_no_training(clock: Clock) -> None:
    """Nor do they count as waiting for data."""
    meter = Meter()
    for _ in meter.timed(clock.batches(3, wait_s=1.0)):
        clock.advance(1.0)
        with meter.paused():
            clock.advance(50.0)
    with meter.paused():
        values = meter.read()
    assert (meter.device_s, values["data/wait_frac"]) == (6, 0.5)


def test_rates_are_since_the_last_reading_and_costs_since_the_start(clock: Clock) -> None:
    meter = Meter(workers=2, device_s=100.0)
    for _ in meter.timed(clock.batches(2, wait_s=2.0)):
        pass
    with meter.paused():
        first = meter.read()
    for _ in meter.timed(clock.batches(4, wait_s=1.0)):
        clock.advance(1.0)
    with meter.paused():
        second = meter.read()
    assert (first["perf/images_per_s"], second["perf/images_per_s"]) == (2 * 10 / 4, 2 * 20 / 8)
    assert (first["cost/device_s"], second["cost/device_s"]) == (108, 124)
    assert (first["data/wait_frac"], second["data/wait_frac"]) == (1, 0.5)


def test_load_of_a_process_that_computes_then_sleeps() -> None:
    monitor = UtilizationMonitor()
    until = time.process_time() + 0.2
    while time.process_time() < until:
        pass
    busy = monitor.read()
    time.sleep(0.2)
    idle = monitor.read()
    assert busy["perf/cpu_cores"] > 3 * idle["perf/cpu_cores"]
    assert idle["perf/cpu_cores"] < 0.5
    with mmap.mmap(-1, GIB) as held:  # malloc may reuse memory that an earlier test has freed
        np.frombuffer(held, dtype=np.uint8)[:] = 1
        grown = monitor.read()["perf/memory_gib"] - idle["perf/memory_gib"]
    assert 0.7 < grown < 1.2


def refuse(*_: object) -> None:
    raise AssertionError("a CUDA context would be made")


def test_a_cpu_run_leaves_the_gpus_of_its_machine_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    for name in ("synchronize", "utilization", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, refuse)
    device_sync()
    assert UtilizationMonitor().read().keys() == {"perf/cpu_cores", "perf/memory_gib"}


def not_supported() -> int:
    raise pynvml.NVMLError(pynvml.NVML_ERROR_NOT_SUPPORTED)


def no_library() -> int:
    raise ModuleNotFoundError("nvidia-ml-py cannot be imported")


@pytest.mark.parametrize("utilization", [not_supported, no_library])
def test_a_gpu_whose_utilization_cannot_be_measured(
    utilization: Callable[[], int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is left out, which the log says once; the mean is over the GPUs of the workers that know theirs."""
    cuda = {
        "is_initialized": lambda: True,
        "max_memory_allocated": lambda: 3 * GIB,
        "utilization": utilization,
    }
    for name, function in (cuda | {"reset_peak_memory_stats": lambda: None}).items():
        monkeypatch.setattr(torch.cuda, name, function)
    monitor = UtilizationMonitor()
    for _ in range(2):
        load = monitor.read()
        assert load["perf/gpu_memory_gib"] == 3
        assert "perf/gpu_util" not in load
    assert len(caplog.records) == 1
    assert "perf/gpu_util is not reported" in caplog.text

    another_worker = torch.tensor([1, 1, 5, 1, 60, 1], dtype=torch.float64)
    monkeypatch.setattr(metrics, "sum_over_ranks", lambda values: values + another_worker)
    load = monitor.read()
    assert (load["perf/gpu_memory_gib"], load["perf/gpu_util"]) == (4, 60)
    monkeypatch.setattr(torch.cuda, "utilization", lambda: 20)
    assert UtilizationMonitor().read()["perf/gpu_util"] == 40


def batch(samples: list[int], places: list[int], bad: list[DecodeError] | None = None) -> Batch:
    made = make_batch(torch.zeros(len(samples), 3, 1, 1), torch.zeros(len(samples)))
    return replace(made, sample=torch.tensor(samples), key=torch.tensor(places), bad=tuple(bad or ()))


def bad(*rows: int) -> list[DecodeError]:
    return [DecodeError("s3://x/train/000000.parquet", n, f"key-{n}", "not an image") for n in rows]


def fingerprint(*read: Batch, before: int = 0) -> int:
    samples = SampleTracker(fingerprint=before)
    assert list(samples.training(iter(read))) == list(read)
    return samples.gather()[0]


def test_parts_in_any_order_have_the_fingerprint_of_the_whole() -> None:
    whole = fingerprint(batch([11, 12, 13, 14], [0, 1, 2, 3]))
    assert fingerprint(batch([13, 14], [2, 3]), batch([11, 12], [0, 1])) == whole
    assert fingerprint(batch([13, 14], [2, 3]), before=fingerprint(batch([11, 12], [0, 1]))) == whole


def test_one_worker_begins_with_what_all_had_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics.dist, "is_initialized", lambda: True)
    began = list[int]()
    for rank in range(3):
        monkeypatch.setattr(metrics.dist, "get_rank", lambda rank=rank: rank)
        began.append(int(SampleTracker(fingerprint=7)._sum))
    assert began == [7, 0, 0]


@pytest.mark.parametrize(
    ("samples", "places"),
    [([11, 12, 14, 13], [0, 1, 2, 3]), ([11, 12, 13, 15], [0, 1, 2, 3]), ([11, 12, 13, 14], [0, 1, 2, 4])],
    ids=["order", "another sample", "another place"],
)
def test_any_change_shows(samples: list[int], places: list[int]) -> None:
    whole, other = fingerprint(batch([11, 12, 13, 14], [0, 1, 2, 3])), fingerprint(batch(samples, places))
    assert fingerprint_metric(other) != fingerprint_metric(whole)
    assert 0 <= fingerprint_metric(other) < 2**48


def test_a_bad_image_counts_once_and_validation_has_no_fingerprint() -> None:
    samples = SampleTracker(bad=bad(9, 3))
    assert len(list(samples.validation(iter([batch([1], [0], bad(5, 3)), batch([1], [1], bad(3))])))) == 2
    assert samples.gather() == (0, bad(3, 5, 9))


def test_requests_for_images_are_counted_where_there_are_any() -> None:
    samples = SampleTracker()
    for training, traffic in ((True, Traffic()), (True, Traffic(2, 10**9)), (False, Traffic(3, 10**9))):
        read = samples.training if training else samples.validation
        list(read(iter([replace(batch([1], [0]), traffic=traffic)])))
        if traffic == Traffic():
            assert samples.traffic() == {}
    assert samples.traffic() == {"data/s3_requests": 5, "data/s3_gb": 2}


@pytest.mark.parametrize(
    ("count", "read", "epoch", "refused"),
    [(10, 100, 5000, False), (11, 100, 5000, True), (3, 10, 200, True), (20, 2000, 50, False)],
)
def test_too_many_bad_images(count: int, read: int, epoch: int, refused: bool) -> None:
    """The limit is one in a hundred of the images read, or of the first thousand images or epoch."""
    errors = bad(*range(count))
    if not refused:
        return check_bad(errors, read=read, epoch=epoch, max_frac=0.01)
    with pytest.raises(
        UsageError, match=rf"^{count} of \d+ images cannot be decoded, .*max_bad_frac=0.01"
    ) as e:
        check_bad(errors, read=read, epoch=epoch, max_frac=0.01)
    assert "s3://x/train/000000.parquet row 2, key-2: not an image" in str(e.value)


def test_the_list_is_a_table(tmp_path: Path) -> None:
    errors = [DecodeError("a,b", 1, "k", 'not "an" image')]
    write_csv(f"{tmp_path}/bad_images.csv", DecodeError._fields, errors)
    expected = b'shard,row,key,reason\r\n"a,b",1,k,"not ""an"" image"\r\n'
    assert (tmp_path / "bad_images.csv").read_bytes() == expected

"""A run on data with images that cannot be decoded: they are counted and named, and too many end it."""

import csv
from pathlib import Path

import numpy as np
import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.packing import Sample, write_shards
from orchestrator.data.stream import in_process
from orchestrator.errors import UsageError
from orchestrator.training.metrics_file import Metrics
from orchestrator.training.run_directory import run_directory
from orchestrator.training.worker import train_worker
from tests.parts import png

BAD = (7, 20, 33)


@pytest.fixture
def run(tmp_path: Path) -> RunConfig:
    """40 training images, three of which are cut short, and a validation set with one more."""
    images = [png(np.full((8, 8), n)) for n in range(50)]
    for number in (*BAD, 45):
        images[number] = images[number][:30]
    samples = [Sample(image, n % 10, f"grey-{n}") for n, image in enumerate(images)]
    path = str(tmp_path / "data")
    write_shards(path, map(str, range(10)), {"train": samples[:40], "val": samples[40:]})
    changes = {
        "storage": str(tmp_path),
        "data.path": path,
        "data.batch_size": 8,
        "train.steps": 10,
        "train.report_every": 5,
        "checkpoint.every": 5,
        "model.width": 16,
        "model.mlp_dim": 32,
        "model.moe.num_experts": 4,
    }
    return override(RunConfig(), changes)


def bad_counts(run: RunConfig) -> list[float]:
    reports: list[Metrics] = []
    train_worker(run, report=lambda step, metrics: reports.append(metrics), read=in_process)
    return [metrics["data/bad_images"] for metrics in reports]


def test_they_are_counted_once_and_named(run: RunConfig) -> None:
    """The first epoch meets those of training, the evaluation at the end the other one."""
    found = bad_counts(override(run, {"data.max_bad_frac": 0.2}))
    assert found[-1] == 4
    assert found == sorted(found)
    with Path(run_directory(run), "bad_images.csv").open() as file:
        assert {row["key"] for row in csv.DictReader(file)} == {f"grey-{n}" for n in (*BAD, 45)}


def test_too_many_end_the_run_with_the_list(run: RunConfig) -> None:
    with pytest.raises(
        UsageError, match=r"3 of 40 images cannot be decoded, more than data.max_bad_frac=0.01"
    ) as error:
        bad_counts(run)
    for number in BAD:
        assert f"grey-{number}: " in str(error.value)


def test_a_run_that_stopped_goes_on_with_more_patience(run: RunConfig) -> None:
    with pytest.raises(UsageError, match="max_bad_frac"):
        bad_counts(run)
    assert bad_counts(override(run, {"data.max_bad_frac": 0.2}))[-1] == 4

"""Ray Data gives the same batches as one process, however they are cut and when workers are restarted."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch
from orchestrator.data.ray_data import BatchServer, ReadPlan, by_ray_data
from orchestrator.data.stream import Split, in_process, open_stream
from orchestrator.errors import UsageError
from tests.orchestrator.data.test_stream import equal, pack
from tests.parts import png

# The cluster is about ten processes.
pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("cluster")]


@pytest.fixture(scope="module")
def server(cluster: None) -> Iterator[Any]:
    server = BatchServer.remote(tasks_each=6)
    yield server
    ray.kill(server)


def digits_run(digits: str, **changes) -> RunConfig:
    data = {"data.path": digits, "data.batch_size": 48, "data.lanes": 12, "model.image_size": 16}
    return override(RunConfig(), data | changes)


def read_all(
    server: Any, run: RunConfig, workers: int, steps: range, split: Split = "train"
) -> list[list[Batch]]:
    """Returns each worker's batches; all workers read at the same time."""

    def read(rank: int) -> list[Batch]:
        return list(by_ray_data(server)(open_stream(run, split, rank, workers), steps))

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(read, range(workers)))


@pytest.mark.parametrize(
    ("workers", "changes", "steps"),
    [
        (1, {"data.augment": "inception", "data.mixup": 1.0}, range(7, 90)),  # 9 blocks in 2 executions
        (3, {"data.augment": "inception", "data.cutmix": 1.0}, range(7, 90)),
        (2, {"model.image_size": 512}, range(3)),  # two blocks a step
    ],
    ids=["one worker", "three", "parts of a step"],
)
def test_same_batches_as_in_process(
    workers: int, changes: dict, steps: range, digits: str, server: Any
) -> None:
    run = digits_run(digits, **changes)
    for rank, batches in enumerate(read_all(server, run, workers, steps)):
        expected = in_process(open_stream(run, "train", rank, workers), steps)
        assert all(equal(a, b) for a, b in zip(batches, expected, strict=True))


def test_validation_beside_training(digits: str, server: Any) -> None:
    run = digits_run(digits)
    stream, validation = open_stream(run, "train", 0, 1), open_stream(run, "val", 0, 1)
    training = by_ray_data(server)(stream, range(40))
    first = next(training)
    for _ in range(2):
        (found,) = read_all(server, run, 1, validation.steps(), "val")
        expected = in_process(validation, validation.steps())
        assert all(equal(a, b) for a, b in zip(found, expected, strict=True))
    expected = in_process(stream, range(40))
    assert all(equal(a, b) for a, b in zip([first, *training], expected, strict=True))


def test_workers_that_come_back_read_from_where_they_say(digits: str, server: Any) -> None:
    """The first attempt is abandoned; the numbers of workers and steps are different."""
    run = digits_run(digits)
    abandoned = by_ray_data(server)(open_stream(run, "train", 0, 1), range(60))
    next(abandoned)
    for rank, batches in enumerate(read_all(server, run, 2, range(20, 25))):
        expected = in_process(open_stream(run, "train", rank, 2), range(20, 25))
        assert all(equal(a, b) for a, b in zip(batches, expected, strict=True))


def test_a_plan_that_is_joined_again_begins_anew(digits: str, server: Any) -> None:
    """The second attempt gets a number of its own, the same for both workers."""
    plan = ReadPlan(digits_run(digits), "train", 0, 1, 2)
    first, again = (set(ray.get([server.join.remote(plan, rank) for rank in range(2)])) for _ in range(2))
    assert len(first) == len(again) == 1
    assert first != again


def test_bad_images_are_named(tmp_path: Path, server: Any) -> None:
    digits = pack(tmp_path / "bad", [b"nothing", b"", *[png(np.full((8, 8), n)) for n in range(10)]])
    run = override(RunConfig(), {"data.path": digits, "data.batch_size": 4, "data.lanes": 2})
    stream = open_stream(run, "train", 0, 1)
    (found,) = read_all(server, run, 1, range(6))
    assert {bad.key for batch in found for bad in batch.bad} == {"0", "1"}
    assert all(equal(a, b) for a, b in zip(found, in_process(stream, range(6)), strict=True))


def test_a_shard_that_changed_is_the_users_to_mend(tmp_path: Path, server: Any) -> None:
    path = pack(tmp_path / "changed", [png(np.full((8, 8), n)) for n in range(12)])
    shard = Path(path, "train/000000.parquet")
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    run = override(RunConfig(), {"data.path": path, "data.batch_size": 4, "data.lanes": 2})
    with pytest.raises(UsageError, match=r"000000.parquet changed since it was packed"):
        read_all(server, run, 1, range(3))

"""Ray Data gives the same batches as one process, however they are cut and when workers are restarted."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import ray
from ray.util.placement_group import placement_group, remove_placement_group

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data import ray_data
from orchestrator.data.batch import Batch
from orchestrator.data.ray_data import BLOCKS_AHEAD, BLOCKS_PER_TASK, READY_BLOCKS, BatchServer, by_ray_data
from orchestrator.data.read_plan import ReadPlan
from orchestrator.data.stream import Split, in_process, open_stream
from orchestrator.errors import UsageError
from tests.orchestrator.data.test_labels import check_sets, pack_sets
from tests.orchestrator.data.test_stream import equal, pack
from tests.parts import command_of, png, to_each

# The cluster is about ten processes.
pytestmark = [pytest.mark.smoke, pytest.mark.usefixtures("cluster")]

LARGE = {"data.batch_size": 264}  # a step fills a block: many blocks of few images


@pytest.fixture(scope="module")
def server(cluster: None) -> Iterator[Any]:
    """A batch server whose tasks soon end, so that other tasks follow."""
    server = BatchServer.remote(task_s=0.05)
    yield server
    ray.kill(server)


@pytest.fixture(scope="module")
def patient(cluster: None) -> Iterator[Any]:
    """A batch server of tasks that last."""
    server = BatchServer.remote()
    yield server
    ray.kill(server)


def digits_run(digits: str, **changes) -> RunConfig:
    data = {"data.path": digits, "data.batch_size": 48, "data.lanes": 12, "model.image_size": 16}
    return override(RunConfig(), data | changes)


def read_all(
    feeds: list[Any], run: RunConfig, workers: int, steps: range, split: Split = "train"
) -> list[list[Batch]]:
    """Returns each worker's batches; all workers read at the same time."""

    def read(rank: int) -> list[Batch]:
        return list(by_ray_data(feeds)(open_stream(run, split, rank, workers), steps))

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(read, range(workers)))


@pytest.mark.parametrize(
    ("workers", "changes", "steps"),
    [
        (1, LARGE | {"data.augment": "inception,mixup"}, range(7, 14)),  # 7 blocks in 2 executions
        (3, {"data.augment": "inception,cutmix"}, range(7, 45)),  # two blocks of several steps for each
        (2, {"model.image_size": 512}, range(2)),  # two blocks a step
    ],
    ids=["one worker", "three", "parts of a step"],
)
def test_same_batches_as_in_process(
    workers: int, changes: dict, steps: range, digits: str, server: Any
) -> None:
    run = digits_run(digits, **changes)
    for rank, batches in enumerate(read_all([server], run, workers, steps)):
        expected = in_process(open_stream(run, "train", rank, workers), steps)
        assert all(equal(a, b) for a, b in zip(batches, expected, strict=True))


def test_images_with_several_labels(server: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pack_sets(str(tmp_path / "sets"), monkeypatch)
    run, steps = digits_run(str(tmp_path / "sets")), range(3)
    for rank, batches in enumerate(read_all([server], run, 2, steps)):
        expected = in_process(open_stream(run, "train", rank, 2), steps)
        assert all(equal(a, b) for a, b in zip(batches, expected, strict=True))
        assert [check_sets(batch) for batch in batches] == [24, 24, 24]


def test_two_feeds_give_the_same_batches_as_one(digits: str, server: Any, patient: Any) -> None:
    """The first feed serves two of three workers."""
    run, steps = digits_run(digits), range(3, 9)
    for rank, batches in enumerate(read_all([server, patient], run, 3, steps)):
        expected = in_process(open_stream(run, "train", rank, 3), steps)
        assert all(equal(a, b) for a, b in zip(batches, expected, strict=True))


def test_blocks_ahead_are_bounded_and_a_task_that_dies_is_repeated(digits: str, patient: Any) -> None:
    """A worker stops reading; then the processes that decode are killed while they wait for room."""
    stream, steps = open_stream(digits_run(digits, **LARGE), "train", 0, 1), range(13)
    reading = by_ray_data([patient])(stream, steps)
    found = [next(reading)]
    waiting = tasks = claimed = -1
    while waiting < tasks or tasks < 0:
        waiting, tasks, claimed = ray.get(patient.__ray_call__.remote(tasks_and_claims))
        time.sleep(0.05)
    asked = 1 + BLOCKS_AHEAD
    assert claimed <= asked + READY_BLOCKS + BLOCKS_PER_TASK * tasks < len(steps)  # the blocks of all
    decoding = [
        each for each in psutil.Process().children(recursive=True) if "MapBatches" in command_of(each)
    ]
    assert decoding
    to_each(psutil.Process.kill, decoding)
    expected = in_process(stream, steps)
    assert all(equal(a, b) for a, b in zip([*found, *reading], expected, strict=True))


def tasks_and_claims(server: Any) -> tuple[int, int, int]:
    """Returns the tasks that wait for room, all tasks, and the blocks that they claimed."""
    (reading,) = server._running.values()
    return len(reading._waiting), reading._tasks, reading._next


def test_a_worker_says_what_it_waits_for(
    digits: str, patient: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(ray_data, "WARN_S", 0.1)
    stream = open_stream(digits_run(digits), "train", 0, 1)
    all_cpus = placement_group([{"CPU": 2}])
    all_cpus.wait()
    with ThreadPoolExecutor(1) as pool:
        batches = pool.submit(list, by_ray_data([patient])(stream, range(2)))
        while not caplog.messages:
            time.sleep(0.05)
        remove_placement_group(all_cpus)
        assert len(batches.result()) == 2
    assert "0 of the cluster's 2 CPUs are free" in caplog.messages[0]


def test_validation_beside_training(digits: str, server: Any) -> None:
    run = digits_run(digits)
    stream, validation = open_stream(run, "train", 0, 1), open_stream(run, "val", 0, 1)
    training = by_ray_data([server])(stream, range(20))
    first = next(training)
    for _ in range(2):
        (found,) = read_all([server], run, 1, validation.steps(), "val")
        expected = in_process(validation, validation.steps())
        assert all(equal(a, b) for a, b in zip(found, expected, strict=True))
    expected = in_process(stream, range(20))
    assert all(equal(a, b) for a, b in zip([first, *training], expected, strict=True))


def test_workers_that_come_back_read_from_where_they_say(digits: str, server: Any) -> None:
    """The first attempt is abandoned; the numbers of workers and steps are different."""
    run = digits_run(digits)
    abandoned = by_ray_data([server])(open_stream(run, "train", 0, 1), range(60))
    next(abandoned)
    for rank, batches in enumerate(read_all([server], run, 2, range(20, 25))):
        expected = in_process(open_stream(run, "train", rank, 2), range(20, 25))
        assert all(equal(a, b) for a, b in zip(batches, expected, strict=True))


def test_a_plan_that_is_joined_again_begins_anew(digits: str, server: Any) -> None:
    """The second attempt gets a number of its own, the same for both workers."""
    plan = ReadPlan(digits_run(digits), "train", 0, 1, 2, range(2))
    first, again = (set(ray.get([server.join.remote(plan, rank) for rank in range(2)])) for _ in range(2))
    assert len(first) == len(again) == 1
    assert first != again


def test_bad_images_are_named(tmp_path: Path, server: Any) -> None:
    digits = pack(tmp_path / "bad", [b"nothing", b"", *[png(np.full((8, 8), n)) for n in range(10)]])
    run = override(RunConfig(), {"data.path": digits, "data.batch_size": 4, "data.lanes": 2})
    stream = open_stream(run, "train", 0, 1)
    (found,) = read_all([server], run, 1, range(6))
    assert {bad.key for batch in found for bad in batch.bad} == {"0", "1"}
    assert all(equal(a, b) for a, b in zip(found, in_process(stream, range(6)), strict=True))


def test_a_shard_that_changed_is_the_users_to_mend(tmp_path: Path, server: Any) -> None:
    path = pack(tmp_path / "changed", [png(np.full((8, 8), n)) for n in range(12)])
    shard = Path(path, "train/000000.parquet")
    shard.write_bytes(shard.read_bytes()[:100])
    run = override(RunConfig(), {"data.path": path, "data.batch_size": 4, "data.lanes": 2})
    with pytest.raises(UsageError, match=r"000000.parquet is shorter than"):
        read_all([server], run, 1, range(3))

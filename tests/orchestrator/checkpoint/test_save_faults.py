"""Saves that fail, on a disk and on S3: training goes on, nothing stays of them, the next save succeeds."""

import logging
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.config import CheckpointConfig
from tests.lanes import mostly_slow
from tests.orchestrator.buckets import Bucket
from tests.orchestrator.checkpoint.counted import IN_STEP, folder, said, save, saved, step_restored
from tests.orchestrator.checkpoint.operations import before_opening

Fault = Callable[[int], AbstractContextManager[Any]]  # of the save of a step
both_ways = pytest.mark.parametrize("asynchronous", [True, False], ids=["beside training", "in step"])


def check_fault(directory: str, fault: Fault, says: str, caplog: pytest.LogCaptureFixture, **save_as: Any):
    """A failure is logged at the next call at the latest. The run fails only if its last save did."""
    rows, asynchronous = save_as.pop("rows", 40), save_as.pop("asynchronous", False)
    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=asynchronous, keep_last=9))

    def save_and_wait(step: int) -> None:
        save(checkpoints, step, rows=rows)
        checkpoints.settle()

    save_and_wait(1)
    before = files(directory)
    with fault(2):
        save_and_wait(2)
        assert checkpoints.failures == 1
        (line,) = said(caplog, logging.ERROR)
        assert f"saving step 2 to {directory} failed" in line
        assert says in line
    assert files(directory) == before
    save_and_wait(3)
    assert (checkpoints.failures, manifests.steps(directory)) == (1, [1, 3])
    with fault(4):
        save(checkpoints, 4, rows=rows)
        with pytest.raises(OSError, match=rf"saving step 4 to .* failed: .*{says}"):
            checkpoints.finish()
    caplog.clear()


def files(directory: str) -> list[str]:
    return sorted(path for path in storage.files(directory) if "mine" not in path)


def refused(at: str) -> Fault:
    """Files with `at` in their path cannot be opened."""

    def fail(location: str) -> None:
        if at in location:
            raise MemoryError("no memory for it")

    return lambda step: before_opening(fail)


def full_after(quarters: int) -> Fault:
    """The kernel makes no file longer than so many quarters of a page."""

    @contextmanager
    def fault(_: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (quarters * 1024, hard))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return fault


def read_only(_: int) -> AbstractContextManager[Any]:
    def refuse(location: str, *_: Any) -> None:
        raise PermissionError(f"{location} is read-only")

    names = ("make_folder", "open_to_write", "delete", "write_bytes")
    return patch.multiple(storage, **dict.fromkeys(names, refuse))


def in_the_way(directory: str) -> Fault:
    """A foreign folder stands in the place of the step."""

    @contextmanager
    def fault(step: int) -> Iterator[None]:
        theirs = folder(directory, step) / "mine"
        theirs.parent.mkdir()
        theirs.write_text("notes")
        yield
        assert theirs.read_text() == "notes"

    return fault


@both_ways
def test_on_a_disk(asynchronous: bool, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    cases = {
        "weights": (refused("weights"), "MemoryError"),
        "manifest": (refused("manifest"), "MemoryError"),
        "read-only": (read_only, "is read-only"),
        "in the way": (in_the_way(f"{tmp_path}/in the way"), "exists already"),
        # what is saved is longer
        **{f"full after {n}": (full_after(n), "File too large") for n in range(6)},
    }
    for name, (fault, says) in cases.items():
        check_fault(f"{tmp_path}/{name}", fault, says, caplog, asynchronous=asynchronous)


@pytest.mark.parametrize(
    "kind",
    mostly_slow(["weights-", "optimizer-", "manifest.json"], fast=["weights-", "manifest.json"]),
)
@pytest.mark.parametrize("failure", mostly_slow(["busy", "cut upload", "short"], fast=["cut upload"]))
def test_on_s3(failure: str, kind: str, bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    def fault(_: int) -> AbstractContextManager[None]:
        return bucket.failing(failure, lambda request: request.startswith("PUT") and kind in request)

    check_fault(bucket.uri("checkpoints"), fault, "OSError", caplog)


@pytest.mark.smoke
def test_parts_of_a_large_file(bucket: Bucket, caplog: pytest.LogCaptureFixture) -> None:
    """None stays, not even where listings do not show it."""

    @contextmanager
    def fault(step: int) -> Iterator[None]:
        with bucket.failing("busy", lambda request: "partNumber=2" in request):
            yield
        assert any("partNumber=2" in request for request in bucket.proxy.requests)
        assert bucket.uploads() == []

    check_fault(bucket.uri("checkpoints"), fault, "OSError", caplog, rows=140_000, asynchronous=True)


def test_a_directory_that_may_only_be_read_is_resumed_from(tmp_path, caplog) -> None:
    """Though nothing in it can be removed."""
    saved(tmp_path, 1)
    (tmp_path / "step-00000002.0123abcd.tmp").mkdir()
    with read_only(2):
        assert step_restored(tmp_path) == 1
    assert "read-only" in caplog.text


def test_a_directory_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").write_text("mine")
    checkpoints = Checkpoints(str(tmp_path / "checkpoints"), IN_STEP)
    assert step_restored(tmp_path / "checkpoints") is None
    save(checkpoints, 1)
    with pytest.raises(OSError, match="checkpoints"):
        checkpoints.finish()
    assert (tmp_path / "checkpoints").read_text() == "mine"


@both_ways
def test_a_save_that_failed_is_forgotten_once_another_is_written(asynchronous: bool, tmp_path: Path) -> None:
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig(asynchronous=asynchronous))
    with refused("step-00000001")(1):
        save(checkpoints, 1)
        checkpoints.settle()
    save(checkpoints, 2)
    checkpoints.finish()
    assert (checkpoints.failures, manifests.steps(str(tmp_path))) == (1, [2])


@both_ways
def test_interrupts_end_the_run(asynchronous: bool, tmp_path: Path) -> None:
    def stop(_: str) -> None:
        raise KeyboardInterrupt

    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig(asynchronous=asynchronous))

    def save_and_wait() -> None:
        save(checkpoints, 1)
        checkpoints.settle()

    with before_opening(stop), pytest.raises(KeyboardInterrupt):
        save_and_wait()
    assert step_restored(tmp_path) is None

"""A disk that is full while a checkpoint is saved: training goes on, and saves when there is room again."""

import logging
import os
import resource
import subprocess
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.run import Checkpoints
from orchestrator.config import CheckpointConfig
from tests.orchestrator.checkpoint.counted import said, save, step_restored

PAGE = 4096
Room = Callable[[int], AbstractContextManager[None]]  # with room(pages): no more than that can be written


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[tuple[Path, Room]]:
    """A file system of its own, with ballast."""
    mounting = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(tmp_path)]
    if subprocess.run(mounting, capture_output=True, check=False).returncode:
        pytest.skip("mounting a file system is not permitted here")

    @contextmanager
    def room(pages: int) -> Iterator[None]:
        ballast = tmp_path / "ballast"
        ballast.write_bytes(bytes((os.statvfs(tmp_path).f_bavail - pages) * PAGE))
        yield
        ballast.unlink()

    yield tmp_path / "checkpoints", room
    subprocess.run(["umount", str(tmp_path)], check=True)


@pytest.fixture
def small_files(tmp_path: Path) -> tuple[Path, Room]:
    """Where nothing may be mounted: the kernel refuses to make a file longer than so."""

    @contextmanager
    def room(pages: int) -> Iterator[None]:
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (pages * PAGE // 4, hard))
        yield
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    return tmp_path / "checkpoints", room


@pytest.fixture(params=["small_disk", "small_files"])
def disk(request: pytest.FixtureRequest) -> tuple[Path, Room]:
    return request.getfixturevalue(request.param)


@pytest.mark.parametrize("asynchronous", [True, False], ids=["beside training", "in step"])
def test_full_after_any_number_of_pages(asynchronous, disk, caplog):
    directory, room = disk
    checkpoints = Checkpoints(str(directory), CheckpointConfig(asynchronous=asynchronous))
    save(checkpoints, 1)
    checkpoints.settle()
    for pages in range(60):
        caplog.clear()
        with room(pages):
            save(checkpoints, 2 + pages)
            checkpoints.settle()
        if checkpoints.failures == pages:
            break
        (line,) = said(caplog, logging.ERROR)
        assert f"saving step {2 + pages} to {directory} failed" in line
        assert "No space left on device" in line or "File too large" in line
        assert "training goes on" in line
        assert os.listdir(directory) == ["step-00000001"]
        assert step_restored(directory) == 1
    assert pages > 4
    checkpoints.finish()  # the last save was fine
    assert manifests.steps(str(directory)) == [1, 2 + pages]
    assert step_restored(directory) == 2 + pages


def test_full_at_the_end(disk):
    """A run without its last weights is not complete."""
    directory, room = disk
    checkpoints = Checkpoints(str(directory), CheckpointConfig())
    save(checkpoints, 1)
    checkpoints.settle()
    with room(3):
        save(checkpoints, 2)
        with pytest.raises(OSError, match=r"saving step 2 to .* failed: .*(No space left|File too large)"):
            checkpoints.finish()
    assert step_restored(directory) == 1


def test_full_before_the_first(disk):
    directory, room = disk
    checkpoints = Checkpoints(str(directory), CheckpointConfig())
    with room(0):
        save(checkpoints, 1)
        checkpoints.settle()
    assert checkpoints.failures == 1
    assert step_restored(directory) is None
    save(checkpoints, 2)
    checkpoints.finish()
    assert step_restored(directory) == 2

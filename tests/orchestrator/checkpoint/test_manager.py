"""Saving beside training: the state at the call, without waiting; and what happens when a save fails."""

import logging
import os
import resource
import shutil
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest
import torch

from orchestrator import storage
from orchestrator.checkpoint import manager
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.files import local_part, state_of
from orchestrator.checkpoint.manager import Checkpoints, Snapshot
from orchestrator.config import CheckpointConfig
from tests.orchestrator.checkpoint.counted import IN_STEP, fill, folder, odd, said, save, saved, step_restored
from tests.orchestrator.checkpoint.operations import before_opening
from tests.orchestrator.checkpoint.small_runs import RUNS, assert_same, built, one_rank, train, whole_state

BESIDE = CheckpointConfig(keep_last=9)
REPORT = {"images": 0, "progress": {}, "config": {}}
both_ways = pytest.mark.parametrize("asynchronous", [True, False], ids=["beside training", "in step"])


@pytest.fixture
def blocked() -> Iterator[threading.Event]:
    """Until it is set, no file is opened."""
    gate = threading.Event()

    def wait(location: str) -> None:
        assert gate.wait(30)

    with before_opening(wait):
        yield gate
        gate.set()


@pytest.mark.parametrize("name", RUNS)
def test_it_is_the_state_at_the_call(name, blocked, tmp_path):
    model, optimizer = built(name, seed=0)
    checkpoints = Checkpoints(str(tmp_path), BESIDE)
    checkpoints.restore(model, optimizer)
    for step in (2, 4):
        blocked.clear()
        train(model, optimizer, range(step - 2, step))
        checkpoints.save(step, model, optimizer, **REPORT)
        # it returned before anything was written
        assert manifests.steps(str(tmp_path)) == list(range(2, step, 2))
        state = whole_state(model, optimizer)
        train(model, optimizer, range(step, step + 2))
        blocked.set()
        checkpoints.settle()
        again, its_optimizer = built(name, seed=9)
        manifest = Checkpoints(str(tmp_path), IN_STEP).restore(again, its_optimizer)
        assert manifest
        assert manifest.step == step
        assert_same(whole_state(again, its_optimizer), state)
        assert any(not torch.equal(t, state[key]) for key, t in whole_state(model, optimizer).items())


@both_ways
@pytest.mark.parametrize("name", RUNS)
def test_a_run_with_checkpoints_is_the_run_without(name, asynchronous, tmp_path):
    """From the first update on: asking a new optimiser for its state must not count as one."""
    plain, saving = built(name, seed=0), built(name, seed=0)
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig(asynchronous=asynchronous))
    checkpoints.restore(*saving)
    for step in range(4):
        assert train(*plain, range(step, step + 1)) == train(*saving, range(step, step + 1))
        checkpoints.save(step + 1, *saving, **REPORT)
    checkpoints.finish()
    assert_same(whole_state(*saving), whole_state(*plain))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_training_replaces_no_tensor(name, sharded):
    """So a snapshot looks them up once; neither do evaluation, nor collecting the state."""
    with one_rank():
        model, optimizer = built(name, seed=0, **({"ep": 1} if sharded else {}))
        snapshot = Snapshot(model, optimizer)
        train(model, optimizer, range(3))
        with torch.no_grad():
            model(torch.zeros(8, 3, 8, 8, dtype=next(model.parameters()).dtype))
        train(model, optimizer, range(3, 5))
        snapshot.take()
        now = {key: local_part(tensor) for key, tensor in state_of(model, optimizer).items()}
        assert_same(snapshot.copies, now)
        before = {key: copy.clone() for key, copy in snapshot.copies.items()}
        train(model, optimizer, range(5, 6))
        assert_same(snapshot.copies, before)


def test_memory_for_the_copy_is_there_before_training(tmp_path, monkeypatch):
    """Or the first save would wait for it. It is the only copy."""
    made = []
    monkeypatch.setattr(manager, "Snapshot", lambda *args: made.append(1) or Snapshot(*args))
    model, optimizer = built("soft, AdamW", seed=0)
    checkpoints = Checkpoints(str(tmp_path), BESIDE)
    checkpoints.restore(model, optimizer)
    for step in (2, 3):
        train(model, optimizer, range(step, step + 1))
        checkpoints.save(step, model, optimizer, **REPORT)
    checkpoints.finish()
    assert len(made) == 1


def test_tensors_that_were_replaced(tmp_path):
    """By another model, an optimiser that was loaded, or a new one: what is handed over is saved."""
    checkpoints = Checkpoints(str(tmp_path), BESIDE)
    model, optimizer = odd()
    checkpoints.restore(model, optimizer)

    def saved_as(step: int) -> None:
        fill(model, optimizer, step)
        checkpoints.save(step, model, optimizer, images=8 * step, progress={}, config={})
        checkpoints.settle()
        assert step_restored(tmp_path) == step

    saved_as(1)
    optimizer.load_state_dict(optimizer.state_dict())
    saved_as(2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    saved_as(3)
    model, optimizer = odd()
    saved_as(4)
    model.of_counter = torch.zeros_like(model.of_counter)
    saved_as(5)


def test_saves_wait_for_each_other(blocked, tmp_path):
    checkpoints = Checkpoints(str(tmp_path), BESIDE)
    threading.Timer(0.1, blocked.set).start()
    for step in range(1, 6):
        save(checkpoints, step)
        assert manifests.steps(str(tmp_path))[: step - 1] == list(range(1, step))
    checkpoints.finish()
    for step in (5, 4, 3, 2, 1):
        assert step_restored(tmp_path) == step
        manifests.remove(str(folder(tmp_path, step)))


@both_ways
def test_the_same_step_again(asynchronous, place):
    """The later one counts."""
    checkpoints = Checkpoints(place, CheckpointConfig(asynchronous=asynchronous))
    model, optimizer = odd()
    for content in (7, 8, 5):
        fill(model, optimizer, content)
        checkpoints.save(5, model, optimizer, images=40, progress={}, config={})
    checkpoints.finish()
    assert checkpoints.failures == 0
    assert step_restored(place) == 5
    assert len(storage.names(manifests.folder_of(place, 5))) == 3


@both_ways
def test_interrupts_are_no_failed_saves(asynchronous, tmp_path):
    def stop(_: str) -> None:
        raise KeyboardInterrupt

    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig(asynchronous=asynchronous))

    def save_and_wait() -> None:
        save(checkpoints, 1)
        checkpoints.settle()

    with before_opening(stop), pytest.raises(KeyboardInterrupt):
        save_and_wait()
    assert step_restored(tmp_path) is None


@both_ways
@pytest.mark.parametrize("at", ["weights", "manifest"])
def test_any_other_error_is(at, asynchronous, tmp_path, caplog):
    """It is known at the next call at the latest, logged, and fails the run if it was the last save."""

    def fail(location: str) -> None:
        if ("manifest" in location) == (at == "manifest"):
            raise MemoryError("no memory for it")

    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig(asynchronous=asynchronous))
    with before_opening(fail):
        save(checkpoints, 1)
        checkpoints.settle()
    assert checkpoints.failures == 1
    assert "saving step 1" in caplog.text
    assert "MemoryError('no memory for it')" in caplog.text
    assert storage.names(str(tmp_path)) == []
    with pytest.raises(OSError, match="no memory for it"):
        checkpoints.finish()


@both_ways
def test_a_directory_that_vanishes(asynchronous, tmp_path):
    """Between saves it is made anew; in the middle of one, that one fails."""
    directory = tmp_path / "checkpoints"
    checkpoints = Checkpoints(str(directory), CheckpointConfig(asynchronous=asynchronous))
    save(checkpoints, 1)
    checkpoints.settle()
    shutil.rmtree(directory)
    save(checkpoints, 2)
    checkpoints.settle()
    assert step_restored(directory) == 2

    def vanish(location: str) -> None:
        if "model-00002" in location:
            shutil.rmtree(directory)

    with before_opening(vanish):
        save(checkpoints, 3)
        checkpoints.settle()
    assert checkpoints.failures == 1
    assert not directory.exists()
    save(checkpoints, 4)
    checkpoints.finish()
    assert step_restored(directory) == 4


def test_a_directory_that_may_only_be_read(tmp_path, monkeypatch, caplog):
    """It can be resumed from, though nothing in it can be removed or saved."""
    saved(tmp_path, 1)
    (tmp_path / "step-00000002.0123abcd.tmp").mkdir()

    def refuse(location: str, *_):
        raise PermissionError(f"{location} is read-only")

    for name in ("make_folder", "open_to_write", "delete", "write_bytes"):
        monkeypatch.setattr(storage, name, refuse)
    assert step_restored(tmp_path) == 1
    assert "read-only" in caplog.text
    checkpoints = Checkpoints(str(tmp_path), IN_STEP)
    save(checkpoints, 2)
    assert checkpoints.failures == 1


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_what_somebody_else_put_where_a_step_should_be(kind, tmp_path, caplog):
    saved(tmp_path, 1)
    theirs = tmp_path / "step-00000002"
    if kind == "folder":
        theirs.mkdir()
        theirs /= "notes"
    theirs.write_text("mine")
    checkpoints = Checkpoints(str(tmp_path), IN_STEP)
    save(checkpoints, 2)
    assert checkpoints.failures == 1
    assert "step-00000002 exists already" in caplog.text
    assert theirs.read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]


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


@both_ways
@pytest.mark.parametrize("disk", ["small_disk", "small_files"])
def test_a_disk_that_is_full(disk, asynchronous, request, caplog):
    """After any number of pages: training continues, and saves when there is room again. Only a run without
    its last weights is not complete.
    """
    directory, room = request.getfixturevalue(disk)
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
        assert os.listdir(directory) == ["step-00000001"]
    assert pages > 4
    assert step_restored(directory) == 2 + pages
    with room(3):
        save(checkpoints, 99)
        with pytest.raises(OSError, match=r"saving step 99 to .* failed: .*(No space left|File too large)"):
            checkpoints.finish()

"""Saving beside training: of the state at the call, without waiting, changing nothing."""

import threading
from collections.abc import Iterator

import pytest
import torch

from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint import run as run_file
from orchestrator.checkpoint.run import Checkpoints
from orchestrator.checkpoint.snapshot import Snapshot
from orchestrator.config import CheckpointConfig
from tests.orchestrator.checkpoint.counted import (
    IN_STEP,
    fill,
    folder,
    odd,
    save,
    step_restored,
    wrong,
)
from tests.orchestrator.checkpoint.small_runs import RUNS, assert_same, built, train, whole_state

BESIDE = CheckpointConfig(keep_last=9)
REPORT = {"images": 0, "progress": {}, "config": {}}


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch) -> Iterator[threading.Event]:
    """Until it is set, no file is opened."""
    gate, open_to_write = threading.Event(), storage.open_to_write

    def wait(location: str):
        assert gate.wait(30)
        return open_to_write(location)

    monkeypatch.setattr(storage, "open_to_write", wait)
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
        assert manifests.steps(str(tmp_path)) == list(
            range(2, step, 2)
        )  # it returned before anything was written
        state = whole_state(model, optimizer)
        train(model, optimizer, range(step, step + 2))
        blocked.set()
        checkpoints.settle()
        again, its_optimizer = built(name, seed=9)
        manifest = Checkpoints(str(tmp_path), IN_STEP).restore(again, its_optimizer)
        assert manifest
        assert manifest.step == step
        assert_same(whole_state(again, its_optimizer), state)
        assert any(
            not torch.equal(tensor, state[key]) for key, tensor in whole_state(model, optimizer).items()
        )


@pytest.mark.parametrize("asynchronous", [True, False], ids=["beside training", "in step"])
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


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("name", RUNS)
def test_memory_for_the_copy_is_there_before_training(name, resumed, tmp_path, monkeypatch):
    """Or the first save would wait for it."""
    if resumed:
        checkpoints, (model, optimizer) = Checkpoints(str(tmp_path), IN_STEP), built(name, seed=0)
        train(model, optimizer, range(1))
        checkpoints.save(1, model, optimizer, **REPORT)
    made = []
    monkeypatch.setattr(run_file, "Snapshot", lambda *args: made.append(1) or Snapshot(*args))
    model, optimizer = built(name, seed=0)
    checkpoints = Checkpoints(str(tmp_path), BESIDE)
    assert bool(checkpoints.restore(model, optimizer)) == resumed
    assert len(made) == 1
    for step in (2, 3):
        train(model, optimizer, range(step, step + 1))
        model.eval()
        model.train()
        checkpoints.save(step, model, optimizer, **REPORT)
    checkpoints.finish()
    assert len(made) == 1


def test_tensors_that_were_replaced(tmp_path):
    """By another model, an optimiser that was loaded, or one begun anew: what is handed over is saved."""
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
    assert manifests.steps(str(tmp_path)) == [1, 2, 3, 4, 5]
    for step in (5, 4, 3, 2, 1):
        assert step_restored(tmp_path) == step
        manifests.remove(str(folder(tmp_path, step)))


@pytest.mark.parametrize("asynchronous", [True, False], ids=["beside training", "in step"])
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
    assert len(storage.names(manifests.folder_of(place, 5))) == 5


@pytest.mark.parametrize("asynchronous", [True, False], ids=["beside training", "in step"])
@pytest.mark.parametrize("interrupt", [KeyboardInterrupt, SystemExit])
def test_interrupts_are_no_failed_saves(interrupt, asynchronous, tmp_path, monkeypatch):
    def stop(*_):
        raise interrupt

    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig(asynchronous=asynchronous))
    monkeypatch.setattr(storage, "flush", stop)

    def save_and_wait() -> None:
        save(checkpoints, 1)
        checkpoints.settle()

    with pytest.raises(interrupt):
        save_and_wait()
    monkeypatch.undo()
    assert step_restored(tmp_path) is None


@pytest.mark.parametrize("asynchronous", [True, False], ids=["beside training", "in step"])
def test_any_other_error_is(asynchronous, tmp_path, monkeypatch, caplog):
    def fail(*_):
        raise MemoryError("no memory for it")

    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig(asynchronous=asynchronous))
    monkeypatch.setattr(storage, "flush", fail)
    save(checkpoints, 1)
    checkpoints.settle()
    monkeypatch.undo()
    assert checkpoints.failures == 1
    assert "saving step 1" in caplog.text
    assert "MemoryError('no memory for it')" in caplog.text
    assert storage.names(str(tmp_path)) == []
    with pytest.raises(OSError, match="no memory for it"):
        checkpoints.finish()


def test_finish_waits(blocked, tmp_path):
    checkpoints = Checkpoints(str(tmp_path), BESIDE)
    save(checkpoints, 1)
    threading.Timer(0.1, blocked.set).start()
    checkpoints.finish()
    assert manifests.steps(str(tmp_path)) == [1]
    checkpoints.finish()
    assert wrong(*odd(), 1)

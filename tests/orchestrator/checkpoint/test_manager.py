"""Saving beside training: the state at the call, without waiting; and what happens when a save fails."""

import math
import threading
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch

from moe.layout import local_part
from orchestrator import storage
from orchestrator.checkpoint import manager, manifest as manifests
from orchestrator.checkpoint.files import state_of
from orchestrator.checkpoint.manager import Checkpoints, NotFiniteError, Snapshot
from orchestrator.config import CheckpointConfig
from tests.lanes import mostly_smoke
from tests.orchestrator.checkpoint.counted import IN_STEP, fill, folder, odd, save, step_restored
from tests.orchestrator.checkpoint.operations import before_opening
from tests.orchestrator.checkpoint.small_runs import (
    FAST,
    RUNS,
    assert_same,
    built,
    one_rank,
    train,
    whole_state,
)

BESIDE = CheckpointConfig(keep_last=9)
REPORT = {"images": 0, "progress": {}, "config": {}}
both_ways = pytest.mark.parametrize("asynchronous", [True, False], ids=["beside training", "in step"])


@pytest.fixture
def blocked() -> Iterator[threading.Event]:
    """Until this event is set, files are not opened."""
    gate = threading.Event()

    def wait(location: str) -> None:
        assert gate.wait(30)

    with before_opening(wait):
        yield gate
        gate.set()


def test_memory_that_cannot_be_page_locked_stays_pageable(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: object) -> None:
        raise RuntimeError("CUDA error: out of memory")

    linear = torch.nn.Linear(2, 2)
    snapshot = Snapshot(linear, torch.optim.AdamW(linear.parameters()))
    monkeypatch.setattr(torch.cuda, "cudart", lambda: SimpleNamespace(cudaHostRegister=lambda *_: 2))
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    snapshot._lock_pages()
    assert "raise the limit of locked memory" in caplog.text
    snapshot.take()
    assert torch.equal(snapshot.copies["weight"], linear.weight)


def test_the_thread_has_the_gpu_of_its_worker(tmp_path, monkeypatch):
    """A thread begins on GPU 0, where the first call would make a context for each worker of the node."""
    chosen = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(
        torch.cuda, "set_device", lambda gpu: chosen.append((threading.current_thread().name, gpu))
    )
    Checkpoints(str(tmp_path), BESIDE)._beside.submit(int).result()
    assert chosen == [("checkpoint_0", 3)]


@pytest.mark.parametrize("name", mostly_smoke(RUNS, fast=FAST))
def test_the_state_at_the_call_is_saved(name, blocked, tmp_path, monkeypatch):
    """`save` returns before anything is written. One copy is made, before training starts."""
    made = []
    monkeypatch.setattr(manager, "Snapshot", lambda *args: made.append(1) or Snapshot(*args))
    model, optimizer = built(name, seed=0)
    checkpoints = Checkpoints(str(tmp_path), BESIDE)
    checkpoints.restore(model, optimizer)
    for step in (2, 4):
        blocked.clear()
        train(model, optimizer, range(step - 2, step))
        checkpoints.save(step, model, optimizer, **REPORT)
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
    assert len(made) == 1


@both_ways
@pytest.mark.parametrize("name", mostly_smoke(RUNS, fast=FAST))
def test_saving_does_not_change_training(name, asynchronous, tmp_path):
    """Reading a new optimiser's state must not count as an update."""
    plain, saving = built(name, seed=0), built(name, seed=0)
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig(asynchronous=asynchronous))
    checkpoints.restore(*saving)
    for step in range(3):
        assert train(*plain, range(step, step + 1)) == train(*saving, range(step, step + 1))
        checkpoints.save(step + 1, *saving, **REPORT)
    checkpoints.finish()
    assert_same(whole_state(*saving), whole_state(*plain))


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("name", mostly_smoke(RUNS, fast=FAST))
def test_training_replaces_no_tensor(name, sharded):
    """Neither do evaluation and reading the state, so a snapshot looks the tensors up only once."""
    with one_rank():
        model, optimizer = built(name, seed=0, **({"ep": 1} if sharded else {}))
        snapshot = Snapshot(model, optimizer)
        train(model, optimizer, range(2))
        with torch.no_grad():
            model(torch.zeros(8, 3, 8, 8, dtype=next(model.parameters()).dtype))
        train(model, optimizer, range(2, 3))
        snapshot.take()
        now = {key: local_part(tensor) for key, tensor in state_of(model, optimizer).items()}
        assert_same(snapshot.copies, now)
        before = {key: copy.clone() for key, copy in snapshot.copies.items()}
        train(model, optimizer, range(3, 4))
        assert_same(snapshot.copies, before)


def test_a_snapshot_is_one_block_of_memory(tmp_path, monkeypatch):
    """Its size is that of the state, and its numbers are aligned. Without GPU tensors CUDA is not asked."""
    model, optimizer = built("soft, AdamW", seed=0)
    snapshot = Snapshot(model, optimizer)
    with monkeypatch.context() as elsewhere:
        elsewhere.setattr(torch.cuda, "is_available", lambda: True)
        snapshot.take()
    assert_same(snapshot.copies, {name: local_part(t) for name, t in snapshot.state.items()})
    assert all(copy.data_ptr() % 64 == 0 for copy in snapshot.copies.values())
    assert len({copy.untyped_storage().data_ptr() for copy in snapshot.copies.values()}) == 1

    linear = torch.nn.ModuleList(torch.nn.Linear(1030, 130) for _ in range(3))
    snapshot = Snapshot(linear, torch.optim.AdamW(linear.parameters()))
    size = sum(tensor.nbytes for tensor in snapshot.state.values())
    assert size <= snapshot.copies["0.weight"].untyped_storage().nbytes() <= 1.02 * size


@both_ways
@pytest.mark.parametrize("where", ["matrix", "optimizer.state.cube.exp_avg", "of_half"])
def test_a_state_that_is_not_finite_is_not_saved(where, asynchronous, tmp_path):
    """Neither weights, nor the optimiser's state, nor buffers; the checkpoints before stay."""
    checkpoints = Checkpoints(str(tmp_path), CheckpointConfig(asynchronous=asynchronous, keep_last=1))
    model, optimizer = odd()
    checkpoints.restore(model, optimizer)
    fill(model, optimizer, 1)
    checkpoints.save(1, model, optimizer, images=8, progress={}, config={})
    for number in (math.nan, math.inf, -math.inf):
        state_of(model, optimizer)[where].data.flatten()[-1] = number
        with pytest.raises(NotFiniteError, match=f"{where} hold numbers that are not finite"):
            checkpoints.save(2, model, optimizer, images=16, progress={}, config={})
    checkpoints.finish()
    assert checkpoints.failures == 0
    assert step_restored(tmp_path) == 1


def test_the_largest_numbers_are_saved(tmp_path):
    """A sum of their squares would not be finite."""
    model, optimizer = odd()
    checkpoints = Checkpoints(str(tmp_path), IN_STEP)
    with torch.no_grad():
        model.matrix.fill_(torch.finfo(torch.float32).max)
    checkpoints.save(1, model, optimizer, **REPORT)
    assert manifests.steps(str(tmp_path)) == [1]


def test_tensors_that_were_replaced(tmp_path):
    """After another model, a loaded optimiser state or a new optimiser, the state at the call is saved."""
    checkpoints = Checkpoints(str(tmp_path), BESIDE)
    model, optimizer = odd()
    checkpoints.restore(model, optimizer)

    def check_saved(step: int) -> None:
        fill(model, optimizer, step)
        checkpoints.save(step, model, optimizer, images=8 * step, progress={}, config={})
        checkpoints.settle()
        assert step_restored(tmp_path) == step

    check_saved(1)
    optimizer.load_state_dict(optimizer.state_dict())
    check_saved(2)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    check_saved(3)
    model, optimizer = odd()
    check_saved(4)
    model.of_counter = torch.zeros_like(model.of_counter)
    check_saved(5)


def test_saves_wait_for_each_other(blocked, tmp_path):
    checkpoints = Checkpoints(str(tmp_path), BESIDE)
    threading.Timer(0.1, blocked.set).start()
    for step in range(1, 4):
        save(checkpoints, step)
        assert manifests.steps(str(tmp_path))[: step - 1] == list(range(1, step))
    checkpoints.finish()
    for step in (3, 2, 1):
        assert step_restored(tmp_path) == step
        manifests.remove(str(folder(tmp_path, step)))


@both_ways
def test_the_same_step_again(asynchronous, place):
    """The later save counts."""
    checkpoints = Checkpoints(place, CheckpointConfig(asynchronous=asynchronous))
    model, optimizer = odd()
    for content in (7, 5):
        fill(model, optimizer, content)
        checkpoints.save(5, model, optimizer, images=40, progress={}, config={})
    checkpoints.finish()
    assert checkpoints.failures == 0
    assert step_restored(place) == 5
    assert len(storage.names(manifests.folder_of(place, 5))) == 3

"""Two runs at one directory: a run that was given up for dead, and the one that took over."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.run import Checkpoints
from orchestrator.config import CheckpointConfig
from tests.lanes import mostly_slow
from tests.orchestrator.checkpoint.counted import IN_STEP, odd, said, save, step_restored
from tests.orchestrator.checkpoint.operations import counting


class Stalled:
    """Stops the thread that saves beside training before its storage operation of this number."""

    def __init__(self, number: int) -> None:
        self.number, self.seen = number, 0
        self.reached, self.gone_on = threading.Event(), threading.Event()

    def meet(self, _: int, what: str) -> None:
        if threading.current_thread().name.startswith("checkpoint"):
            self.seen += 1
            if self.seen == self.number:
                self.reached.set()
                assert self.gone_on.wait(30)


@contextmanager
def stalled(number: int) -> Iterator[Stalled]:
    it = Stalled(number)
    undo = counting(it.meet)
    try:
        yield it
    finally:
        it.gone_on.set()
        undo()


def whole(directory: str) -> dict[int, bool]:
    """Step -> whether its checkpoint is."""
    found = {}
    for step in manifests.steps(directory):
        folder = manifests.folder_of(directory, step)
        found[step] = not manifests.damaged(folder, manifests.read(folder).files.items())
    return found


def left_over(directory: str) -> list[str]:
    """What no manifest vouches for."""
    names = []
    for name in storage.names(directory):
        folder = storage.join(directory, name)
        vouched = {"manifest.json", *manifests.read(folder).files} if manifests.is_there(folder) else set()
        names += [f"{name}/{file}" for file in set(storage.names(folder)) - vouched]
    return names


def test_both_at_the_same_moment(place, monkeypatch, caplog):
    """One wins; the other one reports, and leaves nothing."""
    commit, reached, gone_on = storage.write_new, threading.Event(), threading.Event()
    rename = storage.rename_folder

    def late(function):
        def call(*args):
            if threading.current_thread().name.startswith("checkpoint"):
                reached.set()
                assert gone_on.wait(30)
            return function(*args)

        return call

    monkeypatch.setattr(storage, "write_new", late(commit))
    monkeypatch.setattr(storage, "rename_folder", late(rename))
    slow, fast = Checkpoints(place, CheckpointConfig()), Checkpoints(place, IN_STEP)
    save(slow, 5)
    assert reached.wait(30)
    save(fast, 5)
    before = manifests.read(manifests.folder_of(place, 5))
    gone_on.set()
    slow.settle()
    assert (slow.failures, fast.failures) == (1, 0)
    assert "FileExistsError" in said(caplog, logging.ERROR)[0]
    assert manifests.read(manifests.folder_of(place, 5)) == before
    assert step_restored(place) == 5
    assert left_over(place) == []
    with pytest.raises(OSError, match="exists already"):
        slow.finish()


def test_one_after_the_other(place, caplog):
    """Who did not resume from it does not replace it."""
    save(Checkpoints(place, IN_STEP), 5)
    second = Checkpoints(place, IN_STEP)
    save(second, 5)
    assert second.failures == 1
    assert "exists already" in said(caplog, logging.ERROR)[0]
    assert whole(place) == {5: True}
    assert left_over(place) == []


@pytest.mark.parametrize("number", mostly_slow(range(1, 24, 2), fast=[3, 19]))
def test_one_that_took_over(number, place, monkeypatch):
    """The old run stalls in the middle of a save, at any of its operations; the new one restores, which
    collects what lies about, and saves that step and the next; then the old one goes on.
    """
    old = Checkpoints(place, CheckpointConfig())
    save(old, 1)
    old.settle()
    with stalled(number) as it:
        save(old, 2)
        if not it.reached.wait(5):
            assert number > 15  # its save has no more of them
            old.settle()
        new, model_and_optimizer = Checkpoints(place, IN_STEP), odd()
        manifest = new.restore(*model_and_optimizer)
        assert manifest
        for step in range(manifest.step + 1, 4):
            save(new, step)
        assert new.failures == 0
        it.gone_on.set()
        old.settle()
    assert whole(place) == {1: True, 2: True, 3: True}
    assert step_restored(place) == 3
    assert left_over(place) == []


def test_an_old_one_that_commits_late(place):
    """It removes none of the checkpoints that are newer than what it knows."""
    with stalled(1) as it:
        old = Checkpoints(place, CheckpointConfig(keep_last=1))
        save(old, 5)
        assert it.reached.wait(30)
        new = Checkpoints(place, CheckpointConfig(asynchronous=False, keep_last=2))
        for step in (10, 20, 30):
            save(new, step)
        it.gone_on.set()
        old.settle()
    assert set(manifests.steps(place)) >= {20, 30}
    assert step_restored(place) == 30

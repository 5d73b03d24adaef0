"""Two runs at one directory: a run that was believed dead, and the run that took over."""

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.config import CheckpointConfig
from tests.lanes import mostly_slow
from tests.orchestrator.checkpoint.counted import IN_STEP, odd, said, save, step_restored
from tests.orchestrator.checkpoint.operations import counting


class Stalled:
    """Stops the thread that saves beside training, at a storage operation of this number among the operations
    whose description holds `what`.
    """

    def __init__(self, number: int, what: str) -> None:
        self.number, self.what, self.seen = number, what, 0
        self.reached, self.may_continue = threading.Event(), threading.Event()

    def meet(self, _: int, what: str) -> None:
        if threading.current_thread().name.startswith("checkpoint") and self.what in what:
            self.seen += 1
            if self.seen == self.number:
                self.reached.set()
                assert self.may_continue.wait(30)


@contextmanager
def stalled(number: int, what: str = "") -> Iterator[Stalled]:
    it = Stalled(number, what)
    with counting(it.meet):
        try:
            yield it
        finally:
            it.may_continue.set()


def check_whole(directory: str, *steps: int) -> None:
    """Checks that these checkpoints are whole, and that there are no other files."""
    assert manifests.steps(directory) == list(steps)
    for name in storage.names(directory):
        folder = storage.join(directory, name)
        manifest = manifests.read(folder)
        assert manifests.list_damaged(folder, manifest.files.items()) == []
        assert set(storage.names(folder)) == {"manifest.json", *manifest.files}


def test_both_save_at_the_same_moment(place, caplog):
    """The first run to commit wins; the other run reports a failure, and leaves no files."""
    slow, fast = Checkpoints(place, CheckpointConfig()), Checkpoints(place, IN_STEP)
    commit = "before write_new" if place.startswith("s3://") else "before rename_folder"
    with stalled(1, commit) as it:
        save(slow, 5)
        assert it.reached.wait(30)
        save(fast, 5)
        before = manifests.read(manifests.folder_of(place, 5))
        it.may_continue.set()
        slow.settle()
    assert (slow.failures, fast.failures) == (1, 0)
    assert "FileExistsError" in said(caplog, logging.ERROR)[0]
    assert manifests.read(manifests.folder_of(place, 5)) == before
    assert step_restored(place) == 5
    check_whole(place, 5)
    with pytest.raises(OSError, match="exists already"):
        slow.finish()


@pytest.mark.parametrize("number", mostly_slow(range(1, 24, 2), fast=[3, 5]))
def test_a_run_that_took_over(number, place):
    """The old run stalls in the middle of a save, at any of its operations; the new run restores, which
    collects garbage, and saves this step and the next; then the old run continues.
    """
    old = Checkpoints(place, CheckpointConfig())
    save(old, 1)
    old.settle()
    with stalled(number) as it:
        save(old, 2)
        if not it.reached.wait(5):
            assert number > 9  # a save has no more operations
            old.settle()
        new, model_and_optimizer = Checkpoints(place, IN_STEP), odd()
        manifest = new.restore(*model_and_optimizer)
        assert manifest
        for step in range(manifest.step + 1, 4):
            save(new, step)
        assert new.failures == 0
        it.may_continue.set()
        old.settle()
    assert step_restored(place) == 3
    check_whole(place, *([1, 2, 3] if 1 in manifests.steps(place) else [2, 3]))


def test_an_old_run_that_commits_late(place):
    """It does not remove checkpoints that are newer than its own."""
    with stalled(1) as it:
        old = Checkpoints(place, CheckpointConfig(keep_last=1))
        save(old, 5)
        assert it.reached.wait(30)
        new = Checkpoints(place, CheckpointConfig(asynchronous=False, keep_last=2))
        for step in (10, 20, 30):
            save(new, step)
        it.may_continue.set()
        old.settle()
    assert set(manifests.steps(place)) >= {20, 30}
    assert step_restored(place) == 30

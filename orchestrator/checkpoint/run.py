"""A run's checkpoints, as all its workers see them: saved beside training, resumed from, fallen back to."""

import logging
import warnings
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException

from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.find import agreed, newest, verified
from orchestrator.checkpoint.manifest import DamagedError, Manifest
from orchestrator.checkpoint.retention import collect_garbage, discard, retain, sweep
from orchestrator.checkpoint.snapshot import Snapshot
from orchestrator.checkpoint.state import first_failure, load, state_of
from orchestrator.checkpoint.tensors import Writer
from orchestrator.config import CheckpointConfig
from orchestrator.errors import UsageError

log = logging.getLogger(__name__)
warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant


class Checkpoints:
    """Every method but `failures` is called by all workers of the run, in the same order.

    Saving copies the state and writes the copy beside training, on a process group of its own: collectives
    of a second thread on the training's group would interleave with it. A save that fails is counted and
    logged, and training goes on; the checkpoints before it are untouched.
    """

    def __init__(self, directory: str, config: CheckpointConfig) -> None:
        self.directory = directory
        self.config = config
        self.alone = not dist.is_initialized() or dist.get_world_size() == 1
        self.group: dist.ProcessGroup | None = None
        if not self.alone:
            self.group = dist.new_group(backend="gloo")  # pyright: ignore[reportAttributeAccessIssue]
        self.first = self.alone or dist.get_rank() == 0
        self.failures = 0
        self._beside = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
        self._snapshot: Snapshot | None = None
        self._pending: tuple[int, Writer, Future[Any]] | None = None
        self._failed_last: str | None = None
        self._passed_over: set[int] = set()
        self._saved: set[int] = set()

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Manifest | None:
        """Fills both from the newest checkpoint whose every file is as it was written, whatever layout wrote
        it; damaged ones are named in a warning. None if there is none.

        Raises:
            ValueError: if its tensors are not those of the model, or the optimiser's are gone.
            OSError: if storage does not answer: that is no damage.
        """
        agreed(lambda: _tidy(self.directory, lambda: collect_garbage(self.directory)), self.group)
        there = agreed(lambda: manifests.steps(self.directory), self.group)
        manifest = None
        if there:
            try:
                folder, manifest = newest(self.directory, self.group)
            except FileNotFoundError:
                log.warning("no checkpoint in %s is whole: the run starts anew", self.directory)
            else:
                load(folder, manifest, model, optimizer, group=self.group)
        self._passed_over = {step for step in there if manifest is None or step > manifest.step}
        if self.config.asynchronous:
            self._snapshot = Snapshot(model, optimizer)
        return manifest

    def branch(self, folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> Manifest:
        """Fills both from a checkpoint of another run; what is saved from now on is this one's.

        Raises:
            UsageError: if it is not there, not whole, or weights alone.
        """
        try:
            manifest = verified(folder, self.group)
        except (DamagedError, FileNotFoundError) as error:
            raise UsageError(f"no checkpoint to branch from at {folder}: {error}") from None
        if not manifest.has_optimizer():
            raise UsageError(f"{folder} holds weights alone: a branch goes on with the optimiser too")
        load(folder, manifest, model, optimizer, group=self.group)
        if self.config.asynchronous:
            self._snapshot = Snapshot(model, optimizer)
        return manifest

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        images: int,
        progress: Mapping[str, Any],
        config: Mapping[str, Any],
    ) -> None:
        """Copies the state as it is now, and returns before it is written (unless `asynchronous` is off)."""
        self.settle()
        folder = manifests.folder_of(self.directory, step)
        described = partial(Manifest, step=step, images=images, progress=dict(progress), config=config)
        writer = Writer(
            lambda token: f"{folder}.{token}.tmp" if storage.is_local(folder) else folder,
            lambda temporary, files: self._commit(folder, temporary, described(files=files)),
        )
        write = partial(
            state_dict_saver.save, storage_writer=writer, process_group=self.group, no_dist=self.alone
        )
        if self.config.asynchronous:
            if not (self._snapshot and self._snapshot.is_of(model, optimizer)):
                self._snapshot = Snapshot(model, optimizer)
            copied = self._snapshot.take()
            self._pending = step, writer, self._beside.submit(write, self._snapshot.state, planner=copied)
        else:
            self._outcome(step, writer, lambda: write(state_of(model, optimizer)))

    def settle(self) -> None:
        """Waits until what was saved is written, or has failed."""
        if self._pending:
            step, writer, future = self._pending
            self._pending = None
            self._outcome(step, writer, future.result)

    def finish(self) -> None:
        """Raises OSError if the last save failed: a run is not complete without its weights."""
        self.settle()
        self._beside.shutdown()
        if self._failed_last:
            raise OSError(self._failed_last)

    def _commit(self, folder: str, temporary: str, manifest: Manifest) -> None:
        replace = manifest.step in self._passed_over | self._saved  # else it is another writer's
        manifests.commit(folder, temporary, manifest, replace=replace)
        if replace:
            _tidy(self.directory, lambda: sweep(folder))
        self._passed_over.discard(manifest.step)
        self._saved.add(manifest.step)
        retaining = partial(retain, self.directory, manifest.step, self.config, self._passed_over)
        _tidy(self.directory, retaining)

    def _outcome(self, step: int, writer: Writer, work: Callable[[], Any]) -> None:
        try:
            work()
            self._failed_last = None
        except (CheckpointException, OSError) as error:
            why = repr(error)
            if isinstance(error, CheckpointException):
                worker, cause = first_failure(error)
                if not isinstance(cause, Exception):
                    raise cause from None  # an interrupt, which DCP made an exception
                why = f"worker {worker}: {cause!r}"
            self.failures += 1
            self._failed_last = f"saving step {step} to {self.directory} failed: {why}"
            if self.first:
                log.error("%s; training goes on, older checkpoints are untouched", self._failed_last)
                if token := writer.token:
                    _tidy(self.directory, lambda: discard(writer.temporary(token), token))


def _tidy(directory: str, work: Callable[[], None]) -> None:
    try:
        work()
    except OSError as error:
        log.warning("what could go from %s stays for now: %s", directory, error)

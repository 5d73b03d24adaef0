"""A run's checkpoints: all its workers save beside training and resume; what need not stay is removed."""

import logging
import math
import mmap
import operator
import re
import time
import uuid
import weakref
from collections.abc import Callable, Collection, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.api import CheckpointException

from moe.layout import local_part
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.files import first_failure, load_state, state_of, write
from orchestrator.checkpoint.manifest import MANIFEST, CheckpointManifest, DamagedError, on_first_rank
from orchestrator.config import CheckpointConfig
from orchestrator.errors import UsageError, reason_of

log = logging.getLogger(__name__)
FILE = re.compile(
    r"(weights|optimizer)-\d{5,}-\d{3,}\.[0-9a-f]{8}\.safetensors|manifest\.json\.[0-9a-f]{32}\.tmp"
)
ATTEMPT = re.compile(r"(step-\d+)\.[0-9a-f]{8}\.tmp")
ALIGNMENT = 64  # bytes, of a tensor in a snapshot


class NotFiniteError(Exception):
    """The message names tensors that hold a NaN or an infinity."""


class Snapshot:
    """A copy of this worker's share of the state in host memory, which is written while training continues.

    Tensors are looked up once, because that takes as long as a copy: FSDP, optimisers and our modules write
    into their tensors and never replace them. The memory is allocated before training starts, because its
    first use takes longer than the copy. It is one block, in whole pages, which is page-locked if the tensors
    are on a GPU: torch's own page-locked allocations are rounded up to powers of two, one block no less than
    many, and would take up to twice the state.
    """

    def __init__(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.state = state_of(model, optimizer)
        self._tensors = _tensors_of(model, optimizer)
        self.live = {name: local_part(tensor) for name, tensor in self.state.items()}
        starts, size = dict[str, int](), 0
        for name, live in self.live.items():
            starts[name], size = size, size + -(-live.nbytes // ALIGNMENT) * ALIGNMENT
        pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.memory = torch.frombuffer(pages, dtype=torch.uint8).zero_()
        self.copies = {
            name: self.memory[starts[name] :][: live.nbytes].view(live.dtype).view(live.shape)
            for name, live in self.live.items()
        }
        self._on_gpu = any(live.is_cuda for live in self.live.values())
        if self._on_gpu:
            self._lock_pages()

    def _lock_pages(self) -> None:
        """Page-locks the memory, so that the GPU copies into it directly. Where that is not allowed, as in a
        container with a small limit of locked memory, copies are slower.
        """
        cuda: Any = torch.cuda.cudart()
        address = self.memory.data_ptr()
        try:
            torch.cuda.check_error(cuda.cudaHostRegister(address, self.memory.numel(), 0))
        except RuntimeError as error:
            log.warning(
                "%.1f GB of memory for checkpoints cannot be page-locked, so copying the state into it takes"
                " longer; raise the limit of locked memory (ulimit -l): %s",
                self.memory.numel() / 1e9,
                reason_of(error),
            )
            # CUDA reports the error again at the next launch, which this one takes upon itself.
            with suppress(RuntimeError):
                torch.zeros(1, device="cuda")
        else:
            weakref.finalize(self, cuda.cudaHostUnregister, address).atexit = False

    def is_of(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> bool:
        """Returns whether these tensors still belong to the model and the optimiser."""
        now = _tensors_of(model, optimizer)
        return len(now) == len(self._tensors) and all(map(operator.is_, now, self._tensors))

    def take(self) -> None:
        """Copies the current state."""
        for name, live in self.live.items():
            self.copies[name].copy_(live, non_blocking=True)
        if self._on_gpu:
            torch.cuda.synchronize()


class Checkpoints:
    """Every method is called by all workers of the run, in the same order.

    Saving copies the state and writes the copy beside training, on a process group of its own: collectives of
    a second thread on the training's group would interleave with those of training. A save that fails is
    counted and logged at the next call, and training continues; older checkpoints are untouched.
    """

    def __init__(self, directory: str, config: CheckpointConfig) -> None:
        self.directory = directory
        self.config = config
        self.group: dist.ProcessGroup | None = None
        if dist.is_initialized() and dist.get_world_size() > 1:
            self.group = dist.new_group(backend="gloo")  # pyright: ignore[reportAttributeAccessIssue]
        self.first = manifests.rank_in(self.group) == 0
        self.failures = 0
        self.saved_s = time.monotonic()  # of the last save, or of the beginning
        # A thread begins on GPU 0, where it would make a context of its own; -1 sets none.
        gpu = torch.cuda.current_device() if torch.cuda.is_initialized() else -1
        self._beside = ThreadPoolExecutor(1, "checkpoint", torch.cuda.set_device, (gpu,))
        self._snapshot: Snapshot | None = None
        self._pending: tuple[int, Future[None]] | None = None
        self._last_failure: str | None = None
        self._skipped: set[int] = set()
        self._saved: set[int] = set()
        self._newest: int | None = None

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> CheckpointManifest | None:
        """Fills both from the newest whole checkpoint, whatever layout wrote it, and returns its manifest.
        Damaged checkpoints are named in a warning. Returns None if no checkpoint is whole; then the optimiser
        is new, and the weights are to be set: a damaged checkpoint may have filled a part of them.

        Raises:
            ValueError: if its tensors differ from the model's, or it has no state of the optimiser.
            OSError: if storage does not answer, which is not damage.
        """
        on_first_rank(lambda: _tidy(self.directory, lambda: collect_garbage(self.directory)), self.group)
        there = on_first_rank(lambda: manifests.steps(self.directory), self.group)
        manifest = None
        if there:
            try:
                load_from = partial(self._load, model=model, optimizer=optimizer)
                _, manifest = manifests.newest(self.directory, self.group, load_from)
            except FileNotFoundError:
                log.warning("no checkpoint in %s is whole: the run starts anew", self.directory)
                optimizer.state.clear()
        self._skipped = {step for step in there if manifest is None or step > manifest.step}
        self._newest = manifest and manifest.step
        self._allocate(model, optimizer)
        return manifest

    def branch(self, folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> CheckpointManifest:
        """Fills both from a checkpoint of another run, and returns its manifest.

        Raises:
            UsageError: if the checkpoint is missing or damaged, or holds weights only.
        """
        try:
            manifest = on_first_rank(lambda: manifests.read(folder), self.group)
            if not manifest.has_optimizer():
                raise UsageError(
                    f"{folder} holds weights only: a branch needs the state of the optimiser too"
                )
            load_state(folder, manifest, model, optimizer, group=self.group)
        except (DamagedError, FileNotFoundError) as error:
            raise UsageError(f"no checkpoint to branch from at {folder}: {error}") from None
        self._allocate(model, optimizer)
        return manifest

    def _load(self, folder: str, model: nn.Module, optimizer: torch.optim.Optimizer) -> CheckpointManifest:
        manifest = on_first_rank(lambda: manifests.read(folder), self.group)
        load_state(folder, manifest, model, optimizer, group=self.group)
        return manifest

    def _allocate(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self._snapshot = None  # its memory is freed before the next is allocated
        if self.config.asynchronous:
            self._snapshot = Snapshot(model, optimizer)

    def save(
        self,
        step: int,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        images: int,
        progress: Mapping[str, Any],
        config: Mapping[str, Any],
        signature: Mapping[str, Any] | None = None,
    ) -> None:
        """Copies the current state, and returns before it is written (unless `asynchronous` is off).

        Raises:
            NotFiniteError: on every worker, if a number in the state is not finite; then nothing is saved.
        """
        self.settle()
        content = {"images": images, "progress": dict(progress), "config": config, "signature": signature}
        described = partial(CheckpointManifest, step=step, **content)
        if self.config.asynchronous:
            if not (self._snapshot and self._snapshot.is_of(model, optimizer)):
                self._allocate(model, optimizer)
            assert self._snapshot
            check_finite(self._snapshot.live, self.group)
            self._snapshot.take()
            state, copies = self._snapshot.state, self._snapshot.copies
            self._pending = step, self._beside.submit(self._write, step, state, copies, described)
        else:
            state = state_of(model, optimizer)
            parts = {name: local_part(tensor) for name, tensor in state.items()}
            check_finite(parts, self.group)
            self._finish_save(step, lambda: self._write(step, state, parts, described))

    def settle(self) -> None:
        """Waits until the last save has been written or has failed."""
        if self._pending:
            step, future = self._pending
            self._pending = None
            self._finish_save(step, future.result)

    def finish(self) -> None:
        """Ends saving. Raises OSError if the last save failed: a run is not complete without its weights."""
        self.settle()
        self._beside.shutdown()
        if not self._saved and self.first:
            self._retain()  # the run may have been killed after its last save
        if self._last_failure:
            raise OSError(self._last_failure)

    def _write(
        self,
        step: int,
        state: Mapping[str, Tensor],
        parts: Mapping[str, Tensor],
        described: Callable[..., CheckpointManifest],
    ) -> None:
        folder = manifests.folder_of(self.directory, step)
        token = on_first_rank(lambda: uuid.uuid4().hex[:8], self.group)
        attempt = f"{folder}.{token}.tmp" if storage.is_local(folder) else folder
        try:
            files = write(attempt, token, state, parts, self.group)
            on_first_rank(lambda: self._commit(folder, attempt, described(files=files)), self.group)
            self.saved_s = time.monotonic()
        except (CheckpointException, Exception):
            if self.first:
                _tidy(self.directory, lambda: discard(attempt, token))
            raise

    def _commit(self, folder: str, attempt: str, manifest: CheckpointManifest) -> None:
        # A checkpoint of this step that this run neither skipped nor saved belongs to another run.
        replace = manifest.step in self._skipped | self._saved
        manifests.commit(folder, attempt, manifest, replace=replace)
        if replace:
            _tidy(self.directory, lambda: delete_unlisted(folder))
        self._skipped.discard(manifest.step)
        self._saved.add(manifest.step)
        self._newest = manifest.step
        self._retain()

    def _retain(self) -> None:
        if (step := self._newest) is not None:
            _tidy(self.directory, lambda: retain(self.directory, step, self.config, self._skipped))

    def _finish_save(self, step: int, work: Callable[[], None]) -> None:
        try:
            work()
            self._last_failure = None
        # RuntimeError is not caught: collectives raise it when another worker is gone, and the run must end.
        except (CheckpointException, OSError, MemoryError) as error:
            why = repr(error)
            if isinstance(error, CheckpointException):
                worker, cause = first_failure(error)
                if not isinstance(cause, Exception):
                    raise cause from None  # an interrupt, which DCP wrapped
                why = f"worker {worker}: {cause!r}"
            self.failures += 1
            self._last_failure = f"saving step {step} to {self.directory} failed: {why}"
            if self.first:
                log.error("%s; training continues, older checkpoints are untouched", self._last_failure)


def check_finite(parts: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Raises NotFiniteError, on all workers of `group`, if a number in any worker's tensors is not finite."""
    floats = {n: part for n, part in parts.items() if part.is_floating_point() and part.numel()}

    def not_finite() -> list[str]:
        # A norm reads each number once, and is finite only if all numbers are; large numbers may overflow it.
        if nn.utils.get_total_norm(floats.values()).isfinite():
            return []
        return [name for name, part in floats.items() if not part.isfinite().all()]

    if names := sorted({name for found in manifests.on_every_rank(not_finite, group) for name in found}):
        more = f" and {len(names) - 1} more tensors" if len(names) > 1 else ""
        raise NotFiniteError(f"{names[0]}{more} hold numbers that are not finite")


def checkpoints_to_keep(
    found: Mapping[int, float | None], keep: CheckpointConfig, unscheduled: Collection[int] = ()
) -> set[int]:
    """Returns the steps that stay: the newest, the best, and multiples of `keep.keep_every`.

    `found` maps each step to its quality, higher is better; None or not finite if it was not measured at that
    step. The earliest of several equal qualities is the best, as in the run's progress. Steps that are
    `unscheduled`, because training was cut there, do not count once there is a newer one.
    """
    steps = [step for step in sorted(found) if step not in unscheduled or step == max(found)]
    best = sorted((-q, s) for s in steps if (q := found[s]) is not None and math.isfinite(q))
    multiples = [step for step in steps if keep.keep_every and step % keep.keep_every == 0]
    return {*steps[-keep.keep_last :], *(step for _, step in best[: keep.keep_best]), *multiples}


def retain(directory: str, step: int, keep: CheckpointConfig, skipped: Collection[int] = ()) -> None:
    """Removes the checkpoints that need not stay after `step` was saved.

    Checkpoints that were `skipped` when the run resumed, and checkpoints without a readable manifest, are
    damaged: they are removed, and do not count as kept. Other checkpoints later than `step` belong to another
    run.
    """
    ours = {s for s in manifests.steps(directory) if s <= step or s in skipped}
    whole = {s: manifests.read_or_none(manifests.folder_of(directory, s)) for s in ours - set(skipped)}
    found = {s: manifest.quality() for s, manifest in whole.items() if manifest}
    unscheduled = [s for s, each in whole.items() if each and not each.progress.get("scheduled", True)]
    for old in ours - checkpoints_to_keep(found, keep, unscheduled):
        manifests.remove(manifests.folder_of(directory, old))


def collect_garbage(directory: str) -> None:
    """Removes what interrupted saves and removals left behind: our files that belong to no checkpoint. May
    only be called while no run writes to `directory`.
    """
    storage.abort_uploads(directory)
    for name in storage.names(directory):
        folder = storage.join(directory, name)
        if ATTEMPT.fullmatch(name):
            log.warning("removing %s: its saving was interrupted", folder)
            storage.delete(folder)
        elif manifests.step_of(folder) is not None:
            delete_unlisted(folder)


def discard(attempt: str, token: str) -> None:
    """Removes the files of a failed save from `attempt`."""
    if storage.is_local(attempt):
        storage.delete(attempt)
    else:
        storage.abort_uploads(attempt, f".{token}.")
        delete_unlisted(attempt, f".{token}.")


def delete_unlisted(folder: str, containing: str = "") -> None:
    """Removes files that have our names and that the manifest in `folder` does not list."""
    try:
        listed = manifests.read(folder).files.keys()
    except DamagedError:
        return  # its list is unknown
    except (FileNotFoundError, NotADirectoryError):
        listed = set()
    for name in storage.names(folder):
        if FILE.fullmatch(name) and containing in name and name not in listed:
            log.warning("removing %s/%s: it belongs to no checkpoint", folder, name)
            storage.delete(storage.join(folder, name))
    storage.delete_empty_folder(folder)


def drop_optimizer(directory: str) -> int:
    """Removes the optimiser's state from every checkpoint in `directory`, and returns the bytes freed.

    A complete run needs only its weights, unless it is to be continued.
    """
    freed = 0
    for step in manifests.steps(directory):
        folder = manifests.folder_of(directory, step)
        before = manifests.read_or_none(folder)
        if before and before.has_optimizer():
            # The manifest is written first, so that it never lists a file that is gone.
            after = replace(before, files={name: before.files[name] for name in before.weights()})
            storage.write_bytes(storage.join(folder, MANIFEST), manifests.encode(after))
            storage.flush(folder)
            freed += before.size() - after.size()
            for name in before.files.keys() - after.files.keys():
                storage.delete(storage.join(folder, name))
        delete_unlisted(folder)
    return freed


def _tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[Any]:
    """Returns the tensors that training writes to; parameters are the optimiser's: FSDP swaps the model's."""
    parameters = (param for group in optimizer.param_groups for param in group["params"])
    moments = (value for state in optimizer.state.values() for value in state.values())
    return [model, *parameters, *moments, *model.buffers()]


def _tidy(directory: str, work: Callable[[], None]) -> None:
    """Runs a removal; if storage fails, it is logged and training continues."""
    try:
        work()
    except OSError as error:
        log.warning("removing old files from %s failed, they stay for now: %s", directory, error)

"""A training step at its full size on one machine: a worker's own code, on tensors without memory.

The process is the first of all workers. It builds its part of the model and takes a step with torch's fake
tensors, which have shapes and no values, and torch's fake process group, which has no peers. What a step
holds is counted by storages: their bytes from the operation that made them until nothing refers to them.
"""

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple
from weakref import ref

import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed._tools.fake_collectives import CollectiveOp, collective_ops, sync_ops
from torch.distributed.tensor import DTensor
from torch.distributed.tensor._sharding_prop import ShardingPropagator
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe.layout import local_part
from moe.model import Model
from moe.parallel import update
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.augment.base import UNMIXED, at
from orchestrator.data.batch import Batch
from orchestrator.training.average import Average
from orchestrator.training.loop import train_step
from orchestrator.training.worker import build_model

STEP_PHASES = ("forward", "backward", "optimizer")  # as the loop names them
# By the beginning of an operation's name: the kind, and what each of n ranks sends, in parts of the whole.
COLLECTIVES: dict[str, tuple[str, Callable[[int], float]]] = {
    "allgather": ("all_gather", lambda n: (n - 1) / n),
    "reducescatter": ("reduce_scatter", lambda n: (n - 1) / n),
    "allreduce": ("all_reduce", lambda n: 2 * (n - 1) / n),
    "alltoall": ("all_to_all", lambda n: (n - 1) / n),
}


class Collective(NamedTuple):
    """A kind of collective, and its group: so many ranks, each `stride` after the one before."""

    kind: str
    ranks: int
    stride: int


@dataclass(frozen=True, kw_only=True)
class DryRun:
    """Memory and traffic of the first worker of a run in one step.

    Attributes:
        parameters, optimizer: bytes that it keeps from step to step.
        peaks: bytes of all its tensors at most, by phase of the step.
        collectives: how many there are, and the bytes that the worker sends to others.
        seconds: that the dry run took.
    """

    parameters: int
    optimizer: int
    peaks: dict[str, int]
    collectives: dict[Collective, tuple[int, int]]
    seconds: float


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """This process is the first of `count` ranks, and the only one: nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it remembers the groups of this mesh, and would use them for the next


def dry_run(run: RunConfig) -> DryRun:
    """Takes a step that reports, of the first worker, whose parts of sharded tensors are the largest. Weights
    are not drawn, and blocks are not compiled.
    """
    began = time.perf_counter()
    run = override(run, {"scale.compile": False, **run.task.without_data(run.model)})
    warnings.filterwarnings("ignore", "Accessing the data pointer of FakeTensor")  # by FSDP
    with nullcontext() if run.scale.workers == 1 else fake_ranks(run.scale.workers):
        # Outside of the fake mode, because a mesh reads its ranks from tensors. Memory that nothing writes to
        # is not there.
        model = build_model(run, torch.device("cpu"), seed=None)
        with FakeTensorMode(allow_non_fake_inputs=True) as fake:
            model.to_empty(device="cpu")
            optimizer = run.train.optimizer.build(model)
            if run.train.ema:
                Average(run.train.ema, optimizer)
            with Recorder():
                start_state(model, optimizer)
            batch = fake_batch(run).map(fake.from_tensor)
            with Recorder() as recorder:
                recorder.add(map(local_part, [*model.parameters(), *model.buffers()]))
                parameters = recorder.live
                recorder.add(map(local_part, tree_leaves(list(optimizer.state.values()))))
                optimizer_bytes = recorder.live - parameters
                recorder.add(batch.tensors())
                train_step(model, optimizer, batch, run, step=0)
    return DryRun(
        parameters=parameters,
        optimizer=optimizer_bytes,
        peaks=recorder.peaks,
        collectives=recorder.collectives,
        seconds=time.perf_counter() - began,
    )


def start_state(model: Model, optimizer: torch.optim.Optimizer) -> None:
    """Makes an optimiser's state, by an update without a gradient."""
    for group in optimizer.param_groups:
        for param in group["params"]:
            param.grad = torch.zeros_like(param)
    update(model, optimizer, 1.0)
    optimizer.zero_grad()


def fake_batch(run: RunConfig) -> Batch:
    """Returns a worker's share of a batch, with the fields that the run's task reads."""
    images, side = run.data.batch_size // run.scale.workers, run.model.image_side()
    fields = {name: torch.from_numpy(f.empty(images)) for name, f in run.task.fields(run.model).items()}
    fields["label"] = torch.zeros(images, 1, dtype=torch.int64)
    if side:
        fields["image"] = torch.zeros(images, side, side, 3, dtype=torch.uint8).permute(0, 3, 1, 2)
    if at(run.data.augment, "batch"):
        fields["mix"] = torch.tensor([UNMIXED]).float().repeat(images, 1)
    number = torch.arange(images)
    return Batch(fields=fields, valid=torch.ones(images), key=number, sample=number)


class Recorder(TorchDispatchMode):
    """Counts the bytes of storages that operations make, while they are referenced, and collectives.

    Attributes:
        live: bytes now.
        peaks: bytes at most, by phase.
        collectives: their number, and the bytes that this rank sends.
    """

    def __init__(self) -> None:
        super().__init__()
        self.live, self.phase, self.muted = 0, STEP_PHASES[0], False
        self.peaks: dict[str, int] = {}
        self.collectives: dict[Collective, tuple[int, int]] = {}
        self._storages: dict[int, tuple[Any, int]] = {}
        self._resize = torch.UntypedStorage.resize_

    def __enter__(self) -> "Recorder":
        recorder = self

        def resize(self: torch.UntypedStorage, size: int) -> None:
            recorder._resize(self, size)
            recorder._hold(self)

        # FSDP frees gathered weights by a call that is no operation.
        torch.UntypedStorage.resize_ = resize
        ShardingPropagator._fake_mode_lock = Muted(self)
        return super().__enter__()

    def __exit__(self, *error: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize
        ShardingPropagator._fake_mode_lock = nullcontext()
        super().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types or AsyncCollectiveTensor in types:
            return NotImplemented  # they come again as the tensors they hold
        if func is torch.ops.profiler._record_function_enter_new.default and args[0] in STEP_PHASES:
            self.phase = args[0]
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return 1  # for a number that the host reads, as an optimiser's count of steps
        out = func(*args, **(kwargs or {}))
        self.add(tree_leaves(out))
        if func in collective_ops and func not in sync_ops:
            self._count(func, args, out)
        return out

    def add(self, values: Iterable[Any]) -> None:
        """Counts the storages of tensors that are neither views nor changed in place."""
        for value in () if self.muted else values:
            if isinstance(value, Tensor) and value.device.type != "meta":
                self._hold(value.untyped_storage())

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key, size = storage._cdata, storage.nbytes()
        held, before = self._storages.get(key) or (ref(storage, partial(self._release, key)), 0)
        self._storages[key] = held, size
        self.live += size - before
        self.peaks[self.phase] = max(self.peaks.get(self.phase, 0), self.live)

    def _release(self, key: int, _: Any) -> None:
        self.live -= self._storages.pop(key)[1]

    def _count(self, func: Any, args: Any, out: Any) -> None:
        name = func._schema.name.partition("::")[2].replace("_", "")
        kind, sent = next(found for start, found in COLLECTIVES.items() if name.startswith(start))
        members = dist.get_process_group_ranks(CollectiveOp.get_process_group(func, args))
        n = len(members)
        whole = max(bytes_of(part) for part in (*args, out))
        of = Collective(kind, n, members[1] - members[0] if n > 1 else 1)
        count, total = self.collectives.get(of, (0, 0))
        self.collectives[of] = count + 1, total + round(sent(n) * whole)


class Muted(nullcontext[None]):
    """Mutes a recorder while torch asks fake tensors of the whole size, which nothing holds, for the shape of
    an operation on sharded tensors.
    """

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __enter__(self) -> None:
        self.recorder.muted = True

    def __exit__(self, *_: object) -> None:
        self.recorder.muted = False


def bytes_of(tensors: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(tensors) if isinstance(leaf, Tensor))

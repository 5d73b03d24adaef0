"""Trains a small model on a rank's share of every batch, and compares it with a single process."""

import multiprocessing
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from moe.init import mix
from moe.layout import ParallelConfig
from moe.model import Model, ModelConfig
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.parallel import accumulate, build_sharded, make_mesh, sum_over_ranks, update
from moe.router_state import after_batch, before_step
from tests.parts import poison_memory

BATCH, SEED = 8, 3
PLAIN = ParallelConfig()
MAX_NORM = 0.5  # below most norms, so that clipping matters
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}  # relative


@dataclass(frozen=True, kw_only=True)
class Case:
    config: ModelConfig
    dtype: torch.dtype = torch.float64
    steps: int = 3
    batch: int = BATCH
    # The overrides in training, and in one more pass after it.
    overrides: RoutingOverrides = AS_TRAINED
    after: RoutingOverrides = RoutingOverrides(experts=2, random_blocks=(1,))


@dataclass(frozen=True)
class Trained:
    """Results of a case; tensors of parameters are sharded as the model is, and recorded in float64 alone.

    Attributes:
        start: initial parameters.
        gradients: clipped gradients of the last step.
        logits: logits of a padded batch after training, as trained and as `case.after`.
        stats: routing statistics of this rank's slice of that batch.
    """

    start: dict[str, Tensor]
    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    logits: tuple[Tensor, ...]
    stats: dict[str, Tensor]
    buffers: dict[str, Tensor]


def batches(case: Case) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    """Images, labels and keys of every step, the whole batch."""
    g, size = torch.Generator().manual_seed(SEED), case.config.image_size
    for step in range(case.steps):
        images = torch.randn(case.batch, 3, size, size, generator=g).to(case.dtype)
        labels = torch.randint(0, 10, (case.batch,), generator=g)
        yield images, labels, mix(torch.arange(case.batch), step)


def forward_backward(
    model: Model, case: Case, batch: tuple[Tensor, ...], mine: slice, microbatches: int = 1
) -> Tensor:
    """This rank's share of the loss, its gradients accumulated over equal `microbatches`."""
    shares = zip(*(whole_batch[mine].chunk(microbatches) for whole_batch in batch), strict=True)
    losses = []
    for i, (images, labels, keys_B) in enumerate(shares, start=1):
        accumulate(model, last=i == microbatches)
        output = model(images, keys_B=keys_B, routing_overrides=case.overrides)
        loss = F.cross_entropy(output.logits, labels, reduction="sum") / case.batch
        loss = loss + output.aux * len(labels) / case.batch
        loss.backward()
        losses.append(loss.detach().double())
    return torch.stack(losses).sum()


def train(model: Model, case: Case, mine: slice, microbatches: int = 1) -> Trained:
    """Steps of AdamW, with noise, on this rank's slice of every batch."""
    exact = case.dtype == torch.float64
    start = {name: p.detach().clone() for name, p in model.named_parameters()} if exact else {}
    # at 1e-2 Adam alone amplifies float32 rounding past the tolerance
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1, fused=True)
    losses, norms = [], []
    for step, batch in enumerate(batches(case)):
        optimizer.zero_grad()
        before_step(model, step)
        losses.append(forward_backward(model, case, batch, mine, microbatches))
        after_batch(model)
        norms.append(update(model, optimizer, MAX_NORM).item())
    losses = sum_over_ranks(torch.stack(losses)).tolist()
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()} if exact else {}
    images, _, keys_B = batch
    # the last of four ranks has padding only
    valid = torch.tensor([1, 1, 1, 0, 1, 0, 0, 0]).repeat_interleave(case.batch // 8).to(case.dtype)
    after = (AS_TRAINED, case.after) if model.config.moe else (AS_TRAINED,)
    with torch.no_grad():
        outputs = [
            model(images[mine], valid[mine], None if chosen is AS_TRAINED else keys_B[mine], chosen, True)
            for chosen in after
        ]
    logits = tuple(output.logits for output in outputs)
    return Trained(start, losses, norms, gradients, logits, outputs[0].stats, dict(model.named_buffers()))


def check_equal(
    name: str,
    case: Case,
    mesh: DeviceMesh,
    mine: slice,
    expected: Trained,
    options: ParallelConfig = PLAIN,
    microbatches: int = 1,
) -> None:
    """Trains a sharded model, of which each rank holds its share, as one process does."""
    what = f"{name}, {mesh}, {options}, {microbatches} microbatches"
    shards = mesh["dp"].size() * mesh["ep"].size()
    with default_dtype(case.dtype):
        model = build_sharded(case.config, mesh, seed=SEED, options=options)
        for parameter, p in model.named_parameters():
            assert isinstance(p, DTensor), f"{parameter}, {what}"
            part = p.to_local()
            if "experts" in parameter or p.shape[0] % shards == 0:
                assert part.numel() * shards == p.numel(), f"{parameter}, {what}"
            if "experts" in parameter:
                assert part.shape[0] * mesh["ep"].size() == p.shape[0], f"{parameter}, {what}"
        got = train(model, case, mine, microbatches)
    compare(got, expected, mine, TOLERANCE[case.dtype], what)


def compare(got: Trained, expected: Trained, mine: slice, tolerance: float, case: str) -> None:
    assert set(got.start) == set(expected.start), case
    for name, p in expected.start.items():
        ours, theirs = local(got.start[name], p)
        assert torch.equal(ours, theirs), f"start of {name}, {case}"
    for what in ("losses", "norms"):
        ours, theirs = getattr(got, what), getattr(expected, what)
        for step, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            assert abs(a - b) <= tolerance * abs(b), f"{what} of step {step}, {case}: {a!r}, expected {b!r}"
    # Adam amplifies rounding where a gradient is almost nothing: entries are looser than norms
    for name, gradient in expected.gradients.items():
        close(*local(got.gradients[name], gradient), 100 * tolerance, f"gradient of {name}, {case}")
    for ours, theirs in zip(got.logits, expected.logits, strict=True):
        close(ours, theirs[mine], 100 * tolerance, f"logits of the padded batch, {case}")
    for name, buffer in expected.buffers.items():
        close(got.buffers[name], buffer, 100 * tolerance, f"{name}, {case}")
        if ".router." in name:  # made of integer counts
            assert torch.equal(got.buffers[name], buffer), f"{name}, {case}"
    assert set(got.stats) == set(expected.stats), case


def local(got: Tensor, whole: Tensor) -> tuple[Tensor, Tensor]:
    """Returns this rank's part of `got`, and the same part of `whole`."""
    if not isinstance(got, DTensor):
        return got, whole
    for axis, placement in enumerate(got.placements):
        if isinstance(placement, Shard):
            parts = whole.chunk(got.device_mesh.size(axis), placement.dim)
            mine = got.device_mesh.get_local_rank(axis)
            whole = parts[mine] if mine < len(parts) else whole.narrow(placement.dim, 0, 0)
    return got.to_local(), whole


def wake(*models: Model) -> None:
    """Sets the heads to the same numbers: from its start at zero, a head passes no gradient on."""
    for model in models:
        weight = model.head.weight.detach()
        g = torch.Generator().manual_seed(SEED)
        numbers = torch.randn(weight.shape, generator=g).to(weight.device, weight.dtype) / 10
        ours, theirs = local(weight, numbers)
        ours.copy_(theirs)


def close(got: Tensor, expected: Tensor, tolerance: float, what: str) -> None:
    if got.numel():
        error = (got - expected).abs().max().item()
        bound = tolerance * max(expected.abs().max().item(), 1e-3)
        assert error <= bound, f"{what}: off by {error:.2e}, allowed {bound:.2e}"


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


# what ranks import: a server imports it once for all tests of a process, and forks every rank
multiprocessing.set_forkserver_preload(
    [
        "orchestrator.training.worker",
        "torch.distributed.checkpoint",
        "torch._inductor",  # which deterministic algorithms load
        "sklearn.datasets",
        "wings.image_text.presets",
        "tests.moe.parity",
    ]
)


def spawn(ranks: int, worker: Callable[..., None], folder: str, timeout_s: float = 300) -> None:
    """Runs ``worker(rank, ranks, folder)`` in as many new processes of one gloo group."""
    arguments = (dict(os.environ), ranks, worker, folder, timeout_s)
    mp.start_processes(_start, arguments, nprocs=ranks, start_method="forkserver")


def _start(
    rank: int,
    environment: dict[str, str],
    ranks: int,
    worker: Callable[..., None],
    folder: str,
    timeout_s: float,
) -> None:
    os.environ.clear()  # of the moment when the server started
    os.environ.update(environment)
    torch.set_num_threads(1)
    poison_memory()
    store, timeout = f"file://{folder}/{worker.__name__}-{ranks}", timedelta(seconds=timeout_s)
    dist.init_process_group("gloo", init_method=store, rank=rank, world_size=ranks, timeout=timeout)
    worker(rank, ranks, folder)
    dist.barrier()
    # Everything has been compared. Some ranks were aborted from C++ ("terminate called without an active
    # exception", 4 of some 60 runs), presumably in torch's teardown, so it is left out.
    sys.stdout.flush()
    os._exit(0)


@contextmanager
def one_rank(device_type: str) -> Iterator[DeviceMesh]:
    """A mesh of this process alone."""
    backend = "nccl" if device_type == "cuda" else "gloo"
    dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield make_mesh(device_type, ep=1)
    finally:
        dist.destroy_process_group()


def one_process(cases: dict[str, Case], folder: Path) -> dict[str, Trained]:
    """Results of plain torch in a single process; also written to a file for `read`."""
    results = {}
    for name, case in cases.items():
        with default_dtype(case.dtype):
            results[name] = train(case.config.build(seed=SEED), case, slice(0, case.batch))
    torch.save(results, folder / "one-process")
    return results


def read(folder: str | Path) -> dict[str, Trained]:
    return torch.load(f"{folder}/one-process", weights_only=False)


def share(rank: int, ranks: int, batch: int) -> slice:
    """A rank's images."""
    return slice(rank * batch // ranks, (rank + 1) * batch // ranks)

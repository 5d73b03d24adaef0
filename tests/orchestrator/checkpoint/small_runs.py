"""Small models of several kinds, trained on this rank's share of every batch."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from moe.init import mix
from moe.models.vit import ViT
from moe.parallel import build_sharded, make_mesh, sum_over_ranks, update
from moe.router_state import after_batch, before_step
from orchestrator.checkpoint.files import state_of
from orchestrator.codec import override
from orchestrator.config import RunConfig

BATCH = 8
SMALL = {"model.width": 16, "model.mlp_dim": 32, "model.moe.num_experts": 4, "data.batch_size": BATCH}
SGD = {"train.optimizer.kind": "sgd"}
# With so small a least dimension the weights of routers and of the head are factored too.
ADAFACTOR = {"train.optimizer.kind": "adafactor", "train.optimizer.min_dim_to_factor": 4}
RUNS = {
    name: override(RunConfig(), {"model.moe.router.kind": name.split(",")[0]} | SMALL | fields)
    for name, fields in {
        "soft, AdamW": {"model.moe.router.noise_std": 0.5},
        "mixture, SGD": SGD,  # a router with a buffer
        "top_k, SGD": SGD | {"model.moe.router.balance.kind": "sign", "model.moe.shared_dim": 8},
        "token_choice, SGD without momentum": SGD | {"train.optimizer.momentum": 0},
        "expert_choice, AdamW in bfloat16": {"train.optimizer.state_dtype": "bfloat16"},
        "expert_choice, Adafactor": ADAFACTOR,
    }.items()
}
FAST = ("soft, AdamW", "top_k, SGD", "expert_choice, Adafactor")
DTYPES = {name: torch.float32 if "soft" in name else torch.float64 for name in RUNS}


def built(name: str, *, seed: int | None, **mesh: int) -> tuple[ViT, torch.optim.Optimizer]:
    """Builds a plain model, or one that is sharded over `mesh` (ep, dp_replicate). Without a seed its weights
    are not set.
    """
    run, before = RUNS[name], torch.get_default_dtype()
    torch.set_default_dtype(DTYPES[name])
    try:
        model = build_sharded(run.model, _mesh(**mesh), seed=seed) if mesh else ViT(run.model, seed=seed)
    finally:
        torch.set_default_dtype(before)
    return model, run.train.optimizer.build(model)


@cache
def _mesh(**fields: int) -> DeviceMesh:
    """Returns a cached mesh, for making its process groups takes a while."""
    return make_mesh("cpu", **fields)


def train(
    model: nn.Module, optimizer: torch.optim.Optimizer, steps: range, rate: float = 1e-2
) -> list[float]:
    """Trains for some steps and returns the losses over all ranks."""
    rank, ranks = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    mine = slice(rank * BATCH // ranks, (rank + 1) * BATCH // ranks)
    dtype, losses = next(model.parameters()).dtype, []
    for group in optimizer.param_groups:
        group["lr"] = rate
    for step in steps:
        rng = torch.Generator().manual_seed(step)
        images = torch.randn(BATCH, 3, 8, 8, generator=rng).to(dtype)[mine]
        labels = torch.randint(0, 10, (BATCH,), generator=rng)[mine]
        before_step(model, step)
        optimizer.zero_grad(set_to_none=True)
        output = model(images, keys_B=mix(torch.arange(BATCH), step)[mine])
        share = len(labels) / BATCH
        loss = F.cross_entropy(output.logits, labels, reduction="sum") / BATCH + output.aux * share
        loss.backward()
        after_batch(model)
        update(model, optimizer, 0.5)
        losses.append(sum_over_ranks(loss.detach().double()).item())
    return losses


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns a copy of every tensor, gathered from all ranks."""
    state = state_of(model, optimizer)
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in state.items()
    }


def assert_same(got: Mapping[str, Tensor], expected: Mapping[str, Tensor], what: Any = "") -> None:
    """Compares bit for bit."""
    assert got.keys() == expected.keys(), what
    for name, tensor in expected.items():
        assert got[name].dtype == tensor.dtype, f"{what} {name}"
        assert torch.equal(got[name], tensor), f"{what} {name}"


@contextmanager
def one_rank() -> Iterator[None]:
    """Makes a process group of this process alone, as a single worker with a sharded model has."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        _mesh.cache_clear()
        dist.destroy_process_group()

"""A model on one rank, or split over ranks: FSDP2 for dense parameters, expert parallelism for experts.

The mesh is (dp, ep). Dense parameters are sharded over all its ranks; experts are Shard(0) over ep and
fully sharded over dp. With dp_replicate the mesh is (dp_replicate, dp, ep) and holds as many copies of the
sharded model. Every rank has its own slice of the batch, so a step does not depend on the shape of the mesh.

The loss must be a rank's local sum divided by the global batch. Gradients are then summed, never averaged:
the all-to-all has already summed an expert's gradient over ep, and FSDP's default mean would leave experts
ep times too large.
"""

import warnings
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    FSDPModule,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

from moe.expert_parallel import ExpertParallel
from moe.init import Region, init_weights
from moe.layout import ParallelConfig, check_layout
from moe.model import Model, ModelConfig, find_moe_layers
from moe.precision import compute_in, refresh

GRAPHS = 64  # of a block's code that torch.compile keeps


def make_mesh(device_type: str, *, ep: int, dp_replicate: int = 1) -> DeviceMesh:
    """Makes a mesh of all ranks of the default process group: (dp, ep), or (dp_replicate, dp, ep) where dp
    counts the ranks of a copy. Ranks of an ep group are adjacent."""
    shape, names = (dist.get_world_size() // ep, ep), ("dp", "ep")
    if dp_replicate > 1:
        shape, names = (dp_replicate, shape[0] // dp_replicate, ep), ("dp_replicate", *names)
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def build_whole(
    config: ModelConfig,
    device: torch.device,
    *,
    seed: int | None,
    options: ParallelConfig = ParallelConfig(),
    compute_dtype: torch.dtype | None = None,
) -> Model:
    """Builds the model of `config.build(seed=seed)` for training on a single rank, without a mesh.

    With `compute_dtype` (bfloat16) it computes what `parallelize` computes in that type (`moe.precision`).
    """
    with device:
        model = config.build(seed=seed)
    for block in model.units():
        _compile(block, options)
    if compute_dtype:
        compute_in(model, compute_dtype)
    for block in model.units():
        _checkpoint(block, options)
    return model


def build_sharded(
    config: ModelConfig,
    mesh: DeviceMesh,
    *,
    seed: int | None,
    options: ParallelConfig = ParallelConfig(),
    compute_dtype: torch.dtype | None = None,
) -> Model:
    """Builds the model of `config.build(seed=seed)` in shards; no rank ever holds the whole model. Raises
    ValueError if the model does not split evenly over `mesh`."""
    check_layout(config, dp=mesh["dp"].size(), ep=mesh["ep"].size())
    with torch.device("meta"):
        model = config.build(seed=None)
    parallelize(model, mesh, options, compute_dtype)
    model.to_empty(device=mesh.device_type)
    if seed is not None:
        set_weights(model, seed)
    return model


def set_weights(model: Model, seed: int) -> None:
    """Sets every weight and buffer of a model, sharded or not, to that of `config.build(seed=seed)`."""
    init_weights(model, seed, local=_local)


def parallelize(
    model: Model,
    mesh: DeviceMesh,
    options: ParallelConfig = ParallelConfig(),
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Shards `model` in place, bottom-up: experts, blocks, the rest. Parameter names do not change.

    Weights are gathered in `compute_dtype` (bfloat16), and layers compute in it. The shards and their
    gradients stay float32, routers compute in float32 from unrounded weights, and outputs are float32.
    """
    dense_mesh, expert_mesh = _fsdp_meshes(mesh)
    policy = outermost = MixedPrecisionPolicy()
    if compute_dtype:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        outermost = replace(policy, output_dtype=torch.float32)
        # The views are routers' results, which are never written to.
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .*Router.* returned a view tensor")
    shard = partial(fully_shard, mp_policy=policy, reshard_after_forward=options.reshard_after_forward)
    for block in model.units():
        for layer in find_moe_layers(block):
            layer.experts = ExpertParallel(layer.experts, mesh["ep"], chunks=options.overlap_chunks)
            # Shard(1) over dp: dim 0 belongs to ep, and sharding it twice makes strided shards.
            shard(layer.experts, mesh=expert_mesh, shard_placement_fn=lambda _: Shard(1))
            if compute_dtype:
                # The policy would round the weights. They are kept after the forward pass: a `Routing` is
                # not a tensor, so no hook would gather them again.
                fully_shard(layer.router, mesh=dense_mesh, reshard_after_forward=False)
        _compile(block, options)
        _checkpoint(block, options)
        shard(block, mesh=dense_mesh)
    for module in model.modules() if compute_dtype else ():
        if getattr(module, "in_float32", False):
            fully_shard(module, mesh=dense_mesh)
    fully_shard(model, mesh=dense_mesh, mp_policy=outermost)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
            for name in getattr(module, "computes", ()):
                register_fsdp_forward_method(module, name)


def _compile(block: nn.Module, options: ParallelConfig) -> None:
    """Replaces methods, not modules: parameter names stay, and FSDP's hooks remain outside."""
    if options.compile:
        # All blocks share one code object, whose graphs count together: dense or with experts, with or
        # without statistics, in training and evaluation, for each batch size. Above the limit, 8 by default,
        # blocks run without compilation.
        torch._dynamo.config.recompile_limit = GRAPHS
        for module in block.modules():
            for name in getattr(module, "uncompiled", ()):
                setattr(module, name, torch.compiler.disable(getattr(module, name)))
            if isinstance(module, ExpertParallel):
                module.mlps = torch.compile(module.mlps, dynamic=False)
        block.forward = torch.compile(block.forward, dynamic=False)


def _checkpoint(block: nn.Module, options: ParallelConfig) -> None:
    if options.activation_checkpointing:
        # Noise is keyed: there is no generator state to restore.
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def accumulate(model: nn.Module, *, last: bool) -> None:
    """Prepares a sharded model for the next microbatch of a step; `last` marks the last microbatch.

    Before the last microbatch, gradients are not reduced, and gathered weights are kept from a backward pass
    for the next forward pass. A model that is not sharded is left as it is.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def update(model: nn.Module, optimizer: torch.optim.Optimizer, max_norm: float | None) -> Tensor:
    """Takes a step of `optimizer` with gradients of a total norm of at most `max_norm`, and returns the norm
    before. None bounds nothing.

    `torch.nn.utils.clip_grad_norm_` refuses parameters of two meshes; here each mesh has its own norm, and
    their squares are added.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for param in model.parameters():
        if param.grad is not None:
            by_mesh.setdefault(getattr(param.grad, "device_mesh", None), []).append(param)
    norms = []
    for group in by_mesh.values():
        norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.stack(norms).norm()
    if max_norm is None:
        optimizer.step()
    elif getattr(optimizer, "_step_supports_amp_scaling", False) and total.dtype == torch.float32:
        # A fused optimiser divides gradients as it reads them, which saves a pass over all of them.
        optimizer.grad_scale = ((total + 1e-6) / max_norm).clamp(min=1)  # pyright: ignore[reportAttributeAccessIssue]
        optimizer.step()
        optimizer.grad_scale = None  # pyright: ignore[reportAttributeAccessIssue]
    else:
        for group in by_mesh.values():
            nn.utils.clip_grads_with_norm_(group, max_norm, total)
        optimizer.step()
    refresh(model)
    return total


def weights_changed(model: nn.Module) -> None:
    """Makes a model compute with weights that were set since its last pass: what it has gathered or rounded
    of them is old.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    refresh(model)


def whole(tensor: Tensor) -> Tensor:
    """Returns a tensor of which ranks have parts as a whole; all ranks call it together."""
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach()


def sum_over_ranks(values: Tensor) -> Tensor:
    """Sums `values` over all ranks, in place; a single process keeps its own."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def gather(rows: Tensor) -> Tensor:
    """Returns the rows of all ranks, in the order of ranks: (b, ..) -> (B, ..). A loss over all of them, of
    which each rank computes a share, reaches each row with the sum of the gradients of all shares.
    """
    return _Gather.apply(rows) if dist.is_initialized() else rows


def this_rank() -> tuple[int, int]:
    """Returns this rank and the number of ranks; (0, 1) for a single process."""
    return (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)


def first_row(rows: int) -> int:
    """Returns where this rank's rows begin among those that `gather` returns, of as many from each rank."""
    return this_rank()[0] * rows


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        every = [torch.empty_like(rows) for _ in range(dist.get_world_size())]
        dist.all_gather(every, rows.contiguous())
        return torch.cat(every)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        return sum_over_ranks(gradients[0].clone()).chunk(dist.get_world_size())[dist.get_rank()]


def _fsdp_meshes(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """Returns the meshes of dense parameters and of experts; an axis of copies comes first."""
    one_copy = mesh["dp", "ep"]._flatten("dp_ep")
    if mesh.ndim == 2:
        return one_copy, mesh["dp"]
    return DeviceMesh._concatenate([mesh["dp_replicate"], one_copy]), mesh["dp_replicate", "dp"]


def _local(param: Tensor) -> tuple[Tensor, Region]:
    if not isinstance(param, DTensor):
        return param, tuple(slice(0, n) for n in param.shape)
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return param.to_local(), tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))

"""How a model is spread over ranks and run there: FSDP2 for dense parameters, expert parallelism for experts.

No model file knows this one.

The mesh is (dp, ep). Dense parameters are sharded over all its ranks; experts are Shard(0) over ep and
fully sharded over dp. With dp_replicate the mesh is (dp_replicate, dp, ep) and holds as many copies of all
that. Every rank holds its own slice of the batch, so a step is the same whatever the shape of the mesh.

The loss must be a rank's local sum divided by the global batch. Gradients are then summed, never averaged:
the all-to-all has already summed an expert's gradient over ep, and FSDP's default mean would leave experts
ep times too large.
"""

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset
from torch.utils.checkpoint import checkpoint

from moe.expert_parallel import ExpertParallel
from moe.init import Region, init_weights
from moe.layer import MoELayer
from moe.vit import ViT, ViTConfig


@dataclass(frozen=True, kw_only=True)
class ParallelConfig:
    """How a model is spread and run; changes no result beyond rounding.

    Attributes:
    dp_replicate: copies of the sharded model (HSDP): weights are gathered within a copy, gradients also
        summed over the copies. Divides dp.
    reshard_after_forward: gather weights again for the backward pass (less memory), or keep them from the
        forward pass on (less traffic).
    activation_checkpointing: compute each block again in the backward pass instead of keeping what it needs.
    compile: torch.compile every block. FSDP's hooks break its graph where a MoE block calls its experts, and
        under bfloat16 its router.
    overlap_chunks: pieces in which rows travel to their experts, so that experts compute meanwhile.
    """

    dp_replicate: int = 1
    reshard_after_forward: bool = True
    activation_checkpointing: bool = False
    compile: bool = False
    overlap_chunks: int = 1

    def __post_init__(self) -> None:
        for name in ("dp_replicate", "overlap_chunks"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def make_mesh(device_type: str, *, ep: int, dp_replicate: int = 1) -> DeviceMesh:
    """(dp, ep), or (dp_replicate, dp, ep) with dp ranks in each copy, over all ranks of the default process
    group; ep neighbours are neighbouring ranks."""
    shape, names = (dist.get_world_size() // ep, ep), ("dp", "ep")
    if dp_replicate > 1:
        shape, names = (dp_replicate, shape[0] // dp_replicate, ep), ("dp_replicate", *names)
    return init_device_mesh(device_type, shape, mesh_dim_names=names)


def check_layout(config: ViTConfig, *, dp: int, ep: int, dp_replicate: int = 1) -> None:
    """Raises ValueError if `dp_replicate` does not divide dp (workers / ep), or the model's experts do not
    split evenly over the ranks of a copy."""
    if dp % dp_replicate:
        raise ValueError(f"dp_replicate={dp_replicate} does not divide dp={dp}")
    if not config.moe:
        return
    if config.moe.num_experts % ep:
        fits = [n for n in range(1, config.moe.num_experts + 1) if config.moe.num_experts % n == 0]
        raise ValueError(
            f"num_experts={config.moe.num_experts} does not divide over ep={ep}; use one of {fits}"
        )
    shards = dp // dp_replicate
    if config.width % shards or config.mlp_dim % shards or config.expert_dim() % shards:
        ranks = f"dp={dp}" if dp_replicate == 1 else f"dp / dp_replicate = {dp} / {dp_replicate}"
        own = f", expert_dim={config.moe.expert_dim}" if config.moe.expert_dim else ""
        raise ValueError(
            f"width={config.width} and mlp_dim={config.mlp_dim}{own} must divide by {ranks} to be sharded"
        )


def build_sharded(
    config: ViTConfig,
    mesh: DeviceMesh,
    *,
    seed: int,
    options: ParallelConfig = ParallelConfig(),
    compute_dtype: torch.dtype | None = None,
) -> ViT:
    """The model of `ViT(config, seed=seed)`, each rank holding its share; none ever holds the whole.

    Raises:
        ValueError: if the model does not split evenly over `mesh`.
    """
    check_layout(config, dp=mesh["dp"].size(), ep=mesh["ep"].size())
    with torch.device("meta"):
        model = ViT(config)
    parallelize(model, mesh, options, compute_dtype)
    model.to_empty(device=mesh.device_type)
    init_weights(model, seed, local=_local)
    return model


def parallelize(
    model: ViT,
    mesh: DeviceMesh,
    options: ParallelConfig = ParallelConfig(),
    compute_dtype: torch.dtype | None = None,
) -> None:
    """Shards `model` in place, bottom-up: experts, blocks, the rest. Names of parameters stay.

    `compute_dtype` (bfloat16) is what weights are gathered in and layers compute in. The shards and their
    gradients stay float32, routers compute in float32 from unrounded weights, and outputs are float32.
    """
    everyone, data_parallel = _fsdp_meshes(mesh)
    policy = outermost = MixedPrecisionPolicy()
    if compute_dtype:
        policy = MixedPrecisionPolicy(param_dtype=compute_dtype, reduce_dtype=torch.float32)
        outermost = replace(policy, output_dtype=torch.float32)
        # of routers' results, which nobody writes to
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .*Router.* returned a view tensor")
    shard = partial(fully_shard, mp_policy=policy, reshard_after_forward=options.reshard_after_forward)
    for block in model.blocks:
        if isinstance(layer := block.mlp, MoELayer):
            layer.experts = ExpertParallel(layer.experts, mesh["ep"], chunks=options.overlap_chunks)
            # Shard(1) over dp: dim 0 is ep's, and sharding it twice makes strided shards
            shard(layer.experts, mesh=data_parallel, shard_placement_fn=lambda _: Shard(1))
            if compute_dtype:
                # without the policy, so unrounded; and kept after the forward pass: its `Routing` is no
                # tensor, and nothing would gather the weights again
                fully_shard(layer.router, mesh=everyone, reshard_after_forward=False)
        _set_how_to_run(block, options)
        shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone, mp_policy=outermost)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def _set_how_to_run(block: nn.Module, options: ParallelConfig) -> None:
    """Replaces methods, not modules: names stay, and FSDP's hooks are left outside."""
    if options.compile:
        if isinstance(block.mlp, MoELayer):
            experts = block.mlp.experts
            # a compiled all-to-all is waited for where it starts; `disable` loses the type
            experts.forward = torch.compiler.disable(experts.forward)  # pyright: ignore[reportAttributeAccessIssue]
            experts.mlps = torch.compile(experts.mlps, dynamic=False)
        block.forward = torch.compile(block.forward, dynamic=False)
    if options.activation_checkpointing:  # noise is keyed: there is no generator to rewind
        block.forward = partial(checkpoint, block.forward, use_reentrant=False, preserve_rng_state=False)


def accumulate(model: nn.Module, *, last: bool) -> None:
    """To be called before the forward pass of each microbatch of a step; `last` for the last of them.

    Until then gradients stay on their rank, whole, and gathered weights are kept from a backward pass for
    the next forward pass. Nothing happens to a model that is not sharded.
    """
    if isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(last)
        model.set_reshard_after_backward(last)


def clip_grad_norm(params: Iterable[Tensor], max_norm: float) -> Tensor:
    """Scales gradients to a total norm of at most `max_norm`, over all meshes; the norm before is returned.

    `torch.nn.utils.clip_grad_norm_` refuses parameters of two meshes; here each mesh has its own norm and
    the squares add.
    """
    by_mesh: dict[DeviceMesh | None, list[Tensor]] = {}
    for param in params:
        if param.grad is not None:
            by_mesh.setdefault(getattr(param.grad, "device_mesh", None), []).append(param)
    norms = []
    for group in by_mesh.values():
        norm = nn.utils.get_total_norm([p.grad for p in group if p.grad is not None])
        norms.append(norm.full_tensor() if isinstance(norm, DTensor) else norm)
    total = torch.stack(norms).norm()
    for group in by_mesh.values():
        nn.utils.clip_grads_with_norm_(group, max_norm, total)
    return total


def sum_over_ranks(values: Tensor) -> Tensor:
    """The sum of every rank's `values`; themselves where there is one process."""
    if dist.is_initialized():
        dist.all_reduce(values)
    return values


def _fsdp_meshes(mesh: DeviceMesh) -> tuple[DeviceMesh, DeviceMesh]:
    """Where dense parameters are sharded, and where experts are; the copies' axis first, if there is one."""
    one_copy = mesh["dp", "ep"]._flatten("dp_ep")
    if mesh.ndim == 2:
        return one_copy, mesh["dp"]
    return DeviceMesh._concatenate([mesh["dp_replicate"], one_copy]), mesh["dp_replicate", "dp"]


def _local(param: Tensor) -> tuple[Tensor, Region]:
    assert isinstance(param, DTensor)
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return param.to_local(), tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))

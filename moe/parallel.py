"""How a model is split over ranks: FSDP2 for dense parameters, expert parallelism for experts.

No model file knows this one.

The mesh is (dp, ep). Dense parameters are sharded over all its ranks; experts are Shard(0) over ep and
fully sharded over dp. Every rank holds its own slice of the batch, so a step is the same whatever the shape
of the mesh.

The loss must be a rank's local sum divided by the global batch. Gradients are then summed, never averaged:
the all-to-all has already summed an expert's gradient over ep, and FSDP's default mean would leave experts
ep times too large.
"""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

from moe.experts import Experts
from moe.init import Region, init_weights
from moe.layer import MoELayer
from moe.vit import ViT, ViTConfig


class ExpertParallel(Experts):
    """`Experts` under the same contract and parameter names, with E spread over the ranks of a mesh axis.

    Slots are static, so every rank sends equal blocks and the host never waits for counts.
    """

    def __init__(self, experts: Experts, mesh: DeviceMesh) -> None:
        nn.Module.__init__(self)
        self.activation, self.dropout = experts.activation, experts.dropout
        self.group = mesh.get_group()
        for name, whole in experts.named_parameters():
            share = torch.empty(
                len(whole) // mesh.size(), *whole.shape[1:], device=whole.device, dtype=whole.dtype
            )
            spread = DTensor.from_local(
                share, mesh, [Shard(0)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
            self.register_parameter(name, nn.Parameter(spread))

    def forward(self, x_END: Tensor, keys_EN: Tensor | None = None) -> Tensor:
        weights = (self.w_in_EDF, self.b_in_EF, self.w_out_EFD, self.b_out_ED)
        local = (w.to_local() if isinstance(w, DTensor) else w for w in weights)
        keys_here = None if keys_EN is None else self._to_experts(keys_EN)
        y_here = self.mlps(self._to_experts(x_END), keys_here, *local)
        return self._exchange(y_here.unflatten(1, (self.group.size(), -1)).transpose(0, 1).flatten(0, 1))

    def _to_experts(self, rows: Tensor) -> Tensor:
        """Every rank's rows for the experts that live here: (E, N, ...) -> (E/R, R*N, ...)."""
        return self._exchange(rows).unflatten(0, (self.group.size(), -1)).transpose(0, 1).flatten(1, 2)

    def _exchange(self, blocks: Tensor) -> Tensor:
        return all_to_all_single(blocks.contiguous(), None, None, self.group)


def make_mesh(device_type: str, *, ep: int) -> DeviceMesh:
    """(dp, ep) over all ranks of the default process group; ep neighbours are neighbouring ranks."""
    return init_device_mesh(device_type, (dist.get_world_size() // ep, ep), mesh_dim_names=("dp", "ep"))


def check_layout(config: ViTConfig, *, dp: int, ep: int) -> None:
    """Raises ValueError if the model's experts do not split evenly over (dp, ep)."""
    if not config.moe:
        return
    if config.moe.num_experts % ep:
        fits = [n for n in range(1, config.moe.num_experts + 1) if config.moe.num_experts % n == 0]
        raise ValueError(
            f"num_experts={config.moe.num_experts} does not divide over ep={ep}; use one of {fits}"
        )
    if config.width % dp or config.mlp_dim % dp:
        raise ValueError(
            f"width={config.width} and mlp_dim={config.mlp_dim} must divide by dp={dp} to be sharded"
        )


def build_sharded(config: ViTConfig, mesh: DeviceMesh, *, seed: int) -> ViT:
    """The model of `ViT(config, seed=seed)`, each rank holding its share; none ever holds the whole."""
    check_layout(config, dp=mesh["dp"].size(), ep=mesh["ep"].size())
    with torch.device("meta"):
        model = ViT(config)
    parallelize(model, mesh)
    model.to_empty(device=mesh.device_type)
    init_weights(model, seed, local=_local)
    return model


def parallelize(model: ViT, mesh: DeviceMesh) -> None:
    """Shards `model` in place, bottom-up: experts, blocks, the rest."""
    everyone = mesh._flatten("dp_ep")
    for layer in model.modules():
        if isinstance(layer, MoELayer):
            layer.experts = ExpertParallel(layer.experts, mesh["ep"])
            # Shard(1) over dp: dim 0 is ep's, and sharding it twice makes strided shards
            fully_shard(layer.experts, mesh=mesh["dp"], shard_placement_fn=lambda _: Shard(1))
    for block in model.blocks:
        fully_shard(block, mesh=everyone)
    fully_shard(model, mesh=everyone)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


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


def _local(param: Tensor) -> tuple[Tensor, Region]:
    assert isinstance(param, DTensor)
    shape, offset = compute_local_shape_and_global_offset(param.shape, param.device_mesh, param.placements)
    return param.to_local(), tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))

"""One GPU runs a sharded model as plain torch on the CPU does."""

from collections.abc import Iterator
from itertools import product

import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from moe.layout import ParallelConfig
from moe.models.vit import ViT
from moe.parallel import build_sharded
from moe.routers import ExpertChoiceConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from moe.routers.affinity import SinkhornConfig
from tests.moe.parity import SEED, Case, batches, forward_backward, one_rank, wake
from tests.moe.parts import vit_config

pytestmark = pytest.mark.gpu
ROUTERS: dict[str, RouterConfig | None] = {
    "dense": None,
    "soft": SoftConfig(slots_per_expert=2, noise_std=0.5),
    "token choice": TokenChoiceConfig(
        k=2, capacity_factor=0.8, priority="max", importance_weight=0.1, load_weight=0.1
    ),
    "expert choice": ExpertChoiceConfig(capacity_factor=1.5, noise_std=1.0),
    "sinkhorn": TokenChoiceConfig(k=2, affinity=SinkhornConfig(), combine="affinity"),
}
CASES = {
    name: Case(config=vit_config(router, expert_dropout=0.1), dtype=torch.float32, steps=1, batch=16)
    for name, router in ROUTERS.items()
}
OPTIONS = {
    "eager": ParallelConfig(),
    "all eager": ParallelConfig(reshard_after_forward=False, activation_checkpointing=True, overlap_chunks=3),
    "compiled": ParallelConfig(compile=True),
    "all compiled": ParallelConfig(compile=True, activation_checkpointing=True, overlap_chunks=2),
}
CHOSEN = [*product(CASES, ["eager", "all eager"]), *product(["token choice"], ["compiled", "all compiled"])]
# relative errors of the loss and of the whole gradient; bounds of bfloat16 are those of the CPU,
# tests/moe/test_parallel_options.py
FLOAT32 = (1e-5, 1e-4)
BFLOAT16 = (2e-3, 0.05)


@pytest.fixture(autouse=True)
def _compile_anew() -> Iterator[None]:
    yield
    torch.compiler.reset()


@pytest.mark.parametrize("compute_dtype", [None, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("name", "how"), CHOSEN)
def test_gpu_equals_cpu(name, how, compute_dtype):
    case, everything = CASES[name], slice(0, 16)
    (batch,) = batches(case)
    plain = ViT(case.config, seed=SEED)
    wake(plain)
    expected = forward_backward(plain, case, batch, everything)
    with one_rank("cuda") as mesh:
        model = build_sharded(case.config, mesh, seed=SEED, options=OPTIONS[how], compute_dtype=compute_dtype)
        wake(model)
        on_gpu = tuple(field.cuda() for field in batch)
        loss = forward_backward(model, case, on_gpu, everything, 2)
        of_loss, of_gradient = FLOAT32 if compute_dtype is None else BFLOAT16
        assert abs(loss.item() - expected.item()) <= of_loss * expected.item()
        off, size = torch.zeros(()), torch.zeros(())
        for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
            gradient = on_cpu(ours)
            assert gradient.dtype == torch.float32
            off += (gradient - theirs.grad).square().sum()
            size += theirs.grad.square().sum()
    error = (off / size).sqrt().item()
    assert error <= of_gradient, f"the gradient is off by {error:.2e}"


def on_cpu(parameter: Tensor) -> Tensor:
    assert isinstance(parameter.grad, DTensor)
    return parameter.grad.full_tensor().cpu()

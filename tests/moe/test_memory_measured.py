"""Peaks of real training steps against `memory_per_rank`: bytes of live tensors, not of the process."""

from dataclasses import dataclass, field
from pathlib import Path
from weakref import WeakValueDictionary

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch._subclasses import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe.layer import MoEConfig
from moe.memory import memory_per_rank
from moe.parallel import ParallelConfig, accumulate, build_sharded, clip_grad_norm, make_mesh
from moe.routers import ExpertChoiceConfig, MixtureConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from moe.sharding import Step
from moe.vit import ViT, ViTConfig
from tests.lanes import mostly_slow
from tests.moe.fake_ranks import fake_ranks


def kind(router: RouterConfig | None) -> str:
    return router.kind if router else "dense"


class LiveTensors(TorchDispatchMode):
    """Bytes of all storages that operations made, as long as anybody holds them; and their peak."""

    def __init__(self, tensors: list[torch.Tensor]) -> None:
        super().__init__()
        self.peak = 0
        self.storages: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        self._add(tensors)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if DTensor in types or AsyncCollectiveTensor in types:
            return NotImplemented  # they come again as the tensors they hold
        out = func(*args, **(kwargs or {}))
        if self._add([x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]):
            self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages.values()))
        return out

    def _add(self, tensors: list[torch.Tensor]) -> bool:
        """Whether one of them is new: no view, and not changed in place."""
        before = len(self.storages)
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = storage
        return len(self.storages) > before


@dataclass(frozen=True, kw_only=True)
class Case:
    """A model of 4 blocks, 2 of them with 8 experts, and how it is trained."""

    router: RouterConfig | None
    dp: int = 1
    ep: int = 1
    options: ParallelConfig = field(default_factory=ParallelConfig)
    dtype: torch.dtype | None = None
    images: int = 16
    passes: int = 1

    def model(self) -> ViTConfig:
        moe = MoEConfig(router=self.router, num_experts=8) if self.router else None
        return ViTConfig(
            image_size=32, patch_size=4, width=128, depth=4, heads=4, mlp_dim=512, num_classes=10, moe=moe
        )

    def predicted(self) -> float:
        step = Step(images=self.images, passes=self.passes, compute_bytes=2 if self.dtype else 4)
        memory = memory_per_rank(self.model(), step, dp=self.dp, ep=self.ep, options=self.options)
        return sum(memory.values())

    def measured(self) -> int:
        """Bytes at the peak of the second step; the first makes the optimiser's moments."""
        if self.dp * self.ep == 1 and not self.options.activation_checkpointing and not self.dtype:
            model = ViT(self.model())
        else:
            mesh = make_mesh("cpu", ep=self.ep, dp_replicate=self.options.dp_replicate)
            model = build_sharded(self.model(), mesh, seed=0, options=self.options, compute_dtype=self.dtype)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        images, labels = torch.randn(self.images, 3, 32, 32), torch.zeros(self.images, dtype=torch.long)
        keys_B = torch.arange(self.images)
        with LiveTensors([p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()]) as live:
            for _ in range(2):
                live.peak = 0
                optimizer.zero_grad()
                for i in range(self.passes):
                    accumulate(model, last=i == self.passes - 1)
                    output = model(images, keys_B=keys_B)
                    (F.cross_entropy(output.logits, labels) + output.aux).backward()
                    del output
                clip_grad_norm(model.parameters(), 1.0)
                optimizer.step()
        return live.peak

    def check(self, least: float = -0.05) -> None:
        """Too little is worse than too much."""
        error = self.predicted() / self.measured() - 1
        assert least <= error <= 0.10, f"{self}: off by {error:+.1%}"


SOFT, TOKENS = SoftConfig(), TokenChoiceConfig(k=2)
CHECKPOINT = ParallelConfig(activation_checkpointing=True)
KEEP = ParallelConfig(reshard_after_forward=False)
COPIES = ParallelConfig(dp_replicate=2)
BF16 = torch.bfloat16


@pytest.mark.smoke
@pytest.mark.parametrize("images", mostly_slow([2, 16], fast=[16]))
@pytest.mark.parametrize("router", [None, SOFT, TOKENS, ExpertChoiceConfig(), MixtureConfig()], ids=kind)
def test_peak_of_one_process(router, images):
    Case(router=router, images=images).check()


@pytest.mark.smoke
@pytest.mark.parametrize("fields", [{"options": CHECKPOINT}, {"dtype": BF16}], ids=["checkpoint", "bf16"])
@pytest.mark.parametrize("router", mostly_slow([None, SOFT, TOKENS], fast=[TOKENS]), ids=kind)
def test_peak_of_one_sharded_process(router, fields):
    with fake_ranks(1):
        Case(router=router, **fields).check()


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("dp", "ep", "fields"),
    [
        (4, 1, {"images": 4}),
        (4, 1, {"images": 4, "passes": 2}),
        (2, 2, {"images": 4, "passes": 3, "options": KEEP}),
        (2, 2, {"options": COPIES}),
        (2, 2, {"options": CHECKPOINT, "dtype": BF16}),
    ],
    ids=["plain", "2 passes", "3 passes, kept", "copies", "bf16 checkpoint"],
)
@pytest.mark.parametrize("router", mostly_slow([SOFT, TOKENS], fast=[SOFT]), ids=kind)
def test_peak_of_a_rank_of_four(router, dp, ep, fields):
    """Without the other three: what is gathered has its size, if not its numbers."""
    with fake_ranks(4):
        Case(router=router, dp=dp, ep=ep, **fields).check()


TWO_RANKS = [
    Case(router=None, dp=2),
    Case(router=SOFT, dp=2, dtype=BF16),
    Case(router=TOKENS, ep=2, images=8, options=CHECKPOINT),
    Case(router=TOKENS, ep=2, images=8),
]


def _rank_of_two(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    for case in TWO_RANKS:
        case.check(
            least=-0.08
        )  # a rank that waits holds gathered weights longer: -6 % seen on a busy machine
    dist.destroy_process_group()


@pytest.mark.slow
def test_peak_of_two_ranks(tmp_path: Path):
    """Over gloo, with real traffic: nothing else is held than in the tests above."""
    mp.spawn(_rank_of_two, args=(str(tmp_path),), nprocs=2)

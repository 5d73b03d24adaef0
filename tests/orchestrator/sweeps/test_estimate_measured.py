"""Estimates against real training steps: memory of live tensors, bytes given to collectives."""

from collections import Counter
from contextlib import nullcontext
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses import FakeTensor
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe.models.vit import ViT
from moe.parallel import accumulate, update
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.estimate import layout
from orchestrator.training.worker import build_model
from tests.moe.fake_ranks import fake_ranks

MODEL: dict[str, Any] = {"image_size": 32, "width": 128, "depth": 4, "mlp_dim": 512, "num_classes": 12}
ROUTERS: dict[str, dict[str, Any]] = {
    "dense": {"model.moe": None},
    "soft": {"model.moe.router.kind": "soft"},
    "soft-3": {"model.moe.router.kind": "soft", "model.moe.router.slots_per_expert": 3},
    "tokens": {"model.moe.router.kind": "token_choice", "model.moe.router.k": 2},
    "experts": {"model.moe.router.kind": "expert_choice"},
    "mixture": {"model.moe.router.kind": "mixture"},
}


def run_of(router: str, *, images: int = 16, **scale: Any) -> RunConfig:
    """A model of 4 blocks, 2 of them with 8 experts; `images` per worker and pass."""
    passes, dtype = scale.pop("passes", 1), scale.pop("dtype", "float32")
    optimizer = {f"train.optimizer.{name}": value for name, value in scale.pop("optimizer", {}).items()}
    workers = scale.get("workers", 1)
    changes = {f"model.{name}": value for name, value in MODEL.items()}
    changes |= ROUTERS[router] | ({"model.moe.num_experts": 8} if router != "dense" else {})
    changes |= {"data.batch_size": images * passes * workers, "train.microbatch": images}
    changes |= optimizer | {"train.compute_dtype": dtype}
    return override(RunConfig(), changes | {f"scale.{name}": value for name, value in scale.items()})


def build(run: RunConfig) -> nn.Module:
    """The model of the first rank, with the whole group's sizes."""
    return build_model(run, torch.device("cpu"), seed=0)


def passes(model: nn.Module, run: RunConfig) -> None:
    """All forward and backward passes of an update."""
    images = run.images_per_pass()
    batch, labels = torch.randn(images, 3, 32, 32), torch.zeros(images, dtype=torch.long)
    count = run.data.batch_size // run.scale.workers // images
    for i in range(count):
        accumulate(model, last=i == count - 1)
        output = model(batch, keys_B=torch.arange(images))
        (F.cross_entropy(output.logits, labels) + output.aux).backward()


class LiveTensors(TorchDispatchMode):
    """Bytes of all storages that operations made, while they are referenced; and their peak."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.peak = 0
        self.storages: WeakValueDictionary[int, torch.UntypedStorage] = WeakValueDictionary()
        self._add([p.to_local() if isinstance(p, DTensor) else p for p in model.parameters()])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if DTensor in types or AsyncCollectiveTensor in types:
            return NotImplemented  # they come again as the tensors they hold
        out = func(*args, **(kwargs or {}))
        if self._add([x for x in tree_leaves(out) if isinstance(x, torch.Tensor)]):
            self.peak = max(self.peak, sum(storage.nbytes() for storage in self.storages.values()))
        return out

    def _add(self, tensors: list[torch.Tensor]) -> bool:
        """Whether one of them is new: neither a view, nor changed in place."""
        before = len(self.storages)
        for tensor in tensors:
            if not isinstance(tensor, FakeTensor) and tensor.device.type != "meta":
                storage = tensor.untyped_storage()
                self.storages[storage._cdata] = storage
        return len(self.storages) > before


def measured_peak(run: RunConfig) -> int:
    """Bytes at the peak of the second update; the first one makes the optimiser's moments."""
    with nullcontext() if run.scale.workers == 1 else fake_ranks(run.scale.workers):
        model = build(run)
        optimizer = run.train.optimizer.build(model)
        with LiveTensors(model) as live:
            for _ in range(2):
                live.peak = 0
                optimizer.zero_grad()
                passes(model, run)
                update(model, optimizer, 1.0)
    return live.peak


TWO_DIMS = {"workers": 4, "ep": 2}
BF16 = {"dtype": "bfloat16", "activation_checkpointing": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((router, {}) for router in ("dense", "soft", "tokens", "experts", "mixture")),
    ("soft", {"activation_checkpointing": True}),
    ("tokens", {"passes": 3}),
    ("soft", BF16),
    ("experts", {"dtype": "bfloat16", "passes": 2}),
    ("dense", {"workers": 4, "images": 4}),
    ("soft", {"optimizer": {"state_dtype": "bfloat16"}}),
    ("soft", {"optimizer": {"kind": "adafactor"}}),
    ("soft", {"workers": 4, "images": 4, "passes": 2}),
    ("soft", TWO_DIMS | {"images": 4, "passes": 3, "reshard_after_forward": False}),
    ("tokens", TWO_DIMS | {"dp_replicate": 2}),
    ("soft", TWO_DIMS | BF16),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("router", "fields"), CASES, ids=str)
def test_peak_of_a_step(router: str, fields: dict[str, Any]) -> None:
    """Of the first rank: within 10 % of the bytes of live tensors."""
    run = run_of(router, **fields)
    error = layout(run, run.ep()).peak() / measured_peak(run) - 1
    assert abs(error) <= 0.1, f"{error:+.1%}"


@pytest.mark.parametrize(
    ("router", "head"),
    [
        ("dense", {"model.pooling": "token", "model.representation_size": 12, "model.qk_norm": False}),
        ("dense", {"model.stem": "conv", "model.image_size": 32, "model.patch_size": 8, "model.width": 96}),
        ("soft", {"model.pooling": "map", "model.position": "sincos2d"}),
        ("soft-3", {"model.moe.router.normalize": "none"}),
        ("tokens", {"model.moe.router.priority": "max"}),
        ("experts", {"model.moe.router.capacity_factor": 0.6}),
        ("mixture", {"model.moe.router.level": "hierarchical"}),
    ],
    ids=str,
)
def test_what_autograd_keeps(router: str, head: dict[str, Any]) -> None:
    """Within 8 %: attention on CPUs returns a layout that has to be copied, attention on GPUs does not."""
    run = override(RunConfig(), ROUTERS[router] | head)
    model = ViT(run.model)
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    kept: dict[int, torch.UntypedStorage] = {}  # referenced, or an address could come twice

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        size = run.model.image_size
        model(torch.randn(4, 3, size, size)).logits.sum()
    measured = sum(storage.nbytes() for storage in kept.values())
    assert 4 * sum(run.model.activations().saved) == pytest.approx(measured, rel=0.08)


class Collectives(TorchDispatchMode):
    """Bytes that collectives send, by kind."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.ep = ep
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        sizes = [x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        if "all_to_all_single" in str(func):
            self.sent["all_to_all"] += sizes[0] * (self.ep - 1) // self.ep
        elif "allgather_base" in str(func) or "reduce_scatter_base" in str(func):  # all shares, and one
            kind = "all_gather" if "allgather" in str(func) else "reduce_scatter"
            self.sent[kind] += max(sizes) - min(sizes)
        elif "allreduce" in str(func):  # over two copies: half is sent reduced, half gathered
            self.sent["all_reduce"] += sizes[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "fields",
    [
        {"ep": 2, "passes": 3},
        {"ep": 4, "activation_checkpointing": True},
        {"ep": 2, "dp_replicate": 2, "dtype": "bfloat16"},
        {"ep": 1, "passes": 2, "reshard_after_forward": False},
    ],
    ids=str,
)
def test_traffic_of_a_step(fields: dict[str, Any]) -> None:
    """Of one rank of four, to the byte."""
    run = run_of("soft", workers=4, images=4, **fields)
    with fake_ranks(4):
        model = build(run)
        with Collectives(run.ep()) as collectives:
            passes(model, run)
    traffic = layout(run, run.ep()).traffic
    assert +Counter({name: sent.intra + sent.inter for name, sent in traffic.items()}) == collectives.sent

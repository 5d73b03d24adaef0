"""Estimates against dry runs, whose memory and collectives `test_dry_run` compares with those of workers."""

from collections import Counter
from typing import Any

import pytest
import torch

from moe.cost import model_costs, param_shapes
from moe.presets import PRESETS
from orchestrator.codec import override, to_dict
from orchestrator.config import RunConfig
from orchestrator.estimate import layout
from orchestrator.training.dry_run import dry_run
from tests.lanes import mostly_slow

MODEL: dict[str, Any] = {"image_size": 32, "width": 128, "depth": 4, "mlp_dim": 512, "num_classes": 12}
ROUTERS: dict[str, dict[str, Any]] = {
    "dense": {"model.moe": None},
    "soft": {"model.moe.router.kind": "soft"},
    "soft-3": {"model.moe.router.kind": "soft", "model.moe.router.slots_per_expert": 3},
    "tokens": {"model.moe.router.kind": "token_choice", "model.moe.router.k": 2},
    "dropless": {
        "model.moe.router.kind": "top_k",
        "model.moe.router.k": 2,
        "model.moe.router.capacity_factor": "dropless",
    },
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


TWO_DIMS = {"workers": 4, "ep": 2}
BF16 = {"dtype": "bfloat16", "activation_checkpointing": True}
CASES: list[tuple[str, dict[str, Any]]] = [
    *((router, {}) for router in ("dense", "soft", "tokens", "dropless", "experts", "mixture")),
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
    ("dropless", TWO_DIMS),
    ("soft", TWO_DIMS | BF16),
]


# One of each term of the estimate; the others are combinations.
ONE_OF_EACH = [
    *((router, {}) for router in ("dense", "dropless")),
    ("tokens", {"passes": 3}),
    ("soft", {"optimizer": {"kind": "adafactor"}}),
    ("tokens", TWO_DIMS | {"dp_replicate": 2}),
    ("soft", TWO_DIMS | BF16),
]


@pytest.mark.smoke
@pytest.mark.parametrize(("router", "fields"), mostly_slow(CASES, fast=ONE_OF_EACH), ids=str)
def test_peak_of_a_step(router: str, fields: dict[str, Any]) -> None:
    """Of the first rank: within 10 % of the bytes of live tensors, and exact in what is held."""
    run = run_of(router, **fields)
    estimated, tried = layout(run, run.ep()), dry_run(run)
    error = estimated.peak() / max(tried.peaks.values()) - 1
    assert abs(error) <= 0.1, f"{error:+.1%}"
    counts = 4 * len(param_shapes(run.model))  # of updates
    assert tried.optimizer - estimated.memory["optimizer"] == counts


@pytest.mark.guests
@pytest.mark.smoke
def test_a_frozen_tower_of_full_size() -> None:
    """It has no gradients and moments, and autograd keeps nothing of it."""
    changes = {"task.kind": "contrastive", "train.freeze": ["image."], "data.batch_size": 1024}
    run = override(RunConfig(), changes | {"model": to_dict(PRESETS["lit-B/16"]), "scale.workers": 8})
    estimated, tried = layout(run, 1), dry_run(run)
    assert estimated.peak() == pytest.approx(max(tried.peaks.values()), rel=0.1)
    trained = sum(not name.startswith("image.") for name in param_shapes(run.model))
    assert tried.optimizer - estimated.memory["optimizer"] == 4 * trained
    sent = {kind.kind: size for kind, (_, size) in tried.collectives.items()}
    scattered = estimated.traffic["reduce_scatter"]
    assert sent["reduce_scatter"] == round(scattered.intra + scattered.inter)


@pytest.mark.parametrize(
    ("router", "head"),
    [
        ("dense", {"model.pooling": "token", "model.representation_size": 12, "model.qk_norm": False}),
        ("dense", {"model.stem": "conv", "model.image_size": 32, "model.patch_size": 8, "model.width": 96}),
        ("soft", {"model.pooling": "map", "model.position": "sincos2d"}),
        ("soft-3", {"model.moe.router.normalize": "none"}),
        ("tokens", {"model.moe.router.priority": "max"}),
        ("dropless", {"model.moe.router.score": "sigmoid"}),
        ("experts", {"model.moe.router.capacity_factor": 0.6}),
        ("mixture", {"model.moe.router.level": "hierarchical"}),
    ],
    ids=str,
)
def test_what_autograd_keeps(router: str, head: dict[str, Any]) -> None:
    """Within 8 %: attention on CPUs returns a layout that has to be copied, attention on GPUs does not."""
    run = override(RunConfig(), ROUTERS[router] | head)
    model = run.model.build()
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
    assert 4 * sum(model_costs(run.model).activations.saved) == pytest.approx(measured, rel=0.08)


@pytest.mark.parametrize(
    "fields",
    [
        pytest.param({"ep": 2, "dp_replicate": 2, "dtype": "bfloat16"}, marks=pytest.mark.smoke),
        pytest.param({"ep": 2, "passes": 3}, marks=pytest.mark.slow),
        pytest.param({"ep": 4, "activation_checkpointing": True}, marks=pytest.mark.slow),
        pytest.param({"ep": 1, "passes": 2, "reshard_after_forward": False}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_traffic_of_a_step(fields: dict[str, Any]) -> None:
    """Of one rank of four, to the byte, but for the norms of gradients."""
    run = run_of("soft", workers=4, images=4, **fields)
    sent = Counter[str]()
    for collective, (_, size) in dry_run(run).collectives.items():
        sent[collective.kind] += size
    traffic = layout(run, run.ep()).traffic
    estimated = {name: round(one.intra + one.inter) for name, one in traffic.items()}
    assert 0 < sent["all_reduce"] - estimated["all_reduce"] <= 500
    assert {**sent, "all_reduce": 0} == {**estimated, "all_reduce": 0}

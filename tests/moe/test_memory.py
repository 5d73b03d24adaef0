"""Memory against what autograd keeps, what ranks hold and what steps need at their peak, and by hand."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch

from moe.cost import num_expert_params, num_params
from moe.layer import MoEConfig
from moe.memory import memory_per_rank, saved_for_backward
from moe.parallel import ParallelConfig, build_sharded, make_mesh
from moe.presets import PRESETS
from moe.routers import ExpertChoiceConfig, MixtureConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from moe.sharding import Step, units
from moe.vit import ViT, ViTConfig
from tests.lanes import mostly_slow
from tests.moe.fake_ranks import fake_ranks

ROUTER_CONFIGS: list[RouterConfig | None] = [
    None,
    SoftConfig(),
    SoftConfig(slots_per_expert=3, normalize="none"),
    SoftConfig(dispatch="uniform", combine="uniform"),
    TokenChoiceConfig(),
    TokenChoiceConfig(k=2, capacity_factor=1.5, priority="max"),
    ExpertChoiceConfig(),
    ExpertChoiceConfig(capacity_factor=0.6),
    MixtureConfig(),
    MixtureConfig(level="hierarchical"),
]
PLAIN = ParallelConfig()
HEADS = [
    {},
    {"pooling": "token", "representation_size": 12, "qk_norm": False},
    {"pooling": "map", "position": "sincos2d"},
]


def kind(router: RouterConfig | None) -> str:
    return router.kind if router else "dense"


def debug(router: RouterConfig | None, num_experts: int = 4) -> ViTConfig:
    moe = MoEConfig(router=router, num_experts=num_experts) if router else None
    return replace(PRESETS["debug"], moe=moe)


@contextmanager
def saved_bytes(model: ViT) -> Iterator[list[int]]:
    """What autograd keeps besides the parameters, each storage once."""
    sizes: dict[int, torch.UntypedStorage] = {}  # held, or an address could come twice
    ours = {p.untyped_storage().data_ptr() for p in model.parameters()}
    found: list[int] = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours:
            sizes[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        yield found
    found.append(sum(storage.nbytes() for storage in sizes.values()))


@pytest.mark.parametrize("head", HEADS, ids=lambda head: head.get("pooling", "gap"))
@pytest.mark.parametrize("router", ROUTER_CONFIGS, ids=repr)
def test_saved_activations(router, head):
    """Within 8 %: the CPU's attention gives its answers a layout that has to be copied, GPUs' do not."""
    config = replace(debug(router), **head)
    model = ViT(config)
    with saved_bytes(model) as measured:
        output = model(torch.randn(4, 3, 8, 8))
        output.logits.sum()
    assert 4 * 4 * sum(saved_for_backward(config).values()) == pytest.approx(measured[0], rel=0.08)


@pytest.mark.parametrize("router", [None, SoftConfig(), TokenChoiceConfig()], ids=["dense", "soft", "tokens"])
@pytest.mark.parametrize(
    ("dp", "ep", "copies"),
    mostly_slow([(8, 1, 1), (4, 2, 1), (2, 4, 1), (4, 2, 2), (8, 1, 2)], fast=[(2, 4, 1), (4, 2, 2)]),
)
def test_shares_are_those_of_a_sharded_model(router, dp, ep, copies):
    """Of 8 ranks the first; the head's 10 classes do not divide, so it holds more than an eighth."""
    config = debug(router)
    with fake_ranks(8):
        model = build_sharded(config, make_mesh("cpu", ep=ep, dp_replicate=copies), seed=0)
        shares = {name: p.to_local().numel() for name, p in model.named_parameters()}
    parts = units(config, dp=dp // copies, ep=ep)
    experts = sum(n for name, n in shares.items() if ".experts." in name)
    assert sum(unit.experts.held for unit in parts) == experts
    assert sum(unit.held() for unit in parts) == sum(shares.values())
    options = ParallelConfig(dp_replicate=copies)
    memory = memory_per_rank(config, Step(images=1), dp=dp, ep=ep, options=options)
    assert memory["parameters"] == 4 * sum(shares.values())
    assert memory["optimizer"] == 2 * memory["parameters"]


def test_units_by_hand():
    """Two blocks, the second with 4 experts, over dp=2 and ep=2."""
    config = debug(ExpertChoiceConfig())
    root, dense, moe = units(config, dp=2, ep=2)
    # embed, position, norm, head; of its 10 classes the first of four ranks holds 3
    assert root.dense.held == (32 * 12 + 32 + 16 * 32 + 2 * 32) / 4 + 3 * 33
    assert root.experts == dense.experts == (0, 0)
    assert moe.experts == (num_expert_params(config) / 4, num_expert_params(config) / 2)
    assert dense.dense.gathered == 4 * dense.dense.held
    assert units(config, dp=1, ep=1)[2].experts == (num_expert_params(config), num_expert_params(config))


def test_peak_alone_by_hand():
    """The peak is in the last block's backward pass, or at the update where gradients are more."""
    config = debug(ExpertChoiceConfig())
    memory = memory_per_rank(config, Step(images=64), dp=1, ep=1, options=PLAIN)
    block = num_params(config) - units(config, dp=1, ep=1)[0].held() - units(config, dp=1, ep=1)[1].held()
    assert memory == {
        "parameters": 4 * num_params(config),
        "optimizer": 8 * num_params(config),
        "gradients": 4 * block,
        "activations": 64 * 4 * sum(saved_for_backward(config).values()),
        "buffers": 64 * 4 * 16 * (128 + 32),  # gradients of every row's hidden layer, and of the tokens
    }
    many_classes = replace(config, num_classes=5000)
    memory = memory_per_rank(many_classes, Step(images=1, moments=1), dp=1, ep=1, options=PLAIN)
    assert memory["gradients"] == memory["parameters"] == memory["optimizer"] == 4 * num_params(many_classes)
    assert memory["activations"] == memory["buffers"] == 0
    again = memory_per_rank(config, Step(images=64, passes=2), dp=1, ep=1, options=PLAIN)
    assert again["gradients"] == 4 * (num_params(config) + block)  # the new one, until it is added


def test_peak_sharded_by_hand():
    """dp=2, ep=2: the last block's experts, of which a rank has gathered half, decide."""
    config = debug(ExpertChoiceConfig(), num_experts=16)
    root, dense, moe = units(config, dp=2, ep=2)
    w = num_expert_params(config) / 2

    def buffers(images: int = 1, **fields) -> float:
        options = ParallelConfig(reshard_after_forward=fields.pop("reshard", True))
        return memory_per_rank(config, Step(images=images, **fields), dp=2, ep=2, options=options)["buffers"]

    gathered = root.gathered() + moe.gathered()
    assert buffers() == 4 * (gathered + 2 * w)  # they arrive, are taken apart, are put together
    activations = 64 * 16 * (128 + 32)
    assert buffers(64) == 4 * (gathered + dense.gathered() + moe.gathered() / 2 + activations)
    assert buffers(64, reshard=False) == buffers(64)  # of two blocks both are there, early or kept
    assert (
        buffers(compute_bytes=2) == 2 * (gathered + dense.gathered()) + 4 * moe.gathered()
    )  # reduced in float32


def test_peak_of_several_passes_by_hand():
    """Experts in every block: a backward pass that keeps all weights for the next pass ends with most."""
    moe = MoEConfig(layers=tuple(range(6)), num_experts=16, router=ExpertChoiceConfig())
    config = replace(PRESETS["debug"], depth=6, moe=moe)
    parts = units(config, dp=2, ep=2)
    whole = sum(unit.gathered() for unit in parts)
    two, three = (
        memory_per_rank(config, Step(images=1, passes=n), dp=2, ep=2, options=PLAIN) for n in (2, 3)
    )
    assert three["gradients"] == 4 * whole
    assert two["gradients"] == 4 * sum(unit.gathered() for unit in parts[2:])  # those of one pass, so far
    assert two["buffers"] == three["buffers"] == 4 * (whole + 2 * parts[1].experts.gathered)
    keep = ParallelConfig(reshard_after_forward=False)
    kept = memory_per_rank(config, Step(images=1, passes=3), dp=2, ep=2, options=keep)
    assert kept["buffers"] == 4 * (whole + parts[1].gathered())  # nothing arrives any more


def test_routers_stay_in_float32_by_hand():
    """Two mixing weights per token and slot, its unit vector, and a copy of what the router sees."""
    config, saved = debug(SoftConfig()), saved_for_backward(debug(SoftConfig()))
    memory = memory_per_rank(config, Step(images=64, compute_bytes=2), dp=1, ep=1, options=PLAIN)
    assert saved["mixing"] == 16 * (2 * 4 + 32)
    others = sum(saved.values()) - saved["mixing"]
    assert memory["activations"] == 64 * (2 * others + 4 * (saved["mixing"] + 16 * 32))


def test_activation_checkpointing_by_hand():
    config = debug(ExpertChoiceConfig())
    step, options = Step(images=64), ParallelConfig(activation_checkpointing=True)
    memory = memory_per_rank(config, step, dp=2, ep=2, options=options)
    everything, dense = (saved_for_backward(c) for c in (config, debug(None)))
    one_block = (dense["attention_norms"] + dense["mlp"]) / 2
    assert memory["activations"] == 64 * 4 * (sum(everything.values()) - one_block + 16 * 32)

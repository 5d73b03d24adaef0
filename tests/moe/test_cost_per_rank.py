"""Memory and traffic against what autograd keeps, what collectives move, and figures by hand."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from moe.cost import memory_per_rank, num_expert_params, num_params, saved_for_backward, traffic_per_rank
from moe.layer import MoEConfig
from moe.parallel import build_sharded, make_mesh
from moe.presets import PRESETS
from moe.routers import ExpertChoiceConfig, MixtureConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from moe.vit import ViT, ViTConfig

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
HEADS = [
    {},
    {"pooling": "token", "representation_size": 12, "qk_norm": False},
    {"pooling": "map", "position": "sincos2d"},
]


def debug(router: RouterConfig | None) -> ViTConfig:
    return replace(PRESETS["debug"], moe=MoEConfig(router=router, num_experts=4) if router else None)


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


def test_memory_by_hand():
    """Two blocks, the second with 4 experts over ep=2; four ranks."""
    config = debug(ExpertChoiceConfig())
    memory = memory_per_rank(config, dp=2, ep=2, images_per_rank=8)
    params = num_params(config)
    assert memory["parameters"] == memory["gradients"] == params  # 4 bytes over 4 ranks
    assert memory["adamw_moments"] == 2 * params
    assert memory["gathered"] == 4 * (params - num_expert_params(config) / 2)
    assert memory["activations"] == 8 * 4 * sum(saved_for_backward(config).values())
    alone = memory_per_rank(config, dp=1, ep=1, images_per_rank=8)
    assert alone["parameters"] == 4 * params
    assert alone["gathered"] == 0


def test_traffic_by_hand():
    """16 tokens, capacity factor 1: 16 rows of width 32 per image, exchanged four times."""
    config = debug(ExpertChoiceConfig())
    traffic = traffic_per_rank(config, dp=1, ep=4, images_per_rank=8)
    assert traffic["all_to_all"] == 4 * 8 * 16 * 32 * 4 * 3 / 4
    dense = num_params(config) - num_expert_params(config)  # experts are ep's alone
    assert traffic["reduce_scatter"] == pytest.approx(4 * dense * 3 / 4)
    root = 32 * 12 + 32 + 16 * 32 + 2 * 32 + 10 * 33  # embed, position, norm, head
    assert traffic["all_gather"] == pytest.approx(4 * (2 * dense - root) * 3 / 4)
    assert set(traffic_per_rank(config, dp=1, ep=1, images_per_rank=8).values()) == {0}
    spread = traffic_per_rank(config, dp=2, ep=2, images_per_rank=8)
    experts = num_expert_params(config) / 2
    assert spread["reduce_scatter"] == pytest.approx(4 * (dense * 3 / 4 + experts / 2))
    assert spread["all_to_all"] == 4 * 8 * 16 * 32 * 4 / 2


class Collectives(TorchDispatchMode):
    """Bytes that collectives are given, by kind: all of their arguments."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        for kind in ("all_to_all_single", "allgather_base", "reduce_scatter_base"):
            if kind in str(func):
                tensors = (x for x in torch.utils._pytree.tree_leaves(args) if isinstance(x, torch.Tensor))
                self.bytes[kind] += sum(x.nbytes for x in tensors)
        return func(*args, **(kwargs or {}))


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """This process is the first of four; the others are not there, and nothing is sent."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("router", [ExpertChoiceConfig(), SoftConfig(slots_per_expert=2)])
def test_traffic_is_what_collectives_move(router):
    """One MoE layer, ep over all four ranks. FSDP pads what does not divide: less than 1 % here."""
    config = debug(router)
    model = build_sharded(config, make_mesh("cpu", ep=4), seed=0)
    with Collectives() as collectives:
        output = model(torch.randn(8, 3, 8, 8))
        (output.logits.sum() + output.aux).backward()
    traffic = traffic_per_rank(config, dp=1, ep=4, images_per_rank=8)
    moved = collectives.bytes
    assert moved["all_to_all_single"] * 3 / 4 == traffic["all_to_all"]  # a quarter stays at home
    # a rank's share and the whole are both arguments: 5/4 of the whole, of which 3/4 are sent
    assert moved["allgather_base"] * 3 / 5 == pytest.approx(traffic["all_gather"], rel=0.01)
    assert moved["reduce_scatter_base"] * 3 / 5 == pytest.approx(traffic["reduce_scatter"], rel=0.01)

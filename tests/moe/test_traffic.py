"""Traffic against what collectives are given, and by hand."""

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from moe.cost import num_expert_params, num_params
from moe.layer import MoEConfig
from moe.parallel import ParallelConfig, accumulate, build_sharded, make_mesh
from moe.presets import PRESETS
from moe.routers import ExpertChoiceConfig, RouterConfig, SoftConfig
from moe.sharding import Step
from moe.traffic import Sent, traffic_per_rank
from moe.vit import ViTConfig
from tests.lanes import mostly_slow
from tests.moe.fake_ranks import fake_ranks


def debug(router: RouterConfig) -> ViTConfig:
    """Head, embedding and position divide over four ranks: nothing is padded."""
    return replace(PRESETS["debug"], num_classes=12, moe=MoEConfig(router=router, num_experts=4))


PLAIN = ParallelConfig()


def sums(traffic: dict[str, Sent]) -> dict[str, float]:
    return {name: sum(sent) for name, sent in traffic.items()}


def test_by_hand():
    """16 tokens, capacity factor 1: 16 rows of width 32 per image, exchanged four times."""
    config, step = debug(ExpertChoiceConfig()), Step(images=8)
    sent = sums(traffic_per_rank(config, step, dp=1, ep=4, options=PLAIN))
    assert sent["all_to_all"] == 4 * 8 * 16 * 32 * 4 * 3 / 4
    experts = num_expert_params(config)  # ep's alone
    dense = num_params(config) - experts
    assert sent["reduce_scatter_dense"] == 4 * dense * 3 / 4
    root = 32 * 12 + 32 + 16 * 32 + 2 * 32 + 12 * 33  # embed, position, norm, head
    assert sent["all_gather_dense"] == 4 * (2 * dense - root) * 3 / 4
    assert sent["all_gather_experts"] == sent["reduce_scatter_experts"] == sent["all_reduce"] == 0
    assert not any(sums(traffic_per_rank(config, step, dp=1, ep=1, options=PLAIN)).values())
    spread = sums(traffic_per_rank(config, step, dp=2, ep=2, options=PLAIN))
    assert spread["all_gather_experts"] == 2 * spread["reduce_scatter_experts"] == 2 * 4 * experts / 2 / 2
    assert spread["all_to_all"] == 4 * 8 * 16 * 32 * 4 / 2
    copies = ParallelConfig(dp_replicate=2)
    copied = sums(traffic_per_rank(config, step, dp=4, ep=1, options=copies))
    assert copied["reduce_scatter_dense"] == 4 * dense / 2
    assert copied["all_reduce"] == 2 * 4 * num_params(config) / 2 / 2


class Collectives(TorchDispatchMode):
    """Bytes that collectives send, by kind."""

    def __init__(self, ep: int) -> None:
        super().__init__()
        self.ep = ep
        self.sent: Counter[str] = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        sizes = [x.nbytes for x in tree_leaves(args) if isinstance(x, torch.Tensor)]
        if "all_to_all_single" in str(func):
            self.sent["all_to_all"] += sizes[0] * (self.ep - 1) // self.ep
        elif "allgather_base" in str(func) or "reduce_scatter_base" in str(func):  # all shares, and one
            self.sent["all_gather" if "allgather" in str(func) else "reduce_scatter"] += max(sizes) - min(
                sizes
            )
        elif "allreduce" in str(func):  # over two copies: half is sent reduced, half gathered
            self.sent["all_reduce"] += sizes[0]
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    ("dp", "ep", "copies"),
    mostly_slow([(4, 1, 1), (2, 2, 1), (1, 4, 1), (4, 1, 2), (2, 2, 2)], fast=[(2, 2, 1), (4, 1, 2)]),
    ids=str,
)
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"passes": 3},
        {"passes": 3, "reshard_after_forward": False},
        {"activation_checkpointing": True},
        {"dtype": torch.bfloat16},
    ],
    ids=str,
)
def test_is_what_collectives_move(dp, ep, copies, fields):
    """One step of a rank, to the byte."""
    fields = dict(fields)
    passes, dtype = fields.pop("passes", 1), fields.pop("dtype", None)
    config = debug(SoftConfig(slots_per_expert=2))
    options = ParallelConfig(dp_replicate=copies, **fields)
    with fake_ranks(4):
        mesh = make_mesh("cpu", ep=ep, dp_replicate=copies)
        model = build_sharded(config, mesh, seed=0, options=options, compute_dtype=dtype)
        with Collectives(ep) as collectives:
            for i in range(passes):
                accumulate(model, last=i == passes - 1)
                output = model(torch.randn(8, 3, 8, 8))
                (output.logits.sum() + output.aux).backward()
    step = Step(images=8, passes=passes, compute_bytes=2 if dtype else 4)
    predicted = Counter()
    for name, sent in sums(traffic_per_rank(config, step, dp=dp, ep=ep, options=options)).items():
        predicted[name.removesuffix("_dense").removesuffix("_experts")] += sent
    assert +predicted == collectives.sent


def test_links_of_an_ep_group():
    """Four devices per node: an EP group of 4 stays inside one, of 8 covers two, of 3 may lie across."""
    config, step = debug(ExpertChoiceConfig()), Step(images=1)
    config = replace(config, moe=MoEConfig(router=ExpertChoiceConfig(), num_experts=24), width=48)
    one = 4 * 24 * config.slots() * 48 * 4  # bytes, before they are divided over the members

    def links(ep: int) -> Sent:
        return traffic_per_rank(config, step, dp=24 // ep, ep=ep, options=PLAIN, devices_per_node=4)[
            "all_to_all"
        ]

    assert links(1) == (0, 0)
    assert links(4) == pytest.approx((one * 3 / 4, 0))
    assert links(8) == pytest.approx((one * 3 / 8, one * 4 / 8))
    assert links(2) == pytest.approx((one / 2, 0))
    assert links(3) == pytest.approx((0, one * 2 / 3))  # ranks 3, 4, 5: the first of them alone in its node
    assert links(6) == pytest.approx((one * 1 / 6, one * 4 / 6))  # ranks 0..5: two of them beside 6 and 7
    everywhere = traffic_per_rank(config, step, dp=1, ep=24, options=PLAIN, devices_per_node=32)["all_to_all"]
    assert everywhere == pytest.approx((one * 23 / 24, 0))


def test_links_of_weights():
    """Eight ranks, four to a node. A share enters the other node once, then goes to its three neighbours."""
    config, step = debug(ExpertChoiceConfig()), Step(images=1)

    def links(dp: int, ep: int, copies: int = 1) -> dict[str, Sent]:
        options = ParallelConfig(dp_replicate=copies)
        return traffic_per_rank(config, step, dp=dp, ep=ep, devices_per_node=4, options=options)

    share = 4 * num_expert_params(config) / 8
    assert links(8, 1)["reduce_scatter_experts"] == (6 * share, share)
    assert links(4, 2)["reduce_scatter_experts"] == (2 * share, share)  # two of four in a node
    assert links(2, 4)["reduce_scatter_experts"] == (0, share)  # the other one is in the other node
    assert links(8, 1)["all_gather_dense"].intra == 6 * links(8, 1)["all_gather_dense"].inter
    assert links(4, 2)["all_gather_dense"] == links(8, 1)["all_gather_dense"]
    copied = links(8, 1, copies=2)  # a copy per node
    assert copied["all_gather_dense"].inter == copied["all_gather_experts"].inter == 0
    assert copied["all_reduce"].intra == links(4, 2, copies=2)["all_reduce"].intra == 0
    assert copied["all_reduce"].inter == pytest.approx(4 * num_params(config) / 4, rel=0.01)  # some is padded


def test_soft_moe_of_54_billion_on_512_devices():
    """Experts in float32, gathered forward and backward: 53 GB with ep=8, under 1 GB with ep=256."""
    config, step = PRESETS["soft-H/14-256e"], Step(images=8)
    few, many = (traffic_per_rank(config, step, dp=512 // ep, ep=ep, options=PLAIN) for ep in (8, 256))
    assert few["all_gather_experts"] == (0, pytest.approx(52.9e9, rel=1e-3))
    assert many["all_gather_experts"] == (0, pytest.approx(0.84e9, rel=1e-2))
    # in bfloat16 as much again is half gathered, half reduced: gradients are float32
    few = traffic_per_rank(config, replace(step, compute_bytes=2), dp=64, ep=8, options=PLAIN)
    assert few["all_gather_experts"].inter + few["reduce_scatter_experts"].inter == pytest.approx(
        52.9e9, rel=1e-3
    )
    assert sum(many["all_gather_dense"]) == pytest.approx(3.8e9, rel=0.02)  # whatever the ep

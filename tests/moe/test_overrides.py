"""Routing overrides: other k, capacity and priority, subsets of experts, random choices."""

import re
from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from moe.config import members
from moe.overrides import RoutingOverrides
from moe.routers import (
    ExpertChoiceConfig,
    HashConfig,
    MixtureConfig,
    ReLUConfig,
    RouterConfig,
    SoftConfig,
    TokenChoiceConfig,
    TopKConfig,
)
from moe.routers.affinity import SinkhornConfig
from moe.routers.balance import SignConfig
from tests.moe.parts import build_layer, gate_router, randn

G, S, D, E = 3, 12, 8, 4

CONFIGS = (
    TokenChoiceConfig(k=2, capacity_factor=0.7, priority="max"),
    TokenChoiceConfig(k=2, affinity=SinkhornConfig(), combine="affinity", importance_weight=0.0),
    ExpertChoiceConfig(capacity_factor=1.5),
    HashConfig(by="content", capacity_factor=1.0),
    TopKConfig(k=2, score="sigmoid", balance=SignConfig(), balance_weight=0.1, balance_level="batch"),
    ReLUConfig(),
    SoftConfig(slots_per_expert=2, scale_init=8.0),
    SoftConfig(total_slots=S, dispatch="identity", combine="identity"),
    MixtureConfig(),
    MixtureConfig(level="image"),
    MixtureConfig(level="hierarchical"),
)


def named(config) -> str:
    return f"{config.kind}-{getattr(config, 'level', getattr(config, 'combine', ''))}"


each_router = pytest.mark.parametrize("config", CONFIGS, ids=named)


def images(seed: int = 0) -> Tensor:
    return 2 * randn(G, S, D, seed=seed)


def run(layer, **overrides) -> Tensor:
    return layer(images(), torch.ones(G), None, RoutingOverrides(**overrides))[0]


@each_router
def test_neutral_overrides_change_not_a_bit(config):
    """The router's own values, all experts, and random logits in other blocks than this one, 0."""
    assert {type(config) for config in CONFIGS} == set(members(RouterConfig))
    own = {f.name: getattr(config, f.name) for f in fields(RoutingOverrides) if hasattr(config, f.name)}
    layer = build_layer(config, expert_dropout=0.1)
    for keys in (None, torch.arange(G)):
        expected, routing = layer(images(), torch.ones(G), keys)
        for overrides in (
            RoutingOverrides(**own),
            RoutingOverrides(experts=E),
            RoutingOverrides(experts=tuple(range(E))),
            RoutingOverrides(random_blocks=(1, 7)),
        ):
            got, other = layer(images(), torch.ones(G), keys, overrides)
            assert torch.equal(got, expected), overrides
            assert torch.equal(other.aux_G, routing.aux_G)
            assert all(torch.equal(other.stats[name], value) for name, value in routing.stats.items())


@pytest.mark.parametrize(
    ("config", "overrides"),
    [
        (TokenChoiceConfig(k=2), {"k": E, "capacity_factor": float(E)}),
        (TokenChoiceConfig(k=2, capacity_factor=0.5), {"priority": "sum"}),
        (TokenChoiceConfig(k=2), {"k": 1, "capacity_factor": 0.3, "priority": "max"}),
        (ExpertChoiceConfig(affinity=SinkhornConfig()), {"capacity_factor": 0.5}),
    ],
    ids=str,
)
@pytest.mark.parametrize("noise", [False, True])
def test_an_override_is_a_router_with_that_config(config, overrides, noise):
    """The same weights with the other setting: same output, losses and statistics. Nothing is kept."""
    keys_B, layer = torch.arange(G) if noise else None, build_layer(config)
    before = layer(images(), torch.ones(G), keys_B)[0]
    got, routing = layer(images(), torch.ones(G), keys_B, RoutingOverrides(**overrides))
    expected, other = build_layer(replace(config, **overrides))(images(), torch.ones(G), keys_B)
    assert torch.equal(got, expected)
    assert torch.equal(routing.aux_G, other.aux_G)
    assert all(torch.equal(routing.stats[name], value) for name, value in other.stats.items())
    assert not torch.equal(got, before)
    assert torch.equal(layer(images(), torch.ones(G), keys_B)[0], before)


def test_the_best_experts_of_token_choice_have_the_largest_weight_of_seated_tokens():
    """Six tokens choose expert 0 with gates 0.6, 0.6 and then 0.99; two choose expert 1 with 0.9. Each seats
    two: 1.2 against 1.8, so expert 1 is kept, though expert 0's gates have the larger sum."""
    router = gate_router(TokenChoiceConfig(capacity_factor=0.5), [[1.0, 0.0], [0.0, 1.0]])
    gates = torch.tensor([0.6, 0.6, 0.1, 0.1, 0.99, 0.99, 0.99, 0.99])
    x, ones = torch.stack([gates, 1 - gates], -1).log().unsqueeze(0), torch.ones(1, 8)
    assert router(x, ones).weight_GEC.tolist()[0] == [pytest.approx([0.6, 0.6]), pytest.approx([0.9, 0.9])]
    subset = router(x, ones, None, RoutingOverrides(experts=1)).weight_GEC
    assert subset.tolist()[0] == [[0, 0], pytest.approx([0.9, 0.9])]


@each_router
def test_a_subset_leaves_out_exactly_the_contribution_of_the_others(config):
    """Contributions of single experts add up to those of subsets and of all; nothing is renormalised."""
    layer = build_layer(config)
    alone = [run(layer, experts=(e,)) for e in range(E)]
    assert all(y.abs().sum() > 0 for y in alone)
    torch.testing.assert_close(run(layer, experts=(3, 0, 1)), alone[0] + alone[1] + alone[3])
    torch.testing.assert_close(run(layer), sum(alone))


@pytest.mark.parametrize(("k", "slots"), [(1, 2), (3, 1)])
def test_the_best_experts_are_those_of_algorithm_1(k, slots):
    """Implicit Bias in Soft MoE, algorithm 1, per image: the experts whose slots have the largest sums over
    tokens of combine weights are kept; equal experts are kept in their order."""
    layer, x = build_layer(SoftConfig(slots_per_expert=slots, scale_init=8.0)), images()
    routing = layer(x, torch.ones(G))[1]
    best_GK = routing.combine_GSEC.sum((1, 3)).argsort(descending=True)[:, :k]
    assert len({frozenset(best) for best in best_GK.tolist()}) > 1, "images must differ in their best experts"
    for g, best in enumerate(best_GK.tolist()):
        torch.testing.assert_close(run(layer, experts=k)[g], run(layer, experts=tuple(best))[g])
    kept = RoutingOverrides(experts=2).kept(torch.ones(1, 20))
    assert kept is not None
    assert kept.nonzero().tolist() == [[0, 0], [0, 1]]


@each_router
def test_padding_does_not_affect_the_best_experts(config):
    """Half of each group is padding."""
    if getattr(config, "total_slots", None):
        config = replace(config, total_slots=2 * S)
    layer, valid = build_layer(config, images_per_group=2), torch.tensor([1.0, 0, 1, 0])
    first, second = (torch.cat([images()[:1], 50 * images(seed)[:1], images()[1:]]) for seed in (5, 6))
    outputs = [layer(x, valid, None, RoutingOverrides(experts=1))[0][valid == 1] for x in (first, second)]
    torch.testing.assert_close(*outputs)


def test_stats_of_a_subset_count_its_seats():
    """Token choice: a token whose only expert is left out is dropped, though chosen."""
    layer = build_layer(TokenChoiceConfig(capacity_factor=float(E)))
    _, routing = layer(images(), torch.ones(G), None, RoutingOverrides(experts=(1,)))
    share = routing.gates_GSE.argmax(-1).eq(1).float().mean().item()
    assert routing.stats["dropped_frac"].item() == pytest.approx(1 - share)
    assert routing.stats["unchosen_frac"] == 0
    assert 0 < share < 1


def test_random_logits_are_standard_normal_and_choose_experts_uniformly():
    """The router itself would send all 5000 tokens to expert 0."""
    layer = build_layer(TokenChoiceConfig(k=1, capacity_factor=float(E)))
    with torch.no_grad():
        layer.router.gate_DE.zero_()[:, 0] = 1.0
    x, ones = torch.ones(50, 100, D), torch.ones(50)
    assert layer(x, ones)[1].load_GE.sum(0).tolist() == [5000, 0, 0, 0]
    _, routing = layer(x, ones, None, RoutingOverrides(random_blocks=(0,)))
    share_E = routing.load_GE.sum(0) / 5000
    assert (share_E - 1 / E).abs().max() < 5 * (1 / E * (1 - 1 / E) / 5000) ** 0.5
    difference = (routing.gates_GSE[..., 0] / routing.gates_GSE[..., 1]).log()
    assert difference.std().item() == pytest.approx(2**0.5, rel=0.05)
    assert abs(difference.mean()) < 5 * 2**0.5 / 5000**0.5


@pytest.mark.parametrize(
    "config", [c for c in CONFIGS if getattr(c, "dispatch", "") != "identity"], ids=named
)
@pytest.mark.parametrize("with_keys", [False, True])
def test_random_choices_depend_on_image_token_block_and_key_and_not_on_the_tokens(config, with_keys):
    keys_B = torch.arange(5, 5 + G) if with_keys else None

    def gates(block: int = 0, x: Tensor | None = None, keys_B: Tensor | None = keys_B) -> Tensor:
        layer, overrides = build_layer(config, block=block), RoutingOverrides(random_blocks=(0, 2))
        return layer(images() if x is None else x, torch.ones(len(images())), keys_B, overrides)[1].gates_GSE

    some = gates()
    rows = {tuple(row) for row in some.flatten(0, 1).tolist()}
    if config.kind == "hash":  # its gates are the E rows of an identity
        assert len(rows) == E
    elif config.kind == "relu":  # tokens with one open gate, or none, are alike
        assert G * S > len(rows) > G * S / 2
    else:
        assert len(rows) == (G if getattr(config, "level", "") == "image" else G * S)
    torch.testing.assert_close(gates(x=-images(1)), some)
    assert not torch.allclose(gates(block=2), some)
    assert torch.equal(gates(), some)
    if keys_B is not None:
        assert not torch.allclose(gates(keys_B=keys_B + 1), some)
        layer, overrides = build_layer(config), RoutingOverrides(random_blocks=(0,))
        part = layer(images()[1:], torch.ones(G - 1), keys_B[1:], overrides)[1].gates_GSE
        torch.testing.assert_close(part, some[1:])  # a microbatch is a slice of the batch


@pytest.mark.parametrize(
    ("config", "overrides", "message"),
    [
        (ExpertChoiceConfig(), {"k": 2}, "a router of kind 'expert_choice' has no k to override"),
        (SoftConfig(), {"capacity_factor": 2.0}, "kind 'soft' has no capacity_factor to override"),
        (TokenChoiceConfig(), {"k": 5}, "k=5 exceeds num_experts=4"),
        (TokenChoiceConfig(), {"capacity_factor": 0.01}, r"capacity_factor=0\.01 leaves no slot"),
        (ExpertChoiceConfig(), {"capacity_factor": 9.0}, r"capacity_factor=9\.0 asks .* only 12 tokens"),
        (SoftConfig(), {"experts": 0}, r"experts=0 must lie in 1 \.\. 4"),
        (ExpertChoiceConfig(), {"experts": ()}, r"experts=\(\) must be indices in 0 \.\. 3"),
        (MixtureConfig(), {"experts": (1, 4)}, r"experts=\(1, 4\) must be indices in 0 \.\. 3"),
    ],
)
def test_errors_name_the_kind_the_value_and_the_bound(config, overrides, message):
    with pytest.raises(ValueError, match=message):
        run(build_layer(config), **overrides)


def test_experts_are_a_tuple_of_different_indices():
    for experts in ([0, 1], (0, 0)):
        with pytest.raises(ValueError, match=f"experts must be .* got {re.escape(str(experts))}"):
            RoutingOverrides(experts=experts)


@pytest.mark.parametrize("config", [SoftConfig(), TokenChoiceConfig(k=2), ExpertChoiceConfig()], ids=str)
def test_a_seed_draws_subsets_of_each_layer_and_group(config):
    """Subsets have the right size, are the same for the same seed, and differ otherwise."""
    x, valid = torch.randn(64, S, D), torch.ones(64)

    def kept(seed: int, block: int = 1) -> Tensor:
        layer = build_layer(config, block=block)
        return layer(x, valid, None, RoutingOverrides(experts=2, subset_seed=seed))[1].kept_GE

    first = kept(3)
    assert (first.sum(1) == 2).all()
    assert len({tuple(row) for row in first.tolist()}) == E * (E - 1) // 2
    assert torch.equal(kept(3), first)
    assert not torch.equal(kept(4), first)
    assert not torch.equal(kept(3, block=2), first)
    layer = build_layer(config)
    assert not torch.equal(layer(x, valid, None, RoutingOverrides(experts=2))[1].kept_GE, first)


def test_a_seed_needs_a_number_of_experts():
    for experts in (None, (0, 1)):
        with pytest.raises(ValueError, match="subset_seed=0 draws a number of experts"):
            RoutingOverrides(experts=experts, subset_seed=0)


def test_random_blocks_are_distinct():
    with pytest.raises(ValueError, match=r"random_blocks must be distinct indices, got \(1, 1\)"):
        RoutingOverrides(random_blocks=(1, 1))

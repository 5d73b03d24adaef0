"""Keyed initialisation: the numbers depend on seed, name and expert alone, and spread as they should."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from moe.init import init_weights
from moe.layer import MoEConfig
from moe.presets import PRESETS
from moe.routers import ROUTERS, MixtureConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from moe.vit import ViT

each_router = pytest.mark.parametrize(
    "router", [None, *(kind() for kind in ROUTERS)], ids=lambda r: r and r.kind
)


def build(router: RouterConfig | None, *, seed: int = 0, num_experts: int = 4) -> ViT:
    moe = MoEConfig(num_experts=num_experts, router=router) if router else None
    return ViT(replace(PRESETS["debug"], width=64, depth=4, moe=moe), seed=seed)


def random_ones(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are not constant at the start."""
    return {name: p for name, p in model.named_parameters() if p.numel() > 1 and p.std() > 0}


@each_router
def test_same_seed_same_weights(router):
    first, second = build(router).state_dict(), build(router).state_dict()
    assert all(torch.equal(first[name], second[name]) for name in first)


@each_router
def test_other_seed_other_weights(router):
    first, second = random_ones(build(router)), random_ones(build(router, seed=1))
    assert len(first) > 10
    assert all(not torch.equal(first[name], second[name]) for name in first)


@each_router
def test_no_two_parameters_share_numbers(router):
    """Layers differ, and so do experts: no two of the first numbers of any row drawn by itself are equal."""
    rows = [
        row.flatten()[:4]
        for name, p in random_ones(build(router)).items()
        for row in (p if "experts" in name else p.unsqueeze(0))
    ]
    scaled = torch.stack([row / row.norm() for row in rows])  # the same draw at another scale counts, too
    distance = torch.cdist(scaled, scaled) + torch.eye(len(rows))
    assert distance.min() > 1e-4


def test_an_expert_does_not_depend_on_the_number_of_experts():
    few, many = build(TokenChoiceConfig(), num_experts=2), build(TokenChoiceConfig(), num_experts=8)
    for name, p in few.blocks[1].mlp.experts.named_parameters():
        assert torch.equal(p, many.blocks[1].mlp.experts.get_parameter(name)[:2]), name


def test_a_layer_does_not_depend_on_the_others():
    dense, sparse = build(None), build(TokenChoiceConfig())
    assert torch.equal(dense.blocks[0].mlp.up.weight, sparse.blocks[0].mlp.up.weight)
    assert torch.equal(dense.blocks[3].attention.qkv.weight, sparse.blocks[3].attention.qkv.weight)


@each_router
def test_every_parameter_and_buffer_is_set(router):
    fresh, model = build(router).state_dict(), build(router)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.fill_(torch.nan)
    init_weights(model, 0)
    assert fresh.keys() == model.state_dict().keys()
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, fresh[name]), name


def test_a_rank_draws_the_rows_it_holds():
    """The rank holds the second half of every tensor."""
    whole, model = build(TokenChoiceConfig()), build(TokenChoiceConfig(), seed=1)
    init_weights(model, 0, local=lambda p: (p[len(p) // 2 :], (slice(len(p) // 2, len(p)),)))
    for name, p in random_ones(whole).items():
        mine = model.get_parameter(name)
        assert torch.equal(mine[len(p) // 2 :], p[len(p) // 2 :]), name
        assert not torch.equal(mine[: len(p) // 2], p[: len(p) // 2]), name


@each_router
def test_global_generator_is_not_touched(router):
    before = torch.random.get_rng_state()
    build(router)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_global_generator_is_not_used():
    with torch.random.fork_rng():
        torch.manual_seed(1)
        first = build(SoftConfig())
        torch.manual_seed(2)
        second = build(SoftConfig())
    assert all(torch.equal(p, q) for p, q in zip(first.parameters(), second.parameters(), strict=True))


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_numbers_are_the_same_in_every_dtype(dtype):
    model = build(TokenChoiceConfig()).to(dtype)
    init_weights(model, 0)
    for name, p in build(TokenChoiceConfig()).named_parameters():
        assert torch.equal(model.get_parameter(name), p.to(dtype)), name


def is_normal(std: float) -> Callable[[Tensor], bool]:
    """The deviation within five of its own deviations, and beyond what a uniform could give."""
    return lambda p: abs(p.std() / std - 1) < 5 / math.sqrt(2 * p.numel()) and p.abs().max() > 2 * std


def is_uniform(bound: float) -> Callable[[Tensor], bool]:
    return lambda p: 0.98 * bound < p.abs().max() <= bound and abs(p.std() / (bound / 3**0.5) - 1) < 0.05


def is_constant(value: float) -> Callable[[Tensor], bool]:
    return lambda p: bool(p.eq(value).all())


D, F, E = 64, 128, 4

EXPECTED = {
    "embed.weight": is_normal((3 * 2 * 2) ** -0.5),
    "embed.bias": is_constant(0),
    "position_SD": is_normal(0.02),
    "blocks.0.norm1.weight": is_constant(1),
    "blocks.0.norm1.bias": is_constant(0),
    "blocks.0.attention.qkv.weight": is_uniform(math.sqrt(6 / (D + D))),
    "blocks.0.attention.qkv.bias": is_constant(0),
    "blocks.0.attention.norm_q.weight": is_constant(1),
    "blocks.0.attention.norm_k.weight": is_constant(1),
    "blocks.0.attention.out.weight": is_uniform(math.sqrt(6 / (D + D))),
    "blocks.0.attention.out.bias": is_constant(0),
    "blocks.0.norm2.weight": is_constant(1),
    "blocks.0.norm2.bias": is_constant(0),
    "blocks.0.mlp.up.weight": is_uniform(math.sqrt(6 / (D + F))),
    "blocks.0.mlp.up.bias": is_constant(0),
    "blocks.0.mlp.down.weight": is_uniform(math.sqrt(6 / (D + F))),
    "blocks.0.mlp.down.bias": is_constant(0),
    "blocks.1.mlp.experts.w_in_EDF": is_uniform(math.sqrt(6 / (D + F))),
    "blocks.1.mlp.experts.b_in_EF": is_constant(0),
    "blocks.1.mlp.experts.w_out_EFD": is_uniform(math.sqrt(6 / (D + F))),
    "blocks.1.mlp.experts.b_out_ED": is_constant(0),
    "norm.weight": is_constant(1),
    "norm.bias": is_constant(0),
    "head.weight": is_constant(0),
    "head.bias": is_constant(0),
}
EXPECTED_ROUTER = {
    "token_choice": {"gate_DE": is_normal(D**-0.5)},
    "expert_choice": {"gate_DE": is_normal(D**-0.5)},
    "soft": {"phi_DEC": is_normal((D * E) ** -0.5), "scale": is_constant(1)},
    "mixture": {"gate_DE": is_normal(D**-0.5)},
}


@pytest.mark.parametrize("router", [kind() for kind in ROUTERS], ids=lambda r: r.kind)
def test_distributions(router):
    """Of the first two blocks, a dense and a MoE one."""
    expected = EXPECTED | {f"blocks.1.mlp.router.{n}": f for n, f in EXPECTED_ROUTER[router.kind].items()}
    alike = {name.replace("blocks.0", "blocks.1"): f for name, f in EXPECTED.items() if ".mlp." not in name}
    checked = set()
    for name, p in build(router).named_parameters():
        if not name.startswith(("blocks.2", "blocks.3")):
            assert (alike | expected)[name](p.detach()), name
            checked.add(name)
    assert checked == set(alike | expected)


def test_clusters_of_a_mixture_have_numbers_of_their_own():
    router = build(MixtureConfig(level="hierarchical", clusters=4)).blocks[1].mlp.router
    assert is_normal(D**-0.5)(router.gate_clusters.detach())
    assert router.gate_clusters.shape == router.gate_DE.shape
    assert not torch.allclose(router.gate_clusters, router.gate_DE)


def test_a_mixtures_temperature_starts_where_the_config_says():
    model = build(MixtureConfig(temperature=2.5))
    assert [b.item() for name, b in model.named_buffers() if name.endswith("temperature")] == [2.5, 2.5]


def test_soft_scale_starts_where_the_config_says():
    assert build(SoftConfig(scale_init=2.5)).blocks[1].mlp.router.scale.item() == 2.5

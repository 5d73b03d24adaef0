"""Random numbers from keys: initial weights by seed, name and expert; SplitMix64 to the bit; moments."""

import math
from collections.abc import Callable
from dataclasses import replace

import pytest
import sympy
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor, nn
from torch._inductor import config as inductor
from torch._inductor.loop_body import CaptureIndexing
from torch._inductor.utils import get_code

from moe.experts import Experts
from moe.init import dropout, gaussian, init_weights, mix, split, uniform
from moe.models.vit import ViT
from moe.overrides import RoutingOverrides
from moe.routers import MixtureConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from moe.routers.hash import by_number
from tests.moe.parts import each_kind, each_model, vit_config


def build(router: RouterConfig | None, *, seed: int = 0, num_experts: int = 4) -> ViT:
    return ViT(replace(vit_config(router, num_experts=num_experts), width=64, depth=4), seed=seed)


def random_parameters(model: nn.Module) -> dict[str, Tensor]:
    """The parameters that are not constant at the start."""
    return {name: p for name, p in model.named_parameters() if p.numel() > 1 and p.std() > 0}


@each_model
def test_no_two_parameters_share_numbers(router):
    """Layers differ, and so do experts: the first numbers of separately drawn rows are not proportional."""
    rows = [
        row.flatten()[:4]
        for name, p in random_parameters(build(router)).items()
        for row in (p if "experts" in name else p.unsqueeze(0))
    ]
    scaled = torch.stack([row / row.norm() for row in rows])
    assert (torch.cdist(scaled, scaled) + torch.eye(len(rows))).min() > 1e-4


def test_a_layer_and_an_expert_do_not_depend_on_the_others():
    dense, sparse = build(None), build(TokenChoiceConfig())
    for name in ("blocks.0.mlp.up.weight", "blocks.3.attention.qkv.weight"):
        assert torch.equal(dense.get_parameter(name), sparse.get_parameter(name))
    few, many = build(TokenChoiceConfig(), num_experts=2), build(TokenChoiceConfig(), num_experts=8)
    for name, p in few.blocks[1].mlp.experts.named_parameters():
        assert torch.equal(p, many.blocks[1].mlp.experts.get_parameter(name)[:2]), name


def test_a_rank_draws_the_rows_it_holds():
    """The rank holds the second half of every tensor."""
    whole, model = build(TokenChoiceConfig()), build(TokenChoiceConfig(), seed=1)
    init_weights(model, 0, local=lambda p: (p[len(p) // 2 :], (slice(len(p) // 2, len(p)),)))
    for name, p in random_parameters(whole).items():
        mine = model.get_parameter(name)
        assert torch.equal(mine[len(p) // 2 :], p[len(p) // 2 :]), name
        assert not torch.equal(mine[: len(p) // 2], p[: len(p) // 2]), name


@each_model
def test_weights_depend_on_the_seed_and_not_on_the_global_generator(router):
    """Every parameter and buffer is set; `init_weights` gives the same numbers again."""
    before = torch.random.get_rng_state()
    first, other = build(router), build(router, seed=1)
    assert torch.equal(torch.random.get_rng_state(), before)
    assert all(not torch.equal(p, other.get_parameter(name)) for name, p in random_parameters(first).items())
    torch.manual_seed(1)
    with torch.no_grad():
        for tensor in other.state_dict().values():
            tensor.fill_(torch.nan)
    init_weights(other, 0)
    for name, tensor in other.state_dict().items():
        assert torch.equal(tensor, first.state_dict()[name]), name


def test_initial_values_of_the_config():
    model = build(MixtureConfig(level="hierarchical", clusters=4, temperature=2.5))
    router = model.get_submodule("blocks.1.mlp.router")
    gate, clusters = router.get_parameter("gate_DE"), router.get_parameter("gate_clusters")
    assert is_normal(D**-0.5)(clusters.detach())
    assert not torch.allclose(clusters, gate)
    assert [b.item() for name, b in model.named_buffers() if name.endswith("temperature")] == [2.5, 2.5]
    assert build(SoftConfig(scale_init=2.5)).get_parameter("blocks.1.mlp.router.scale").item() == 2.5


@pytest.mark.parametrize("equal", [False, True])
def test_experts_may_start_equal(equal):
    experts = Experts(3, 8, 16, equal_init=equal)
    init_weights(experts, 0)
    first, *others = experts.w_in_EDF
    assert [torch.equal(first, other) for other in others] == [equal, equal]
    own = Experts(3, 8, 16)
    init_weights(own, 0)
    assert torch.equal(first, own.w_in_EDF[0])


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

ONE, ZERO = is_constant(1), is_constant(0)
ATTENTION, MLP = is_uniform(math.sqrt(6 / (D + D))), is_uniform(math.sqrt(6 / (D + F)))
# The first rule that matches a name's end decides; of a name's parts a bias is 0 and a norm's weight 1.
EXPECTED = {
    "embed.weight": is_normal((3 * 2 * 2) ** -0.5),
    "position_SD": is_normal(0.02),
    "head.weight": ZERO,
    "bias": ZERO,
    "b_in_EF": ZERO,
    "b_out_ED": ZERO,
    **dict.fromkeys(("norm.weight", "norm1.weight", "norm2.weight", "norm_q.weight", "norm_k.weight"), ONE),
    **dict.fromkeys(("qkv.weight", "out.weight"), ATTENTION),
    **dict.fromkeys(("up.weight", "down.weight", "w_in_EDF", "w_out_EFD"), MLP),
    "gate_DE": is_normal(D**-0.5),
    "phi_DEC": is_normal((D * E) ** -0.5),
    "router.scale": ONE,
}


@each_kind
def test_distributions(router):
    for name, p in build(router).named_parameters():
        expected = next(rule for end, rule in EXPECTED.items() if name.endswith(end))
        assert expected(p.detach()), name


MASK = 2**64 - 1
GAMMA = 0x9E3779B97F4A7C15


def splitmix64(state: int) -> int:
    """The finaliser of SplitMix64, on Python's integers."""
    z = ((state ^ (state >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & MASK
    return z ^ (z >> 31)


def signed(z: int) -> int:
    return z - 2**64 if z >= 2**63 else z


def test_split_is_the_published_sequence():
    """The first five outputs of SplitMix64 from seed 1234567, as implementations are checked against."""
    published = [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]
    assert split(torch.tensor(1234567), 5).tolist() == [signed(z) for z in published]


@settings(max_examples=100)
@given(key=st.integers(-(2**63), 2**63 - 1), salt=st.integers(-(2**20), 2**62))
def test_mix_is_splitmix64(key, salt):
    """State update by (salt + 1) gammas and finaliser, modulo 2^64; a salt as a tensor is the same."""
    expected = signed(splitmix64((key + (salt + 1) * GAMMA) & MASK))
    assert mix(torch.tensor([key]), salt).tolist() == [expected]
    assert mix(torch.tensor([key]), torch.tensor(salt)).tolist() == [expected]


def test_split_does_not_depend_on_how_many_are_drawn():
    keys = mix(torch.arange(6).view(2, 3), 5)
    many = split(keys, 100)
    assert many.shape == (2, 3, 100)
    for count in (1, 2, 99):
        assert torch.equal(split(keys, count), many[..., :count])
    assert split(keys, 4).dtype == torch.int64


SUBSETS = RoutingOverrides(experts=2, subset_seed=5)
KEYS_OF_PLACES = {
    "split": lambda x: split(x, 8),
    "salt by number": lambda x: mix(torch.arange(8), 5) + x,
    "salt by place": lambda x: mix(torch.arange(8), torch.arange(8)) + x,
    "hash": lambda x: by_number(torch.arange(8), 4, 5) + x,
    "subsets": lambda x: SUBSETS.kept(x.expand(8, 8).float()),
}


@pytest.mark.parametrize("keys", KEYS_OF_PLACES.values(), ids=KEYS_OF_PLACES)
def test_a_compiler_computes_keys_of_places_in_int64(keys, monkeypatch):
    """Inductor turns sums and products of an arange into an index, which on a GPU is an int32, where a larger
    constant does not compile: https://github.com/pytorch/pytorch/issues/175966. Here it makes C++, of the
    same indices, and compiles nothing.
    """
    indices, index_expr = [], CaptureIndexing.index_expr

    def record(handler, index, dtype):
        indices.append(index)
        return index_expr(handler, index, dtype)

    monkeypatch.setattr(CaptureIndexing, "index_expr", record)
    with inductor.patch({"cpp.simdlen": 1, "fx_graph_cache": False}):  # 1: no trial of the machine
        get_code(torch.compile(keys), torch.arange(8))
    assert indices
    assert all(abs(number) < 2**31 for index in indices for number in index.atoms(sympy.Integer))


def test_keys_of_a_slice_are_the_slice_of_the_keys():
    """A microbatch, or a rank, draws what the whole batch would."""
    keys = mix(torch.arange(12), 5)
    for part in (slice(0, 4), slice(4, 12), slice(11, 12)):
        assert torch.equal(gaussian(split(keys[part], 9)), gaussian(split(keys, 9))[part])
        assert torch.equal(mix(keys[part], 3), mix(keys, 3)[part])
    x = torch.randn(12, 9, generator=torch.Generator().manual_seed(0))
    assert torch.equal(dropout(x[4:8], 0.3, keys[4:8]), dropout(x, 0.3, keys)[4:8])


@pytest.mark.parametrize("key", [-1, -(1 << 39), 0, (1 << 39), 2**63 - 1, -(2**63)])
def test_uniform_never_reaches_0_or_1(key):
    """All ones in the upper bits must not round up to 1: its normal would be infinite, once in 2^24 draws."""
    value = uniform(torch.tensor([key]))
    assert 0 < value < 1
    assert gaussian(torch.tensor([key])).isfinite()
    assert gaussian(torch.tensor([key])).abs() < 5.5


def test_normal_is_normal():
    n = 10**6
    values = gaussian(split(torch.tensor(12), n)).double()
    assert abs(values.mean()) < 5 / math.sqrt(n)
    assert abs(values.var() - 1) < 5 * math.sqrt(2 / n)
    assert abs(values.pow(3).mean()) < 5 * math.sqrt(15 / n)
    assert abs(values.pow(4).mean() - 3) < 5 * math.sqrt(96 / n)
    assert abs((values > 3).double().mean() - 0.0013499) < 5 * math.sqrt(0.00135 / n)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
def test_dropout_keeps_the_mean_and_drops_its_share(p):
    keys, n = split(torch.tensor(3), 1000), 1000 * 200
    y = dropout(torch.ones(1000, 200), p, keys)
    assert abs(y.eq(0).float().mean() - p) < 5 * math.sqrt(p * (1 - p) / n)
    torch.testing.assert_close(y[y != 0], torch.full_like(y[y != 0], 1 / (1 - p)))
    assert abs(y.mean() - 1) < 5 * math.sqrt(p / (1 - p) / n)
    rows = y.eq(0).float()
    assert not torch.equal(rows[0], rows[1]), "a row's key is its own"

"""Costs against independent counts: torch's FLOP counter, the authors' configs, figures by hand."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe.cost import (
    forward_gflops_2mac,
    model_costs,
    num_active_params,
    num_expert_params,
    num_params,
    slots_per_token,
    train_flops_3mac,
    train_flops_6mac,
)
from moe.layer import MoEConfig
from moe.models.vit import ViT, ViTConfig
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.presets import PRESETS
from moe.routers import (
    ExpertChoiceConfig,
    MixtureConfig,
    ReLUConfig,
    RouterConfig,
    SoftConfig,
    TokenChoiceConfig,
    TopKConfig,
)
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig
from moe.routers.balance import SignConfig
from moe.routing import LayerShape
from tests.moe.parts import vit_config

ROUTER_CONFIGS: list[RouterConfig | None] = [
    None,
    SoftConfig(),
    SoftConfig(total_slots=8, normalize="none"),
    SoftConfig(dispatch="uniform", combine="uniform"),
    SoftConfig(total_slots=16, dispatch="identity", combine="identity"),
    TokenChoiceConfig(k=2, capacity_factor=1.5, priority="max"),
    TokenChoiceConfig(affinity=SinkhornConfig()),
    ExpertChoiceConfig(capacity_factor=0.6),
    ExpertChoiceConfig(affinity=SparseTransportConfig()),
    MixtureConfig(),
    MixtureConfig(level="image"),
    MixtureConfig(level="hierarchical"),
    MixtureConfig(level="image", gate="mlp"),
    TopKConfig(k=2, score="sigmoid", balance=SignConfig()),
    TopKConfig(cosine=True, projection=5),
    TopKConfig(k=2, capacity_factor="dropless"),
    ReLUConfig(),
]
HEADS = [
    {},
    {"pooling": "token", "representation_size": 12, "qk_norm": False},
    {"pooling": "map", "position": "sincos2d"},
    {"stem": "conv", "patch_size": 2},
    {"stem": "conv", "patch_size": 4},
]
each_router = pytest.mark.parametrize("router", ROUTER_CONFIGS, ids=repr)


def grouped_flops(rows: torch.Size, weights: torch.Size, *_: object, **__: object) -> int:
    """Which torch has no formula for."""
    return 2 * rows[0] * weights[1] * weights[2]


def check_flops(config: ViTConfig, overrides: RoutingOverrides = AS_TRAINED) -> None:
    """Two FLOPs per MAC; attention in plain matmuls, for the counter does not see the CPU's fused kernel."""
    model, images = ViT(config), torch.randn(4, 3, 8, 8)
    formulas = {torch.ops.aten._grouped_mm: grouped_flops}
    with (
        FlopCounterMode(display=False, custom_mapping=formulas) as counter,
        sdpa_kernel(SDPBackend.MATH),
    ):
        model(images, routing_overrides=overrides)
    assert counter.get_total_flops() == 2 * 4 * sum(model_costs(config, overrides).macs.values())


@each_router
def test_forward_macs_equal_the_flop_counter(router):
    identity = getattr(router, "dispatch", "") == "identity"
    config = vit_config(router, images_per_group=1 if identity else 2)
    check_flops(config)


@each_router
def test_forward_macs_with_a_shared_mlp_equal_the_flop_counter(router):
    if router:
        config = vit_config(router, shared_dim=24)
        check_flops(config)
        if not isinstance(config.slots(), float):  # without slots the images decide: `test_rows`
            with torch.no_grad():
                check_flops(config, RoutingOverrides(experts=2))
        plain = vit_config(router)
        assert num_params(config) - num_params(plain) == 32 * 24 * 2 + 24 + 32
        assert num_active_params(config) - num_active_params(plain) == 32 * 24 * 2 + 24 + 32


@pytest.mark.parametrize("head", HEADS, ids=str)
def test_forward_macs_of_heads_and_stems_equal_the_flop_counter(head):
    check_flops(replace(vit_config(SoftConfig()), **head))


# preset, classes, parameters, GMACs per image: counted from google-research/vmoe's own configs (942a78b) by
# jax.eval_shape and by matmul shapes; "params" and "analytic_matmul_gmacs" of reference/param_counts.json.
# V-MoE's MACs are without the one-hot einsums that the authors' code moves tokens with.
COUNTED = [
    ("S/16", 29_593, 33_059_737, 4.585006464),
    ("B/16", 29_593, 108_555_673, 17.493609216),
    ("L/16", 29_593, 333_635_481, 61.262685184),
    ("H/14", 29_593, 668_675_993, 166.6605376),
    ("soft-S/16-128e", 29_593, 933_709_471, 4.277118336),
    ("soft-S/14-256e", 29_593, 1_841_402_527, 6.561949056),
    ("soft-B/16-128e", 29_593, 3_707_638_687, 15.915240192),
    ("soft-L/16-128e", 29_593, 13_127_249_829, 55.342425088),
    ("soft-H/14-128e", 29_593, 27_318_132_649, 141.83025792),
    ("soft-H/14-256e", 29_593, 54_177_406_889, 170.68706944),
    ("vmoe-H/14-dense", 18_291, 655_835_251, 167.31888),
    ("vmoe-L/16", 18_291, 3_445_959_539, 99.808611328 - 16.112418816),
    ("vmoe-H/14-last-5", 18_291, 2_688_648_051, 200.4966848 - 14.3163392),
    ("vmoe-H/14", 18_291, 7_160_836_211, 273.48785536 - 45.81228544),
]


@pytest.mark.parametrize(("preset", "classes", "params", "gmacs"), COUNTED)
def test_counts_of_the_authors_configs(preset, classes, params, gmacs):
    """Their capacity is rounded up to a multiple of 4, the paper's and ours to the nearest: up to 1 %."""
    config = replace(PRESETS[preset], num_classes=classes)
    assert num_params(config) == params
    rounding = 0.005 if "vmoe" in preset else 1e-9
    assert sum(model_costs(config).macs.values()) / 1e9 == pytest.approx(gmacs, rel=rounding)


def test_parameters_of_released_checkpoints():
    """Eight experts, in the last two odd blocks or in every second block."""
    assert num_params(replace(PRESETS["vmoe-S/32"], moe=MoEConfig(layers="last_2_odd"))) == 56_999_400
    assert num_params(replace(PRESETS["vmoe-B/16"], num_classes=21_843, moe=MoEConfig())) == 301_565_523


def test_presets_that_were_not_counted():
    """Soft MoE, sections 3.3 and 3.4; V-MoE, sections 3.1 and 3.6: tokens, width, slots, MoE blocks."""
    dense = {"S/32": (49, 384), "S/14": (256, 384), "S/8": (784, 384), "B/32": (49, 768), "L/32": (49, 1024)}
    assert {name: (PRESETS[name].tokens(), PRESETS[name].width) for name in dense} == dense
    # C = round(k N P c / E), V-MoE section 2.4: 2 * 8 * 197 * 1.05 / 32 = 103.4
    sparse = {
        "soft-S/14-256e": (256, 1, (6, 7, 8, 9, 10, 11)),
        "vmoe-B/16": (197, 103, (1, 3, 5, 7, 9, 11)),
        "vmoe-S/32": (50, 26, (1, 3, 5, 7)),
        "vmoe-H/14-last-5": (257, 135, (23, 25, 27, 29, 31)),
        "vmoe-15B": (257, 135, tuple(range(1, 48, 2))),
    }
    configs = {name: PRESETS[name] for name in sparse}
    assert {name: (c.tokens(), c.slots(), c.moe_blocks()) for name, c in configs.items()} == sparse


def test_parameters_of_implicit_bias():
    """Its ViT-B/16, section 4.4.1: 513M, of them 453-454M in experts, whatever their number."""
    for n in (2, 8, 16, 64, 128):
        hidden = 16 * 3072 // n
        moe = MoEConfig(layers="last_6", num_experts=n, expert_dim=hidden, router=SoftConfig())
        config = replace(PRESETS["B/16"], moe=moe)
        assert 453e6 <= num_expert_params(config) <= 454e6
        assert num_params(config) == pytest.approx(513e6, rel=0.004)


@pytest.mark.parametrize(
    ("router", "share"),
    [
        (TokenChoiceConfig(k=2), 2 / 4),
        (ExpertChoiceConfig(capacity_factor=1.5), 1.5 / 4),
        (SoftConfig(), 1),
        (MixtureConfig(), 1),
    ],
)
def test_active_params(router, share):
    config = vit_config(router)
    mlp = 32 * 128 + 128 + 128 * 32 + 32
    assert num_expert_params(config) == 4 * mlp
    assert num_active_params(config) == num_params(config) - 4 * mlp + share * 4 * mlp
    assert num_active_params(PRESETS["debug"]) == num_params(PRESETS["debug"])
    assert num_expert_params(PRESETS["debug"]) == 0


def test_training_conventions():
    """Forward and backward are three forwards; a MAC is one FLOP or two."""
    forward = 1e9 * forward_gflops_2mac(PRESETS["S/16"])
    assert train_flops_6mac(PRESETS["S/16"], 10) == pytest.approx(3 * forward * 10)
    assert train_flops_3mac(PRESETS["S/16"], 10) == pytest.approx(1.5 * forward * 10)


@pytest.mark.parametrize(
    ("router", "rows"),
    [
        (None, 1.0),
        (TokenChoiceConfig(k=2, capacity_factor=1.5), 3.0),
        (ExpertChoiceConfig(capacity_factor=0.5), 0.5),
        (SoftConfig(slots_per_expert=2), 0.5),
        (MixtureConfig(), 4.0),
        (TopKConfig(k=3, capacity_factor="dropless"), 3.0),
    ],
)
def test_slots_per_token(router, rows):
    """16 tokens, 4 experts. The images of a group share soft slots."""
    assert slots_per_token(vit_config(router)) == rows
    if isinstance(router, SoftConfig):
        assert slots_per_token(vit_config(router, images_per_group=2)) == rows / 2


POINTS: list[tuple[RouterConfig, dict]] = [
    (TokenChoiceConfig(k=2), {"k": 1, "capacity_factor": 0.5}),
    (TokenChoiceConfig(k=2), {"k": 1, "experts": 2}),
    (ExpertChoiceConfig(), {"capacity_factor": 2.0}),
    (ExpertChoiceConfig(), {"experts": (0, 3, 1)}),
    (SoftConfig(slots_per_expert=3), {"experts": 1}),
    (MixtureConfig(), {"experts": (2, 1)}),
    (MixtureConfig(level="hierarchical"), {"experts": 3}),
]


@pytest.mark.parametrize(("router", "changes"), POINTS, ids=str)
def test_macs_at_an_operating_point_equal_the_flop_counter(router, changes):
    """In evaluation only the chosen experts run."""
    config = vit_config(router, images_per_group=2)
    with torch.no_grad():
        check_flops(config, RoutingOverrides(**changes))


def test_overrides_that_do_not_fit_have_no_cost():
    for changes, message in (({"experts": 5}, "experts=5 must lie in 1"), ({"k": 2}, "has no k to override")):
        with pytest.raises(ValueError, match=message):
            vit_config(SoftConfig()).costs(RoutingOverrides(**changes))


def test_macs_by_hand():
    """debug: 16 tokens, width 32, hidden 128, two blocks, the second of them MoE with 4 experts."""
    choice = vit_config(TokenChoiceConfig(k=2, capacity_factor=1.0))
    assert model_costs(choice).macs == {
        "embed": 16 * 3 * 2 * 2 * 32,
        "attention_projections": 2 * 16 * 4 * 32 * 32,
        "attention_scores": 2 * 2 * 16 * 16 * 32,
        "mlp": 16 * 2 * 32 * 128,
        "experts": 32 * 2 * 32 * 128,  # k=2: two rows a token
        "router": 16 * 32 * 4,
        "dispatch_combine": 0,
        "pooling": 0,
        "head": 32 * 10,
    }
    assert model_costs(choice, RoutingOverrides(priority="max")).macs == model_costs(choice).macs
    soft, half = vit_config(SoftConfig(slots_per_expert=4)), RoutingOverrides(experts=2)
    macs = model_costs(soft, half).macs
    assert macs["experts"] == 2 * 4 * 2 * 32 * 128
    assert macs["dispatch_combine"] == 2 * 16 * (2 * 4) * 32
    assert macs["router"] == 16 * 32 * 16  # which weighs all experts
    assert forward_gflops_2mac(soft, half) == pytest.approx(2e-9 * sum(macs.values()))


def test_activations_of_a_shared_mlp():
    config = vit_config(TopKConfig())
    own, shared = (model_costs(vit_config(TopKConfig(), shared_dim=n)).activations for n in (None, 24))
    more = 4 * 2 * config.tokens() * 24 * len(config.moe_blocks())  # before and after GELU, of 4 bytes
    assert sum(shared.saved) - sum(own.saved) == more


def test_activations_of_gates_by_hand():
    """Beside rows: a gate of each expert, two weights of each slot, and tokens of length 1 where it is so."""
    layer = LayerShape(tokens=16, images=1, experts=4, slots=2, dim=32)
    assert MixtureConfig().saved(layer) == (4 * 2, 16 * 4)
    assert SoftConfig().saved(layer) == (2 * 4 * 2, 2 * 16 * 4 * 2 + 16 * 32)
    for soft in (SoftConfig(normalize="none"), SoftConfig(dispatch="uniform", combine="uniform")):
        assert soft.saved(layer) == (2 * 4 * 2, 2 * 16 * 4 * 2)


def test_measured_mixing_of_a_subset(monkeypatch):
    """The model does not answer its costs, so they are measured."""
    monkeypatch.setattr(ViTConfig, "costs", lambda *_, **__: None)
    config = vit_config(SoftConfig(slots_per_expert=2))
    few, every = (model_costs(config, RoutingOverrides(experts=n)).macs for n in (1, None))
    assert few["dispatch_combine"] == every["dispatch_combine"] / 4 > 0

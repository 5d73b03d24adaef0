"""Costs against three independent counts: the built model, torch's FLOP counter, and published numbers."""

from dataclasses import replace

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from moe.cost import forward_gflops_2mac, forward_macs, num_params, slots_per_token, train_flops_6mac
from moe.layer import MoEConfig
from moe.presets import PRESETS
from moe.routers import ExpertChoiceConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from moe.vit import ViT, ViTConfig

ROUTER_CONFIGS: list[RouterConfig | None] = [
    None,
    SoftConfig(),
    SoftConfig(slots_per_expert=3, normalize=False),
    TokenChoiceConfig(),
    TokenChoiceConfig(k=2, capacity_factor=1.5),
    ExpertChoiceConfig(),
    ExpertChoiceConfig(capacity_factor=0.6),
]


def with_moe(preset: str, router: RouterConfig | None, **fields) -> ViTConfig:
    moe = MoEConfig(router=router, **fields) if router else None
    return replace(PRESETS[preset], moe=moe)


@pytest.mark.parametrize("router", ROUTER_CONFIGS, ids=repr)
@pytest.mark.parametrize("preset", PRESETS)
def test_num_params_equals_the_model(preset, router):
    config = with_moe(preset, router, num_experts=4)
    with torch.device("meta"):
        model = ViT(config)
    assert num_params(config) == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("images_per_group", [1, 2])
@pytest.mark.parametrize("router", ROUTER_CONFIGS, ids=repr)
def test_forward_macs_equal_the_flop_counter(router, images_per_group):
    """Two FLOPs per MAC; attention in plain matmuls, for the counter does not see the CPU's fused kernel."""
    config = with_moe("debug", router, num_experts=4, images_per_group=images_per_group)
    model, images = ViT(config), torch.randn(4, 3, 8, 8)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        model(images)
    assert counter.get_total_flops() == 2 * 4 * sum(forward_macs(config).values())


def soft_moe_paper(preset: str, experts: int) -> ViTConfig:
    """The models of Soft MoE: MoE in the last half, one slot per expert, JFT-4B's 29,593 classes."""
    size = replace(PRESETS[preset], num_classes=29593)
    if not experts:
        return size
    layers = f"last_{size.depth // 2}"
    return replace(size, moe=MoEConfig(layers=layers, num_experts=experts, router=SoftConfig()))


# preset, experts, parameters, GMACs per image: counted from google-research/vmoe's own configs (942a78b) by
# jax.eval_shape and by matmul shapes; "params" and "analytic_matmul_gmacs" of reference/param_counts.json
COUNTED = [
    ("S/16", 0, 33_059_737, 4.585006464),
    ("B/16", 0, 108_555_673, 17.493609216),
    ("L/16", 0, 333_635_481, 61.262685184),
    ("H/14", 0, 668_675_993, 166.6605376),
    ("S/16", 128, 933_709_471, 4.277118336),
    ("S/14", 256, 1_841_402_527, 6.561949056),
    ("B/16", 128, 3_707_638_687, 15.915240192),
    ("L/16", 128, 13_127_249_829, 55.342425088),
    ("H/14", 128, 27_318_132_649, 141.83025792),
    ("H/14", 256, 54_177_406_889, 170.68706944),
]


@pytest.mark.parametrize(("preset", "experts", "params", "gmacs"), COUNTED)
def test_counts_of_the_authors_configs(preset, experts, params, gmacs):
    config = soft_moe_paper(preset, experts)
    assert num_params(config) == params
    assert sum(forward_macs(config).values()) == pytest.approx(gmacs * 1e9, rel=1e-12)


# preset, experts, parameters, GFLOP per image, steps of 4096 images, training exaFLOP: Soft MoE, table 1
PRINTED = [
    ("S/16", 0, 33e6, 9.2, 4e6, 227.1),
    ("B/16", 0, 108e6, 35.1, 4e6, 864.1),
    ("L/16", 0, 333e6, 122.9, 4e6, 3025.4),
    ("H/14", 0, 669e6, 334.2, 1e6, 2060.2),
    ("H/14", 0, 669e6, 334.2, 2e6, 4120.3),
    ("S/14", 256, 1.8e9, 13.2, 10e6, 814.2),
    ("B/16", 128, 3.7e9, 32.0, 9e6, 1769.5),
    ("L/16", 128, 13.1e9, 111.1, 4e6, 2734.1),
]


@pytest.mark.parametrize(("preset", "experts", "params", "gflop", "steps", "exaflop"), PRINTED)
def test_figures_of_the_paper(preset, experts, params, gflop, steps, exaflop):
    """Within what softmax, LayerNorm and GELU add. The paper's training figure is 3 per MAC, half of ours."""
    config = soft_moe_paper(preset, experts)
    rounding = 0.025 if params == 1.8e9 else 0.01  # of "1.8B"
    assert num_params(config) == pytest.approx(params, rel=rounding)
    assert forward_gflops_2mac(config) == pytest.approx(gflop, rel=0.01)
    assert train_flops_6mac(config, int(steps) * 4096) / 2 == pytest.approx(exaflop * 1e18, rel=0.025)


def test_macs_by_hand():
    """debug: 16 tokens, width 32, two blocks, the second of them MoE with 4 experts."""
    macs = forward_macs(with_moe("debug", TokenChoiceConfig(k=2, capacity_factor=1.0), num_experts=4))
    assert macs == {
        "embed": 16 * 3 * 2 * 2 * 32,
        "attention_projections": 2 * 16 * 4 * 32 * 32,
        "attention_scores": 2 * 2 * 16 * 16 * 32,
        "mlp": 16 * 2 * 32 * 128,
        "experts": 32 * 2 * 32 * 128,  # k=2: two rows a token
        "router": 16 * 32 * 4,
        "dispatch_combine": 0,
        "head": 32 * 10,
    }


@pytest.mark.parametrize(
    ("router", "rows"),
    [
        (None, 1.0),
        (TokenChoiceConfig(k=2, capacity_factor=1.5), 3.0),
        (ExpertChoiceConfig(capacity_factor=0.5), 0.5),
        (SoftConfig(slots_per_expert=2), 0.5),
    ],
)
def test_slots_per_token(router, rows):
    """16 tokens, 4 experts."""
    assert slots_per_token(with_moe("debug", router, num_experts=4)) == rows


def test_soft_slots_are_shared_by_the_images_of_a_group():
    assert slots_per_token(with_moe("debug", SoftConfig(), num_experts=4, images_per_group=2)) == 4 / 32
    assert slots_per_token(with_moe("debug", ExpertChoiceConfig(), num_experts=4, images_per_group=2)) == 1.0

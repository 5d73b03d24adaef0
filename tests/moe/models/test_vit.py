"""The whole model: outputs, config errors, padding, learning, compiling."""

import math
from dataclasses import replace
from itertools import combinations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from moe.dense import MLP
from moe.init import init_weights, mix, split, uniform
from moe.layer import MoEConfig
from moe.models.vit import ViT, ViTConfig
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.presets import PRESETS, create_model
from moe.routers import ExpertChoiceConfig, ReLUConfig, SoftConfig, TokenChoiceConfig
from moe.routers.affinity import SinkhornConfig, SparseTransportConfig
from moe.routing import RoutingInput
from tests.lanes import mostly_slow
from tests.moe.parts import KINDS, build_vit, each_kind, each_model, images, randn, vit_config


def overrides_of(router) -> RoutingOverrides:
    """Overrides that the router accepts."""
    if router is None:
        return AS_TRAINED
    changes = {"k": 2, "capacity_factor": 0.5} if isinstance(router, TokenChoiceConfig) else {}
    return RoutingOverrides(experts=2, random_blocks=(1,), **changes)


@each_model
def test_output(router):
    """Routings of the same forward pass if requested, for groups of two images; statistics per layer; the
    auxiliary loss sums layers and averages groups."""
    model = build_vit(router, layers="last_2", images_per_group=2)
    output, measured = model(images(4)), model(images(4), return_stats=True)
    requested = model(images(4), return_routings=True)
    assert output.routings == measured.routings == ()
    assert not output.stats
    assert output.logits.shape == (4, 10)
    assert torch.equal(output.logits, requested.logits)
    _, aux, *_ = model(images(4))
    assert torch.equal(model.head(model.features(images(4))), output.logits)
    assert [r.gates_GSE.shape for r in requested.routings] == [(2, 32, 4)] * (2 if router else 0)
    assert ("dropped_frac" in measured.stats) == (router is not None)
    assert all(value.shape == (2,) and not value.requires_grad for value in measured.stats.values())
    assert torch.equal(output.logits, measured.logits)
    summed = sum((r.aux_G.mean() for r in requested.routings), start=torch.zeros(()))
    torch.testing.assert_close(aux, summed)
    torch.testing.assert_close(output.aux, summed)
    assert (output.aux > 0) == isinstance(router, TokenChoiceConfig | ReLUConfig)


@each_kind
def test_keys_and_overrides_reach_every_layer(router):
    """Dropout and noise need keys; equal keys give equal logits."""
    model, keys_B = build_vit(router, expert_dropout=0.5), torch.arange(4)
    quiet, one, other = (model(images(4), keys_B=k).logits for k in (None, keys_B, keys_B + 4))
    torch.testing.assert_close(quiet, build_vit(router)(images(4)).logits)
    assert not torch.allclose(one, quiet)
    assert not torch.allclose(one, other)
    assert torch.equal(one, model(images(4), keys_B=keys_B).logits)
    assert not torch.allclose(model(images(4), routing_overrides=overrides_of(router)).logits, quiet)


@each_model
def test_bfloat16_stays_bfloat16(router):
    model = build_vit(router).to(torch.bfloat16)
    output = model(images(2).to(torch.bfloat16))
    assert output.logits.dtype == torch.bfloat16
    (output.logits.sum() + output.aux).backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())


def test_sizes_of_a_config():
    """Slots are per group; a class token is routed like any other token."""
    config = vit_config(ExpertChoiceConfig(), preset="S/16", num_experts=8, images_per_group=4)
    assert PRESETS["S/16"].slots() == 0
    assert config.slots() == 98  # 4 x 196 / 8
    assert replace(config, pooling="token").tokens() == 197
    assert replace(config, pooling="token").slots() == 98  # 98.5 to even
    sparse = vit_config(ExpertChoiceConfig(affinity=SparseTransportConfig()))
    assert sparse.family() == "sparse_transport_expert_choice"
    assert vit_config(TokenChoiceConfig()).family() == "token_choice"
    assert vit_config(None).family() == "dense"


def test_starts_with_the_same_prediction():
    for bias in (0.0, -math.log(10)):
        assert ViT(replace(PRESETS["debug"], head_bias=bias))(images(2)).logits.eq(bias).all()


def test_names_of_checkpoints():
    """Checkpoints depend on parameter names: those of the default config, and those that options add."""
    config = replace(PRESETS["debug"], depth=1)

    def names(**fields) -> set[str]:
        return set(ViT(replace(config, **fields)).state_dict())

    def with_bias(*layers: str) -> set[str]:
        return {f"{layer}.{part}" for layer in layers for part in ("weight", "bias")}

    block = ("norm1", "norm2", "attention.qkv", "attention.out", "mlp.up", "mlp.down")
    layers = with_bias("embed", "norm", "head", *(f"blocks.0.{layer}" for layer in block))
    qk_norm = {"blocks.0.attention.norm_q.weight", "blocks.0.attention.norm_k.weight"}
    assert names() == layers | qk_norm | {"position_SD"}
    assert names(qk_norm=False) == names() - qk_norm
    assert names(pooling="token") == names() | {"class_token_D"}
    assert names(position="sincos2d") == names(position="none") == names() - {"position_SD"}
    assert names(representation_size=5) == names() | with_bias("pre_logits")
    assert {name.split(".")[0] for name in names(pooling="map") - names()} == {"pool"}
    stem = with_bias("embed.conv0", "embed.norm0", "embed.project")
    assert names(layer_scale=1e-4) == names() | {"blocks.0.scale1_D", "blocks.0.scale2_D"}
    assert names(stem="conv") == names() - with_bias("embed") | stem


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 225}, "patch_size=16 does not divide image_size=225"),
        ({"heads": 7}, "heads=7 does not divide width=384"),
        (
            {"patch_size": 14, "stem": "conv"},
            "stem='conv' needs a patch_size that is a power of two .* got 14",
        ),
        ({"patch_size": 1, "stem": "conv"}, "a power of two and at least 2, got 1"),
        ({"position": "sincos2d", "width": 390}, "multiples of 4 from 8, got 390"),
        ({"moe": MoEConfig(layers=(12,))}, r"layers=\(12,\) does not fit depth=12"),
        ({"moe": MoEConfig(num_experts=500)}, "capacity_factor=1.05 leaves no slot: 196 assignments"),
        ({"moe": MoEConfig(router=TokenChoiceConfig(k=9))}, "k=9 exceeds num_experts=8"),
        (
            {"moe": MoEConfig(residual=False), "drop_path": 0.1},
            "drop_path=0.1 and layer_scale=None are for what a block adds, .* with moe.residual=False",
        ),
        ({"moe": MoEConfig(residual=False), "layer_scale": 1e-4}, "layer_scale=0.0001 are for what a block"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        ViTConfig(**fields)


def shuffled(x: torch.Tensor) -> torch.Tensor:
    """Patches of 2 x 2 in reverse order."""
    patches = x.unflatten(2, (4, 2)).unflatten(4, (4, 2))
    return patches.flip(2, 4).flatten(4, 5).flatten(2, 3)


@pytest.mark.parametrize("pooling", ["gap", "token", "map"])
@pytest.mark.parametrize("position", ["learned", "sincos2d", "none"])
def test_position_matters_where_there_is_one(pooling, position):
    """A class token comes first; it has a learned position, but no sine or cosine."""
    model = ViT(replace(PRESETS["debug"], pooling=pooling, position=position, representation_size=6))
    one, other = model.features(images(2)), model.features(shuffled(images(2)))
    assert one.shape == (2, 6)
    assert one.abs().max() < 1
    assert torch.allclose(one, other, atol=1e-5) == (position == "none")
    if pooling == "token":
        torch.nn.init.normal_(model.class_token_D)
        own = model.position_SD[0] if position == "learned" else 0
        assert torch.equal(model.embedded(images(2))[:, 0], (model.class_token_D + own).expand(2, -1))


@each_kind
def test_without_the_skip_connection(router):
    """The block's output is that of its MoE layer."""
    model, seen = build_vit(router, residual=False, layers=(1,)), []
    model.blocks[1].mlp.register_forward_hook(lambda _, __, out: seen.append(out[0]))
    model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(images(2))
    assert torch.equal(*seen)


def test_overrides_that_do_not_fit():
    model = build_vit(TokenChoiceConfig(), layers=(1,))
    with pytest.raises(ValueError, match=r"random_blocks=\[0, 7\] are not MoE blocks; .* are \(1,\)"):
        model(images(4), routing_overrides=RoutingOverrides(random_blocks=(7, 1, 0)))
    with pytest.raises(ValueError, match="a dense model has no routing to override"):
        build_vit(None)(images(2), routing_overrides=RoutingOverrides(experts=2))


@each_model
def test_padding_images_change_nothing(router):
    """`test_routers` tests larger groups; here an incomplete group is filled with padding."""
    model, valid = build_vit(router), torch.tensor([1.0, 0, 1, 0])
    padded = images(4) * valid[:, None, None, None]
    with_padding = model(padded, valid, return_stats=True)
    alone = model(images(4)[valid == 1], return_stats=True)
    torch.testing.assert_close(with_padding.logits[valid == 1], alone.logits)
    assert alone.logits.std() > 0.1
    torch.testing.assert_close(with_padding.stats, alone.stats)
    model = build_vit(router, images_per_group=2)
    torch.testing.assert_close(
        model(padded[:3]).logits, model(padded, torch.tensor([1.0, 1, 1, 0])).logits[:3]
    )


SLOW = [
    None,
    *KINDS,
    *(ExpertChoiceConfig(affinity=plan(iterations=30)) for plan in (SinkhornConfig, SparseTransportConfig)),
]


@pytest.mark.parametrize(
    ("router", "calls"),
    [
        pytest.param(SoftConfig(), ["overrides"], marks=pytest.mark.smoke),
        *mostly_slow([(r, ["plain", "keys", "overrides", "plain"]) for r in SLOW], fast=[]),
    ],
    ids=lambda value: "" if isinstance(value, list) else value.kind if value else "dense",
)
def test_compiles_as_one_graph(router, calls):
    """One compiled function obeys its arguments: nothing of the first call is compiled in."""
    model = build_vit(router, images_per_group=2, expert_dropout=0.1)
    torch.compiler.reset()  # other models' graphs count against the limit of recompilations
    compiled, logits = torch.compile(model, fullgraph=True, backend="aot_eager"), {}
    names, params = zip(*model.named_parameters(), strict=True)
    for call in calls:
        arguments = {
            "plain": {},
            "keys": {"keys_B": torch.arange(4), "return_stats": True},
            "overrides": {"routing_overrides": overrides_of(router)},
        }[call]
        expected, got = model(images(4), **arguments), compiled(images(4), **arguments)
        torch.testing.assert_close(got.logits, expected.logits)
        torch.testing.assert_close(got.stats, expected.stats)
        # A random router has no gradient.
        both = (
            torch.autograd.grad(out.logits.square().sum() + out.aux, params, materialize_grads=True)
            for out in (got, expected)
        )
        for name, ours, theirs in zip(names, *both, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=name)
        logits[call] = got.logits
    values = list(logits.values()) if router else []
    assert not any(torch.allclose(one, other) for one, other in combinations(values, 2))


def test_dropout_is_keyed_by_image_and_off_without_keys():
    """An image's dropout depends on its key, not on the images beside it; blocks drop different numbers."""
    config = replace(PRESETS["debug"], dropout=0.3)
    model, plain = (ViT(each, seed=0) for each in (config, PRESETS["debug"]))
    for each in (model, plain):
        torch.nn.init.normal_(each.head.weight, generator=torch.Generator().manual_seed(0))
    x, keys_B = images(4), torch.tensor([5, 6, 7, 5])
    assert torch.equal(model(x).logits, plain(x).logits)
    dropped = model(x, keys_B=keys_B).logits
    assert not torch.allclose(dropped, plain(x).logits)
    torch.testing.assert_close(model(x[[2, 0]], keys_B=keys_B[[2, 0]]).logits, dropped[[2, 0]])
    same = x[[0, 0, 0, 0]]
    first, second, _, fourth = model(same, keys_B=keys_B).logits
    assert torch.equal(first, fourth)
    assert not torch.allclose(first, second)


@each_model
def test_drop_path_skips_branches_of_an_image(router):
    """Each half of the last block alone changes an image's tokens or not, by the image's own key."""
    config = replace(vit_config(router), drop_path=0.4, drop_path_schedule="constant")
    model, plain = ViT(config), ViT(replace(config, drop_path=0.0))
    x, keys_B = images(64), torch.arange(64)
    assert torch.equal(model(x).logits, plain(x).logits)
    block = model.blocks[1]
    tokens, valid = randn(64, 16, config.width), torch.ones(64)
    kept_2B = block.kept(keys_B)
    torch.testing.assert_close(kept_2B.unique(), torch.tensor([0, 1 / 0.6]))
    assert torch.equal(block.kept(keys_B.flip(0)), kept_2B.flip(1))
    assert not torch.equal(model.blocks[0].kept(keys_B), kept_2B)
    assert abs((kept_2B > 0).float().mean() - 0.6) < 0.13
    both = kept_2B.bool().float() @ kept_2B.bool().float().T / 64
    assert abs(both[0, 1] - 0.36) < 0.18, "the branches of an image are drawn apart"
    out = block(tokens, RoutingInput(valid, keys_B)).x
    assert torch.equal((out == tokens).all((1, 2)), (kept_2B == 0).all(0))


def test_a_model_starts_with_its_layer_scale():
    """With tiny factors blocks change nothing; factors of 1 are none."""
    config = vit_config(SoftConfig())
    one, none, tiny = (ViT(replace(config, layer_scale=scale)) for scale in (1.0, None, 1e-9))
    x = images(3)
    assert torch.equal(one.features(x), none.features(x))
    torch.testing.assert_close(tiny.features(x), tiny.pooled(tiny.norm(tiny.embedded(x))))
    assert not torch.allclose(tiny.features(x), none.features(x))


def test_an_mlp_drops_both_of_its_layers():
    mlp, x = MLP(8, 256, dropout=0.25), randn(3, 5, 8)
    init_weights(mlp, 0)
    keys = torch.arange(15).view(3, 5)
    h = F.gelu(mlp.up(x), approximate="tanh")
    h = h * keep(mix(keys, 0), 256) / 0.75
    expected = mlp.down(h) * keep(mix(keys, 1), 8) / 0.75
    torch.testing.assert_close(mlp(x, keys), expected)
    assert abs(keep(mix(keys, 0), 256).mean() - 0.75) < 0.03


def keep(keys: Tensor, width: int) -> Tensor:
    return (uniform(split(keys, width)) >= 0.25).float()


def test_a_model_by_name():
    model, again = (create_model("debug", num_classes=7, seed=3) for _ in range(2))
    assert model(images(2)).logits.shape == (2, 7)
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), again.parameters(), strict=True))
    with pytest.raises(ValueError, match=r"unknown model 'S/61'; known: debug, .*; did you mean 'S/16'"):
        create_model("S/61")

"""The whole model: outputs, config errors, padding, learning, compiling."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moe.layer import MoEConfig
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.presets import PRESETS
from moe.routers import ROUTERS, ExpertChoiceConfig, SoftConfig, TokenChoiceConfig
from moe.routers.affinity import SparseTransportConfig
from moe.vit import ViT, ViTConfig
from tests.lanes import mostly_slow
from tests.moe.parts import randn

routers = [None, *(kind() for kind in ROUTERS)]
each_router = pytest.mark.parametrize("router", routers[1:], ids=lambda r: r.kind)
each_model = pytest.mark.parametrize("router", routers, ids=lambda r: r.kind if r else "dense")


def images(count: int) -> torch.Tensor:
    return randn(count, 3, 8, 8)


@each_model
def test_output(build_vit, router):
    """Routings of the same forward pass if requested, for groups of two images; statistics per layer; the
    auxiliary loss sums layers and averages groups."""
    model = build_vit(router, layers="last_2", images_per_group=2)
    output, requested = model(images(4)), model(images(4), return_routings=True)
    assert output.routings == ()
    assert output.logits.shape == (4, 10)
    assert torch.equal(output.logits, requested.logits)
    features, aux, *_ = model.features(images(4))
    assert torch.equal(model.head(features), output.logits)
    assert [r.gates_GSE.shape for r in requested.routings] == [(2, 32, 4)] * (2 if router else 0)
    assert ("dropped_frac" in output.stats) == (router is not None)
    assert all(value.shape == (2,) and not value.requires_grad for value in output.stats.values())
    summed = sum((r.aux_G.mean() for r in requested.routings), start=torch.zeros(()))
    torch.testing.assert_close(aux, summed)
    torch.testing.assert_close(output.aux, summed)
    assert (output.aux > 0) == isinstance(router, TokenChoiceConfig)


@each_router
def test_keys_and_overrides_reach_every_layer(build_vit, router):
    """Dropout and noise need keys; equal keys give equal logits."""
    model, keys_B = build_vit(router, expert_dropout=0.5), torch.arange(4)
    quiet, one, other = (model(images(4), keys_B=k).logits for k in (None, keys_B, keys_B + 4))
    torch.testing.assert_close(quiet, build_vit(router)(images(4)).logits)
    assert not torch.allclose(one, quiet)
    assert not torch.allclose(one, other)
    assert torch.equal(one, model(images(4), keys_B=keys_B).logits)
    overridden = model(images(4), routing_overrides=kept(router)).logits
    assert not torch.allclose(overridden, quiet)


@each_model
def test_bfloat16_stays_bfloat16(build_vit, router):
    model = build_vit(router).to(torch.bfloat16)
    output = model(images(2).to(torch.bfloat16))
    assert output.logits.dtype == torch.bfloat16
    (output.logits.sum() + output.aux).backward()
    assert all(p.grad.dtype == torch.bfloat16 and p.grad.isfinite().all() for p in model.parameters())


def test_sizes_of_a_config():
    """Slots are per group; a class token is routed like any other token."""
    config = replace(PRESETS["S/16"], moe=MoEConfig(router=ExpertChoiceConfig(), images_per_group=4))
    assert PRESETS["S/16"].slots() == 0
    assert config.slots() == 98  # 4 x 196 / 8
    assert replace(config, pooling="token").tokens() == 197
    assert replace(config, pooling="token").slots() == 98  # 98.5 to even
    assert PRESETS["S/16"].family() == "dense"
    assert replace(PRESETS["S/16"], moe=MoEConfig()).family() == "token_choice"
    sparse = MoEConfig(router=ExpertChoiceConfig(affinity=SparseTransportConfig()))
    assert replace(PRESETS["S/16"], moe=sparse).family() == "sparse_transport_expert_choice"


def test_starts_with_the_same_prediction():
    for bias in (0.0, -math.log(10)):
        assert ViT(replace(PRESETS["debug"], head_bias=bias))(images(2)).logits.eq(bias).all()


def test_names_of_checkpoints():
    """Checkpoints depend on parameter names: those of the default config, and those that options add."""
    config = replace(PRESETS["debug"], depth=1)

    def names(**fields) -> set[str]:
        return set(ViT(replace(config, **fields)).state_dict())

    norms = {f"blocks.0.{n}.{p}" for n in ("norm1", "norm2") for p in ("weight", "bias")}
    layers = {
        f"{layer}.{p}"
        for layer in ("embed", "norm", "head", "blocks.0.attention.qkv", "blocks.0.attention.out")
        for p in ("weight", "bias")
    } | {f"blocks.0.mlp.{layer}.{p}" for layer in ("up", "down") for p in ("weight", "bias")}
    qk_norm = {"blocks.0.attention.norm_q.weight", "blocks.0.attention.norm_k.weight"}
    assert names() == norms | layers | qk_norm | {"position_SD"}
    assert names(qk_norm=False) == names() - qk_norm
    assert names(pooling="token") == names() | {"class_token_D"}
    assert names(position="sincos2d") == names(position="none") == names() - {"position_SD"}
    assert names(representation_size=5) == names() | {"pre_logits.weight", "pre_logits.bias"}
    assert {name.split(".")[0] for name in names(pooling="map") - names()} == {"pool"}
    stem = {f"embed.{layer}.{p}" for layer in ("conv0", "norm0", "project") for p in ("weight", "bias")}
    assert names(stem="conv") == names() - {"embed.weight", "embed.bias"} | stem


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 225}, "patch_size=16 does not divide image_size=225"),
        ({"heads": 7}, "heads=7 does not divide width=384"),
        (
            {"patch_size": 14, "stem": "conv"},
            "stem='conv' needs a patch_size that is a power of two and at least 2, got 14",
        ),
        ({"patch_size": 1, "stem": "conv"}, "a power of two and at least 2, got 1"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"num_classes": -1}, "num_classes must be at least 1, got -1"),
        ({"representation_size": 0}, "representation_size must be at least 1, got 0"),
        ({"position": "sincos2d", "width": 390}, "multiples of 4 from 8, got 390"),
        ({"head_bias": -math.inf}, "head_bias must be finite, got -inf"),
        ({"moe": MoEConfig(layers=(12,))}, r"layers=\(12,\) does not fit depth=12"),
        ({"moe": MoEConfig(num_experts=500)}, "capacity_factor=1.05 leaves no slot: 196 assignments"),
        ({"moe": MoEConfig(router=TokenChoiceConfig(k=9))}, "k=9 exceeds num_experts=8"),
        ({"moe": MoEConfig(router=ExpertChoiceConfig(capacity_factor=9.0))}, "use at most 8"),
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
    model = ViT(replace(PRESETS["debug"], pooling=pooling, position=position, representation_size=6))
    one, other = model.features(images(2))[0], model.features(shuffled(images(2)))[0]
    assert one.shape == (2, 6)
    assert one.abs().max() < 1
    assert torch.allclose(one, other, atol=1e-5) == (position == "none")


@pytest.mark.parametrize("position", ["learned", "sincos2d"])
def test_class_token_comes_first(position):
    """It has a learned position, but no sine or cosine."""
    model = ViT(replace(PRESETS["debug"], pooling="token", position=position))
    torch.nn.init.normal_(model.class_token_D)
    first_BD = model.embedded(images(2))[:, 0]
    own = model.position_SD[0] if position == "learned" else 0
    assert torch.equal(first_BD, (model.class_token_D + own).expand(2, -1))


@each_router
def test_without_the_skip_connection(build_vit, router):
    """The block's output is that of its MoE layer."""
    model, seen = build_vit(router, residual=False, layers=(1,)), []
    model.blocks[1].mlp.register_forward_hook(lambda _, __, out: seen.append(out[0]))
    model.norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    model(images(2))
    assert torch.equal(*seen)


def test_overrides_that_do_not_fit(build_vit):
    model = build_vit(TokenChoiceConfig(), layers=(1,))
    with pytest.raises(ValueError, match=r"random_blocks=\[0, 7\] are no MoE blocks; .* are \(1,\)"):
        model(images(4), routing_overrides=RoutingOverrides(random_blocks=(7, 1, 0)))
    with pytest.raises(ValueError, match="a dense model has no routing to override"):
        build_vit(None)(images(2), routing_overrides=RoutingOverrides(experts=2))


@each_model
def test_padding_images_change_nothing(build_vit, router):
    """One image per group; test_routers tests larger groups."""
    model, valid = build_vit(router), torch.tensor([1.0, 0, 1, 0])
    padded = images(4) * valid[:, None, None, None]
    with_padding, alone = model(padded, valid), model(images(4)[valid == 1])
    torch.testing.assert_close(with_padding.logits[valid == 1], alone.logits)
    assert alone.logits.std() > 0.1
    for name, value in alone.stats.items():
        torch.testing.assert_close(with_padding.stats[name], value)


@each_router
def test_an_incomplete_group_is_filled_with_padding(build_vit, router):
    model, valid = build_vit(router, images_per_group=2), torch.tensor([1.0, 1, 1, 0])
    padded = images(4) * valid[:, None, None, None]
    torch.testing.assert_close(model(padded[:3]).logits, model(padded, valid).logits[:3])


@each_model
def test_learns_one_batch(router):
    """From the initial weights of training, with the head at zero."""
    moe = MoEConfig(num_experts=4, router=router) if router else None
    model = ViT(replace(PRESETS["debug"], moe=moe))
    x, labels = images(8), torch.arange(8)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=3e-3), []
    for _ in range(60):
        output = model(x)
        loss = F.cross_entropy(output.logits, labels) + output.aux
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(10.0).log().item(), rel=0.05)
    assert losses[-1] < 0.2
    assert all(p.grad.abs().sum() > 0 for p in model.parameters())


def kept(router) -> RoutingOverrides:
    """Overrides that the router accepts."""
    if router is None:
        return AS_TRAINED
    changes = {"k": 2, "capacity_factor": 0.5} if isinstance(router, TokenChoiceConfig) else {}
    return RoutingOverrides(experts=2, random_blocks=(1,), **changes)


@pytest.mark.parametrize(
    "router",
    mostly_slow(routers, fast=[SoftConfig(), TokenChoiceConfig()]),
    ids=lambda r: r.kind if r else "dense",
)
@pytest.mark.parametrize("how", mostly_slow(["plain", "keys", "overrides"], fast=["overrides"]))
def test_compiles_as_one_graph(build_vit, router, how):
    model = build_vit(router, expert_dropout=0.1)
    torch.compiler.reset()  # other models' graphs count against the limit of recompilations
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    arguments = {
        "plain": {},
        "keys": {"keys_B": torch.arange(4)},
        "overrides": {"routing_overrides": kept(router)},
    }[how]
    expected, got = model(images(4), **arguments), compiled(images(4), **arguments)
    torch.testing.assert_close(got.logits, expected.logits)
    assert set(got.stats) == set(expected.stats)
    names, params = zip(*model.named_parameters(), strict=True)
    both = (  # a random router has no gradient
        torch.autograd.grad(out.logits.square().sum() + out.aux, params, materialize_grads=True)
        for out in (got, expected)
    )
    for name, ours, theirs in zip(names, *both, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4, msg=name)

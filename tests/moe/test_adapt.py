"""Resized position embeddings and upcycled models against what they must equal."""

from dataclasses import replace

import pytest
import torch

from moe.adapt import plan_transfer, resize_position, upcycle
from moe.layer import MoEConfig
from moe.presets import PRESETS
from moe.routers import ROUTERS, ExpertChoiceConfig, MixtureConfig, SoftConfig, TokenChoiceConfig
from moe.vit import ViT, ViTConfig
from tests.moe.parts import GOLDENS, read_golden

DEBUG = PRESETS["debug"]


def dense(**fields) -> dict[str, torch.Tensor]:
    """Random weights, without the zeros and ones of initial weights."""
    state, g = ViT(replace(DEBUG, **fields)).state_dict(), torch.Generator().manual_seed(1)
    return {name: 0.3 * torch.randn(t.shape, generator=g) for name, t in state.items()}


def with_experts(router, **fields) -> ViTConfig:
    return replace(DEBUG, moe=MoEConfig(router=router, num_experts=4), **fields)


def output(config: ViTConfig, state: dict[str, torch.Tensor]) -> torch.Tensor:
    model = ViT(config)
    model.load_state_dict(state)
    side = config.image_size
    return model(torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(2))).logits


def test_resize_is_the_authors_zoom():
    arrays, meta = read_golden(GOLDENS / "posemb__vit_zoom.npz")
    source, target = arrays["source"][0], arrays["target"][0]
    got = resize_position(source, meta["old_grid"], meta["new_grid"], class_token=True)
    torch.testing.assert_close(got, target, rtol=0, atol=1e-6)
    patches = resize_position(source[1:], meta["old_grid"], meta["new_grid"], class_token=False)
    assert torch.equal(patches, got[1:])
    assert torch.equal(got[0], source[0])


def test_resize_by_hand():
    """Corners stay corners, and new points are interpolated; the same grid changes nothing."""
    corners = torch.tensor([[0.0], [1], [2], [3]])
    got = resize_position(corners, 2, 3, class_token=False)
    assert got.flatten().tolist() == [0, 0.5, 1, 1, 1.5, 2, 2, 2.5, 3]
    assert torch.equal(resize_position(corners, 2, 2, class_token=False), corners)


@pytest.mark.parametrize(("rows", "class_token"), [(9, True), (10, False), (16, False)])
def test_resize_of_another_grid_is_refused(rows, class_token):
    with pytest.raises(ValueError, match=rf"has {rows} rows, a grid of 3 x 3 .* class token"):
        resize_position(torch.zeros(rows, 4), 3, 5, class_token=class_token)


@pytest.mark.parametrize("router", [kind() for kind in ROUTERS], ids=lambda r: r.kind)
def test_every_expert_is_the_mlp(router):
    config, state = with_experts(router, pooling="token"), dense(pooling="token")
    model = ViT(config)
    model.load_state_dict(upcycle(state, config, seed=5))
    experts = model.blocks[1].mlp.experts
    x = torch.randn(3, 32)
    hidden = x @ state["blocks.1.mlp.up.weight"].T + state["blocks.1.mlp.up.bias"]
    mlp = torch.nn.functional.gelu(hidden, approximate="tanh") @ state["blocks.1.mlp.down.weight"].T
    expected = (mlp + state["blocks.1.mlp.down.bias"]).expand(4, -1, -1)
    torch.testing.assert_close(experts(x.expand(4, -1, -1)), expected)
    fresh = ViT(config, seed=5).state_dict()
    for name, tensor in model.state_dict().items():
        if ".router." in name:
            assert torch.equal(tensor, fresh[name]), name
        elif ".experts." not in name:
            assert torch.equal(tensor, state[name]), name


SUM_TO_ONE = {
    # as many slots as tokens, token i to slot i and back
    "identity": SoftConfig(total_slots=16, dispatch="identity", combine="identity"),
    # a softmax over all experts, each of which has room for every token
    "every expert": TokenChoiceConfig(k=4, capacity_factor=1.0),
    "mixture": MixtureConfig(),
}


@pytest.mark.parametrize("router", SUM_TO_ONE.values(), ids=SUM_TO_ONE.keys())
def test_where_weights_sum_to_one_it_is_the_dense_model(router):
    """Each token itself is what experts see, and they are copies of one MLP: routing changes nothing."""
    config, state = with_experts(router), dense()
    torch.testing.assert_close(output(config, upcycle(state, config)), output(DEBUG, state))


def test_upcycled_weights_share_no_memory():
    """Neither with the dense model nor between experts."""
    state, config = dense(), with_experts(ExpertChoiceConfig())
    before = {name: tensor.clone() for name, tensor in state.items()}
    upcycled = upcycle(state, config)
    weights = upcycled["blocks.1.mlp.experts.w_in_EDF"]
    weights[0] = 0
    assert weights[1].abs().sum() > 0
    for tensor in upcycled.values():
        tensor.zero_()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


def test_models_move_to_another_resolution():
    """4 x 4 -> 6 x 6 patches. MoE blocks are copied, including their routers (V-MoE section 3.5)."""
    config = with_experts(ExpertChoiceConfig())
    state = {name: torch.randn_like(tensor) for name, tensor in ViT(config).state_dict().items()}
    for source, target in ((state, config), (dense(), DEBUG)):
        adapted = upcycle(source, replace(target, image_size=12))
        assert adapted.keys() == source.keys()
        resized = resize_position(source["position_SD"], 4, 6, class_token=False)
        for name, tensor in adapted.items():
            assert torch.equal(tensor, resized if name == "position_SD" else source[name]), name


def test_what_does_not_fit_is_named():
    config = with_experts(ExpertChoiceConfig())
    with pytest.raises(ValueError, match=r"blocks.0.mlp.up.weight \(\(64, 32\) there, \(128, 32\) here\)"):
        upcycle(dense(mlp_dim=64), config)
    with pytest.raises(ValueError, match=r"position_SD \(\(16, 48\) there, \(16, 32\) here\)"):
        upcycle(dense(width=48), config)
    with pytest.raises(ValueError, match=r"fit: head.weight \(\(7, 32\) there, \(10, 32\) here\)"):
        upcycle(dense(num_classes=7), config)
    with pytest.raises(ValueError, match=r"fit: blocks\.1\.norm1\.weight \(absent there\), .* and 9 more"):
        upcycle(dense(depth=1), config)
    with pytest.raises(ValueError, match=r"fit: blocks\.2\.norm1\.weight \(no place here\), .* and 9 more"):
        upcycle(dense(depth=3), config)
    with pytest.raises(ValueError, match=r"fit: position_SD \(\(17, 32\) there, \(16, 32\) here\), class_"):
        upcycle(dense(pooling="token"), config)


SHAPES = {
    "position_SD": (16, 8),
    "blocks.0.mlp.up.weight": (32, 8),
    "blocks.0.mlp.up.bias": (32,),
    "blocks.0.mlp.down.weight": (8, 32),
    "blocks.0.mlp.down.bias": (8,),
    "head.weight": (10, 8),
}
EXPERTS = {
    "blocks.0.mlp.router.gate_DE": (8, 4),
    "blocks.0.mlp.experts.w_in_EDF": (4, 8, 32),
    "blocks.0.mlp.experts.b_in_EF": (4, 32),
    "blocks.0.mlp.experts.w_out_EFD": (4, 32, 8),
    "blocks.0.mlp.experts.b_out_ED": (4, 8),
}
MLP = [name for name in SHAPES if ".mlp." in name]


def moe(**changed: tuple[int, ...]) -> dict[str, tuple[int, ...]]:
    outside = {name: shape for name, shape in SHAPES.items() if name not in MLP}
    return outside | EXPERTS | {f"blocks.0.mlp.experts.{name}": shape for name, shape in changed.items()}


def test_plan_between_dense_and_experts():
    plan = plan_transfer(SHAPES, moe())
    assert plan.copied == ("position_SD", "head.weight")
    assert {name: made.source for name, made in plan.converted.items()} == dict(
        zip([name for name in EXPERTS if ".experts." in name], MLP, strict=True)
    )
    assert plan.initial == {"blocks.0.mlp.router.gate_DE": "absent there"}
    assert plan.unused == ()
    plan = plan_transfer(moe(), SHAPES)
    assert plan.initial == dict.fromkeys(MLP, "absent there")
    assert plan.converted == {}
    assert plan.unused == tuple(EXPERTS)
    assert plan_transfer(SHAPES, SHAPES).copied == tuple(SHAPES)


def test_plan_of_other_experts():
    """Experts in another number or of another width are not taken over."""
    plan = plan_transfer(moe(), moe(b_in_EF=(2, 32)))
    assert plan.initial == {"blocks.0.mlp.experts.b_in_EF": "(4, 32) there, (2, 32) here"}
    assert plan.unused == ()
    plan = plan_transfer(SHAPES, moe(w_in_EDF=(4, 8, 16)))
    assert plan.initial["blocks.0.mlp.experts.w_in_EDF"] == "(32, 8) there, (4, 8, 16) here"
    assert plan.unused == ("blocks.0.mlp.up.weight",)


def test_plan_of_other_positions():
    """Resized where both have a class token, or neither has."""
    token = {"class_token_D": (8,)}
    old, new = SHAPES | token | {"position_SD": (17, 8)}, SHAPES | token | {"position_SD": (37, 8)}
    assert plan_transfer(old, new).converted["position_SD"].how == "resized from 4 x 4 to 6 x 6 patches"
    plan = plan_transfer(old, SHAPES)
    assert plan.initial == {"position_SD": "(17, 8) there, (16, 8) here"}
    assert plan.unused == ("class_token_D",)
    assert plan_transfer(SHAPES, SHAPES | {"position_SD": (36, 16)}).converted == {}

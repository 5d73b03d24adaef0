"""Resized position embeddings and upcycled models against what they must equal."""

from dataclasses import replace

import pytest
import torch

from moe.adapt import plan_transfer, resize_position
from moe.models.vit import ViT, ViTConfig
from moe.presets import PRESETS
from moe.routers import ExpertChoiceConfig, MixtureConfig, SoftConfig, TokenChoiceConfig, TopKConfig
from tests.moe.parts import each_kind, upcycle, vit_config

DEBUG = PRESETS["debug"]


def dense(**fields) -> dict[str, torch.Tensor]:
    """Random weights, without the zeros and ones of initial weights."""
    state, g = ViT(replace(DEBUG, **fields)).state_dict(), torch.Generator().manual_seed(1)
    return {name: 0.3 * torch.randn(t.shape, generator=g) for name, t in state.items()}


def output(config: ViTConfig, state: dict[str, torch.Tensor]) -> torch.Tensor:
    model = ViT(config)
    model.load_state_dict(state)
    side = config.image_size
    return model(torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(2))).logits


def test_resize_by_hand():
    """Corners stay corners, and new points are interpolated; the same grid changes nothing."""
    corners = torch.tensor([[0.0], [1], [2], [3]])
    got = resize_position(corners, 2, 3, class_token=False)
    assert got.flatten().tolist() == [0, 0.5, 1, 1, 1.5, 2, 2, 2.5, 3]
    assert torch.equal(resize_position(corners, 2, 2, class_token=False), corners)
    for rows, class_token in ((4, True), (5, False)):
        with pytest.raises(ValueError, match=rf"has {rows} rows, a grid of 2 x 2 .* class token"):
            resize_position(torch.zeros(rows, 1), 2, 3, class_token=class_token)


@each_kind
def test_every_expert_is_the_mlp(router):
    config = replace(vit_config(router), pooling="token")
    state, fresh = dense(pooling="token"), ViT(config, seed=5).state_dict()
    for name, tensor in upcycle(state, config, seed=5).items():
        block, experts, part = name.partition(".experts.")
        if experts:
            mlp = state[
                f"{block}.{'up' if 'in' in part else 'down'}.{'bias' if part[0] == 'b' else 'weight'}"
            ]
            torch.testing.assert_close(tensor, mlp.t().expand(4, *mlp.t().shape))
        else:
            assert torch.equal(tensor, fresh[name] if ".router." in name else state[name]), name


SUM_TO_ONE = {
    # as many slots as tokens, token i to slot i and back
    "identity": SoftConfig(total_slots=16, dispatch="identity", combine="identity"),
    # a softmax over all experts, each of which has room for every token
    "every expert": TokenChoiceConfig(k=4, capacity_factor=1.0),
    "mixture": MixtureConfig(),
    # each expert takes every token
    "expert choice": ExpertChoiceConfig(capacity_factor=4),
}


@pytest.mark.parametrize("router", SUM_TO_ONE.values(), ids=SUM_TO_ONE.keys())
def test_where_weights_sum_to_one_it_is_the_dense_model(router):
    """Each token itself is what experts see, and they are copies of one MLP: routing changes nothing."""
    state = dense()
    expected = output(DEBUG, state)
    torch.testing.assert_close(output(vit_config(router), upcycle(state, vit_config(router))), expected)


@pytest.mark.parametrize(("shared", "own", "slices"), [(64, 32, 2), (None, 32, 4), (32, 96, 1)])
def test_shared_mlp_and_slices_together_are_the_mlp(shared, own, slices):
    """Any run of as many experts as there are slices, for 6 experts in all."""
    state = dense()
    config = vit_config(TopKConfig(), num_experts=6, expert_dim=own, shared_dim=shared)
    model, plain = ViT(config), ViT(DEBUG)
    model.load_state_dict(upcycle(state, config))
    plain.load_state_dict(state)
    layer, mlp = model.blocks[1].mlp, plain.blocks[1].mlp
    x = torch.randn(5, 32, generator=torch.Generator().manual_seed(3))
    outputs = layer.experts(x.expand(6, -1, -1))
    for first in range(6 - slices + 1):
        y = outputs[first : first + slices].sum(0) + (layer.shared(x) if shared else 0)
        torch.testing.assert_close(y, mlp(x))


def test_what_is_no_slice_is_drawn():
    """Experts that fill the MLP are its copies, beside a shared MLP that is new; others fit nowhere."""
    config = vit_config(TopKConfig(), shared_dim=64)
    taken, drawn = upcycle(dense(), config), ViT(config).state_dict()
    shared = [name for name in drawn if ".shared." in name]
    assert len(shared) == 4
    assert all(torch.equal(taken[name], drawn[name]) for name in shared)
    assert not torch.equal(taken["blocks.1.mlp.experts.w_in_EDF"], drawn["blocks.1.mlp.experts.w_in_EDF"])
    whole = upcycle(dense(), vit_config(TopKConfig(), expert_dim=32, shared_dim=128))
    assert torch.equal(whole["blocks.1.mlp.shared.down.weight"], dense()["blocks.1.mlp.down.weight"])
    plan = plan_transfer(SHAPES, moe(w_in_EDF=(4, 8, 12), b_in_EF=(4, 12), w_out_EFD=(4, 12, 8)))
    assert (
        plan.initial["blocks.0.mlp.experts.w_in_EDF"] == "(32, 8) in the checkpoint, (4, 8, 12) in the model"
    )


def test_models_move_to_another_resolution():
    """4 x 4 -> 6 x 6 patches. MoE blocks are copied, including their routers (V-MoE section 3.5)."""
    config = vit_config(ExpertChoiceConfig())
    state = {name: torch.randn_like(tensor) for name, tensor in ViT(config).state_dict().items()}
    for source, target in ((state, config), (dense(), DEBUG)):
        adapted = upcycle(source, replace(target, image_size=12))
        assert adapted.keys() == source.keys()
        resized = resize_position(source["position_SD"], 4, 6, class_token=False)
        for name, tensor in adapted.items():
            assert torch.equal(tensor, resized if name == "position_SD" else source[name]), name


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
    assert plan.initial == {"blocks.0.mlp.router.gate_DE": "not in the checkpoint"}
    assert plan.unused == ()
    plan = plan_transfer(moe(), SHAPES)
    assert plan.initial == dict.fromkeys(MLP, "not in the checkpoint")
    assert plan.converted == {}
    assert plan.unused == tuple(EXPERTS)
    assert plan_transfer(SHAPES, SHAPES).copied == tuple(SHAPES)


def test_plan_of_other_experts():
    """Experts in another number or of another width are not taken over."""
    plan = plan_transfer(moe(), moe(b_in_EF=(2, 32)))
    assert plan.initial == {"blocks.0.mlp.experts.b_in_EF": "(4, 32) in the checkpoint, (2, 32) in the model"}
    assert plan.unused == ()
    plan = plan_transfer(SHAPES, moe(w_in_EDF=(4, 8, 16)))
    assert (
        plan.initial["blocks.0.mlp.experts.w_in_EDF"] == "(32, 8) in the checkpoint, (4, 8, 16) in the model"
    )
    assert plan.unused == ("blocks.0.mlp.up.weight",)


def test_plan_of_other_positions():
    """Resized where both have a class token, or neither has."""
    token = {"class_token_D": (8,)}
    old, new = SHAPES | token | {"position_SD": (17, 8)}, SHAPES | token | {"position_SD": (37, 8)}
    assert plan_transfer(old, new).converted["position_SD"].how == "resized from 4 x 4 to 6 x 6 patches"
    plan = plan_transfer(old, SHAPES)
    assert plan.initial == {"position_SD": "(17, 8) in the checkpoint, (16, 8) in the model"}
    assert plan.unused == ("class_token_D",)
    assert plan_transfer(SHAPES, SHAPES | {"position_SD": (36, 16)}).converted == {}


def test_the_first_rows_of_a_larger_head():
    plan = plan_transfer({"head.weight": (3, 4)}, {"head.weight": (2, 4)}, rows=[0, 1])
    assert plan.copied == ()
    old = torch.arange(12).view(3, 4)
    assert torch.equal(plan.converted["head.weight"].of(old), old[:2])

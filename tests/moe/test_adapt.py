"""Resized position embeddings and upcycled models against what they must equal."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from moe.adapt import resize_position, upcycle
from moe.layer import MoEConfig
from moe.presets import PRESETS
from moe.routers import ROUTERS, ExpertChoiceConfig, SoftConfig
from moe.vit import ViT, ViTConfig

GOLDEN = Path(__file__).parents[1] / "goldens" / "posemb__vit_zoom.npz"
DEBUG = PRESETS["debug"]


def dense(**fields) -> dict[str, torch.Tensor]:
    """A trained model's state, as far as its numbers go: nothing is zero or one."""
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
    with np.load(GOLDEN) as file:
        meta = json.loads(str(file["meta"]))
        source, target = (torch.from_numpy(file[name])[0] for name in ("source", "target"))
    got = resize_position(source, meta["old_grid"], meta["new_grid"], class_token=True)
    torch.testing.assert_close(got, target, rtol=0, atol=1e-6)
    patches = resize_position(source[1:], meta["old_grid"], meta["new_grid"], class_token=False)
    assert torch.equal(patches, got[1:])
    assert torch.equal(got[0], source[0])


def test_resize_by_hand():
    """Corners stay corners, new points lie between their neighbours."""
    corners = torch.tensor([[0.0], [1], [2], [3]])
    got = resize_position(corners, 2, 3, class_token=False)
    assert got.flatten().tolist() == [0, 0.5, 1, 1, 1.5, 2, 2, 2.5, 3]


def test_resize_to_the_same_grid_changes_nothing():
    position = torch.randn(10, 4)
    assert torch.equal(resize_position(position, 3, 3, class_token=True), position)


@pytest.mark.parametrize(("rows", "class_token"), [(9, True), (10, False), (16, False)])
def test_resize_of_another_grid_is_refused(rows, class_token):
    with pytest.raises(ValueError, match=rf"has {rows} rows, a grid of 3 x 3 .* class token"):
        resize_position(torch.zeros(rows, 4), 3, 5, class_token=class_token)


@pytest.mark.parametrize("router", [kind() for kind in ROUTERS], ids=lambda r: r.kind)
@pytest.mark.parametrize("pooling", ["gap", "token", "map"])
def test_every_expert_is_the_mlp(router, pooling):
    config, state = with_experts(router, pooling=pooling), dense(pooling=pooling)
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


def test_with_the_identity_it_is_the_dense_model():
    """As many slots as tokens, token i to slot i and back: experts that are copies change nothing."""
    config = with_experts(SoftConfig(total_slots=16, dispatch="identity", combine="identity"))
    state = dense()
    torch.testing.assert_close(output(config, upcycle(state, config)), output(DEBUG, state))


def test_experts_do_not_share_memory():
    config = with_experts(ExpertChoiceConfig())
    weights = upcycle(dense(), config)["blocks.1.mlp.experts.w_in_EDF"]
    weights[0] = 0
    assert weights[1].abs().sum() > 0


def test_upcycling_takes_the_input_as_it_is():
    state, config = dense(), with_experts(ExpertChoiceConfig())
    before = {name: tensor.clone() for name, tensor in state.items()}
    for tensor in upcycle(state, config).values():
        tensor.zero_()
    assert all(torch.equal(state[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("pooling", ["gap", "token"])
def test_upcycling_to_another_resolution(pooling):
    """8 -> 12 pixels, 4 x 4 -> 6 x 6 patches; a model without experts is only resized."""
    state = dense(pooling=pooling)
    larger = replace(DEBUG, pooling=pooling, image_size=12)
    for config in (larger, replace(larger, moe=MoEConfig(num_experts=4, router=ExpertChoiceConfig()))):
        adapted = upcycle(state, config)
        expected = resize_position(state["position_SD"], 4, 6, class_token=pooling == "token")
        assert torch.equal(adapted["position_SD"], expected)
        assert output(config, adapted).isfinite().all()


def test_what_does_not_fit_is_named():
    config = with_experts(ExpertChoiceConfig())
    with pytest.raises(
        ValueError, match=r"blocks.0.mlp.up.weight of the dense model has shape \(64, 32\), .* \(128, 32\)"
    ):
        upcycle(dense(mlp_dim=64), config)
    with pytest.raises(
        ValueError, match=r"position_SD of the dense model has shape \(16, 48\), .* \(16, 32\)"
    ):
        upcycle(dense(width=48), config)
    with pytest.raises(
        ValueError, match=r"head.weight of the dense model has shape \(7, 32\), .* \(10, 32\)"
    ):
        upcycle(dense(num_classes=7), config)
    with pytest.raises(ValueError, match=r"the dense model has no blocks\.1\.attention\.norm_k\.weight, "):
        upcycle(dense(depth=1), config)
    with pytest.raises(
        ValueError, match=r"the model has no place for blocks\.2\.attention\.norm_k\.weight, "
    ):
        upcycle(dense(depth=3), config)
    with pytest.raises(ValueError, match=r"has 17 rows, a grid of 4 x 4 without class token 16"):
        upcycle(dense(pooling="token"), config)

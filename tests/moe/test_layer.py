"""Position of MoE layers, routing groups, and the router's arguments."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from moe.init import mix, split
from moe.layer import MoEConfig, MoELayer
from moe.models.vit import ViT
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.presets import PRESETS
from tests.moe.parts import build_layer, each_kind, randn

S, D = 6, 8


@pytest.mark.parametrize(
    ("layers", "depth", "blocks"),
    [
        ("every_2", 5, (1, 3)),
        ("last_1", 4, (3,)),
        ("last_12", 12, tuple(range(12))),
        ((5, 1, 1), 6, (1, 5)),
        ((0,), 1, (0,)),
        ("last_5_odd", 32, (23, 25, 27, 29, 31)),  # V-MoE-H/14, Last-5
        *((layers, 4, None) for layers in ("last_5", "last_3_odd", (), (1, 4), (-1, 2))),
        ("every_2", 1, None),
    ],
)
def test_placement(layers, depth, blocks):
    if blocks is not None:
        assert MoEConfig(layers=layers).blocks(depth) == blocks
        return
    with pytest.raises(ValueError, match=rf"does not fit depth={depth}: blocks are 0 .. {depth - 1}"):
        MoEConfig(layers=layers).blocks(depth)


def test_config_errors():
    for layers in ("every_3", "last_0", "last_2_even"):
        choices = "layers must be every_2, last_<n>, .* or block indices"
        with pytest.raises(ValueError, match=f"{choices}, got '{layers}'"):
            MoEConfig(layers=layers)


@each_kind
def test_groups_are_consecutive_images(router):
    """Images 0 and 1 share a group: image 0 depends on image 1, and not on image 2."""
    layer, x = build_layer(router, images_per_group=2), randn(4, S, D)
    y, routing = layer(x, torch.ones(4))
    assert y.shape == x.shape
    assert routing.aux_G.shape == (2,)
    other = torch.cat([x[:1], torch.randn(1, S, D), x[2:]])
    torch.testing.assert_close(layer(other, torch.ones(4))[0][2:], y[2:])
    x_GSD = x[:2].reshape(1, 2 * S, D)
    as_one_group = layer.router(x_GSD, torch.ones(1, 2 * S))
    expected = as_one_group.combine(layer.experts(as_one_group.dispatch(x_GSD)))
    torch.testing.assert_close(y[:2], expected.view(2, S, D))
    with pytest.raises(ValueError, match="images_per_group=2 does not divide a batch of 3"):
        layer(x[:3], torch.ones(3))
    for other in (x[0], x[..., 1:]):
        with pytest.raises(ValueError, match=rf"tokens must be \(B, S, D={D}\), got"):
            layer(other)


@each_kind
def test_router_gets_keys_of_block_image_and_token(router):
    """Keys are `split(mix(keys_B, block), tokens)`, image after image; random blocks have other keys. Without
    noise and dropout there are none."""
    quiet = build_layer(router)
    quiet.router.register_forward_hook(lambda module, args, routing: calls.append(args))
    router = replace(router, noise_std=0.5) if hasattr(router, "noise_std") else router
    layer, calls = build_layer(router, images_per_group=2, block=5), []
    layer.router.register_forward_hook(lambda module, args, routing: calls.append(args))
    keys_B, x, valid = torch.tensor([3, 1, 4, 1]), torch.randn(4, S, D), torch.tensor([1.0, 1, 0, 1])
    layer(x, valid, keys_B)
    layer(x, valid, keys_B, RoutingOverrides(random_blocks=(5,)))
    layer(x, valid)
    x_GSD, valid_GS, keys_GS, overrides, random_GS, _ = calls[0]
    assert torch.equal(x_GSD, x.view(2, 2 * S, D))
    assert valid_GS.tolist() == [[1.0] * 2 * S, [0.0] * S + [1.0] * S]
    assert torch.equal(keys_GS.view(4, S), split(mix(keys_B, 5), S))
    assert overrides is AS_TRAINED
    assert random_GS is None
    assert not set(calls[1][4].flatten().tolist()) & set(keys_GS.flatten().tolist())
    assert calls[2][2] is calls[2][4] is None
    quiet(x, valid, keys_B)
    assert (calls[3][2] is None) == (getattr(quiet.router.config, "noise_std", 1) == 0)


class PlainBlock(nn.Module):
    """A pre-norm block as timm has it, which knows nothing of experts."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = nn.MultiheadAttention(dim, 2, batch_first=True)
        self.mlp: nn.Module = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attn(y, y, y, need_weights=False)[0]
        return x + self.mlp(self.norm2(x))


@each_kind
def test_a_layer_of_its_own_trains_in_a_plain_block(router):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Sequential(PlainBlock(D), PlainBlock(D), nn.Flatten(), nn.Linear(S * D, 2))
        x = torch.randn(32, S, D)
    label = (x.mean((1, 2)) > 0).long()
    model[1].mlp = MoELayer(MoEConfig(num_experts=4, router=router), dim=D, hidden=4 * D, block=1)
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(10):
        losses.append(F.cross_entropy(model(x), label))
        optimizer.zero_grad()
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.5 * losses[0]
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model[1].mlp.parameters())


@each_kind
def test_a_layer_of_its_own_starts_as_in_a_vit(router):
    config = replace(
        PRESETS["debug"], moe=MoEConfig(num_experts=4, router=router, layers=(1,), expert_dim=24)
    )
    state = torch.get_rng_state()
    layer = MoELayer(config.moe, dim=config.width, hidden=config.mlp_dim, block=1, seed=3)
    assert torch.equal(torch.get_rng_state(), state)  # the global generator is not used
    expected = ViT(config, seed=3).blocks[1].mlp.state_dict()
    assert layer.state_dict().keys() == expected.keys()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in layer.state_dict().items())
    with torch.device("meta"):
        assert next(MoELayer(config.moe, dim=8, hidden=8).parameters()).is_meta


@each_kind
def test_all_images_are_valid_unless_it_is_said_otherwise(router):
    layer, x = MoELayer(MoEConfig(num_experts=4, router=router), dim=D, hidden=16), randn(4, S, D)
    y, routing = layer(x, return_routing=True)
    assert torch.equal(y, layer(x))
    assert torch.equal(y, layer(x, torch.ones(4)))
    assert routing.aux_G.shape == (4,)
    assert not routing.stats


@each_kind
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_routers_compute_in_float32_under_autocast(router, dtype):
    """To the bit as without it; experts do follow autocast."""
    layer, x_BSD = build_layer(router).eval(), randn(4, S, D)
    _, expected = layer(x_BSD)
    with torch.autocast("cpu", dtype):
        y_BSD, routing = layer(x_BSD)
    torch.testing.assert_close(routing.dispatch(x_BSD), expected.dispatch(x_BSD), rtol=0, atol=0)
    assert y_BSD.isfinite().all()

"""The whole model: shapes, configs that cannot be, padding, learning, compiling."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from moe.layer import MoEConfig
from moe.presets import PRESETS
from moe.routers import ROUTERS, ExpertChoiceConfig, SoftConfig, TokenChoiceConfig
from moe.vit import Attention, ViT, ViTConfig

routers = [None, *(kind() for kind in ROUTERS)]
each_model = pytest.mark.parametrize("router", routers, ids=lambda r: r.kind if r else "dense")


def images(count: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(seed))


@each_model
def test_output(build_vit, router):
    logits, aux, stats = build_vit(router, layers="last_2")(images(4))
    assert logits.shape == (4, 10)
    assert aux.shape == ()
    names = {"dropped_frac", "load_cv", "gate_entropy_nats"} if router else set()
    assert set(stats) == names
    assert all(value.shape == (2,) and not value.requires_grad for value in stats.values())


def test_presets_are_the_papers_sizes():
    """Soft MoE, section 3.3: tokens, width, depth, heads, hidden."""
    sizes = {
        name: (c.tokens(), c.width, c.depth, c.heads, c.mlp_dim)
        for name, c in PRESETS.items()
        if name != "debug"
    }
    assert sizes == {
        "S/32": (49, 384, 12, 6, 1536),
        "S/16": (196, 384, 12, 6, 1536),
        "S/14": (256, 384, 12, 6, 1536),
        "S/8": (784, 384, 12, 6, 1536),
        "B/32": (49, 768, 12, 12, 3072),
        "B/16": (196, 768, 12, 12, 3072),
        "L/32": (49, 1024, 24, 16, 4096),
        "L/16": (196, 1024, 24, 16, 4096),
        "H/14": (256, 1280, 32, 16, 5120),
    }


def test_starts_with_the_uniform_prediction():
    assert ViT(PRESETS["debug"])(images(2)).logits.eq(0).all()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"image_size": 225}, "patch_size=16 does not divide image_size=225"),
        ({"heads": 7}, "heads=7 does not divide width=384"),
        ({"depth": 0}, "depth must be at least 1, got 0"),
        ({"num_classes": -1}, "num_classes must be at least 1, got -1"),
        ({"moe": MoEConfig(layers=(12,))}, r"layers=\(12,\) does not fit depth=12"),
        ({"moe": MoEConfig(num_experts=500)}, "capacity_factor=1.05 leaves no slot: 196 assignments"),
        ({"moe": MoEConfig(router=TokenChoiceConfig(k=9))}, "k=9 exceeds num_experts=8"),
        ({"moe": MoEConfig(router=ExpertChoiceConfig(capacity_factor=9.0))}, "use at most 8"),
    ],
)
def test_config_errors(fields, message):
    with pytest.raises(ValueError, match=message):
        ViTConfig(**fields)


def test_slots_are_those_of_a_group():
    def slots(router, **fields) -> int:
        return replace(PRESETS["S/16"], moe=MoEConfig(router=router, **fields)).slots()

    assert PRESETS["S/16"].slots() == 0
    assert slots(ExpertChoiceConfig(), images_per_group=4) == 98  # 4 x 196 / 8
    assert slots(TokenChoiceConfig(k=2, capacity_factor=1.0)) == 49
    assert slots(SoftConfig(slots_per_expert=5), images_per_group=4) == 5


def test_attention_is_its_definition():
    """softmax(norm(q) norm(k)^T / sqrt(width of a head)) v for every head."""
    attention, x = Attention(12, 3), torch.randn(2, 5, 12)
    torch.nn.init.normal_(attention.norm_q.weight)
    q, k, v = attention.qkv(x).chunk(3, -1)
    heads = []
    for h in range(3):
        part = slice(4 * h, 4 * h + 4)
        q_h = F.layer_norm(q[..., part], (4,), attention.norm_q.weight, eps=1e-6)
        k_h = F.layer_norm(k[..., part], (4,), attention.norm_k.weight, eps=1e-6)
        heads.append((q_h @ k_h.mT / 2).softmax(-1) @ v[..., part])
    torch.testing.assert_close(attention(x), attention.out(torch.cat(heads, -1)))


@each_model
def test_aux_sums_layers_and_averages_groups(build_vit, router):
    model, aux = build_vit(router, layers="last_2"), []
    hooks = [
        block.mlp.register_forward_hook(lambda _, __, out: aux.append(out[1].aux_G.detach().mean()))
        for block in model.blocks
        if router
    ]
    assert len(hooks) == (2 if router else 0)
    torch.testing.assert_close(model(images(4)).aux, torch.tensor(aux).sum())


def test_only_token_choice_has_an_auxiliary_loss(build_vit):
    has = {router.kind if router else None: bool(build_vit(router)(images(2)).aux > 0) for router in routers}
    assert has == {None: False, "token_choice": True, "expert_choice": False, "soft": False}


@each_model
def test_padding_images_change_nothing(build_vit, router):
    """With one image to a group; with more, test_routers says what holds."""
    model, valid = build_vit(router), torch.tensor([1.0, 0, 1, 0])
    padded = images(4) * valid[:, None, None, None]
    with_padding, alone = model(padded, valid), model(images(4)[valid == 1])
    torch.testing.assert_close(with_padding.logits[valid == 1], alone.logits)
    assert alone.logits.std() > 0.1
    for name, value in alone.stats.items():
        torch.testing.assert_close(with_padding.stats[name], value)


@pytest.mark.parametrize("router", routers[1:], ids=lambda r: r.kind)
def test_images_per_group_matters(build_vit, router):
    one, two = (build_vit(router, images_per_group=n)(images(4)).logits for n in (1, 2))
    assert not torch.allclose(one, two)


@each_model
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dtypes(build_vit, router, dtype):
    model = build_vit(router).to(dtype)
    output = model(images(2).to(dtype))
    assert output.logits.dtype == dtype
    assert output.logits.isfinite().all()
    (output.logits.sum() + output.aux).backward()
    assert all(p.grad.dtype == dtype and p.grad.isfinite().all() for p in model.parameters())


@each_model
def test_learns_one_batch(router):
    """From the start that training has: the head at zero."""
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


@each_model
def test_compiles_as_one_graph(build_vit, router):
    model = build_vit(router)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    expected, got = model(images(4)), compiled(images(4))
    torch.testing.assert_close(got.logits, expected.logits)
    assert set(got.stats) == set(expected.stats)
    (got.logits.square().sum() + got.aux).backward()
    gradients = [p.grad.clone() for p in model.parameters()]
    model.zero_grad()
    (expected.logits.square().sum() + expected.aux).backward()
    for (name, p), gradient in zip(model.named_parameters(), gradients, strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-4, msg=name)

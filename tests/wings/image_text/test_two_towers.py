"""Two towers and the text tower: shapes, costs, what depends on what, and weights from a classifier."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from jobs import plan
from moe.adapt import plan_transfer, shapes_of
from moe.codec import from_dict, to_dict
from moe.cost import num_params
from moe.experts import is_expert
from moe.layer import MoEConfig
from moe.model import ModelConfig
from moe.models.vit import ViTConfig
from moe.parallel import build_sharded
from moe.precision import compute_in
from moe.presets import PRESETS
from moe.routers import SoftConfig, TokenChoiceConfig
from moe.tokenizers import END
from moe.trace import _Operations
from orchestrator.checkpoint.start import start_from
from tests.moe.parity import one_rank
from tests.moe.parts import randn
from wings.image_text.presets import TWO_TOWERS
from wings.image_text.text_tower import TextConfig, TextTower
from wings.image_text.two_towers import ImageText, TwoTowers, TwoTowersConfig

SIZES: dict[str, Any] = {"width": 16, "depth": 2, "heads": 2, "mlp_dim": 32}
SOFT = MoEConfig(num_experts=4, layers="last_1", router=SoftConfig(slots_per_expert=2))
IMAGE = ViTConfig(image_size=8, patch_size=4, **SIZES)
TEXT = TextConfig(vocabulary=20, length=6, **SIZES)
TOWERS = {
    "dense": TwoTowersConfig(image=IMAGE, text=TEXT),
    "image experts": TwoTowersConfig(image=replace(IMAGE, moe=SOFT), text=TEXT, embed_dim=12),
    "text experts": TwoTowersConfig(image=IMAGE, text=replace(TEXT, moe=SOFT)),
    "both": TwoTowersConfig(image=replace(IMAGE, moe=SOFT), text=replace(TEXT, moe=SOFT, pooling="map")),
}
each = pytest.mark.parametrize("config", TOWERS.values(), ids=TOWERS)
POOLINGS = ("last", "first", "mean", "map")


def inputs(count: int = 4) -> ImageText:
    tokens = torch.randint(1, 20, (count, 6), generator=torch.Generator().manual_seed(0))
    tokens[:, 4:] = END
    return ImageText(randn(count, 3, 8, 8), tokens)


@each
def test_gradient_reaches_every_parameter(config: TwoTowersConfig) -> None:
    model = config.build()
    output = model(inputs(), keys_B=torch.arange(4), return_stats=True)
    size = config.embed_dim or IMAGE.width
    assert {name: tuple(head.shape) for name, head in output.heads.items()} == {
        "image": (4, size),
        "text": (4, size),
        "scale": (4, 2),
    }
    (sum(head.square().sum() for head in output.heads.values()) + output.aux).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert param.grad.isfinite().all(), name
    layers = bool(config.image.moe) + bool(config.text.moe)
    assert all(len(values) == layers for values in output.stats.values())
    assert len(config.moe_blocks()) == layers


@each
def test_pairs_do_not_influence_each_other(config: TwoTowersConfig) -> None:
    model, four = config.build().eval(), inputs()
    assert four.images is not None
    assert four.tokens is not None
    whole = model(four).heads
    part = model(ImageText(four.images[:2], four.tokens[:2])).heads
    for name, head in part.items():
        torch.testing.assert_close(whole[name][:2], head, rtol=1e-5, atol=1e-6)


@each
def test_the_cost_is_that_of_the_operations(config: TwoTowersConfig) -> None:
    with torch.device("meta"):
        model = config.build(seed=None)
        tokens = torch.empty(1, 6, dtype=torch.int64)
        counted = _Operations()
        with counted:
            model(ImageText(torch.empty(1, 3, 8, 8), tokens))
    assert sum(config.costs().macs.values()) == pytest.approx(sum(counted.macs.values()))
    assert num_params(config) == sum(param.numel() for param in config.build().parameters())
    saved = config.costs().activations.saved
    assert len(saved) == 1 + len(model.units())


def test_the_factor_is_not_rounded() -> None:
    model = TOWERS["both"].build()
    compute_in(model, torch.bfloat16)
    heads = model(inputs()).heads
    assert all(head.dtype == torch.float32 for head in heads.values())
    assert torch.equal(heads["scale"][0], torch.tensor([math.log(10.0), -10.0]))
    with one_rank("cpu") as mesh:
        sharded = build_sharded(TOWERS["both"], mesh, seed=0, compute_dtype=torch.bfloat16)
        found = sharded(inputs()).heads
    for name, head in heads.items():
        assert torch.equal(found[name], head), name


def test_a_config_reads_on() -> None:
    for config in TOWERS.values():
        assert from_dict(ModelConfig, to_dict(config)) == config


@pytest.mark.parametrize("pooling", POOLINGS)
def test_a_causal_tower_sees_no_later_token(pooling: Any) -> None:
    text = replace(TEXT, attention="causal", pooling=pooling)
    tower, tokens = TextTower(text), inputs().tokens
    assert tokens is not None
    changed = tokens.clone()
    changed[:, 3] = changed[:, 3] % 18 + 1
    found: list[torch.Tensor] = []
    tower.norm.register_forward_hook(lambda module, args, output: found.append(output))
    tower(tokens), tower(changed)  # pyright: ignore[reportUnusedExpression]
    assert torch.equal(found[0][:, :3], found[1][:, :3])
    assert not torch.equal(found[0][:, 3:], found[1][:, 3:])
    full = TextTower(replace(TEXT, pooling=pooling))
    assert not torch.equal(full(tokens).heads["pooled"], full(changed).heads["pooled"])


def test_the_mean_ends_with_the_text() -> None:
    tower = TextTower(replace(TEXT, pooling="mean"))
    x_BLD, tokens = randn(1, 6, 16), torch.tensor([[5, 7, END, END, END, END]])
    torch.testing.assert_close(tower.pooled(x_BLD, tokens), x_BLD[:, :3].mean(1))


def test_a_classifier_is_the_start_of_the_image_tower() -> None:
    classifier, towers = IMAGE.build(), TOWERS["image experts"].build(seed=None)
    below = TOWERS["image experts"].starts_from
    plan = plan_transfer(shapes_of(classifier.state_dict()), shapes_of(towers.state_dict()), below)
    state, source = towers.state_dict(), classifier.state_dict()
    for name, conversion in plan.converted.items():
        state[name].copy_(conversion.of(source[conversion.source]))
    assert torch.equal(state["image.blocks.0.mlp.up.weight"], source["blocks.0.mlp.up.weight"])
    assert torch.equal(state["image.blocks.1.mlp.experts.w_in_EDF"][2], source["blocks.1.mlp.up.weight"].T)
    assert {*plan.unused} == {"head.weight", "head.bias"}
    assert all(not name.startswith("image.") or "router" in name for name in plan.initial)
    own = shapes_of(towers.state_dict())
    assert {*plan_transfer(own, own, below).copied} == {*own}


def test_trained_experts_become_those_of_a_tower_without_noise(tmp_path: Path) -> None:
    """Noise is for copies of an MLP, which would stay equal."""
    classifier, towers = replace(IMAGE, moe=SOFT).build(), TOWERS["image experts"].build()
    save_file(classifier.state_dict(), tmp_path / "weights.safetensors")
    start_from(towers, str(tmp_path / "weights.safetensors"), noise=0.5)
    experts = {name: value for name, value in classifier.state_dict().items() if is_expert(name)}
    assert len(experts) == 4
    for name, value in experts.items():
        assert torch.equal(towers.state_dict()[f"image.{name}"], value)


def test_refuses() -> None:
    with pytest.raises(ValueError, match="as many experts, got 4 and 2"):
        TwoTowersConfig(image=replace(IMAGE, moe=SOFT), text=replace(TEXT, moe=replace(SOFT, num_experts=2)))
    with pytest.raises(ValueError, match="texts are routed one by one"):
        replace(TEXT, moe=MoEConfig(images_per_group=2, router=TokenChoiceConfig()))


@pytest.mark.parametrize(
    ("name", "image", "text"),
    [
        ("lit-L/16", "L/16", (1024, 24, 32_000, 16)),
        ("soft-B/16-laion", "soft-B/16-128e", (768, 12, 32_000, 16)),
        ("soft-H/14-256e-lit-g", "soft-H/14-256e", (1408, 40, 32_000, 16)),
    ],
)
def test_presets(name: str, image: str, text: tuple[int, ...]) -> None:
    config = TWO_TOWERS[name]
    assert isinstance(config, TwoTowersConfig)
    assert (config.text.width, config.text.depth, config.text.vocabulary, config.text.length) == text
    assert config.image.size() == PRESETS[image].size()
    with torch.device("meta"):
        assert isinstance(config.build(seed=None), TwoTowers)


def test_a_dry_run_names_the_task_of_two_towers(call: Callable[..., tuple[str, str]]) -> None:
    error, _ = call(plan.main, "--dry-run", "lit-S/16")
    assert error.startswith("error: ")
    assert "set task.kind=contrastive" in error
    assert "\n" not in error


def test_each_of_two_towers_has_layers_of_its_own() -> None:
    model = TwoTowersConfig(image=PRESETS["debug"], text=TextConfig(width=16, depth=3, heads=2)).build(
        seed=None
    )
    layers = model.layers_above()
    assert layers.keys() == dict(model.named_parameters()).keys()
    depth = len(model.image.units())
    assert (layers["image.embed.weight"], layers["text.embed_VD"]) == (depth + 1, 4)
    assert (layers["image.norm.weight"], layers["text.norm.weight"], layers["project_text.weight"]) == (
        1,
        1,
        0,
    )

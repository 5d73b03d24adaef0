"""Laws that every classifier satisfies, dense and with experts. It is tested because it is a ModelConfig."""

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe.codec import from_dict, to_dict
from moe.config import members
from moe.cost import model_costs
from moe.layer import MoEConfig
from moe.model import Model, ModelConfig
from moe.presets import PRESETS
from tests.moe.parts import randn

SMALL: dict[str, dict[str, Any]] = {  # kind -> fields
    "vit": to_dict(PRESETS["debug"]),
    "astroformer": {
        **{"image_size": 16, "num_classes": 10, "stages": "CT", "widths": (16, 32), "depths": (2, 2)},
        **{"stem_width": 8, "head_dim": 16},
    },
}
MODELS = [from_dict(cls, SMALL.get(cls.kind, {})) for cls in members(ModelConfig) if cls.gives == ("logits",)]
EXPERTS = MoEConfig(num_experts=4, layers="last_1")
each_model = pytest.mark.parametrize(
    "config",
    [replace(config, moe=moe) for config in MODELS for moe in (None, EXPERTS)],
    ids=lambda config: f"{config.kind}-{'moe' if config.moe else 'dense'}",
)


def built(config: ModelConfig) -> Model:
    """A model whose head is not at its zero start."""
    model = config.build()
    torch.nn.init.normal_(model.get_submodule("head").weight, generator=torch.Generator().manual_seed(0))
    return model


def images(config: ModelConfig, count: int) -> torch.Tensor:
    return randn(count, 3, config.image_size, config.image_size)


@each_model
def test_a_config_reads_on_and_knows_its_costs(config):
    assert from_dict(ModelConfig, to_dict(config)) == config
    assert config.moe_blocks() or not config.moe
    assert sum(model_costs(config).macs.values()) > 0
    assert config.tokens() > 0
    assert config.size()


@each_model
def test_gradient_reaches_every_parameter(config):
    model = built(config).train()
    output = model(images(config, 4), keys_B=torch.arange(4))
    assert output.logits.shape == (4, config.num_classes)
    (output.logits.square().sum() + output.aux).backward()
    for name, param in model.named_parameters():
        assert param.grad is not None, name
        assert param.grad.isfinite().all(), name


@each_model
def test_images_do_not_influence_each_other(config):
    """Nor does padding, which is no image."""
    model, four = built(config).eval(), images(config, 4)
    expected = model(four[:2]).logits
    torch.testing.assert_close(model(four).logits[:2], expected, rtol=1e-4, atol=1e-5)
    padded = model(four, torch.tensor([1.0, 1, 0, 0])).logits[:2]
    torch.testing.assert_close(padded, expected, rtol=1e-4, atol=1e-5)


@each_model
def test_features_are_the_input_of_the_head(config):
    model, two = built(config).eval(), images(config, 2)
    assert torch.equal(model.get_submodule("head")(model.features(two)), model(two).logits)


@each_model
@pytest.mark.parametrize(
    "shape", [(3, 1, 4), (3, 4, 1), (3, 2, 0.5), (3, 1.5, 1.5), (1, 1, 1), (4, 1, 1), (1, 1)]
)
def test_images_of_another_shape_are_refused(config, shape):
    """Also where they have as many tokens, each of which would get the position of another place."""
    side = config.image_size
    wrong = torch.zeros(2, *shape[:-2], *(int(part * side) for part in shape[-2:]))
    model = built(config).eval()
    for call in (model, model.features):
        with pytest.raises(ValueError, match=rf"the model takes \(B, 3, {side}, {side}\)"):
            call(wrong)


def test_a_vit_without_positions_takes_any_number_of_patches():
    model = built(replace(PRESETS["debug"], position="none", pooling="gap")).eval()
    side = model.config.image_size
    assert model(torch.zeros(2, 3, side, 2 * side)).logits.shape == (2, 10)
    with pytest.raises(ValueError, match="the model takes"):
        model(torch.zeros(2, 3, side, side + 1))

"""The contract of models, on a ViT and on a user's own model: costs, operating points, causality."""

from dataclasses import dataclass, replace
from typing import Literal

import pytest
import torch

from moe.codec import from_dict, to_dict
from moe.cost import model_costs
from moe.layer import MoEConfig
from moe.model import Model, ModelConfig
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.presets import PRESETS
from moe.routers import ExpertChoiceConfig, SoftConfig, TokenChoiceConfig
from moe.trace import trace
from tests.moe.parts import images, vit_config
from tests.own.convnet import ConvNetConfig

ROUTERS = (
    TokenChoiceConfig(k=2),
    ExpertChoiceConfig(capacity_factor=1.5),
    SoftConfig(slots_per_expert=2),
)
MODELS = [
    *(pytest.param(PRESETS[name], id=name) for name in ("S/16", "soft-S/16-128e", "vmoe-S/32", "debug")),
    *(pytest.param(vit_config(router), id=router.kind) for router in ROUTERS),
    pytest.param(replace(vit_config(None), stem="conv", pooling="map"), id="conv-map"),
    pytest.param(replace(PRESETS["S/16"], layer_scale=1e-4), id="LayerScale"),
]


TOKENS = TokenChoiceConfig(k=2)


def convnet(router=TOKENS, **changes) -> ConvNetConfig:
    moe = router and MoEConfig(layers="last_1", num_experts=4, router=router)
    return ConvNetConfig(**({"moe": moe} | changes))


def with_a_head(model: Model) -> Model:
    """A head that is not at its zero start."""
    torch.nn.init.normal_(model.get_submodule("head").weight, generator=torch.Generator().manual_seed(0))
    return model.eval()


def test_models_compute_convolutions_without_tf32(monkeypatch):
    """Which torch has on by default."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", True)
    vit_config(None).build(seed=None)
    assert not torch.backends.cudnn.allow_tf32


@pytest.mark.parametrize("config", MODELS)
def test_measured_costs_are_those_of_the_formulas(config):
    """Multiply-adds to the number; of the activations, the formulas leave out what is small."""
    measured, formula = trace(config), config.costs()
    assert sum(measured.macs.values()) == sum(formula.macs.values())
    assert sum(measured.activations.saved) == pytest.approx(sum(formula.activations.saved), rel=0.15)
    assert measured.activations.stream == formula.activations.stream


@pytest.mark.parametrize("router", ROUTERS, ids=lambda router: router.kind)
@pytest.mark.parametrize("experts", [2, (0, 3)])
def test_measured_costs_of_a_subset_of_experts(router, experts, monkeypatch):
    """The experts that are left out compute nothing, in the measurement as in the formula."""
    config, point = vit_config(router), RoutingOverrides(experts=experts)
    formula = model_costs(config, point).macs
    monkeypatch.setattr(type(config), "costs", ModelConfig.costs)
    measured, whole = (model_costs(config, each).macs for each in (point, AS_TRAINED))
    for part in ("router", "experts", "dispatch_combine"):
        assert measured.get(part, 0) == formula[part]
    assert sum(measured.values()) == sum(formula.values()) < sum(whole.values())


def test_a_model_without_formulas_has_its_costs_measured():
    """A stem of 3 x 2 x 2 numbers per place, two 3 x 3 convolutions by channel, a dense MLP, the router's
    matrix, the rows of the experts, the head."""
    config, places, width = convnet(), 16, 32
    rows = config.slots() * 4
    mlp = 2 * 4 * width * width
    known = model_costs(config)
    assert (
        sum(known.macs.values())
        == (places * 12 * width + 2 * places * 9 * width + places * mlp + places * width * 4 + rows * mlp)
        + width * 10
    )
    assert known.largest == rows * mlp / 2
    assert config.moe_blocks() == (1,)
    assert model_costs(config, number=2).activations.stream == 2 * places * width
    for fewer in (RoutingOverrides(capacity_factor=0.5), RoutingOverrides(experts=2)):
        assert sum(model_costs(config, fewer).macs.values()) == sum(known.macs.values()) - rows * mlp / 2
    with pytest.raises(ValueError, match="has no k to override"):
        model_costs(convnet(SoftConfig()), RoutingOverrides(k=1))


def test_points_of_a_model_without_a_shared_pass():
    model, points = with_a_head(convnet().build()), [AS_TRAINED, RoutingOverrides(experts=2)]
    logits = [heads["logits"] for heads in model.at_points(images(3), torch.ones(3), points)]
    assert [each.shape for each in logits] == [(3, 10)] * 2
    assert not torch.equal(*logits)
    with pytest.raises(ValueError, match=r"random_blocks=\[0\] are not MoE blocks.*\(1,\)"):
        model(images(1), routing_overrides=RoutingOverrides(random_blocks=(0,)))
    with pytest.raises(ValueError, match="a dense model has no routing"):
        convnet(None).build()(images(1), routing_overrides=RoutingOverrides(experts=1))


def test_json_names_the_kind_of_a_model():
    config = convnet()
    assert from_dict(ModelConfig, to_dict(config)) == config
    assert from_dict(ModelConfig, {"width": 24, "heads": 3}) == replace(PRESETS["S/16"], width=24, heads=3)
    with pytest.raises(ValueError, match=r"unknown model.kind 'convnext'; known: .*convnet.*vit"):
        from_dict(ModelConfig, {"kind": "convnext"}, "model.")


def test_a_causal_model_refuses_routers_that_leak_the_future():
    @dataclass(frozen=True, kw_only=True)
    class CausalConfig(ConvNetConfig):
        @property
        def causal(self) -> bool:
            return True

    moe = MoEConfig(layers="last_1", num_experts=4, router=TokenChoiceConfig(k=1, priority="none"))
    CausalConfig(moe=moe)
    with pytest.raises(ValueError, match=r"is causal, and its router \(token_choice\) is not: .*second"):
        CausalConfig(moe=replace(moe, router=TokenChoiceConfig(k=2, priority="none")))
    with pytest.raises(ValueError, match="is causal"):
        CausalConfig(moe=replace(moe, router=SoftConfig()))


def test_code_that_reads_numbers_has_no_measured_cost():
    @dataclass(frozen=True, kw_only=True)
    class ReadingConfig(ConvNetConfig):
        kind: Literal["reading"] = "reading"

        def build(self, *, seed=0):
            model = super().build(seed=seed)
            model.norm.register_forward_pre_hook(lambda module, inputs: inputs[0].sum().item())
            return model

    try:
        with pytest.raises(ValueError, match=r"kind 'reading' cannot run on the meta device.*costs"):
            model_costs(ReadingConfig())
    finally:
        del ModelConfig.kinds["reading"]

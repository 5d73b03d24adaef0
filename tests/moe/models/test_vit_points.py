"""Many operating points in one pass have the logits of each point alone, and share their common work."""

from dataclasses import replace

import pytest
import torch

from moe.models.vit import ViT
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routers import ExpertChoiceConfig, MixtureConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from tests.moe.parts import images, vit_config

EVERYWHERE = (
    AS_TRAINED,
    RoutingOverrides(experts=2),
    RoutingOverrides(experts=2, subset_seed=3),
    RoutingOverrides(experts=2, subset_seed=4),
    RoutingOverrides(experts=(0, 3)),
    RoutingOverrides(random_blocks=(3,)),
)
CAPACITIES = (RoutingOverrides(capacity_factor=0.5), RoutingOverrides(capacity_factor=2.0))
POINTS = {
    TokenChoiceConfig(k=2): (
        *EVERYWHERE,
        *CAPACITIES,
        RoutingOverrides(k=1, capacity_factor=0.3, priority="max"),
    ),
    TokenChoiceConfig(k=2, capacity_factor=0.3, eval_capacity_factor=4.0): (
        AS_TRAINED,
        RoutingOverrides(capacity_factor=0.3),
    ),
    ExpertChoiceConfig(): (*EVERYWHERE, *CAPACITIES),
    SoftConfig(): EVERYWHERE,
    MixtureConfig(): EVERYWHERE,
}


def build(router: RouterConfig | None, **moe: int) -> ViT:
    """Four blocks, experts in 1 and 3; the head is not at its zero start."""
    model = ViT(replace(vit_config(router, **moe), depth=4, layer_scale=0.5))
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(1))
    return model.eval()


@pytest.mark.parametrize("router", POINTS, ids=lambda router: router.kind)
@pytest.mark.parametrize("images_per_group", [1, 3])
def test_every_point_has_the_logits_of_a_pass_alone(router: RouterConfig, images_per_group: int):
    """Seven images do not fill groups of three; one is padding."""
    model, points = build(router, images_per_group=images_per_group), POINTS[router]
    x, valid = images(7), torch.tensor([1.0, 1, 1, 0, 1, 1, 1])
    together = [heads["logits"] for heads in model.at_points(x, valid, points)]
    with torch.no_grad():
        for point, logits in zip(points, together, strict=True):
            assert torch.equal(logits, model(x, valid, routing_overrides=point).logits), point
    different = {tuple(logits.flatten().tolist()) for logits in together}
    assert len(different) == len(points)


@pytest.mark.parametrize("router", POINTS, ids=lambda router: router.kind)
def test_groups_of_one_image_are_a_setting(router: RouterConfig):
    """The model of the same weights that routes image by image, beside points in its own groups of three."""
    model, alone, x = build(router, images_per_group=3), build(router), images(7)
    by_itself = RoutingOverrides(images_per_group=1)
    found = [heads["logits"] for heads in model.at_points(x, None, [AS_TRAINED, by_itself])]
    with torch.no_grad():
        assert torch.equal(found[0], model(x).logits)
        assert torch.equal(found[1], model(x, routing_overrides=by_itself).logits)
        torch.testing.assert_close(found[1], alone(x).logits)
        assert torch.equal(model(x[:1], routing_overrides=by_itself).logits, alone(x[:1]).logits)
    assert model.config.costs(by_itself).macs == alone.config.costs().macs
    with pytest.raises(ValueError, match="images_per_group=2 does not divide the model's 3"):
        model.config.costs(RoutingOverrides(images_per_group=2))


def count_rows(model: ViT) -> dict[str, int]:
    """Calls of each module's forward, counted from now on."""
    calls = dict.fromkeys(("embed", *(f"attention{i}" for i in range(4))), 0)

    def counted(name: str):
        def hook(*_: object) -> None:
            calls[name] += 1

        return hook

    model.embed.register_forward_hook(counted("embed"))
    for i, block in enumerate(model.blocks):
        block.attention.register_forward_hook(counted(f"attention{i}"))
    return calls


def test_what_points_share_is_computed_once():
    """Three points differ from the first MoE block (1) on, the random router of block 3 only there: until
    then it is the model as trained. So blocks 0 and 1 attend once, 2 and 3 once for each of three branches.
    """
    model = build(TokenChoiceConfig(k=2, capacity_factor=1.0))
    calls = count_rows(model)
    points = [
        AS_TRAINED,
        RoutingOverrides(k=1),
        RoutingOverrides(capacity_factor=0.5),
        RoutingOverrides(random_blocks=(3,)),
        RoutingOverrides(k=2, capacity_factor=1.0),  # as trained, in other words
    ]
    logits = model.at_points(images(2), None, points)
    assert calls == {"embed": 1, "attention0": 1, "attention1": 1, "attention2": 3, "attention3": 3}
    assert logits[4]["logits"] is logits[0]["logits"]


def test_a_dense_model_has_one_point():
    model = build(None)
    (heads,) = model.at_points(images(2), None, [AS_TRAINED])
    assert torch.equal(heads["logits"], model(images(2)).logits)
    assert model.at_points(images(2), None, []) == []
    with pytest.raises(ValueError, match="a dense model has no routing"):
        model.at_points(images(2), None, [RoutingOverrides(experts=1)])


@pytest.mark.parametrize(
    ("point", "message"),
    [
        (RoutingOverrides(random_blocks=(2,)), r"random_blocks=\[2\] are not MoE blocks"),
        (RoutingOverrides(k=9), "k=9 exceeds num_experts=4"),
        (RoutingOverrides(experts=5), "experts=5 must lie in 1 .. 4"),
    ],
)
def test_points_that_the_model_refuses(point: RoutingOverrides, message: str):
    with pytest.raises(ValueError, match=message):
        build(TokenChoiceConfig()).at_points(images(2), None, [AS_TRAINED, point])

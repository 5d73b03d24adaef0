"""A trained model with other settings of its routers, as a file holds it."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from moe import MoEConfig, TokenChoiceConfig, ViTConfig
from moe.overrides import RoutingOverrides
from orchestrator.checkpoint.export import write_export
from orchestrator.checkpoint.models import ModelRef, read_model
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError

ROUTER = TokenChoiceConfig(k=2, capacity_factor=1.5, eval_capacity_factor=3.0)
MOE = MoEConfig(num_experts=4, router=ROUTER, images_per_group=2)
SMALL = {
    "image_size": 8,
    "patch_size": 2,
    "width": 16,
    "depth": 2,
    "heads": 2,
    "mlp_dim": 16,
    "num_classes": 3,
}


def written(folder: Path, moe: MoEConfig | None) -> ModelRef:
    config = ViTConfig(**SMALL, moe=moe)
    run, path = RunConfig(name="a", storage=str(folder), model=config), f"{folder}/a.safetensors"
    write_export(path, config.build(seed=0).state_dict(), run, more={"step": "0"})
    return read_model(path)


@pytest.mark.parametrize(
    "point",
    [
        RoutingOverrides(),
        RoutingOverrides(k=1),
        RoutingOverrides(capacity_factor=0.5, priority="max"),
        RoutingOverrides(k=1, images_per_group=1),
    ],
)
def test_a_model_at_a_point_answers_as_one_that_is_overridden(
    tmp_path: Path, point: RoutingOverrides
) -> None:
    """Also where the capacity of evaluation is another than that of training."""
    model = written(tmp_path, MOE)
    images = torch.rand(4, 3, 8, 8, generator=torch.Generator().manual_seed(0)) * 2 - 1
    with torch.no_grad():
        wanted = model.load()(images, routing_overrides=point).logits
        there = model.at_point(point)
        found = there.load()(images).logits
    assert torch.equal(found, wanted)
    assert there.signature.images_per_group == (point.images_per_group or 2)


def test_what_a_file_does_not_hold_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="a@0: a file holds k, capacity, priority and images"):
        written(tmp_path, MOE).at_point(RoutingOverrides(experts=2))
    with pytest.raises(UsageError, match="a@0: "):
        written(tmp_path / "soft", replace(MOE, router=replace(ROUTER, k=1))).at_point(RoutingOverrides(k=9))
    with pytest.raises(UsageError, match="a@0: a dense model has no routing"):
        written(tmp_path / "dense", None).at_point(RoutingOverrides(k=1))

"""Effects of routing in trained models that the papers report, on the digits of scikit-learn.

`test_studies.py` has the others. Accuracies of routers are not compared: at this size they
come out in another order than in the papers.
"""

from dataclasses import replace
from statistics import mean

import pytest
import torch
from torch import Tensor

from moe.models.vit import ViT
from moe.routers import ExpertChoiceConfig, RouterConfig, SoftConfig, TokenChoiceConfig
from moe.routers.affinity import SinkhornConfig
from papers.digits import EXPERTS, MOE_BLOCKS, accuracy, answer, trained_vit

pytestmark = pytest.mark.slow  # it trains eight models


def test_learned_dispatch_beats_uniform_dispatch():
    """Soft MoE section 3.6, table 2, with a scale that starts at 8, far from uniform."""

    def mean_accuracy(dispatch) -> float:
        config = SoftConfig(dispatch=dispatch, scale_init=8.0)
        models = (trained_vit(config, epochs=12, seed=seed, images_per_group=1) for seed in (0, 1, 2))
        return mean(map(accuracy, models))

    assert mean_accuracy("soft") - mean_accuracy("uniform") >= 0.01


@pytest.mark.parametrize(
    ("trained", "epochs", "stat", "variants"),
    [
        (TokenChoiceConfig(k=2, capacity_factor=1.0), 14, "dropped_frac", [{"k": 1}, {"k": 2}]),
        (ExpertChoiceConfig(), 6, "unchosen_frac", [{}]),
    ],
    ids=["token_choice", "expert_choice"],
)
def test_a_transport_plan_leaves_out_fewer_tokens(trained, epochs, stat, variants):
    """Routers sections 2.2 and 2.4: on the logits of a trained model, at capacity 1."""
    model = trained_vit(trained, epochs=epochs, seed=0)
    for fields in variants:
        config = replace(trained, **fields)
        plain, balanced = (
            routed_by(model, c, stat) for c in (config, replace(config, affinity=SinkhornConfig()))
        )
        assert (balanced < plain).all(), (balanced, plain)


def routed_by(model: ViT, config: RouterConfig, stat: str) -> Tensor:
    """A statistic of another router with the tokens and weights of each router of `model`, by layer."""
    values = []
    for block in MOE_BLOCKS:
        router = model.blocks[block].mlp.router
        seen: list[tuple[Tensor, ...]] = []
        hook = router.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[:2]))
        answer(model)
        hook.remove()
        other = config.build(dim=router.gate_DE.shape[0], num_experts=EXPERTS)
        other.load_state_dict(router.state_dict())
        with torch.no_grad():
            values.append(other(*seen[0]).stats[stat])
    return torch.stack(values)

"""Similarity of slots in closed form, and maps that sum to 1."""

import pytest
import torch

from moe.init import init_weights
from moe.overrides import AS_TRAINED
from moe.routers import SoftConfig, TokenChoiceConfig
from moe.routers.soft import SoftRouter, mean_cosine
from moe.routers.token_choice import TokenChoiceRouter
from orchestrator.evaluation.microscope.examples import examples
from orchestrator.evaluation.microscope.slots import off_diagonal, parameter_cosines, slot_sums, spread


def soft_router(phi_DEC: torch.Tensor) -> SoftRouter:
    D, E, C = phi_DEC.shape
    router = SoftRouter(SoftConfig(slots_per_expert=C, scale_init=10.0), dim=D, num_experts=E)
    init_weights(router, 0)
    router.phi_DEC.data = phi_DEC
    return router


def test_orthogonal_and_duplicated_parameters():
    """Unit vectors as slots: all cosines 0. Both slots of each expert alike: 1 within, 0 between them."""
    orthogonal = parameter_cosines(soft_router(torch.eye(4).view(4, 2, 2)))
    assert orthogonal is not None
    assert off_diagonal(orthogonal).tolist() == [0, 0, 0]
    duplicated = parameter_cosines(soft_router(torch.eye(4)[:, [0, 0, 1, 1]].reshape(4, 2, 2)))
    assert duplicated is not None
    block = torch.ones(2, 2, dtype=torch.float64)
    torch.testing.assert_close(duplicated, torch.block_diag(block, block))
    found = spread(duplicated)  # 2 of 6 pairs are alike
    assert (found.least, found.mean, found.most) == pytest.approx((0, 1 / 3, 1))


def test_duplicated_slots_take_the_same():
    """As their parameters are the same, so are their dispatch weights, whatever the tokens."""
    routing = soft_router(torch.randn(4, 1, 1).expand(4, 3, 2).contiguous())(
        torch.randn(2, 5, 4), torch.ones(2, 5), None, AS_TRAINED
    )
    sums = slot_sums(routing, torch.ones(2, 5))
    assert sums is not None
    torch.testing.assert_close(sums.mean_NN(), torch.ones(6, 6, dtype=torch.float64))
    assert sums.spreads()["dispatch"].least == pytest.approx(1)
    assert sums.spreads()["combine"].least == pytest.approx(1)  # every token takes all slots alike


def test_mean_is_that_of_training_and_padding_counts_nowhere():
    """`moe/slot_similarity` is the same mean, by another way; a group of padding alone changes nothing."""
    router = soft_router(torch.randn(4, 3, 2))
    valid_GS = torch.tensor([[1.0] * 5, [1.0, 1, 1, 0, 0], [0.0] * 5])
    routing = router(torch.randn(3, 5, 4), valid_GS, None, AS_TRAINED)
    sums = slot_sums(routing, valid_GS)
    assert sums is not None
    assert sums.groups == 2
    expected = mean_cosine(routing.dispatch_GSEC.detach().flatten(2))[:2].mean()
    assert sums.spreads()["dispatch"].mean == pytest.approx(float(expected), abs=1e-6)
    assert slot_sums(router(torch.randn(1, 5, 4), valid_GS[2:], None, AS_TRAINED), valid_GS[2:]) is None


def test_routers_without_slots_of_their_own():
    assert parameter_cosines(TokenChoiceRouter(TokenChoiceConfig(), dim=4, num_experts=2)) is None
    assert (
        parameter_cosines(SoftRouter(SoftConfig(dispatch="uniform", combine="uniform"), dim=4, num_experts=2))
        is None
    )


def test_maps_sum_to_one(build_vit, noise_batch):
    """A slot's map over the patches of its image, a patch's over all slots."""
    model = build_vit(SoftConfig(slots_per_expert=3))
    found = examples(model, noise_batch(4, valid=3), count=3, blocks=model.config.moe_blocks(), points=[])
    for maps in found.slots.values():
        assert maps.dispatch_BPEC.shape == (3, 16, 4, 3)
        torch.testing.assert_close(maps.dispatch_BPEC.sum(1), torch.ones(3, 4, 3))
        torch.testing.assert_close(maps.combine_BPEC.sum((2, 3)), torch.ones(3, 16))

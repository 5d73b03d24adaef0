"""Exactly the patches without a seat are white."""

import pytest
import torch

from moe.overrides import RoutingOverrides
from moe.routers import ExpertChoiceConfig, MixtureConfig, SoftConfig, TokenChoiceConfig
from orchestrator.data.images import normalize
from orchestrator.evaluation.microscope.discarded import discarded, drops, pixels_of, settings, whitened


def test_white_by_hand():
    """A 4x4 image of 2x2 patches of 2x2 pixels, patches 1 and 2 discarded."""
    image = torch.arange(16, dtype=torch.uint8).view(1, 1, 4, 4).expand(1, 3, 4, 4)
    white = whitened(image, torch.tensor([[False, True, True, False]]))
    expected = [[0, 1, 255, 255], [4, 5, 255, 255], [255, 255, 10, 11], [255, 255, 14, 15]]
    assert white.dtype == torch.uint8
    assert white[0].tolist() == [expected] * 3


@pytest.mark.parametrize("pooling", ["gap", "token"])
@pytest.mark.parametrize("priority", ["none", "max"])
def test_white_patches_are_those_without_a_seat(build_vit, noise_batch, pooling, priority):
    """Seats are looked up token by token in the routing; images of noise have no white of their own."""
    model = build_vit(TokenChoiceConfig(k=1), pooling, images_per_group=2)
    batch = noise_batch(6, valid=5)
    point = RoutingOverrides(capacity_factor=0.4, priority=priority)
    found = discarded(model, batch, point)
    tokens = model.config.tokens()
    routings = model(
        normalize(batch.image), batch.valid, routing_overrides=point, return_routings=True
    ).routings
    for block, routing in zip(model.config.moe_blocks(), routings, strict=True):
        white = whitened(batch.image[:5], found.patch_BP[block])
        dropped = 0
        for b in range(5):
            seats = set(routing.token_GEC[b // 2].flatten().tolist())
            for p in range(16):
                y, x = 2 * (p // 4), 2 * (p % 4)
                token = (b % 2) * tokens + (tokens - 16) + p
                expected = batch.image[b, :, y : y + 2, x : x + 2]
                if token not in seats:
                    expected, dropped = torch.full_like(expected, 255), dropped + 1
                assert torch.equal(white[b, :, y : y + 2, x : x + 2], expected)
        assert int(found.patch_BP[block].sum()) == dropped > 0
        if pooling == "gap":  # else the statistic counts class tokens, too
            assert float(routing.stats["dropped_frac"]) == pytest.approx(dropped / (5 * 16))


def test_more_room_discards_less(build_vit, noise_batch):
    model, batch = build_vit(ExpertChoiceConfig()), noise_batch(4)
    points, refused = settings(model, [2.0, 0.5, 1.0])
    assert [point.capacity_factor for point in points] == [0.5, 1.0, 2.0]
    assert not refused
    counts = [int(discarded(model, batch, point).patch_BP[1].sum()) for point in points]
    assert counts == sorted(counts, reverse=True)


def test_priorities_and_capacities_that_cannot_be(build_vit):
    """16 tokens, 4 experts: capacity 0.01 rounds to no slot at all."""
    points, refused = settings(build_vit(TokenChoiceConfig(k=1)), [0.5, 0.01])
    assert [(p.capacity_factor, p.priority) for p in points] == [(0.5, "none"), (0.5, "max")]
    assert len(refused) == 1
    assert "0.01" in refused[0]


def test_who_discards():
    assert drops(TokenChoiceConfig())
    assert drops(ExpertChoiceConfig())
    assert not drops(SoftConfig())
    assert not drops(MixtureConfig())


def test_pixels():
    assert pixels_of(torch.eye(4).view(1, 16), 8).sum() == 4 * 4

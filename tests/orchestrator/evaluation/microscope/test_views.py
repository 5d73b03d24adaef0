"""From routings to images: seats, weights, class tokens, groups, padding."""

from dataclasses import replace

import pytest
import torch

from moe.presets import PRESETS
from moe.routers import ROUTERS
from moe.routing import GatherRouting
from orchestrator.data.images import normalize
from orchestrator.evaluation.microscope.views import patches, seated, view_of

each_router = pytest.mark.parametrize("router", [kind() for kind in ROUTERS], ids=lambda r: r.kind)


def by_hand() -> GatherRouting:
    """Tokens 0 .. 3, two experts with two slots: token 0 sits at both, token 2 at expert 1; 4 is empty."""
    gates = torch.tensor([[[0.6, 0.4], [0.5, 0.5], [0.1, 0.9], [0.7, 0.3]]])
    return GatherRouting(
        token_GEC=torch.tensor([[[0, 4], [2, 0]]]),
        weight_GEC=torch.tensor([[[0.6, 0.0], [0.9, 0.4]]]),
        gates_GSE=gates,
        load_GE=torch.ones(1, 2),
        aux_G=torch.zeros(1),
        stats={},
    )


def test_seats_by_hand():
    weight_GSE, seat_GSE = seated(by_hand())
    assert seat_GSE.tolist() == [[[True, True], [False, False], [False, True], [False, False]]]
    torch.testing.assert_close(weight_GSE, torch.tensor([[[0.6, 0.4], [0, 0], [0, 0.9], [0, 0]]]))


def test_view_by_hand():
    """One image of 2x2 patches: patches 1 and 3 are discarded, patch 0 listens to expert 0 most."""
    config = replace(PRESETS["debug"], image_size=8, patch_size=4)
    view = view_of(by_hand(), config, torch.ones(1))
    assert view.experts_BP().tolist() == [[2, 0, 1, 0]]
    assert view.discarded_BP().tolist() == [[False, True, False, True]]
    assert view.best_BP().tolist() == [[0, -1, 1, -1]]


def test_groups_class_tokens_and_padding():
    """Two groups of two images with a class token and four patches; the third image is padding. Values say
    100 * image + token, of which the class token, 0, goes."""
    config = replace(PRESETS["debug"], image_size=8, patch_size=4, pooling="token")
    value_GS = torch.tensor([[100 * image + token for image in range(2) for token in range(5)]])
    value_GS = torch.cat([value_GS, value_GS + 200])
    found = patches(value_GS, config, torch.tensor([1.0, 1, 0, 1]))
    assert found.tolist() == [[1, 2, 3, 4], [101, 102, 103, 104], [301, 302, 303, 304]]


@each_router
@pytest.mark.parametrize("pooling", ["gap", "token"])
def test_of_every_router(build_vit, noise_batch, router, pooling):
    model, batch = build_vit(router, pooling, images_per_group=2), noise_batch(6, valid=5)
    routings = model(normalize(batch.image), batch.valid, return_routings=True).routings
    view = view_of(routings[0], model.config, batch.valid)
    assert view.gate_BPE.shape == view.seat_BPE.shape == (5, 16, 4)
    torch.testing.assert_close(view.gate_BPE.sum(-1), torch.ones(5, 16))
    assert not view.weight_BPE[~view.seat_BPE].any()
    if router.kind in ("soft", "mixture"):
        assert not view.discarded_BP().any()
        torch.testing.assert_close(view.weight_BPE, view.gate_BPE)

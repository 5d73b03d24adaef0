"""Sums over images, and what follows from them, on routers that are tied to the class."""

import math
from dataclasses import replace

import pytest
import torch

from moe.overrides import AS_TRAINED
from moe.presets import PRESETS
from moe.routers import TokenChoiceConfig
from moe.routers.token_choice import TokenChoiceRouter
from orchestrator.evaluation.microscope.tally import block_order, mutual_information, tally
from orchestrator.evaluation.microscope.views import View, view_of

CONFIG = replace(PRESETS["debug"], image_size=8, patch_size=4)  # four patches


def tied_to_the_class(label_B: torch.Tensor, expert_of: list[int]) -> View:
    """Tokens are their class's unit vector; the gate sends class c to expert `expert_of[c]` for sure."""
    classes, experts = len(expert_of), max(expert_of) + 1
    router = TokenChoiceRouter(TokenChoiceConfig(capacity_factor=8.0), dim=classes, num_experts=experts)
    gate = torch.zeros(classes, experts)
    gate[range(classes), expert_of] = 1000.0  # in float32 the softmax is exactly 1 there
    router.gate_DE.data = gate
    x_GSD = torch.eye(classes)[label_B].unsqueeze(1).expand(-1, 4, -1)
    with torch.no_grad():
        routing = router(x_GSD, torch.ones(len(label_B), 4), None, AS_TRAINED)
    return view_of(routing, CONFIG, torch.ones(len(label_B)))


def test_an_expert_for_every_class():
    """After sorting the map is the unit matrix, whatever the permutation; they share ln 5 nats."""
    label_B = torch.arange(20) % 5
    found = tally(tied_to_the_class(label_B, [3, 0, 4, 1, 2]), label_B, classes=5)
    rows, columns = block_order(found.mean_by_class())
    torch.testing.assert_close(found.mean_by_class()[rows][:, columns], torch.eye(5, dtype=torch.float64))
    assert mutual_information(found.class_expert) == pytest.approx(math.log(5))


def test_experts_that_share_classes():
    """Classes 0, 2, 4 go to expert 1, the others to expert 0: two blocks, and the ln 2 of two experts."""
    label_B = torch.arange(24) % 6
    found = tally(tied_to_the_class(label_B, [1, 0, 1, 0, 1, 0]), label_B, classes=6)
    rows, columns = block_order(found.mean_by_class())
    block = found.mean_by_class()[rows][:, columns]
    assert block[:3, 0].tolist() == block[3:, 1].tolist() == [1.0] * 3
    assert not block[:3, 1].any()
    assert not block[3:, 0].any()
    assert mutual_information(found.class_expert) == pytest.approx(math.log(2))


def test_a_router_that_sees_no_class_shares_nothing():
    by_class, by_expert = torch.rand(7).double(), torch.rand(4).double()
    assert mutual_information(torch.outer(by_class, by_expert)) == pytest.approx(0, abs=1e-9)


def random_view(images: int, seed: int) -> View:
    drawn = torch.Generator().manual_seed(seed)
    gate = torch.randn(images, 4, 3, generator=drawn).softmax(-1)
    seat = torch.rand(images, 4, 3, generator=drawn) < 0.5
    return View(gate_BPE=gate, seat_BPE=seat, weight_BPE=gate * seat)


def test_sums_of_batches_add_up():
    first, second = random_view(5, 0), random_view(3, 1)
    label = torch.tensor([0, 1, 1, 2, 0, 2, 2, 1])
    both = View(**{name: torch.cat([value, vars(second)[name]]) for name, value in vars(first).items()})
    sums = tally(first, label[:5], classes=4) + tally(second, label[5:], classes=4)
    for name, value in vars(tally(both, label, classes=4)).items():
        torch.testing.assert_close(getattr(sums, name), value)


def test_figures_are_means():
    """Rows' averages, weighted by their patches, are the mean gate; shares sum to 1."""
    view, label = random_view(6, 2), torch.tensor([0, 0, 0, 1, 1, 3])
    found = tally(view, label, classes=4)
    mean_gate = view.gate_BPE.double().mean((0, 1))
    share = torch.tensor([3 / 6, 2 / 6, 0, 1 / 6], dtype=torch.float64)
    torch.testing.assert_close(share @ found.mean_by_class(), mean_gate)
    torch.testing.assert_close(found.mean_by_position().mean(0), mean_gate)
    assert found.mean_by_class()[2].tolist() == [0, 0, 0]  # a class without images
    assert float(found.experts_frac().sum()) == pytest.approx(1)
    assert float(found.experts_frac()[0]) == pytest.approx(float(view.discarded_BP().double().mean()))
    assert found.mean_weight() == pytest.approx(float(view.weight_BPE[view.seat_BPE].mean()))
    assert found.weights.sum() == view.seat_BPE.sum()

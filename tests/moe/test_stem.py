"""Convolutions in front of the blocks."""

from dataclasses import replace

import pytest
import torch

from moe.dense import ConvStem, stem_channels
from moe.layer import MoEConfig
from moe.presets import PRESETS
from moe.routers import SoftConfig
from moe.vit import ViT
from tests.moe.test_memory_measured import Case

CONFIG = replace(
    PRESETS["debug"],
    stem="conv",
    patch_size=4,
    moe=MoEConfig(num_experts=4, router=SoftConfig(), residual=False),
)


@pytest.mark.parametrize(
    ("width", "patch_size", "channels"),
    [(384, 16, [48, 96, 192, 384]), (32, 2, [32]), (8, 32, [1, 1, 2, 4, 8])],
)
def test_channels_double(width, patch_size, channels):
    assert stem_channels(width, patch_size) == channels


@pytest.mark.parametrize("patch_size", [2, 4, 8])
def test_a_token_per_patch(patch_size):
    assert ConvStem(16, patch_size)(torch.zeros(3, 3, 8, 8)).shape == (
        3,
        16,
        8 // patch_size,
        8 // patch_size,
    )


def test_images_do_not_see_each_other():
    """Nor padding."""
    model, images = ViT(CONFIG), torch.randn(4, 3, 8, 8)
    together = model.features(images)[0]
    for i, image in enumerate(images):
        torch.testing.assert_close(model.features(image[None])[0][0], together[i])


def test_it_learns():
    """Which half of the image is bright; every weight of the stem takes part."""
    model, images = ViT(replace(CONFIG, num_classes=2)), torch.randn(32, 3, 8, 8) / 4
    labels = torch.arange(32) % 2
    images[labels == 1, :, :4] += 1
    images[labels == 0, :, 4:] += 1
    before = {name: p.detach().clone() for name, p in model.embed.named_parameters()}
    optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(images).logits, labels)
        loss.backward()
        optimizer.step()
    assert (model(images).logits.argmax(-1) == labels).all()
    assert all(not torch.equal(p, before[name]) for name, p in model.embed.named_parameters())


def test_its_memory_is_planned(monkeypatch):
    plain = Case.model
    monkeypatch.setattr(Case, "model", lambda self: replace(plain(self), stem="conv"))
    Case(router=SoftConfig(), images=16).check()

"""A training step of mixed images against the same step on images that were mixed beforehand."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from moe.init import mix
from moe.vit import ViT
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data import augment
from orchestrator.data.batch import Batch
from orchestrator.data.images import normalize
from orchestrator.training.loop import train_step
from orchestrator.training.optim import build_optimizer

SMALL = {"model.width": 16, "model.mlp_dim": 32, "data.batch_size": 8, "train.steps": 20}


def run_of(**changes: Any) -> RunConfig:
    return override(RunConfig(), SMALL | {f"data.{name}": value for name, value in changes.items()})


def batch_of(run: RunConfig) -> Batch:
    rng = torch.Generator().manual_seed(0)
    image = torch.randint(256, (8, 3, 8, 8), generator=rng, dtype=torch.uint8)
    label = torch.randint(10, (8,), generator=rng)
    keys = [str(n) for n in range(8)]
    draws = augment.draw(keys, mixup=run.data.mixup, cutmix=run.data.cutmix, size=8)
    key = torch.arange(8)
    return Batch(image, label, torch.ones(8), key, sample=key, mix=torch.from_numpy(draws))


def live_model(run: RunConfig) -> ViT:
    """With a head that is not at its zero start, so that logits depend on every block."""
    model = ViT(run.model, seed=1)
    torch.nn.init.normal_(model.head.weight, generator=torch.Generator().manual_seed(2))
    return model


def step(run: RunConfig, batch: Batch) -> tuple[ViT, dict[str, float]]:
    model = live_model(run)
    metrics = train_step(model, build_optimizer(run.train.optimizer, model), batch, run, step=0)
    return model, {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("parameters", [{"mixup": 0.5}, {"cutmix": 1.0}, {"mixup": 0.5, "cutmix": 1.0}])
def test_loss_and_accuracy_are_those_of_mixed_images_and_soft_labels(parameters: dict[str, float]) -> None:
    run = run_of(**parameters)
    batch = batch_of(run)
    images = augment.mix(normalize(batch.image), batch.mix)
    logits = live_model(run)(images, keys_B=mix(batch.key, run.train.seed)).logits
    batch = batch._replace(label=augment.partners(logits.argmax(-1)))  # correct where the partner weighs more
    weight = batch.mix[:, :1]
    one_hot = F.one_hot(batch.label, logits.shape[1]).float()
    soft = weight * one_hot + (1 - weight) * augment.partners(one_hot)
    _, metrics = step(run, batch)
    assert metrics["train/loss_class"] == pytest.approx(F.cross_entropy(logits, soft).item(), rel=1e-5)
    correct = (logits.argmax(-1) == soft.argmax(-1)).float().mean().item()
    assert metrics["train/acc1"] == pytest.approx(correct)
    assert 0 < correct < 1


def test_two_passes_are_one() -> None:
    """As long as no pair is torn apart."""
    run = run_of(mixup=0.5, cutmix=1.0)
    batch = batch_of(run)
    model, metrics = step(run, batch)
    halved, same = step(override(run, {"train.microbatch": 4}), batch)
    assert same == pytest.approx(metrics, rel=1e-4)
    for one, other in zip(model.parameters(), halved.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


def test_draws_do_not_matter_where_nothing_is_mixed() -> None:
    run = run_of()
    batch = batch_of(run)
    model, metrics = step(run, batch)
    other, same = step(run, batch._replace(mix=torch.full((8, 5), torch.nan)))
    assert same == metrics
    assert all(map(torch.equal, model.parameters(), other.parameters()))

"""Losses in a step: over classes, and of images that are mixed with each other."""

import pytest
import torch
import torch.nn.functional as F

from moe.init import mix
from moe.models.vit import ViT
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.augment.base import draw
from orchestrator.data.batch import Batch, normalize
from orchestrator.tasks.classification import mix_images, partners
from orchestrator.training.loop import evaluate, train_step
from tests.orchestrator.training.batches import with_fields
from tests.orchestrator.training.test_loop import live_model, random_batch, small_run


def test_a_sigmoid_loss_is_summed_over_classes() -> None:
    run, batch = small_run(**{"task.loss": "sigmoid", "model.head_bias": -2.0}), random_batch(8)
    _, metrics = one_step(run, batch)
    logits = live_model(run)(normalize(batch["image"]), keys_B=mix(batch.key, run.train.seed)).logits
    targets = F.one_hot(batch["label"][:, 0], logits.shape[1]).float()
    expected = F.binary_cross_entropy_with_logits(logits, targets, reduction="sum") / 8
    assert metrics["train/loss_class"] == pytest.approx(expected.item(), rel=1e-5)
    assert evaluate(live_model(run), [batch], run)["val/loss"] == pytest.approx(expected.item(), rel=1e-5)


def mixed_batch(run: RunConfig) -> Batch:
    draws = draw(run.data.augment, [str(n) for n in range(8)], 8)
    return with_fields(random_batch(8), mix=torch.from_numpy(draws))


def one_step(run: RunConfig, batch: Batch) -> tuple[ViT, dict[str, float]]:
    model = live_model(run)
    metrics = train_step(model, run.train.optimizer.build(model), batch, run, step=0)
    return model, {name: value.item() for name, value in metrics.items()}


@pytest.mark.parametrize("mixing", ["mixup", "mixup,cutmix"])
def test_loss_and_accuracy_are_those_of_mixed_images_and_soft_labels(mixing: str) -> None:
    """The step is compared with images and labels that are mixed beforehand."""
    run = small_run(**{"data.augment": mixing, "data.augment.mixup.alpha": 0.5})
    batch = mixed_batch(run)
    images = mix_images(normalize(batch["image"]), batch["mix"])
    logits = live_model(run)(images, keys_B=mix(batch.key, run.train.seed)).logits
    # Correct where the partner weighs more.
    batch = with_fields(batch, label=partners(logits.argmax(-1))[:, None])
    weight = batch["mix"][:, :1]
    one_hot = F.one_hot(batch["label"][:, 0], logits.shape[1]).float()
    soft = weight * one_hot + (1 - weight) * partners(one_hot)
    _, metrics = one_step(run, batch)
    assert metrics["train/loss_class"] == pytest.approx(F.cross_entropy(logits, soft).item(), rel=1e-5)
    correct = (logits.argmax(-1) == soft.argmax(-1)).float().mean().item()
    assert metrics["train/acc1"] == pytest.approx(correct)
    assert 0 < correct < 1


def test_pairs_of_mixed_images_stay_together_in_microbatches() -> None:
    run = small_run(**{"data.augment": "mixup,cutmix", "data.augment.mixup.alpha": 0.5})
    batch = mixed_batch(run)
    model, metrics = one_step(run, batch)
    halved, same = one_step(override(run, {"train.microbatch": 4}), batch)
    assert same == pytest.approx(metrics, rel=1e-4)
    for ours, theirs in zip(model.parameters(), halved.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)

"""A loss over the global batch, that of a task from outside of the tree, and what a task refuses."""

import math
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from moe.init import mix
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.batch import normalize
from orchestrator.errors import UsageError
from orchestrator.training.loop import train_step
from tests.orchestrator.tasks import test_laws
from tests.orchestrator.training.test_loop import ROUTERS, live_model, random_batch, small_run
from tests.own.proportions import ProportionsConfig

PROPORTIONS = {"task.kind": "proportions"}


def loss_by_loop(logits: torch.Tensor, labels: torch.Tensor) -> float:
    means, counts = [0.0] * 10, [0] * 10
    for row, label in zip(logits, labels, strict=True):
        counts[label] += 1
        total = sum(math.exp(x) for x in row)
        means = [mean + math.exp(x) / total / len(logits) for mean, x in zip(means, row, strict=True)]
    return -sum(count / len(logits) * math.log(mean) for count, mean in zip(counts, means, strict=True))


def test_a_loss_over_the_batch_is_that_of_all_its_images() -> None:
    """With microbatches of two, whose pairs alone would know nothing of the others."""
    run, batch = small_run(**PROPORTIONS), random_batch(8)
    logits = live_model(run, torch.float64)(normalize(batch["image"]), keys_B=mix(batch.key, 0)).logits
    expected = loss_by_loop(logits.detach(), batch["label"][:, 0])
    for microbatch in (None, 4, 2):
        run = override(run, {"train.microbatch": microbatch})
        model = live_model(run, torch.float64)
        metrics = train_step(model, run.train.optimizer.build(model), batch, run, step=0)
        assert float(metrics["train/loss_proportions"]) == pytest.approx(expected, rel=1e-12)
        assert float(metrics["train/loss"]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("router", ROUTERS)
def test_it_obeys_the_law_of_microbatches(router: str) -> None:
    test_laws.test_microbatches_have_the_gradients_of_the_whole(router, "proportions")


@pytest.mark.smoke
def test_it_obeys_the_law_of_workers(tmp_path: Path) -> None:
    test_laws.test_two_workers_train_as_one("proportions", tmp_path)


def test_the_model_must_give_what_the_task_reads() -> None:
    class Pairs(ProportionsConfig):
        needs: ClassVar = ("image", "text")

    with pytest.raises(ValueError, match=r"'proportions' reads image, text, and .* gives logits"):
        RunConfig(task=Pairs())
    with pytest.raises(UsageError, match=r"mixup mixes labels, of which .*'proportions'"):
        override(RunConfig(), PROPORTIONS | {"data.augment": "mixup"})

"""Losses of a sample and of the global batch, over workers and microbatches, and what a task refuses."""

import math
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
import torch.distributed as dist

from moe.init import mix
from orchestrator.codec import flat, override, read_config, to_dict
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch, normalize
from orchestrator.errors import UsageError
from orchestrator.training.loop import _sum_over_workers, evaluate, train_step
from orchestrator.training.metrics_file import Metrics
from orchestrator.training.worker import build_model
from tests.moe.parity import share, spawn
from tests.orchestrator.training.test_loop import ROUTERS, live_model, random_batch, small_run
from tests.own.proportions import ProportionsConfig

STEPS, BATCH = 3, 8
PROPORTIONS = {"task.kind": "proportions"}
LIVELY = {"train.lr": 0.01, "train.schedule.warmup_steps": 0}
# Relative.
TOLERANCES = {"train/loss": 1e-6, "train/grad_norm": 2e-6, "val/recognised": 0.0}
LAYOUTS: dict[str, dict[str, Any]] = {
    "dp=2": {"scale.workers": 2},
    "dp=2, microbatches": {"scale.workers": 2, "train.microbatch": 2},
    "ep=2": {"scale.workers": 2, "scale.ep": 2},
    "ep=2, microbatches": {"scale.workers": 2, "scale.ep": 2, "train.microbatch": 2},
}


def loss_by_loop(logits: torch.Tensor, labels: torch.Tensor) -> float:
    means, counts = [0.0] * 10, [0] * 10
    for row, label in zip(logits, labels, strict=True):
        counts[label] += 1
        total = sum(math.exp(x) for x in row)
        means = [mean + math.exp(x) / total / len(logits) for mean, x in zip(means, row, strict=True)]
    return -sum(count / len(logits) * math.log(mean) for count, mean in zip(counts, means, strict=True))


def test_a_loss_over_the_batch_is_that_of_all_its_images() -> None:
    """With microbatches of two, whose pairs alone would know nothing of the others."""
    run, batch = small_run(**PROPORTIONS), random_batch(BATCH)
    logits = live_model(run, torch.float64)(normalize(batch["image"]), keys_B=mix(batch.key, 0)).logits
    expected = loss_by_loop(logits.detach(), batch["label"][:, 0])
    for microbatch in (None, 4, 2):
        run = override(run, {"train.microbatch": microbatch})
        model = live_model(run, torch.float64)
        metrics = train_step(model, run.train.optimizer.build(model), batch, run, step=0)
        assert float(metrics["train/loss_proportions"]) == pytest.approx(expected, rel=1e-12)
        assert float(metrics["train/loss"]) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("router", ROUTERS)
def test_microbatches_have_the_gradients_of_the_whole(router: str) -> None:
    grown: list[dict[str, torch.Tensor]] = []
    for microbatch in (None, 4, 2):
        run = small_run(router, **PROPORTIONS, **{"train.microbatch": microbatch, "train.clip_norm": None})
        model = live_model(run, torch.float64)
        train_step(model, run.train.optimizer.build(model), random_batch(BATCH), run, step=0)
        grown.append({name: param.grad for name, param in model.named_parameters()})
    for other in grown[1:]:
        for name, expected in grown[0].items():
            torch.testing.assert_close(other[name], expected, rtol=1e-12, atol=1e-14)


def trained(router: str, layout: dict[str, Any], rank: int = 0, workers: int = 1) -> list[Metrics]:
    """Metrics of every step, and of an evaluation whose last images are padding."""
    run = small_run(router, **PROPORTIONS, **LIVELY, **layout)
    mine = share(rank, workers, BATCH)
    model = build_model(run, torch.device("cpu"), seed=1)
    optimizer = run.train.optimizer.build(model)

    def part(seed: int, valid: int = BATCH) -> Batch:
        return random_batch(BATCH, seed, valid=valid).map(lambda field: field[mine])

    found = [
        _sum_over_workers(train_step(model, optimizer, part(step), run, step=step)) for step in range(STEPS)
    ]
    values = evaluate(model, [part(step, valid=6) for step in range(STEPS)], run)
    return [*found, {"val/recognised": values["val/recognised"]}]


def check(rank: int, ranks: int, folder: str) -> None:
    for case, expected in torch.load(f"{folder}/one").items():
        router, layout = case
        for step, (ours, theirs) in enumerate(
            zip(trained(router, LAYOUTS[layout], rank, ranks), expected, strict=True)
        ):
            for name in ours.keys() & TOLERANCES:
                error = abs(ours[name] - theirs[name])
                assert error <= TOLERANCES[name] * abs(theirs[name]), (case, step, name, error)


def test_two_workers_train_as_one(tmp_path: Path) -> None:
    routers = ("soft", "token_choice")
    torch.save({(r, layout): trained(r, {}) for r in routers for layout in LAYOUTS}, tmp_path / "one")
    spawn(2, check, str(tmp_path))


def test_the_model_must_give_what_the_task_reads() -> None:
    class Pairs(ProportionsConfig):
        needs: ClassVar = ("image", "text")

    with pytest.raises(ValueError, match=r"'proportions' reads image, text, and .* gives logits"):
        RunConfig(task=Pairs())
    with pytest.raises(UsageError, match=r"mixup and cutmix mix labels, of which .*'proportions'"):
        override(RunConfig(), PROPORTIONS | {"data.mixup": 0.5})


def test_a_config_of_before_has_its_loss_in_the_task() -> None:
    tree = to_dict(RunConfig())
    del tree["task"]
    tree["train"]["loss"] = "sigmoid"
    run = read_config(RunConfig, tree)
    assert flat(run)["task.loss"] == "sigmoid"
    assert override(RunConfig(), {"train.loss": "sigmoid"}) == run


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
    assert not dist.is_initialized()

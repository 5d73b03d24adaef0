"""Fine-tuning: the recipe, what is new in the model, and the figures of several seeds."""

import math
from pathlib import Path

import pytest
import torch

from moe.vit import ViT
from orchestrator.checkpoint.start import start_from, start_report
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.loader import in_process
from orchestrator.errors import UsageError
from orchestrator.evaluation.finetune import failures, fine_tuned, finetune_run, finetune_sweep
from orchestrator.evaluation.trained import Trained, read_trained
from orchestrator.training.optim import learning_rate
from orchestrator.training.worker import Result, checkpoint_directory, train_worker

SMALL = {"model.width": 16, "model.mlp_dim": 32, "model.moe.num_experts": 4, "train.steps": 2}


@pytest.fixture(scope="module")
def trained(digits: str, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    home = str(tmp_path_factory.mktemp("home"))
    run = override(RunConfig(), {**SMALL, "data.path": digits, "storage": home})
    train_worker(run, report=lambda step, metrics: None, read=in_process)
    return read_trained(checkpoint_directory(run))


def test_the_recipe(trained: Trained) -> None:
    """V-MoE 3.5: SGD .9, 3e-3 by a cosine to 1e-5, clip 10, dropout .1 on experts, capacity 1.5."""
    run = finetune_run(trained, image_size=16)
    assert run.train.optimizer.kind == "sgd"
    assert run.train.optimizer.momentum == 0.9
    assert run.train.clip_norm == 10
    rates = [learning_rate(run.train.schedule, step, peak=run.train.lr, total=500) for step in (0, 50, 500)]
    assert rates == pytest.approx([0, 3e-3, 1e-5])
    moe = run.model.moe
    assert moe is not None
    assert (moe.expert_dropout, moe.router.capacity_factor) == (0.1, 1.5)  # pyright: ignore
    assert run.model.grid() == 2 * trained.run.model.grid()
    assert run.model.slots() > trained.run.model.slots()


def test_a_soft_router_has_slots_and_no_capacity(trained: Trained) -> None:
    soft = Trained(**{**vars(trained), "run": override(trained.run, {"model.moe.router.kind": "soft"})})
    moe = finetune_run(soft, image_size=16).model.moe
    assert moe is not None
    assert moe.router == soft.run.model.moe.router  # pyright: ignore
    assert moe.expert_dropout == 0.1


def test_the_head_is_new_though_it_would_fit(trained: Trained) -> None:
    """It starts at zero; the rest is the trained model's, the position embedding resized."""
    run = finetune_run(trained, image_size=16)
    assert run.train.init_from
    model, was = ViT(run.model, seed=1), trained.load()
    assert was.head.weight.abs().sum() > 0
    report = start_from(model, run.train.init_from, without=run.train.init_without)
    assert not model.head.weight.any()
    assert torch.equal(model.blocks[1].mlp.experts.w_in_EDF, was.blocks[1].mlp.experts.w_in_EDF)
    assert model.position_SD.shape == (64, 16)
    assert {name: how.how for name, how in report.transfer.converted.items()} == {
        "position_SD": "resized from 4 x 4 to 8 x 8 patches"
    }
    assert report.transfer.initial == {"head.weight": "new, as asked", "head.bias": "new, as asked"}
    assert report.transfer.unused == ()
    planned = start_report(run.model, run.train.init_from, without=run.train.init_without)
    assert str(planned) == str(report)


def test_without_it_the_head_is_copied(trained: Trained) -> None:
    model = ViT(trained.run.model, seed=1)
    start_from(model, trained.location)
    assert torch.equal(model.head.weight, trained.load().head.weight)


def test_a_size_that_patches_do_not_fill(trained: Trained) -> None:
    with pytest.raises(UsageError, match=r"--image-size 15: patch_size=2 does not divide image_size=15"):
        finetune_run(trained, image_size=15)


def test_figures_of_seeds_and_data_sets(trained: Trained, digits: str, tmp_path: Path) -> None:
    """a: 0.8 and 0.6; b: 0.5, and seed 1 diverged. Mean over data sets of seed 0 alone: 0.65."""
    (tmp_path / "b").symlink_to(digits)
    sweep = finetune_sweep(finetune_run(trained), [digits, str(tmp_path / "b")], seeds=2)
    assert list(sweep.trials()) == ["shards-seed0", "shards-seed1", "b-seed0", "b-seed1"]
    run = sweep.runs()["b-seed1"]
    assert (run.train.seed, run.data.path, run.model.num_classes) == (1, str(tmp_path / "b"), 10)

    def ended(accuracy: float, status: str = "finished") -> Result:
        return Result(status=status, step=500, metrics={"val/acc1": accuracy})  # pyright: ignore

    outcomes = {
        "shards-seed0": ended(0.8),
        "shards-seed1": ended(0.6),
        "b-seed0": ended(0.5),
        "b-seed1": ended(math.nan, "diverged"),
    }
    found = fine_tuned(sweep, outcomes)
    assert found.of("shards").mean == pytest.approx(0.7)
    assert math.isnan(found.of("b").half)
    overall = found.overall()
    assert overall is not None
    assert overall.mean == pytest.approx(0.65)
    assert failures(outcomes) == {"b-seed1": "diverged at step 500: try a lower --set train.lr"}
    assert failures({"b-seed0": "no space"}) == {"b-seed0": "no space"}
    assert fine_tuned(sweep, {}).accuracy == {}

"""Fine-tuning: the recipe, what is new in the model, and the figures of several seeds."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from moe.models.vit import ViT
from orchestrator.checkpoint.models import ModelRef, read_model
from orchestrator.checkpoint.start import start_from, start_report
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.augment import InceptionConfig
from orchestrator.data.stream import in_order, in_process
from orchestrator.errors import UsageError
from orchestrator.runs.run_directory import Result, RunDir
from orchestrator.training.fewshot import augmented
from orchestrator.training.worker import train_worker
from tests.jobs.bare import run_bare
from wings.transfer.finetune import (
    CAPACITY,
    EXPERT_DROPOUT,
    LR,
    SIZES,
    failures,
    fine_tuned,
    finetune_run,
    finetune_sweep,
    interval,
    probe,
)
from wings.transfer.suite import SuiteRow

SMALL = {"model.width": 16, "model.mlp_dim": 32, "model.moe.num_experts": 4, "train.steps": 2}


@pytest.fixture(scope="module")
def trained(digits: str, tmp_path_factory: pytest.TempPathFactory) -> ModelRef:
    home = str(tmp_path_factory.mktemp("home"))
    run = override(RunConfig(), {**SMALL, "data.path": digits, "storage": home})
    train_worker(run, report=lambda step, metrics: None, read=in_process)
    return read_model(RunDir.of(run).checkpoints)


def test_the_recipe(trained: ModelRef) -> None:
    """V-MoE 3.5: SGD .9, 3e-3 by a cosine to 1e-5, clip 10, dropout .1 on experts, capacity 1.5.

    Its configs resize whole images to squares.
    """
    run = finetune_run(trained, image_size=16)
    assert run.train.optimizer.kind == "sgd"
    assert run.train.optimizer.momentum == 0.9
    assert run.train.clip_norm == 10
    assert (run.data.eval_resize, run.data.eval_crop) == ("square", 1)
    rates = [run.train.schedule.rate(step, peak=run.train.lr, total=500) for step in (0, 50, 500)]
    assert rates == pytest.approx([0, 3e-3, 1e-5])
    moe = run.model.moe
    assert moe is not None
    assert (moe.expert_dropout, moe.router.capacity_factor) == (0.1, 1.5)  # pyright: ignore
    assert run.model.grid() == 2 * trained.run.model.grid()
    assert run.model.slots() > trained.run.model.slots()
    with pytest.raises(UsageError, match=r"`image_size` 15: patch_size=2 does not divide image_size=15"):
        finetune_run(trained, image_size=15)


def test_the_published_size(trained: ModelRef) -> None:
    run = finetune_run(trained, size=SIZES["published"])
    assert (run.train.steps, run.data.batch_size, run.model.image_size) == (10_000, 1024, 384)
    assert run.data.augment == (InceptionConfig(),)
    rates = [run.train.schedule.rate(step, peak=3e-3, total=10_000) for step in (250, 500, 10_000)]
    assert rates == pytest.approx([1.5e-3, 3e-3, 1e-5])


def test_experts_that_choose_keep_their_capacity(trained: ModelRef) -> None:
    changes = {"model.moe.router.kind": "expert_choice", "model.moe.router.capacity_factor": 2.0}
    moe = finetune_run(replace(trained, run=override(trained.run, changes))).model.moe
    assert moe is not None
    assert moe.router.capacity_factor == 2.0  # pyright: ignore


def test_a_soft_router_has_slots_and_no_capacity(trained: ModelRef) -> None:
    soft = replace(trained, run=override(trained.run, {"model.moe.router.kind": "soft"}))
    moe = finetune_run(soft, image_size=16).model.moe
    assert moe is not None
    assert moe.router == soft.run.model.moe.router  # pyright: ignore
    assert moe.expert_dropout == 0.1


def test_the_head_is_new_though_it_would_fit(trained: ModelRef) -> None:
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


def test_figures_of_seeds_and_data_sets(trained: ModelRef, digits: str, tmp_path: Path) -> None:
    """a: 0.8 and 0.6; b: 0.5, and seed 1 diverged. Mean over data sets of seed 0 alone: 0.65."""
    (tmp_path / "b").symlink_to(digits)
    rows = [SuiteRow(name="shards", path=digits), SuiteRow(name="b", path=str(tmp_path / "b"))]
    sweep = finetune_sweep(finetune_run(trained), rows, seeds=2)
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
    overall = found.overall(["shards", "b"])
    assert overall is not None
    assert overall.mean == pytest.approx(0.65)
    assert found.overall(["shards", "b", "c"]) is None, "c has no run"
    group = found.overall(["shards"])
    assert group is not None
    assert group.half == pytest.approx(12.706205 * 0.1, rel=1e-6)
    assert failures(outcomes) == {"b-seed1": "diverged at step 500: try a lower train.lr"}
    assert failures({"b-seed0": "no space"}) == {"b-seed0": "no space"}
    assert fine_tuned(sweep, {}).accuracy == {}


def test_intervals_of_a_mean():
    """Values 1, 2, 3: mean 2, deviation 1; Student's t is 4.303 for 2 degrees of freedom, 12.706 for 1."""
    assert interval([1.0, 2.0, 3.0]).mean == 2
    assert interval([1.0, 2.0, 3.0]).half == pytest.approx(4.302653 / math.sqrt(3), rel=1e-6)
    assert interval([0.0, 2.0]).half == pytest.approx(12.706205, rel=1e-6)
    assert str(interval([0.5])) == "0.5000"
    assert str(interval([0.5, 0.5])) == "0.5000 +- 0.0000"


def test_the_probe_is_scikit_learns_ridge(trained: ModelRef, digits: str):
    """On the features of all 1,433 training images; equal float64 numbers may differ by one tied image."""
    model = trained.load()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    found = probe(
        model, trained, [SuiteRow(name="d", path=digits)], batch_size=64, device=torch.device("cpu")
    )
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    x, y = {}, {}
    for split in ("train", "val"):
        stream = in_order(override(trained.run, {"data.batch_size": 2000, "data.lanes": 1}), split)
        (batch,) = in_process(stream, stream.steps())
        whole = batch.valid > 0
        with torch.no_grad():
            x[split] = model.features(batch["image"][whole].float() / 127.5 - 1).double().numpy()
        y[split] = batch["label"][:, 0][whole].numpy()
    mean, scale = x["train"].mean(0), x["train"].std(0) + 1e-5
    ridge = Ridge(alpha=found.strength, fit_intercept=False, solver="svd")
    ridge.fit(augmented(x["train"], mean, scale), 2 * np.eye(10)[y["train"]] - 1)
    answers = ridge.predict(augmented(x["val"], mean, scale)).argmax(-1)
    (accuracy,) = found.accuracy.values()
    assert abs((answers == y["val"]).mean() - accuracy) <= 1.01 / len(answers)
    assert accuracy > 0.2


def test_help_states_what_holds() -> None:
    """Numbers of the recipe, which help does not load."""
    said = " ".join(run_bare("wings/jobs/finetune.py", "--help").stdout.split())
    short = SIZES["short"]
    assert f"train.steps={short.steps}, train.lr={LR}," in said
    assert f"data.batch_size={short.batch_size}," in said
    assert f"expert_dropout={EXPERT_DROPOUT}," in said
    assert f"capacity_factor={CAPACITY}" in said

"""The average of weights: what is evaluated is what is exported, on every layout and after every stop."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from moe.config import members
from moe.layout import local_part
from moe.models.vit import ViT
from orchestrator.checkpoint.export import export
from orchestrator.checkpoint.files import EMA
from orchestrator.checkpoint.manifest import newest
from orchestrator.checkpoint.models import read_model
from orchestrator.codec import override
from orchestrator.config import EMAConfig, RunConfig
from orchestrator.data.stream import in_process
from orchestrator.errors import UsageError
from orchestrator.estimate import checkpoint_bytes, layout
from orchestrator.evaluation.evaluate import images_of
from orchestrator.evaluation.scores import evaluate_at
from orchestrator.evaluation.soup import average_of
from orchestrator.optimizers import OptimizerConfig
from orchestrator.runs.metrics_file import Metrics
from orchestrator.runs.run_directory import RunDir
from orchestrator.training.average import Average
from orchestrator.training.worker import train_worker
from tests.lanes import mostly_smoke
from tests.orchestrator.as_one import train_on_ranks
from tests.orchestrator.checkpoint.small_runs import ADAFACTOR, SGD

CHANGES = {
    "model.width": 16,
    "model.mlp_dim": 32,
    "model.moe.num_experts": 4,
    "model.moe.router.kind": "soft",
    "data.batch_size": 16,
    "train.steps": 8,
    "train.lr": 0.01,
    "train.schedule.warmup_steps": 0,
    "train.report_every": 1,
    "train.eval_every": 4,
    "train.ema.decay": 0.9,
    "train.ema.start": 1,
    "checkpoint.every": 4,
}


@pytest.fixture
def run(few_digits: str, tmp_path: Path) -> RunConfig:
    return override(RunConfig(), {**CHANGES, "data.path": few_digits, "storage": str(tmp_path)})


def trained(run: RunConfig, until: int | None = None, **changes: Any) -> dict[int, Metrics]:
    reports: dict[int, Metrics] = {}
    run = override(run, {name.replace("__", "."): value for name, value in changes.items()})
    train_worker(
        run, report=lambda step, metrics: reports.update({step: metrics}), read=in_process, until=until
    )
    return reports


def weights(run: RunConfig, name: str, **options: bool) -> dict[str, torch.Tensor]:
    location = f"{RunDir.of(override(run, {'name': name})).path}"
    export(f"{location}/checkpoints", f"{location}.safetensors", fresh=True, **options)
    return load_file(f"{location}.safetensors")


def measured(metrics: Metrics, prefix: str) -> dict[str, float]:
    return {name: value for name, value in metrics.items() if name.startswith(prefix)}


@pytest.mark.parametrize("dtype", mostly_smoke(["float32", "bfloat16"], fast=["bfloat16"]))
def test_what_is_evaluated_is_what_is_exported(run: RunConfig, dtype: str, digits: str) -> None:
    """Also where a model computes with rounded copies. The run itself goes on as without an average."""
    run = override(run, {"data.path": digits})  # on fewer images the average is too near to the weights
    reports = trained(run, name="with", train__compute_dtype=dtype)
    plain = trained(run, name="plain", train__compute_dtype=dtype, train__ema=None)
    assert {s: m["train/loss"] for s, m in reports.items()} == {s: m["train/loss"] for s, m in plain.items()}
    assert measured(plain[8], "val/") == measured(reports[8], "val/")
    assert not measured(plain[8], "val_ema/")
    weights(run, "with", ema=True)
    model = read_model(f"{run.storage}/with.safetensors")
    where = {"path": run.data.path, "split": "val", "batch_size": 16, "device": torch.device("cpu")}
    (scores,) = evaluate_at(model.load(), run.task, images_of(model, **where))  # pyright: ignore[reportArgumentType]
    off = 1e-6 if dtype == "float32" else 2e-3
    assert reports[8]["val_ema/loss"] == pytest.approx(scores.metrics()["loss"], rel=off)
    assert abs(reports[8]["val_ema/loss"] / reports[8]["val/loss"] - 1) > 2 * off


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param({}, marks=pytest.mark.smoke),
        ADAFACTOR,
        {"train.optimizer.state_dtype": "bfloat16"},
        pytest.param(SGD | {"train.optimizer.momentum": 0}, marks=pytest.mark.smoke),
    ],
    ids=["AdamW", "Adafactor", "AdamW in bfloat16", "SGD without momentum"],
)
def test_it_goes_on_to_the_bit(run: RunConfig, optimizer: dict[str, Any]) -> None:
    """Whatever else the optimiser has in its state."""
    run = override(run, optimizer)
    whole, parts = trained(run, name="whole"), trained(run, 4) | trained(run)
    assert measured(parts[8], "val_ema/") == measured(whole[8], "val_ema/")
    one, other = weights(run, "whole", ema=True), weights(run, "train", ema=True)
    assert all(torch.equal(one[name], other[name]) for name in one)
    assert not all(map(torch.equal, one.values(), weights(run, "whole").values()))


BATCH_NORM = {
    "model": {
        "kind": "astroformer",
        "image_size": 8,
        "num_classes": 10,
        "stages": "CT",
        "widths": (8, 16),
        "depths": (1, 1),
        "stem_width": 8,
        "head_dim": 8,
    },
    "train.steps": 12,
    "train.eval_every": 12,
    "data.batch_size": 64,
}


@pytest.mark.guests
def test_an_average_of_batch_norm_has_statistics_of_its_own(
    run: RunConfig, few_digits: str, tmp_path: Path
) -> None:
    """The weights' own statistics do not fit their average. Evaluation, export and a soup of two compute new
    statistics from the same images, and the run itself stays as it is without an average. Without the images
    they are refused."""
    run = override(run, BATCH_NORM)
    reports, plain = trained(run, name="with"), trained(run, name="plain", train__ema=None)
    assert measured(plain[12], "val/") == measured(reports[12], "val/")
    own, averaged = weights(run, "with"), weights(run, "with", ema=True)
    name = next(name for name in own if name.endswith("variance_C"))
    assert not torch.equal(own[name], averaged[name])
    model = read_model(f"{run.storage}/with.safetensors")
    where = {"path": few_digits, "split": "val", "batch_size": 64, "device": torch.device("cpu")}
    (scores,) = evaluate_at(model.load(), run.task, images_of(model, **where))  # pyright: ignore[reportArgumentType]
    assert reports[12]["val_ema/loss"] == pytest.approx(scores.metrics()["loss"], rel=1e-5)
    soup = average_of([model, model])
    assert all(torch.allclose(soup[name], averaged[name], rtol=1e-5) for name in averaged)
    gone = replace(model, run=override(model.run, {"data.path": str(tmp_path / "gone")}))
    with pytest.raises(UsageError, match="need running statistics of their own, from the training images"):
        average_of([gone, gone])


def test_updates_count_and_not_microbatches(run: RunConfig) -> None:
    trained(run, name="whole")
    trained(run, name="micro", train__microbatch=4)
    one = weights(run, "whole", ema=True)
    for name, tensor in weights(run, "micro", ema=True).items():
        torch.testing.assert_close(tensor, one[name], rtol=1e-4, atol=1e-5)


@pytest.mark.smoke
def test_two_workers_have_the_average_of_one_and_one_goes_on(run: RunConfig, tmp_path: Path) -> None:
    """They share the experts, and FSDP shards the rest. Steps after the evaluation show that it
    left the weights as they were.
    """
    whole = trained(run, name="whole")
    spread = {"name": "spread", "train.eval_every": 2, "scale.workers": 2, "scale.ep": 2}
    reports = train_on_ranks(override(run, spread), tmp_path, until=4)
    assert measured(reports[4], "val_ema/") == pytest.approx(measured(whole[4], "val_ema/"), rel=1e-4)
    # Twice what the average of two workers may differ by.
    assert abs(reports[4]["val_ema/loss"] / reports[4]["val/loss"] - 1) > 2e-4
    assert reports[3]["train/loss"] == pytest.approx(whole[3]["train/loss"], rel=1e-5)
    lanes = override(run, {"train.eval_every": 2})
    after = trained(lanes, name="spread")
    assert min(after) == 5
    assert measured(after[8], "val_ema/") == pytest.approx(measured(whole[8], "val_ema/"), rel=1e-4)
    one, other = weights(run, "whole", ema=True), weights(run, "spread", ema=True)
    for name in one:
        torch.testing.assert_close(other[name], one[name], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("optimizer", members(OptimizerConfig))
def test_every_optimiser_has_it(optimizer: type[OptimizerConfig]) -> None:
    """By hand for some updates. A parameter without a gradient at first counts from its first one."""
    torch.manual_seed(0)
    layer, config = torch.nn.Linear(3, 2), EMAConfig(decay=0.5, power=None)
    built = optimizer().build(layer)
    Average(config, built)
    expected: dict[str, torch.Tensor] = {}
    for step in range(4):
        layer.weight.grad, layer.bias.grad = torch.randn(2, 3), torch.randn(2) if step else None
        for group in built.param_groups:
            group["lr"] = 0.1
        built.step()
        for name, param in layer.named_parameters():
            if param.grad is not None:
                new = param.detach().clone()
                expected[name] = expected.get(name, new).lerp(new, 0.5)
    for name, param in layer.named_parameters():
        torch.testing.assert_close(local_part(built.state[param][EMA]), expected[name])


def test_frozen_weights_are_their_own_average(run: RunConfig) -> None:
    first = trained(run, name="first")
    assert first[8]["val/loss"] != first[8]["val_ema/loss"]
    start = {"train__init_from": f"{run.storage}/first/checkpoints", "train__freeze": ("blocks.",)}
    trained(run, name="second", **start)
    before, average, now = (
        weights(run, "first"),
        weights(run, "second", ema=True),
        weights(run, "second"),
    )
    for name, tensor in average.items():
        assert torch.equal(tensor, before[name]) == name.startswith("blocks."), name
        assert torch.equal(tensor, now[name]) == name.startswith("blocks."), name


def test_it_takes_a_weight_for_each_weight(run: RunConfig) -> None:
    without = override(run, {"train.ema": None})
    more = sum(4 * param.numel() for param in ViT(run.model).parameters())
    assert checkpoint_bytes(run) - checkpoint_bytes(without) == more
    assert layout(run, 1).memory["optimizer"] - layout(without, 1).memory["optimizer"] == more


def test_a_run_without_an_average_has_none_to_export(run: RunConfig) -> None:
    trained(run, train__ema=None, train__steps=2)
    folder, _ = newest(RunDir.of(run).checkpoints)
    with pytest.raises(UsageError, match=r"step-00000002 holds no average of the weights: .*train\.ema"):
        export(folder, f"{run.storage}/x.safetensors", ema=True)

"""Two arms of every sweep of the papers, and of `language`, train for eight steps at a laptop's scale."""

import math
from pathlib import Path

import pytest
import torch.distributed as dist

from moe.cost import train_flops_6mac
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.stream import in_process
from orchestrator.packing import pack as packing
from orchestrator.sweeps.catalog import SCALES, make_sweep
from orchestrator.training.fit import decided_by_data
from orchestrator.training.worker import train_worker
from papers import SWEEPS

FEW = {"train.steps": 8, "train.report_every": 4, "train.eval_every": 8}
# `lit` starts from trained towers: tests/jobs/test_image_text.py
TRAINED = ["language", *(name for name in SWEEPS if name != "lit")]


@pytest.mark.slow
@pytest.mark.parametrize("name", TRAINED)
def test_the_cheapest_and_the_dearest_arm_train(
    name: str, digits: str, captioned: str, tmp_path: Path
) -> None:
    runs = make_sweep(name, "tiny").runs()
    cost = {arm: train_flops_6mac(run.model, 1) for arm, run in runs.items() if run.model.family() != "dense"}
    match SCALES["tiny"].data_of.get(name, "digits"):
        case "digits":
            data = digits
        case "digits-captions":
            data = captioned
        case source:
            data = packing.digits(str(tmp_path), source)
    for arm in {min(cost, key=cost.__getitem__), max(cost, key=cost.__getitem__)}:
        where = {"name": arm, "storage": str(tmp_path), "data.path": data}
        run = decided_by_data(override(runs[arm], where | FEW))
        losses = losses_of(run)
        if dist.is_initialized():
            dist.destroy_process_group()
        assert len(losses) == 2, arm
        assert all(map(math.isfinite, losses)), arm


def losses_of(run: RunConfig) -> list[float]:
    losses: list[float] = []
    train_worker(run, report=lambda step, metrics: losses.append(metrics["train/loss"]), read=in_process)
    return losses

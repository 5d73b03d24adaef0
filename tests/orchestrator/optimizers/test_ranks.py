"""Optimisers with norms or sums of whole tensors do on several ranks what they do in one process."""

from pathlib import Path
from typing import Any

import pytest
import torch

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch
from orchestrator.optimizers.adafactor import factored_dims
from tests.moe.parity import TOLERANCE
from tests.orchestrator.as_one import Case, check_ranks_train_as_one
from tests.orchestrator.checkpoint.small_runs import ADAFACTOR, BATCH, SMALL
from tests.orchestrator.training.test_loop import random_batch

LAYOUTS: dict[int, list[dict[str, int]]] = {  # by ranks
    2: [{}, {"scale.ep": 2}],
    4: [{}, {"scale.ep": 2}, {"scale.ep": 4}, {"scale.ep": 2, "scale.dp_replicate": 2}],
}
LIVELY = {"train.lr": 3e-3, "train.steps": 20, "train.clip_norm": 0.5}
LIVELY |= {"train.schedule.kind": "constant", "train.schedule.warmup_steps": 0}
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "lamb": {"train.optimizer.kind": "lamb", "train.optimizer.weight_decay": 0.1},
    "adafactor": ADAFACTOR | {"model.num_classes": 10},
}
ROUTERS = [("soft", torch.float64), ("token_choice", torch.float32)]


def batch_of(step: int, valid: int) -> Batch:
    return random_batch(BATCH, step, valid=valid)


@pytest.mark.smoke
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_several_ranks_train_as_one(ranks: int, tmp_path: Path) -> None:
    cases = {}
    for optimizer, fields in OPTIMIZERS.items():
        for router, dtype in ROUTERS:
            run = override(RunConfig(), SMALL | fields | LIVELY | {"model.moe.router.kind": router})
            cases[f"{optimizer}, {router}"] = Case(
                run=run,
                layouts=LAYOUTS[ranks],
                batch=batch_of,
                compared={"train/loss": TOLERANCE[dtype]},
                padded=0,
                steps=20 if optimizer == "adafactor" else 10,
                dtype=dtype,
            )
    shapes = {name: (*p.shape,) for name, p in cases["adafactor, soft"].run.model.build().named_parameters()}
    factored = {n for n, shape in shapes.items() if factored_dims(shape, 4, expert=".experts." in n)}
    assert {"blocks.1.mlp.experts.w_in_EDF", "head.weight", "position_SD"} <= factored
    for found in check_ranks_train_as_one(cases, tmp_path, ranks).values():
        assert found[-1]["train/loss"] != found[0]["train/loss"]

"""Every switch of a recipe trains on digits, on two workers as on one."""

from functools import partial
from typing import Any

import pytest
import torch
from sklearn.datasets import load_digits

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.augment.base import draw
from orchestrator.data.batch import Batch
from tests.orchestrator.as_one import Case, check_ranks_train_as_one
from tests.orchestrator.training.batches import make_batch, with_fields

BATCH = 16
SOFT = {"model.moe.router.kind": "soft"}
TOKENS = {"model.moe.router.kind": "token_choice", "model.moe.router.k": 2}
EXPERTS = {"model.moe.router.kind": "expert_choice"}
RECIPES: dict[str, dict[str, Any]] = {
    "as it was": SOFT,
    "sigmoid": SOFT | {"task.loss": "sigmoid", "model.head_bias": -2.3},
    "sigmoid, mixup": TOKENS | {"task.loss": "sigmoid", "data.augment.mixup.alpha": 0.5},
    "scale and head decay": SOFT
    | {"train.optimizer.weight_decay_scale": 0.3, "train.optimizer.weight_decay_head": 3.0},
    "all decays": TOKENS | {"train.optimizer.weight_decay": 0.3, "train.optimizer.decays": "all"},
    "no clipping": SOFT | {"train.clip_norm": None},
    "experts start equal": TOKENS | {"model.moe.equal_init": True},
    "capacity of evaluation": TOKENS
    | {"model.moe.router.capacity_factor": 0.5, "model.moe.router.eval_capacity_factor": 4.0},
    "expert choice as released": EXPERTS | {"model.moe.router.noise_std": 1.0},
    "first moment in bfloat16": EXPERTS | {"train.optimizer.state_dtype": "bfloat16"},
    "adafactor": TOKENS | {"train.optimizer.kind": "adafactor", "train.optimizer.min_dim_to_factor": 4},
    "lamb": TOKENS | {"train.optimizer.kind": "lamb"},
    "dropout": SOFT | {"model.dropout": 0.2, "model.moe.expert_dropout": 0.1},
    "top-k before the softmax": TOKENS | {"model.moe.router.topk": "before"},
    "mixture": {
        "model.moe.router.kind": "mixture",
        "model.moe.router.gate": "mlp",
        "model.moe.router.scale_inputs": True,
        "model.moe.router.learn_temperature": True,
    },
    "mixture that sharpens": {
        "model.moe.router.kind": "mixture",
        "model.moe.router.temperature_decay": 0.9,
    },
    "several labels": SOFT | {"task.loss": "sigmoid", "data.augment.mixup.alpha": 0.3},
    "loss-free, with a shared MLP": {
        "model.moe.router.kind": "top_k",
        "model.moe.router.score": "sigmoid",
        "model.moe.router.balance.kind": "sign",
        "model.moe.shared_dim": 24,  # at 8, rounding decides between two experts of a token
    },
    "quantile, with the loss of the batch before": {
        "model.moe.router.kind": "top_k",
        "model.moe.router.balance.kind": "quantile",
        "model.moe.router.balance_weight": 0.1,
        "model.moe.router.balance_level": "batch",
    },
    "relu": {"model.moe.router.kind": "relu", "model.moe.router.coefficient": 0.01},
    "rates of parts": TOKENS | {"train.optimizer.rates.router": 4.0, "train.optimizer.rates.head": 0.5},
    "momentum": SOFT | {"train.optimizer.kind": "sgd", "train.optimizer.decays": "all"},
}


def run_of(recipe: str) -> RunConfig:
    small = {"model.width": 16, "model.mlp_dim": 32, "model.moe.num_experts": 4, "data.batch_size": BATCH}
    small |= {
        "train.lr": 1e-2,
        "train.clip_norm": 0.2,
        "train.steps": 3,
        "train.schedule.warmup_steps": 0,
        "train.schedule.cooldown_steps": 0,
    }
    return override(RunConfig(), small | RECIPES[recipe])


def digits(run: RunConfig, several: bool, step: int, valid: int) -> Batch:
    """The whole batch of a step; with `several`, some images have two labels."""
    data, places = load_digits(), slice(step * BATCH, (step + 1) * BATCH)
    grey = torch.from_numpy(data.images[places] * 15.9).to(torch.uint8)
    label = torch.from_numpy(data.target[places]).long()
    batch = make_batch(grey.unsqueeze(1).repeat(1, 3, 1, 1), label, valid=valid)
    names = [f"{step}/{n}" for n in range(BATCH)]
    draws = draw(run.data.augment, names, 8)
    if several:
        second = torch.where(batch.key % 3 == 0, (batch["label"][:, 0] + 1) % 10, -1)
        batch = with_fields(batch, label=torch.stack([batch["label"][:, 0], second], 1))
    return with_fields(batch, mix=torch.from_numpy(draws)) if run.data.augment else batch


def case_of(recipe: str) -> Case:
    run = run_of(recipe)
    return Case(
        run=run,
        layouts=[{"scale.ep": 2}],
        batch=partial(digits, run, recipe == "several labels"),
        compared=dict.fromkeys(("train/loss", "train/grad_norm", "val/loss", "val/acc1"), 1e-6),
        padded=BATCH - 3,
        steps=3,
    )


# Whose loss or statistics are of the whole batch, and an optimiser with norms of whole tensors.
WHOLE = ["capacity of evaluation", "adafactor"]
WHOLE += [name for name in RECIPES if name.startswith("quantile")]
REST = [name for name in RECIPES if name not in WHOLE]


@pytest.mark.parametrize(
    "recipes", [WHOLE, pytest.param(REST, marks=pytest.mark.slow)], ids=["whole", "rest"]
)
def test_two_workers_train_as_one(recipes, tmp_path):
    expected = check_ranks_train_as_one({recipe: case_of(recipe) for recipe in recipes}, tmp_path)
    ends = {recipe: found[-2]["train/loss"] for recipe, found in expected.items()}
    assert len(set(ends.values())) == len(recipes), "each switch changes something"
    assert all(found[0]["train/loss"] != found[-2]["train/loss"] for found in expected.values())

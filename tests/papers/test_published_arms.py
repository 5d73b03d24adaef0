"""The named sweeps at scale `jft` are the papers' arms, row by row of the table of published settings."""

import csv
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from math import log
from pathlib import Path
from typing import Any

import pytest

from moe.cost import forward_gflops_2mac, num_params, slots_per_token, train_flops_3mac
from moe.layout import check_layout
from moe.routers import ExpertChoiceConfig, SoftConfig, TokenChoiceConfig
from orchestrator.config import RunConfig
from orchestrator.sweeps.catalog import SCALES, SWEEPS, make_sweep

Row = dict[str, str]
ROWS: list[Row] = list(csv.DictReader((Path(__file__).parents[1] / "fixtures" / "published_arms.csv").open()))


@dataclass(frozen=True)
class Arm:
    """Where a row is in our sweeps: scale, sweep and arm."""

    sweep: str
    name: str
    scale: str = "jft"

    def run(self) -> RunConfig:
        return _runs(self.sweep, self.scale)[self.name]


@cache
def _runs(sweep: str, scale: str) -> dict[str, RunConfig]:
    return make_sweep(sweep, scale).runs()


def _pareto(arm: str) -> Arm:
    """``S/32 expert 32e c0.5 group8``."""
    name = arm.replace("/", "").replace(" ", "-").replace("group", "g").replace(".0", "")
    return Arm("pareto", name)


def _ablations(arm: str) -> Arm:
    return Arm("ablations", arm.replace(" / ", "-"))


def _slots_experts(arm: str) -> Arm:
    """``soft 8e 1 slots per token``, ``figure 23 soft 2e``, ``figure 12 S/16 soft 32e 1 slots``."""
    words = arm.split()
    if arm.startswith("figure 12"):
        return Arm("slots", f"soft-s{words[5]}")
    if arm.startswith("figure 23"):  # 4096 slots for 256 tokens
        return Arm("slots_experts", f"soft-e{words[3][:-1]}-x16")
    return Arm("slots_experts", f"{words[0]}-e{words[1][:-1]}-x{words[2]}")


def _long_runs(arm: str) -> Arm:
    """``ViT S/16 4M cooldown 50k``, ``soft S/16 128e 4M cooldown 50k``."""
    kind, size, *experts, steps, _, cooldown = arm.replace("/", "").split()
    middle = "dense" if kind == "ViT" else f"soft-{experts[0]}"
    return Arm("long_runs", f"{size}-{middle}-{steps}-cooldown{cooldown}")


def _routers(arm: str) -> Arm:
    size, router, how = arm.split()
    router = router.replace("_token_choice", "-tc").replace("_expert_choice", "-ec")
    return Arm("routers", f"{size}-{router}-{how}")


def _softmax_combine(arm: str) -> Arm:
    _, _, k, combine = arm.split()
    return Arm("softmax_combine", f"token-{k}-{combine}")


def _vmoe(arm: str) -> Arm:
    if arm.startswith("released"):
        small = "S/32" in arm
        name = "S32-last2-8e-released" if small else "B16-every2-8e-released"
        return Arm("vmoe", name, "in1k" if small else "in21k")
    size, *layers = arm.partition(" (")[0].replace("V-MoE-", "").replace("ViT-", "").split()
    layout = layers[0].replace("-", "") if layers else "dense"
    return Arm("vmoe", f"{size.replace('/', '')}-{layout}")


def _capacity(arm: str) -> Arm:
    return Arm("capacity", "k2-c1.05")


def _expert_count(arm: str) -> Arm:
    return Arm("expert_count", "n16", "deit3")


ARM_OF: dict[str, Callable[[str], Arm]] = {
    "pareto": _pareto,
    "ablations": _ablations,
    "slots_experts": _slots_experts,
    "long_runs": _long_runs,
    "routers": _routers,
    "softmax_combine": _softmax_combine,
    "vmoe": _vmoe,
    "capacity": _capacity,
    "expert_count": _expert_count,
}
NO_ARM = {  # part of the row's name -> why no sweep has it
    "expert 8e 16 slots per token": "each of 8 experts would take more tokens than there are",
    "figure 23 soft 2e": "fewer experts than in figure 6",
    "figure 23 soft 4e": "fewer experts than in figure 6",
    "at inference": "an operating point of a trained model: jobs/evaluate.py --grid",
    "BPR in training": "its capacity was not read",
    "7 epochs": "as 14 epochs, for half of the steps",
    "large experts": "the width of the experts is not printed",
    "MNIST": "not a ViT",
    "Astroformer": "not a ViT: sweep expert_count_cifar",
}
# (sweep, column) -> why our arms differ from all rows
OTHERWISE = {}
ROWS_WITH_ARMS = [
    row for row in ROWS if row["sweep"] in ARM_OF and not any(part in row["arm"] for part in NO_ARM)
]


def _settings(run: RunConfig) -> dict[str, str | float | None]:
    """The run under the names of the table's columns, as far as it is published there."""
    model, train, data = run.model, run.train, run.data
    decay, moe = train.optimizer, model.moe
    members: dict[str, Any] = {member.kind: member for member in data.augment}
    distorts = members.get("randaugment")
    warmup, cooldown = train.schedule.phases(train.steps)
    found: dict[str, str | float | None] = {
        "image_size": model.image_size,
        "patch": model.patch_size,
        "width": model.width,
        "depth": model.depth,
        "heads": model.heads,
        "mlp_dim": model.mlp_dim,
        "num_classes": model.num_classes,
        "head_bias": model.head_bias,
        "steps": train.steps,
        "batch": data.batch_size,
        "lr": train.lr,
        "warmup_steps": warmup,
        "cooldown_steps": cooldown,
        "schedule": {"deit": "cosine"}.get(train.schedule.kind, train.schedule.kind),
        "timescale": getattr(train.schedule, "timescale", None),
        "weight_decay": decay.weight_decay,
        "weight_decay_head": decay.weight_decay_head,
        "weight_decay_scale": decay.weight_decay_scale,
        "decays": decay.decays,
        "clip_norm": train.clip_norm,
        "label_smoothing": run.task.smoothing,
        "optimizer": {"adamw": "adam", "lamb": "FusedLAMB"}.get(decay.kind, decay.kind),
        "loss": run.task.loss,
        "augment": "inception_crop+flip" if "inception" in members else "none",
        "randaugment": f"{distorts.operations},{distorts.magnitude}" if distorts else None,
        "mixup": members["mixup"].alpha if "mixup" in members else None,
        "dtype_first_moment": getattr(decay, "state_dtype", None),
        "dropout": moe.expert_dropout if moe else 0.0,
        "family": model.family(),
    }
    if moe is None:
        return found
    router = moe.router
    found |= {
        "experts": moe.num_experts,
        "layers": moe.layers if isinstance(moe.layers, str) else None,
        "images_per_group": moe.images_per_group,
        "slots_per_token": round(slots_per_token(model), 3),
        "noise_std": getattr(router, "noise_std", None),
    }
    if isinstance(router, SoftConfig):
        found |= {"slots_per_expert": model.slots(), "total_slots": moe.num_experts * model.slots()}
        found |= {"dispatch": router.dispatch, "combine": router.combine}
        found |= {"capacity": round(slots_per_token(model))}
    if isinstance(router, TokenChoiceConfig | ExpertChoiceConfig):
        found |= {"capacity": router.capacity_factor, "combine": router.combine}
        found |= {"priority": getattr(router, "priority", None), "k": getattr(router, "k", None)}
    return found


def _equal(ours: str | float | None, printed: str, row: Row) -> bool:
    if printed == "none":
        return ours in (None, "none")
    if printed == "-log(num_classes)":
        return ours == pytest.approx(-log(int(row["num_classes"])))
    if isinstance(ours, str):
        return ours == printed
    return ours is not None and ours == pytest.approx(float(printed))


# Sizes and costs have tests of their own; group_tokens, TPU-days and epochs follow from other columns or the
# machine.
NOT_SETTINGS = {"sweep", "paper", "arm", "source", "group_tokens", "tpu_days", "tpu_days_unit", "epochs"}
NOT_SETTINGS |= {"params_m", "forward_gflops", "gflops_convention", "train_exaflops"}
NOT_SETTINGS |= {"train_exaflops_convention"}


def test_an_arm_has_the_published_settings() -> None:
    for row in ROWS_WITH_ARMS:
        ours = _settings(ARM_OF[row["sweep"]](row["arm"]).run())
        for column, printed in row.items():
            if printed and column not in NOT_SETTINGS and (row["sweep"], column) not in OTHERWISE:
                assert _equal(ours[column], printed, row), (row["arm"], column, ours[column], printed)


def test_an_arm_has_the_printed_size() -> None:
    """Within 1 %, or half of the last printed digit: billions have one decimal, below they are millions."""
    for row in ROWS_WITH_ARMS:
        model = ARM_OF[row["sweep"]](row["arm"]).run().model
        if row["params_m"]:
            printed = float(row["params_m"])
            allowed = max(0.01 * printed, 50 if printed >= 1000 else 0.5)
            assert num_params(model) / 1e6 == pytest.approx(printed, abs=allowed), row
        if row["forward_gflops"]:
            printed = float(row["forward_gflops"])
            assert forward_gflops_2mac(model) == pytest.approx(printed, rel=0.01), row


def _has_our_cost(row: Row) -> bool:
    """Dense and Soft MoE rows. The sparse rows pay for matmuls that dispatch, which we do not have; the two
    H/14 rows of table 9 of Soft MoE contradict its table 8."""
    contradicted = row["sweep"] == "pareto" and row["arm"].startswith("H/14")
    ours = row["train_exaflops_convention"] == "3mac" and row["family"] in ("dense", "soft")
    return ours and not contradicted


def test_an_arm_has_the_printed_training_cost() -> None:
    """Within 2 %, or half of the last printed digit."""
    rows = [row for row in ROWS_WITH_ARMS if _has_our_cost(row)]
    assert len(rows) > 40
    for row in rows:
        run = ARM_OF[row["sweep"]](row["arm"]).run()
        exaflops = train_flops_3mac(run.model, run.train.steps * run.data.batch_size) / 1e18
        assert exaflops == pytest.approx(float(row["train_exaflops"]), rel=0.02, abs=0.05), row


@pytest.mark.parametrize(
    ("scale", "arm", "config"),
    [
        (
            "in1k",
            "S32-last2-8e-released",
            # vmoe_paper/vmoe_s32_last2_ilsvrc2012_randaug_light1.py; 8 * 50 * 2 * 1.05 / 8 = 105
            {"layers": (5, 7), "dropout": 0.2, "capacity": (108, 400), "representation": 512},
        ),
        (
            "in21k",
            "B16-every2-8e-released",
            # vmoe_paper/pretrain_imagenet21k.py; 8 * 197 * 2 * 1.05 / 8 = 413.7
            {"layers": (1, 3, 5, 7, 9, 11), "dropout": 0.0, "capacity": (416, 416), "representation": None},
        ),
    ],
)
def test_a_released_arm_has_the_values_of_its_config(scale: str, arm: str, config: dict[str, object]) -> None:
    """The settings for which the table of published settings has no column."""
    model = Arm("vmoe", arm, scale).run().model
    moe = model.moe
    assert moe
    router = moe.router
    assert isinstance(router, TokenChoiceConfig)
    # The released code rounds the capacity up, and then up to a multiple of 4.
    assert (router.capacity_rounding, router.capacity_multiple_of) == ("ceil", 4)
    assert (model.slots(), model.slots(router.eval_config())) == config["capacity"]
    # split_rngs = False, "All experts share initialization."
    assert moe.equal_init
    assert (router.importance_weight, router.load_weight) == (0.005, 0.005)
    assert (model.pooling, model.position, model.dropout) == ("token", "learned", 0.0)
    assert model.moe_blocks() == config["layers"]
    assert moe.expert_dropout == config["dropout"]
    assert model.representation_size == config["representation"]


def test_every_exception_is_one() -> None:
    for part in NO_ARM:
        assert any(part in row["arm"] for row in ROWS), part
    left_out = {row["sweep"] for row in ROWS} - set(ARM_OF)
    assert left_out == {"finetune"}  # wings/jobs/finetune.py


@pytest.mark.parametrize("name", ["pareto", "long_runs", "slots_experts"])
def test_the_sweep_has_no_other_arms(name: str) -> None:
    ours = {arm.name for row in ROWS_WITH_ARMS if (arm := ARM_OF[row["sweep"]](row["arm"])).sweep == name}
    assert ours == set(_runs(name, "jft"))


@pytest.mark.parametrize("scale", SCALES)
def test_every_arm_splits_over_its_experts(scale: str) -> None:
    """Every run is valid, and two workers can share its experts, of which one alone is not to be shared."""
    names = [name for name, sweep in SWEEPS.items() if sweep.runs_at(SCALES[scale])]
    models = {run.model for name in names for run in _runs(name, scale).values()}
    for model in models:
        if model.moe and model.moe.num_experts > 1:
            check_layout(model, dp=1, ep=2)

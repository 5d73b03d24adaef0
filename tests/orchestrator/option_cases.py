"""For every field of every config: another value, and what then differs (`tests.orchestrator.effects`).

Guests have such tables of their own members.
"""

from collections.abc import Mapping
from importlib import import_module
from types import MappingProxyType
from typing import Any, NamedTuple

from moe.guests import guests

Changes = Mapping[str, Any]
NOTHING: Changes = MappingProxyType({})
ALL = object()  # each value of a Literal differs from each other


class Case(NamedTuple):
    """Another value of a field. A dict has changes below the field.

    by: effects that differ, between spaces; empty: those of the place.
    given: what else is set, in the base too.
    """

    other: Any
    by: str = ""
    given: Changes = NOTHING


class Place(NamedTuple):
    """Where a class of configs stands in a run, how it gets there, and its fields: another value of each, a
    case, or a list of cases.
    """

    at: str
    by: str
    given: Changes
    fields: Mapping[str, Any]


SMALL = {
    "model.width": 16,
    "model.mlp_dim": 32,
    "data.batch_size": 8,
    "train.lr": 0.02,
    "train.steps": 3,
    "train.schedule.warmup_steps": 0,
    "train.schedule.cooldown_steps": 0,
}
TINY = {"train.steps": 2} | {name: value for name, value in SMALL.items() if "model." not in name}
SIZES = {"width": 16, "depth": 2, "heads": 2, "mlp_dim": 32}


def below(at: str, values: Changes) -> dict[str, Any]:
    return {f"{at}.{name}": value for name, value in values.items()}


def router(kind: str, **fields: Any) -> dict[str, Any]:
    """Returns a run of a single block, with experts, and two steps: the first one trains the head alone."""
    block = {"train.steps": 2, "model.depth": 1, "model.moe.num_experts": 4, "model.moe.layers": (0,)}
    return SMALL | block | below("model.moe.router", {"kind": kind, **fields})


TOKENS, EXPERTS = router("token_choice"), router("expert_choice")
CAPACITY = {
    "capacity_factor": 0.5,
    "eval_capacity_factor": Case(0.5, "steps:val"),
    "capacity_rounding": Case(ALL, given={"model.moe.router.capacity_factor": 0.6}),
    "capacity_multiple_of": Case(3, given={"model.moe.router.capacity_factor": 0.5}),
}
SINKHORN = {"model.moe.router.affinity.kind": "sinkhorn"}
BOTH = "steps planned:costs"  # what it computes, and what it is said to compute

MODELS = {
    "ViTConfig": Place("model", "steps", SMALL, {
        "image_size": Case(16, BOTH),
        "patch_size": Case(4, BOTH),
        "width": Case(32, BOTH),
        "depth": Case(3, BOTH),
        "heads": 4,
        "mlp_dim": Case(64, BOTH),
        "num_classes": Case(12, BOTH),
        "stem": Case("conv", BOTH, {"model.patch_size": 4}),
        "pooling": ALL,
        "position": ALL,
        "representation_size": Case(8, BOTH),
        "qk_norm": False,
        "gelu": ALL,
        "norm_eps": 0.01,
        "dropout": 0.5,
        "drop_path": 0.5,
        "drop_path_schedule": Case(ALL, given={"model.drop_path": 0.5}),
        "layer_scale": 0.1,
        "head_bias": Case(-2.0, given={"task.loss": "sigmoid"}),
        "moe": Case({"num_experts": 4}, BOTH),
    }),
}  # fmt: skip

LAYERS = {
    "MoEConfig": Place("model.moe", BOTH, TOKENS, {
        "layers": Case((1,), "steps", {"model.depth": 2}),
        "num_experts": 2,
        "images_per_group": Case(2, "steps"),
        "router": {"kind": "mixture"},
        "expert_dim": 8,
        "shared_dim": 8,
        "equal_init": Case(True, "steps"),
        "expert_dropout": Case(0.5, "steps"),
        "residual": Case(False, "steps"),
    }),
    "TokenChoiceConfig": Place("model.moe.router", "steps", TOKENS, CAPACITY | {
        "k": Case(2, BOTH),
        "affinity": {"kind": "sinkhorn"},
        "combine": Case(ALL, given=SINKHORN),
        "topk": Case(ALL, given={"model.moe.router.k": 2}),
        "priority": Case(ALL, given=router("token_choice", k=2, capacity_factor=0.5)),
        "noise_std": 0.0,
        "importance_weight": 1.0,
        "load_weight": 1.0,
        "gshard_balance_weight": 1.0,
        "z_weight": 1.0,
    }),
    "SoftmaxConfig": Place("model.moe.router.affinity", "steps", EXPERTS, {}),
    "SinkhornConfig": Place("model.moe.router.affinity", "steps", EXPERTS | SINKHORN, {"iterations": 1}),
    "SparseTransportConfig": Place(
        "model.moe.router.affinity",
        "steps",
        EXPERTS | {"model.moe.router.affinity.kind": "sparse_transport"},
        {"iterations": 1},
    ),
    "ExpertChoiceConfig": Place("model.moe.router", "steps", EXPERTS, CAPACITY | {
        "affinity": {"kind": "sinkhorn"},
        "combine": Case(ALL, given=SINKHORN),
        "normalize": True,
        "noise_std": 1.0,
    }),
    "HashConfig": Place("model.moe.router", "steps", router("hash"), CAPACITY | {"by": ALL, "salt": 1}),
    "MixtureConfig": Place("model.moe.router", "steps", router("mixture"), {
        "level": Case(ALL, BOTH),
        "clusters": Case(4, BOTH, {"model.moe.router.level": "hierarchical"}),
        "gate": Case(ALL, BOTH),
        "scale_inputs": True,
        "learn_temperature": True,
        "temperature": 2.0,
        "temperature_decay": 0.5,
        "temperature_min": Case(0.9, given={"model.moe.router.temperature_decay": 0.5}),
    }),
    "ReLUConfig": Place("model.moe.router", "steps", router("relu"), CAPACITY | {
        "k": Case(2, BOTH),
        "coefficient": 0.1,
        "factor": Case(2.0, given={"model.moe.router.coefficient": 0.1}),
    }),
    "SoftConfig": Place("model.moe.router", "steps", router("soft"), {
        "slots_per_expert": Case(2, BOTH),
        "total_slots": Case(8, BOTH),
        "normalize": ALL,
        "scale_init": 3.0,
        "dispatch": Case(ALL, given={"model.moe.router.slots_per_expert": 4}),
        "combine": Case(ALL, given={"model.moe.router.slots_per_expert": 4}),
        "noise_std": 1.0,
    }),
    "TopKConfig": Place("model.moe.router", "steps", router("top_k"), CAPACITY | {
        "k": Case(2, BOTH),
        "score": ALL,
        "normalise": Case(True, given={"model.moe.router.k": 2}),
        "scale": 2.0,
        "cosine": True,
        "projection": Case(8, BOTH, {"model.moe.router.cosine": True}),
        "temperature": Case(0.5, given={"model.moe.router.cosine": True}),
        "balance": {"kind": "sign"},
        "balance_weight": 1.0,
        "balance_level": Case(ALL, given={"model.moe.router.balance_weight": 1.0}),
        "z_weight": 1.0,
        "priority": Case(ALL, given=router("top_k", k=2, capacity_factor=0.5)),
    }),
    "NoBalanceConfig": Place("model.moe.router.balance", "steps", router("top_k"), {}),
    "SignConfig": Place(
        "model.moe.router.balance", "steps", router("top_k", **{"balance.kind": "sign", "balance.rate": 0.1}),
        {"rate": 0.5, "centre": False},
    ),
    "QuantileConfig": Place(
        "model.moe.router.balance", "steps", router("top_k", **{"balance.kind": "quantile"}),
        {"ema": 0.5, "bins": 10},
    ),
}  # fmt: skip

# An optimiser sees routers of their own scale, experts and a head.
PARTS = router("soft")
DECAYS = {
    "weight_decay": 0.5,
    "weight_decay_head": 0.5,
    "weight_decay_scale": 0.5,
    "decays": Case(ALL, given={"train.optimizer.weight_decay": 0.5}),
    "layer_decay": 0.5,
    "rates": {"head": 0.5},
}
MOMENTS = {"beta1": 0.5, "beta2": 0.5}


def optimizer(kind: str, fields: Changes) -> Place:
    return Place(
        "train.optimizer", "steps:weights", PARTS | {"train.optimizer.kind": kind}, {**DECAYS, **fields}
    )


def schedule(kind: str, fields: Changes, **given: Any) -> Place:
    start = {name: value for name, value in SMALL.items() if "schedule" not in name}
    phases = below("train.schedule", {"kind": kind, "warmup_steps": 0, **given})
    return Place("train.schedule", "steps:metrics steps:weights", start | phases, fields)


COOLS = {"warmup_steps": 2, "cooldown_steps": 2}
DECAYING = {"warmup_steps": 2, "end_frac": 0.5}

TRAINING = {
    "TrainConfig": Place("train", "steps", TOKENS, {"seed": 1}),
    "ClassificationConfig": Place("task", "steps", SMALL, {
        "loss": ALL,
        "smoothing": 0.1,
        "binarised": Case(True, given={"task.loss": "sigmoid", "data.augment": "mixup"}),
        "class_weights": (0.5,) * 9 + (5.5,),
    }),
    "AdamWConfig": optimizer("adamw", MOMENTS | {
        "state_dtype": Case(ALL, "steps:weights planned:memory"),
    }),
    "AdafactorConfig": optimizer("adafactor", {
        "beta1": 0.5,
        "beta2_cap": 0.1,
        "min_dim_to_factor": Case(4, "steps:weights planned:memory"),
    }),
    "LambConfig": optimizer("lamb", MOMENTS | {
        "epsilon": 0.1,
        "bias_correction": False,
        "always_adapt": True,
        "trust_clip": True,
    }),
    "SGDConfig": optimizer("sgd", {"momentum": 0.5}),
    "RatesConfig": Place("train.optimizer.rates", "steps:weights", PARTS, {
        "router": 0.5, "experts": 0.5, "head": 0.5, "backbone": 0.5,
    }),
    "RsqrtConfig": schedule("rsqrt", COOLS | {"timescale": 1, "begin": 5000}, cooldown_steps=0),
    "ConstantConfig": schedule("constant", COOLS, cooldown_steps=0),
    "CosineConfig": schedule("cosine", DECAYING),
    "LinearConfig": schedule("linear", DECAYING),
    "DeitConfig": schedule(
        "deit",
        {"warmup_steps": 2, "epoch_steps": 2, "start": 0.01, "end": 0.01},
        warmup_steps=1,
        epoch_steps=1,
    ),
}  # fmt: skip
OF_GUESTS = {"wings": "tests.wings.option_cases", "papers": "tests.papers.option_cases"}


def joined(name: str) -> dict[str, Place]:
    """Returns the table of that name, ``MODELS`` or ``TRAINING``, with the places of the guests."""
    tables = [vars(import_module(OF_GUESTS[guest.__name__])) for guest in guests()]
    return globals()[name] | {cls: place for table in tables for cls, place in table.get(name, {}).items()}

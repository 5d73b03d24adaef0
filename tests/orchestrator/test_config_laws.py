"""Laws over all configs of the project. A new config is found by itself."""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from moe.config import Bound, Config, Family, members
from orchestrator.codec import flat, override
from orchestrator.config import RunConfig

ROOT = Path(__file__).parents[2]
for path in [
    *ROOT.glob("moe/**/*.py"),
    *ROOT.glob("orchestrator/**/*.py"),
    *ROOT.glob("papers/**/*.py"),
]:
    if "moe.config import" in path.read_text():
        importlib.import_module(".".join(path.relative_to(ROOT).with_suffix("").parts))


def subclasses(cls: Any) -> Iterator[Any]:
    for sub in cls.__subclasses__():
        yield from (sub, *subclasses(sub))


CONFIGS = sorted(
    {
        c
        for c in subclasses(Config)
        if c.__module__.split(".")[0] in ("moe", "orchestrator", "papers")
        and is_dataclass(c)
        and not inspect.isabstract(c)
        and Family not in c.__bases__
    },
    key=lambda cls: cls.__qualname__,
)
# The fields without a default.
NEEDED: dict[str, dict[str, Any]] = {
    "Device": {"usd_per_hour": 1.0, "peak_tflops": 1.0},
    "SuiteRow": {"name": "a", "path": "b"},
    "Sweep": {"base": RunConfig(), "arms": {}},
    "Trunk": {"at": (1,), "cooldown": 1},
    "Tuning": {"field": "train.lr", "values": (1e-3, 1e-2)},
}
# Bounds that configs have; a new one may stay out of this list.
BOUNDS = """
AdafactorConfig: weight_decay >= 0, weight_decay_head >= 0, beta1 >= 0, beta1 <= 1, beta2_cap >= 0,
    beta2_cap <= 1, min_dim_to_factor >= 1
AdamWConfig: weight_decay >= 0, weight_decay_head >= 0, beta1 >= 0, beta1 <= 1, beta2 >= 0, beta2 <= 1
CheckpointConfig: every >= 1, keep_last >= 1, keep_best >= 0, keep_every >= 1
ColorJitterConfig: strength > 0, strength <= 1
CosineConfig: warmup_steps >= 0, end_frac >= 0, end_frac <= 1
DataConfig: batch_size >= 1, lanes >= 1, shuffle_window >= 1, shuffle_run >= 1, eval_crop > 0, eval_crop <= 1,
    repeats >= 1, max_bad_frac >= 0, max_bad_frac <= 1, cache_gb >= 0
Device: usd_per_hour >= 0, peak_tflops > 0, memory_gib > 0
ExpertChoiceConfig: capacity_factor > 0, eval_capacity_factor > 0, capacity_multiple_of >= 1, noise_std >= 0
MixtureConfig: clusters >= 1, temperature > 0, temperature_decay > 0, temperature_decay <= 1,
    temperature_min > 0
MoEConfig: num_experts >= 1, images_per_group >= 1, expert_dim >= 1, expert_dropout >= 0, expert_dropout < 1
MixupConfig: alpha > 0
ParallelConfig: dp_replicate >= 1, overlap_chunks >= 1
RandAugmentConfig: operations >= 1, operations <= 16, magnitude >= 0, magnitude <= 30
RandomErasingConfig: fraction > 0, fraction <= 1
RsqrtConfig: warmup_steps >= 0, cooldown_steps >= 0, timescale >= 1
SGDConfig: weight_decay >= 0, momentum >= 0
ScaleConfig: workers >= 1, ep >= 1, workers_per_node >= 1, min_workers >= 1, wait_s >= 1, profile_steps >= 0
SinkhornConfig: iterations >= 1
SoftConfig: slots_per_expert >= 1, total_slots >= 1, noise_std >= 0
SparseTransportConfig: iterations >= 1
TokenChoiceConfig: capacity_factor > 0, k >= 1, noise_std >= 0, importance_weight >= 0, load_weight >= 0,
    gshard_balance_weight >= 0, z_weight >= 0
TrainConfig: steps >= 1, lr >= 0, seed >= 0, report_every >= 1, eval_every >= 1, stop_at >= 0, stop_at <= 1,
    microbatch >= 1, clip_norm > 0
ViTConfig: image_size >= 1, patch_size >= 1, width >= 1, depth >= 1, heads >= 1, mlp_dim >= 1,
    num_classes >= 1, representation_size >= 1, dropout >= 0, dropout < 1, drop_path >= 0, drop_path < 1,
    layer_scale > 0
"""


def make(cls: Any, **values: Any) -> Any:
    return cls(**NEEDED.get(cls.__name__, {}) | values)


def hints(cls: Any) -> list[tuple[str, Any]]:
    found = get_type_hints(cls, include_extras=True)
    return [(field.name, member) for field in fields(cls) for member in members(found[field.name])]


def refused(cls: Any, name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=f"^{name} must "):
        make(cls, **{name: value})


def bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def test_there_are_configs() -> None:
    assert {"RunConfig", "ViTConfig", "TokenChoiceConfig", "AdamWConfig", "Sweep"} <= {
        cls.__name__ for cls in CONFIGS
    }


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_field_is_checked(cls: Any) -> None:
    """Literals refuse "x", ints refuse 1.5, and so on, unless another type of the union allows it."""
    make(cls)
    for field in fields(cls):
        kinds = [bare(hint) for name, hint in hints(cls) if name == field.name]
        protocols = [kind for kind in kinds if getattr(kind, "_is_protocol", False)]
        if not protocols and Any not in kinds:
            refused(cls, field.name, object())
        if str not in kinds and not protocols:
            refused(cls, field.name, "x")
        if float not in kinds and not protocols:
            refused(cls, field.name, 1.5)
        if float in kinds:
            refused(cls, field.name, float("nan"))
            refused(cls, field.name, float("inf"))
        if (int in kinds or float in kinds) and bool not in kinds:
            refused(cls, field.name, True)


def bounds(cls: Any) -> Iterator[tuple[str, Any, Bound]]:
    for name, hint in hints(cls):
        for bound in getattr(hint, "__metadata__", ()):
            assert isinstance(bound, Bound)
            yield name, hint, bound


def test_no_bound_is_lost() -> None:
    found = {cls.__name__: {f"{name} {b.sign} {b.limit}" for name, _, b in bounds(cls)} for cls in CONFIGS}
    for line in BOUNDS.replace("\n    ", " ").strip().splitlines():
        name, _, listed = line.partition(": ")
        assert {*listed.split(", ")} <= found[name], name


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_bound_holds(cls: Any) -> None:
    for name, hint, bound in bounds(cls):
        beyond = {">=": -1, ">": 0, "<=": 1, "<": 0}[bound.sign]
        refused(cls, name, bare(hint)(bound.limit + beyond))


@pytest.mark.parametrize("cls", CONFIGS)
def test_an_override_below_an_absent_group_changes_one_leaf(cls: Any) -> None:
    """Whichever leaf is named, the group is its field's default, or that of its class, but for this leaf."""
    for field in fields(cls):
        kinds = [hint for name, hint in hints(cls) if name == field.name]
        groups: list[Any] = [kind for kind in kinds if is_dataclass(kind)]
        if not groups or type(None) not in kinds or groups[0].__name__ in NEEDED:
            continue
        group = field.default if is_dataclass(field.default) else groups[0]()
        for leaf, value in flat(group).items():
            changed = override(make(cls, **{field.name: None}), {f"{field.name}.{leaf}": value})
            assert getattr(changed, field.name) == group

"""Laws over all configs of the project. A new config is found by itself."""

import importlib
import inspect
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, get_args, get_origin, get_type_hints

import pytest

from moe.config import Bound, Config, members
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
    },
    key=lambda cls: cls.__qualname__,
)
# The fields without a default.
NEEDED: dict[str, dict[str, Any]] = {
    "Device": {"usd_per_hour": 1.0, "peak_tflops": 1.0},
    "Sweep": {"base": RunConfig(), "arms": {}},
    "Trunk": {"at": (1,), "cooldown": 1},
}


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


@pytest.mark.parametrize("cls", CONFIGS)
def test_every_bound_holds(cls: Any) -> None:
    for name, hint in hints(cls):
        for bound in getattr(hint, "__metadata__", ()):
            assert isinstance(bound, Bound)
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

"""Configs to plain dicts and back: for wires, files, overrides from the command line, MLflow params.

pydantic checks the leaves; the walk over dataclasses is ours, because its errors for unions and unknown
fields do not say which fields and kinds there are.
"""

import json
from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

from pydantic import ConfigDict, TypeAdapter, ValidationError

from orchestrator.errors import UsageError

T = TypeVar("T")

# What may differ between a run and its resumption: how it is split, how and where it is kept.
MAY_CHANGE = ("scale.", "checkpoint.", "storage", "train.microbatch", "data.cache_gb", "data.max_bad_frac")


def to_dict(config: Any) -> Any:
    """Plain JSON values; a member of a union carries its ``kind``."""
    if isinstance(config, tuple):
        return list(config)
    if not is_dataclass(config):
        return config
    return {f.name: to_dict(getattr(config, f.name)) for f in fields(config)}


def from_dict(cls: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """Rebuilds and so re-checks a config. Strings are parsed as what their field wants.

    Raises:
        UsageError: for an unknown field or kind, naming those that exist; for a value its field refuses.
    """
    hints = _hints(cls)
    if unknown := sorted(data.keys() - hints.keys()):
        raise UsageError(
            f"unknown field {path}{unknown[0]}; {path.rstrip('.') or 'a run'} has: {', '.join(hints)}"
        )
    values = {name: _value(hints[name], value, f"{path}{name}") for name, value in data.items()}
    try:
        return cls(**values)
    except UsageError:
        raise
    except ValueError as error:
        raise UsageError(f"{path.rstrip('.')}: {error}" if path else str(error)) from None


def override(config: T, changes: Mapping[str, Any]) -> T:
    """`config` with dotted fields replaced: ``{"model.moe.router.k": 2}``.

    A new ``kind`` starts that member from its defaults, whatever the order; so does a field below one that
    is None.

    Raises:
        UsageError: as `from_dict`.
    """
    tree = to_dict(config)
    for path, value in sorted(changes.items(), key=_parents_and_kinds_first):
        node, cls, (*parents, leaf) = tree, type(config), path.split(".")
        for depth, name in enumerate(parents, start=1):
            here = ".".join(parents[:depth])
            if name not in _hints(cls):
                raise UsageError(f"unknown field {here}; there is: {', '.join(_hints(cls))}")
            if node.get(name) is None:
                node[name] = {}
            node, hint = node[name], _hints(cls)[name]
            if not isinstance(node, dict):
                raise UsageError(f"{here} is a value, not a group: {path} does not exist")
            cls = _member(hint, node, here)
        if leaf == "kind" and node.get("kind") != value:
            node.clear()
        node[leaf] = value
    return from_dict(type(config), tree)


def flat(config: Any) -> dict[str, Any]:
    """Dotted leaves, as MLflow params."""

    def walk(node: Any, prefix: str) -> dict[str, Any]:
        if not isinstance(node, dict):
            return {prefix[:-1]: node}
        return {k: v for name, child in node.items() for k, v in walk(child, f"{prefix}{name}.").items()}

    return walk(to_dict(config), "")


def describe(config: Any, prefix: str = "") -> list[str]:
    """Every field with its value, one per line; of unions every member, the others with their defaults."""
    lines = []
    for name, hint in _hints(type(config)).items():
        value, path = getattr(config, name), f"{prefix}{name}"
        members = _dataclasses(hint)
        if not members:
            lines.append(f"{path} = {json.dumps(to_dict(value))}")
            continue
        if value is None:
            lines.append(f"{path} = null, or with:")
        for member in members:
            lines += describe(value if isinstance(value, member) else member(), f"{path}.")
    return lines


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Fields of two flat configs that differ and may not when a run is resumed: field -> (old, new)."""
    names = [n for n in {**old, **new} if not n.startswith(MAY_CHANGE)]
    return {n: (old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)}


def _parents_and_kinds_first(change: tuple[str, Any]) -> tuple[int, bool]:
    return change[0].count("."), not change[0].endswith(".kind")


@cache
def _hints(cls: type) -> dict[str, Any]:
    return get_type_hints(cls)


def _dataclasses(hint: Any) -> list[Any]:
    return [t for t in get_args(hint) or [hint] if is_dataclass(t)]


def _member(hint: Any, value: Mapping[str, Any], path: str) -> Any:
    """The dataclass that `value` describes: the one of its kind, or the field's only one."""
    choices = _dataclasses(hint)
    if not choices:
        raise UsageError(f"{path} is a value, not a group of fields")
    if len(choices) == 1 or "kind" not in value:
        return choices[0]
    by_kind = {get_args(_hints(t)["kind"])[0]: t for t in choices}
    if value["kind"] not in [*by_kind]:  # a list, because a value from JSON may have no hash
        raise UsageError(f"unknown {path}.kind {value['kind']!r}; known: {', '.join(sorted(by_kind))}")
    return by_kind[value["kind"]]


def _value(hint: Any, value: Any, path: str) -> Any:
    if _dataclasses(hint):
        if value is None and NoneType in get_args(hint):
            return None
        if not isinstance(value, Mapping):
            raise UsageError(f"{path} is a group of fields, not a value; got {value!r}")
        return from_dict(_member(hint, value, path), value, f"{path}.")
    try:
        return _adapter(hint).validate_python(value)
    except ValidationError as error:
        why = " or ".join(one["msg"] for one in error.errors())
        raise UsageError(f"{path}={value!r}: {why}") from None


@cache
def _adapter(hint: Any) -> TypeAdapter[Any]:
    return TypeAdapter(hint, config=ConfigDict(allow_inf_nan=False))

"""Configs as plain JSON values, and back by the types of their fields."""

from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, TypeVar, get_args, get_type_hints

T = TypeVar("T")
# (type of the field, JSON value, dotted path) -> value
Parse = Callable[[Any, Any, str], Any]


def to_dict(config: Any) -> Any:
    """Returns plain JSON values; a member of a union carries its ``kind``."""
    if isinstance(config, tuple):
        return list(config)
    if not is_dataclass(config):
        return config
    return {f.name: to_dict(getattr(config, f.name)) for f in fields(config)}


def plain(hint: Any, value: Any, path: str) -> Any:
    """Takes a JSON value as it is; a list stands for a tuple."""
    return tuple(value) if isinstance(value, list) else value


def from_dict(cls: type[T], data: Mapping[str, Any], path: str = "", parse: Parse = plain) -> T:
    """Rebuilds a config, which checks itself.

    Raises ValueError for an unknown field or kind, with those that exist, and for a value that is refused.
    """
    hints = hints_of(cls)
    if unknown := sorted(data.keys() - hints.keys()):
        raise ValueError(
            f"unknown field {path}{unknown[0]}; {path.rstrip('.') or 'the config'} has: {', '.join(hints)}"
        )
    values = {name: _value(hints[name], value, f"{path}{name}", parse) for name, value in data.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{path.rstrip('.')}: {error}" if path else str(error)) from None


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """Returns the type of every field."""
    return get_type_hints(cls)


def dataclasses_of(hint: Any) -> list[Any]:
    """Returns the configs that a field may hold."""
    return [t for t in get_args(hint) or [hint] if is_dataclass(t)]


def member_of(hint: Any, value: Mapping[str, Any], path: str) -> Any:
    """Returns the config class that `value` describes: the one of its kind, or the field's first."""
    choices = dataclasses_of(hint)
    if not choices:
        raise ValueError(f"{path} is a value, not a group of fields")
    if len(choices) == 1 or "kind" not in value:
        return choices[0]
    by_kind = {get_args(hints_of(t)["kind"])[0]: t for t in choices}
    # A list, because a value from JSON may have no hash.
    if value["kind"] not in [*by_kind]:
        raise ValueError(f"unknown {path}.kind {value['kind']!r}; known: {', '.join(sorted(by_kind))}")
    return by_kind[value["kind"]]


def _value(hint: Any, value: Any, path: str, parse: Parse) -> Any:
    if not dataclasses_of(hint):
        return parse(hint, value, path)
    if value is None and NoneType in get_args(hint):
        return None
    if not isinstance(value, Mapping):
        raise ValueError(f"{path} is a group of fields, not a value; got {value!r}")
    return from_dict(member_of(hint, value, path), value, f"{path}.", parse)

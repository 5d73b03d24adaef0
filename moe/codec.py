"""Configs as plain JSON values, and back by the types of their fields."""

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from functools import cache
from types import NoneType
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from moe.config import did_you_mean, members
from moe.guests import join_families

T = TypeVar("T")

NO_VALUE = ("none", "None")  # texts for None, where a field takes no such text


def to_dict(config: Any) -> Any:
    """Returns plain JSON values; a member of a union carries its ``kind``."""
    if isinstance(config, tuple):
        return [to_dict(entry) for entry in config]
    if not is_dataclass(config):
        return config
    return {name: to_dict(value) for name, value in fields_of(config).items()}


def fields_of(config: Any) -> Any:
    """Returns the fields of a config, with configs in them as they are; another value as it is."""
    if not is_dataclass(config):
        return config
    return {name: getattr(config, name) for name in hints_of(type(config))}


def from_dict(cls: type[T], data: Mapping[str, Any], path: str = "") -> T:
    """Rebuilds a config, which checks itself: of `cls`, or of the kind that `data` names if that is a family.

    A list stands for a tuple, and text is read as the type of its field, as a command line has it. A config
    may stand for its fields.

    Raises ValueError for an unknown field or kind, with those that exist, and for a value that is refused.
    """
    return _built(member_of(cls, data, path.rstrip(".") or "config"), data, path)


def _built(cls: Any, data: Mapping[str, Any], path: str) -> Any:
    hints, (groups, families) = hints_of(cls), _groups_of(cls)
    if unknown := sorted(data.keys() - hints.keys()):
        raise ValueError(
            f"unknown field {path}{unknown[0]}; {path.rstrip('.') or 'the config'} has: {', '.join(hints)}"
            f"{did_you_mean(unknown[0], hints)}"
        )
    values = {
        name: _group(hints[name], value, f"{path}{name}")
        if name in groups
        else _tuple(hints[name], value, f"{path}{name}")
        if name in families
        else _value(hints[name], value)
        for name, value in data.items()
    }
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{path.rstrip('.')}: {error}" if path else str(error)) from None


@cache
def hints_of(cls: type) -> dict[str, Any]:
    """Returns the type of every field, ``kind`` first."""
    hints, names = get_type_hints(cls), [field.name for field in fields(cls)]
    return {name: hints[name] for name in sorted(names, key=lambda name: name != "kind")}


def dataclasses_of(hint: Any) -> list[Any]:
    """Returns the configs that a field may hold."""
    return [member for member in members(hint) if is_dataclass(member)]


def entries_of(hint: Any) -> list[Any]:
    """Returns the configs of which a field holds a tuple."""
    return dataclasses_of(get_args(hint)[0]) if get_origin(hint) is tuple else []


def by_kind(hint: Any, value: Any, path: str) -> dict[str, Any]:
    """Returns the entries of a tuple of configs, in order: kind -> fields.

    They may be written as kinds with commas between them, ``none``, a list of kinds and of groups of fields
    with their kind, or a group for each kind, of which a group that is none is left out.
    """
    if value is None or value in NO_VALUE:
        value = ()
    elif isinstance(value, str):
        value = [word.strip() for word in value.split(",")]
    elif isinstance(value, Mapping):
        groups = [(kind, fields) for kind, fields in value.items() if fields not in (None, *NO_VALUE)]
        value = [value] if "kind" in value else [_named(kind, fields, path) for kind, fields in groups]
    found: dict[str, Any] = {}
    for entry in value if isinstance(value, list | tuple) else [value]:
        fields = _named(entry, {}, path) if isinstance(entry, str) else entry
        if not isinstance(fields, Mapping) or "kind" not in fields:
            known = ", ".join(sorted(_by_kind(tuple(entries_of(hint)))))
            raise ValueError(f"{path} has {entry!r}: write a name, or fields with a kind; known: {known}")
        member_of(get_args(hint)[0], fields, path)
        if fields["kind"] in found:
            raise ValueError(f"{path} has {fields['kind']} more than once")
        found[fields["kind"]] = {name: value for name, value in fields.items() if name != "kind"}
    return found


def _named(kind: str, fields: Any, path: str) -> dict[str, Any]:
    if not isinstance(fields, Mapping):
        raise ValueError(
            f"{path}.{kind} is a group of fields, not a value; got {fields!r}; {{}} has its defaults"
        )
    return {"kind": kind, **fields}


def member_of(hint: Any, value: Mapping[str, Any], path: str) -> Any:
    """Returns the config class that `value` describes: the one of its kind, or the field's first."""
    choices = dataclasses_of(hint)
    if not choices:
        raise ValueError(f"{path} is a value, not a group of fields")
    kinds = _by_kind(tuple(choices))
    if not kinds or "kind" not in value:
        return choices[0]
    # A list, because a value from JSON may have no hash.
    if value["kind"] not in [*kinds]:
        join_families()
        kinds = _by_kind(tuple(dataclasses_of(hint)))
    if value["kind"] not in [*kinds]:
        raise ValueError(
            f"unknown {path}.kind {value['kind']!r}; known: {', '.join(sorted(kinds))}"
            f"{did_you_mean(value['kind'], kinds)}"
        )
    return kinds[value["kind"]]


@cache
def _by_kind(choices: tuple[Any, ...]) -> dict[str, Any]:
    """Returns the configs that have a kind: kind -> class."""
    return {get_args(hints_of(cls)["kind"])[0]: cls for cls in choices if "kind" in hints_of(cls)}


@cache
def _groups_of(cls: type) -> tuple[frozenset[str], frozenset[str]]:
    """Returns the fields that hold a config, and those that hold a tuple of them. Families grow, but this
    stays.
    """
    hints = hints_of(cls).items()
    return (
        frozenset(name for name, hint in hints if dataclasses_of(hint)),
        frozenset(name for name, hint in hints if entries_of(hint)),
    )


def _group(hint: Any, value: Any, path: str) -> Any:
    if NoneType in get_args(hint) and value in (None, *NO_VALUE):
        return None
    if isinstance(value, tuple(dataclasses_of(hint))):
        return value
    if not isinstance(value, Mapping):
        kinds = _by_kind(tuple(dataclasses_of(hint)))
        way_out = f"; set {path}.kind to {' or '.join(kinds)}" if kinds else ""
        raise ValueError(f"{path} is a group of fields, not a value; got {value!r}{way_out}")
    return _built(member_of(hint, value, path), value, f"{path}.")


def _tuple(hint: Any, value: Any, path: str) -> tuple[Any, ...]:
    entry, entries = get_args(hint)[0], tuple(entries_of(hint))
    if isinstance(value, tuple) and all(isinstance(each, entries) for each in value):
        return value
    return tuple(
        _built(member_of(entry, {"kind": kind}, path), fields, f"{path}.{kind}.")
        for kind, fields in by_kind(hint, value, path).items()
    )


def _value(hint: Any, text: Any) -> Any:
    """Reads text as a number or a bool if the type takes no such text; the config checks the value."""
    if isinstance(text, list):
        return tuple(text)
    if not isinstance(text, str):
        return text
    kinds = members(hint)
    words = [word for kind in kinds if get_origin(kind) is Literal for word in get_args(kind)]
    if str in kinds or text in words:
        return text
    for kind in kinds:
        try:
            if kind is bool:
                return {"true": True, "false": False}[text.lower()]
            if kind in (int, float):
                return kind(text)
            if kind is NoneType and text in NO_VALUE:
                return None
        except (KeyError, ValueError):
            continue
    return text

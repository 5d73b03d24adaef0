"""Configs as plain dicts and back (`moe.codec`), with overrides by dotted names."""

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from typing import Any, TypeVar

from moe import codec
from moe.codec import by_kind, dataclasses_of, entries_of, fields_of, hints_of, member_of, to_dict
from moe.config import did_you_mean
from orchestrator.errors import UsageError
from orchestrator.plugins import check_loaded

T = TypeVar("T")

# Fields that may differ between a run and its resumption: how it is split, and how and where it is kept.
MAY_CHANGE = ("scale.", "checkpoint.", "storage", "train.microbatch", "data.cache_gb", "data.max_bad_frac")


@contextmanager
def _usage_errors() -> Iterator[None]:
    """Turns a ValueError into a UsageError."""
    try:
        yield
    except ValueError as error:
        raise UsageError(str(error)) from None


@_usage_errors()
def read_config(cls: type[T], data: Mapping[str, Any]) -> T:
    """Rebuilds a config, which checks itself. Strings are parsed as the types of their fields.

    Raises:
        UsageError: for an unknown field or kind, naming those that exist; for a value that its field refuses;
            for a plugin that is not loaded.
    """
    if isinstance(plugins := data.get("plugins"), list):
        check_loaded(map(str, plugins))
    return codec.from_dict(cls, data)


@_usage_errors()
def override(config: T, changes: Mapping[str, Any]) -> T:
    """Returns `config` with dotted fields replaced: ``{"model.moe.router.k": 2}``; itself, if it has them.

    A new ``kind`` starts that member of a union from its defaults, whatever the order of the changes. A field
    below a group that is None starts the group from the default of its field, or else of its class. Entries
    of a tuple of configs are named by their kinds: ``data.augment.mixup.alpha`` changes or adds an entry, and
    None leaves it out.

    Raises:
        UsageError: as `read_config`.
    """
    tree, same = fields_of(config), True
    for path, value in sorted(changes.items(), key=_parents_and_kinds_first):
        node, cls, (*parents, leaf) = tree, type(config), path.split(".")
        for depth, name in enumerate(parents, start=1):
            here = ".".join(parents[:depth])
            if name not in (known := _below(cls)):
                near = did_you_mean(name, known)
                raise UsageError(f"unknown field {here}; there is: {', '.join(known)}{near}")
            if node.get(name) is None:
                node[name], same = _default(cls, name), False
            hint = known[name]
            if entries_of(hint):
                # The names below a tuple are the kinds of its entries.
                node[name], cls = by_kind(hint, to_dict(node[name]), here), hint
                node = node[name]
                continue
            node[name] = node = fields_of(node[name])
            if not isinstance(node, dict):
                raise UsageError(f"{here} is a value, not a group: {path} does not exist")
            cls = member_of(hint, node, here)
        if leaf == "kind" and node.get("kind") != value:
            node.clear()
        same = same and leaf in node and to_dict(node[leaf]) == value
        node[leaf] = value
    return config if same else read_config(type(config), tree)  # What is not changed is not built again.


def differences(old: Any, new: Any) -> dict[str, Any]:
    """Returns the fewest dotted changes with which `override` makes `new` of `old`, a config of its class."""
    found: dict[str, Any] = {}
    for field in fields(new):
        before, now = getattr(old, field.name), getattr(new, field.name)
        if not is_dataclass(now):
            if before != now:
                found[field.name] = to_dict(now)
            continue
        # What `override` starts from: without the group the field's default, and with another kind its own.
        default = field.default if before is None and type(field.default) is type(now) else type(now)()
        same = type(before) is type(now)
        below = differences(before if same else default, now)
        if not same and (kind := getattr(now, "kind", None)):
            below = {"kind": kind, **below}
        found |= {f"{field.name}.{name}": value for name, value in below.items()}
        if not same and not below:
            found[field.name] = {}
    return found


def places_of(config: Any, path: str = "") -> dict[type, set[str]]:
    """Returns the fields of a config, and of the configs in it, that hold configs: class -> dotted names. In
    a field that is None, those of its classes' defaults count.
    """
    found: dict[type, set[str]] = {}
    for name, hint in hints_of(type(config)).items():
        value, known = getattr(config, name), dataclasses_of(hint)
        for member in known:
            found.setdefault(member, set()).add(f"{path}{name}")
        for inner in [value] if is_dataclass(value) else [member() for member in known]:
            for below, names in places_of(inner, f"{path}{name}.").items():
                found.setdefault(below, set()).update(names)
    return found


def _parents_and_kinds_first(change: tuple[str, Any]) -> tuple[int, bool]:
    return change[0].count("."), not change[0].endswith(".kind")


def _below(cls: Any) -> dict[str, Any]:
    """Returns the fields of a config, or the kinds of a tuple of configs: name -> type."""
    return hints_of(cls) if is_dataclass(cls) else {entry.kind: entry for entry in entries_of(cls)}


def _default(cls: Any, name: str) -> Any:
    """Returns the tree of a field's default group; without one, the group's class has the defaults."""
    if not is_dataclass(cls):
        return {}
    (default,) = (field.default for field in fields(cls) if field.name == name)
    return to_dict(default) if is_dataclass(default) else {}


def flat(config: Any) -> dict[str, Any]:
    """Returns the leaves of a config, or of its dict, by dotted names: the params in MLflow. Of a tuple of
    configs these are the list of their kinds, and their fields.
    """

    def walk(node: Any, prefix: str) -> dict[str, Any]:
        if isinstance(node, list) and any(isinstance(entry, dict) for entry in node):
            fields = {entry["kind"]: {n: v for n, v in entry.items() if n != "kind"} for entry in node}
            return {prefix[:-1]: [*fields], **walk(fields, prefix)}
        if not isinstance(node, dict):
            return {prefix[:-1]: node}
        return {k: v for name, child in node.items() for k, v in walk(child, f"{prefix}{name}.").items()}

    return walk(to_dict(config), "")


def describe(config: Any, prefix: str = "", within: tuple[Any, ...] = ()) -> list[str]:
    """Returns a line for every field with its value; for a union, lines for every member, with the defaults
    of those that are not chosen. A config within one of its own class has no lines.
    """
    lines = []
    for name, hint in hints_of(type(config)).items():
        value, path = getattr(config, name), f"{prefix}{name}"
        if entries := entries_of(hint):
            given = {each.kind: each for each in value}
            lines.append(f"{path} = {json.dumps([*given])}")
            for entry in entries:
                _, *fields = describe(given.get(entry.kind, entry()), f"{path}.{entry.kind}.")
                lines += fields or [f"{path}.{entry.kind} = {{}}"]
            continue
        members = [member for member in dataclasses_of(hint) if member not in (*within, type(config))]
        if not dataclasses_of(hint):
            lines.append(f"{path} = {json.dumps(to_dict(value))}")
            continue
        if value is None:
            lines.append(f"{path} = null, or with:")
        for member in members:
            chosen = value if isinstance(value, member) else member()
            lines += describe(chosen, f"{path}.", (*within, type(config)))
    return lines


def changed_fields(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, tuple[Any, Any]]:
    """Returns the fields of two flat configs that differ and may not: field -> (old, new)."""
    names = [n for n in {**old, **new} if not n.startswith(MAY_CHANGE)]
    return {n: (old.get(n), new.get(n)) for n in names if old.get(n) != new.get(n)}

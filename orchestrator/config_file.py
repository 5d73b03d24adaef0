"""Configs as TOML files: the fields that `set` has, in tables or as dotted names. Every run writes its own.

TOML has no null, so the text ``"null"`` is None, as it is on a command line. A place that begins with
``storage:`` lies below the storage of whoever reads the file.
"""

import json
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from orchestrator import storage
from orchestrator.codec import flat, override, to_dict
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.upgrade import upgraded

CONFIG_TOML = "config.toml"  # of a run's directory
BELOW = "storage:"
NULL = "null"


def to_toml(run: RunConfig) -> str:
    """Returns the file that repeats a run. Where it lies is left out, and so are its plugins' digests."""
    tree = {name: value for name, value in to_dict(run).items() if name not in ("storage", "plugins")}
    return "\n".join(_lines(tree, "", f"{run.storage.rstrip('/')}/")).lstrip("\n") + "\n"


def read_toml(location: str, root: str) -> dict[str, Any]:
    """Returns the fields of a file by their dotted names.

    Args:
        root: the storage of which the file may name places.

    Raises:
        UsageError: if there is no such file, or it is no TOML.
    """
    try:
        tree = tomllib.loads(storage.read_bytes(storage.absolute(location)).decode())
    except OSError as error:
        raise UsageError(f"no file of fields: {location}: {error.strerror or error}") from None
    except ValueError as error:  # of TOML or of UTF-8
        raise UsageError(f"{location}: {error}") from None
    return {name: _value(value, root) for name, value in _fields(upgraded(tree))}


def check_written(
    location: str, fields: Mapping[str, Any], base: RunConfig, changes: Mapping[str, Any]
) -> None:
    """Checks the fields of a file among all `changes` of the base.

    Raises:
        UsageError: naming the file and the field, for a change that is refused, and for a number or a bool
            that the file has as text.
    """
    try:
        found = flat(override(base, changes))
    except UsageError as error:
        raise UsageError(f"{error} (with the fields of {location})") from None
    for name, value in fields.items():
        if isinstance(value, str) and changes.get(name) == value != found.get(name, value):
            raise UsageError(f"{location}: {name} = {value!r} is text: write {_text(found[name], location)}")


def merged(fields: Mapping[str, Any], explicit: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields with others that win: a group or a kind that they set has nothing of the fields."""

    def loses(name: str) -> bool:
        for winner, value in explicit.items():
            group = winner.removesuffix(".kind")
            other_kind = group != winner and fields.get(winner, value) != value
            if (
                name == winner
                or name.startswith(f"{winner}.")
                or (other_kind and name.startswith(f"{group}."))
            ):
                return True
        return False

    return {name: value for name, value in fields.items() if not loses(name)} | dict(explicit)


def _fields(tree: Mapping[str, Any], above: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _fields(value, f"{above}{name}.")
            if not value:
                yield f"{above}{name}", {}
        else:
            yield f"{above}{name}", value


def _value(value: Any, root: str) -> Any:
    if isinstance(value, list):
        return [_value(each, root) for each in value]
    if isinstance(value, dict):
        return {name: _value(each, root) for name, each in value.items()}
    if isinstance(value, str) and value.startswith(BELOW):
        return storage.join(root, value.removeprefix(BELOW))
    return None if value == NULL else value


def _lines(tree: Mapping[str, Any], table: str, root: str) -> Iterator[str]:
    """Yields the values of a table before the tables in it, as TOML wants them."""
    groups = {name: value for name, value in tree.items() if isinstance(value, dict)}
    if table and (len(groups) < len(tree) or not tree):
        yield f"\n[{table}]"
    for name, value in tree.items():
        if name not in groups:
            yield f"{name} = {_text(value, root)}"
    for name, group in groups.items():
        yield from _lines(group, f"{table}.{name}" if table else name, root)


def _text(value: Any, root: str) -> str:
    """Returns a value in TOML's notation."""
    if isinstance(value, list | tuple):
        return f"[{', '.join(_text(each, root) for each in value)}]"
    if isinstance(value, dict):
        return f"{{ {', '.join(f'{name} = {_text(each, root)}' for name, each in value.items())} }}"
    if value is None:
        return f'"{NULL}"'
    if isinstance(value, str) and value.startswith(root):
        value = BELOW + value.removeprefix(root)
    # JSON's notation of texts, numbers and bools is TOML's, but for one character.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")

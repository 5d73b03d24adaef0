"""Configs as records hold them: read where their storage lies now, and with the plugins that are needed.

A record names its storage. What lay below it is looked for below the storage in which the record lies now,
which may have been moved, copied or renamed; then where it was. So a record needs no rewriting.
"""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import make_dataclass, replace
from functools import cache
from typing import Any, get_args

from moe import codec
from moe.codec import dataclasses_of, entries_of, hints_of
from moe.config import Family
from orchestrator import storage
from orchestrator.codec import read_config
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.names import check_run_path
from orchestrator.plugins import check_loaded, is_loaded, plugins_of
from orchestrator.upgrade import upgraded

CONFIG = "config.json"  # of a run's directory


class Move:
    """Where the things lie now that the record of a run or a sweep names.

    Args:
        config: the config of the run, or of the sweep's base, as `to_dict` wrote it.
        directory: of the run or the sweep; empty: unknown, as of a file that was exported.
        root: a storage to look in last.

    Attributes:
        name, storage: of the run, by its directory.
    """

    def __init__(self, config: Mapping[str, Any], directory: str = "", root: str = "") -> None:
        was, old = str(config.get("name", "")), str(config.get("storage", ""))
        self.name, self.storage = _found_at(directory, was) or (was, old)
        folders = [storage.join(*each) for each in ((old, _top(was)), (self.storage, _top(self.name)))]
        # A sweep that was renamed is looked at first.
        self._pairs = [folders, (old, self.storage), (old, root or self.storage)] if old else []

    def config(self, config: Mapping[str, Any], known: Any = None) -> dict[str, Any]:
        """Returns the config with today's fields, name, storage and places; those of `known` are newer."""
        named = {"name": self.name, "storage": self.storage} if self.storage else {}
        placed = {name: value for name, value in upgraded(config).items() if name != "storage"}
        return {**self.tree(placed, known), **named}

    def tree(self, node: Any, known: Any = None) -> Any:
        """Returns a part of the record with today's places."""
        if isinstance(node, Mapping):
            others = known if isinstance(known, Mapping) else {}
            return {name: self.tree(value, others.get(name)) for name, value in node.items()}
        if isinstance(node, list):
            others = known if isinstance(known, list) and len(known) == len(node) else [None] * len(node)
            return [self.tree(value, other) for value, other in zip(node, others, strict=True)]
        return self._place(node, known) if isinstance(node, str) else node

    def _place(self, text: str, known: Any) -> str:
        moved = [f"{now}{text[len(old) :]}" for old, now in self._pairs if f"{text}/".startswith(f"{old}/")]
        newest = [known] if is_place(text) and is_place(known) else []
        first, *others = dict.fromkeys([*newest, *moved, text])
        return next((place for place in (first, *others) if exists_at(place)), first) if others else first


def is_place(value: Any) -> bool:
    """Returns whether a value of a config is an absolute path or a URI."""
    return isinstance(value, str) and (value.startswith("/") or "://" in value)


def exists_at(location: str) -> bool:
    """Returns whether there is a file or a folder."""
    if storage.is_local(location):
        return os.path.exists(location.removeprefix("file://"))
    with suppress(OSError, UsageError):
        return storage.size(location) is not None or bool(storage.names(location))
    return False


def at_its_place(config: Mapping[str, Any], location: str, root: str = "") -> dict[str, Any]:
    """Returns the config of weights, as a checkpoint's folder or a file holds it, with today's places."""
    directory, known = "", None
    above, _, last = location.rpartition("/")
    if last.startswith("step-") and above.endswith("/checkpoints"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            folder = above.removesuffix("/checkpoints")
            written = json.loads(storage.read_bytes(storage.join(folder, CONFIG)))["config"]
            directory, known = folder, Move(written, folder, root).config(written)
    return Move(config, directory, root).config(config, known)


def _found_at(directory: str, name: str) -> tuple[str, str] | None:
    """Returns name and storage of the run in a directory, which was called `name`: ``sweep/trials/arm`` is
    still a trial if its folder is below ``trials``. None if no run can be called so.
    """
    folders, (*above, _) = directory.split("/"), name.split("/")
    depth = len(above) + 1 if above and folders[-2:-1] == above[-1:] else 1
    found, root = "/".join(folders[-depth:]), "/".join(folders[:-depth])
    with suppress(UsageError):
        check_run_path(found)
        return (found, root) if root else None
    return None


def _top(name: str) -> str:
    return name.partition("/")[0]


def read_run(config: Mapping[str, Any]) -> RunConfig:
    """Rebuilds the config of trained weights, for which the plugins of its model and its task are enough: a
    schedule or an optimiser that is not loaded keeps its fields, and can do nothing.

    Raises:
        UsageError: as `read_config`, and naming a plugin that the model or the task needs.
    """
    recorded = [str(plugin) for plugin in config.get("plugins") or ()]
    if all(map(is_loaded, recorded)):
        with suppress(UsageError):  # else another file of these weights has lost what they do not need
            return read_config(RunConfig, config)
    stand_ins = dict[tuple[str, ...], Any]()
    try:
        run = read_config(RunConfig, _only_needed(RunConfig, {**config, "plugins": []}, recorded, stand_ins))
    except UsageError:
        check_loaded(recorded)
        raise
    if not {*plugins_of(run.model), *plugins_of(run.task)} <= {*recorded}:  # another version of one
        check_loaded(recorded)
    for path, stand_in in stand_ins.items():
        run = _with(run, path, stand_in)
    return run


def _only_needed(
    cls: Any,
    tree: Mapping[str, Any],
    plugins: Sequence[str],
    left_out: dict[tuple[str, ...], Any],
    *path: str,
) -> dict[str, Any]:
    """Returns the tree without what is neither model nor task, if its plugin is not loaded: that goes to
    `left_out`.
    """
    found = dict(tree)
    for name, hint in hints_of(cls).items():
        fields, choices, here = tree.get(name), (hint, *get_args(hint)), (*path, name)
        if entries_of(hint) and isinstance(fields, list):
            family = get_args(hint)[0]
            stays = [_is_known(family, each["kind"], plugins) for each in fields]
            if not all(stays):
                found[name] = [each for each, kept in zip(fields, stays, strict=True) if kept]
                left_out[here] = tuple(
                    codec.from_dict(family, each) if kept else _stand_in(family, tuple(each))(**each)
                    for each, kept in zip(fields, stays, strict=True)
                )
            continue
        if not isinstance(fields, Mapping) or here in (("model",), ("task",)):
            continue
        family = next((each for each in choices if isinstance(each, type) and "kinds" in each.__dict__), None)
        if family is not None and issubclass(family, Family):
            if not _is_known(family, fields.get("kind", family.default_kind), plugins):
                left_out[here] = _stand_in(family, tuple(fields))(**found.pop(name))
        elif classes := dataclasses_of(hint):
            found[name] = _only_needed(classes[0], fields, plugins, left_out, *here)
    return found


def _is_known(family: type[Family], kind: str, plugins: Sequence[str]) -> bool:
    member = family.kinds.get(kind)
    return member is not None and {*plugins_of(member())} <= {*plugins}


def _with(config: Any, path: Sequence[str], value: Any) -> Any:
    name, *below = path
    return replace(config, **{name: _with(getattr(config, name), below, value) if below else value})


@cache
def _stand_in(family: type[Family], names: tuple[str, ...]) -> Any:
    """Returns a member of a family that has these fields and no abilities."""
    kept = [(name, Any) for name in names]
    made: Any = make_dataclass(family.__name__, kept, bases=(family,), frozen=True, kw_only=True)
    made.__abstractmethods__ = frozenset()
    return made

"""Plugins: files of a user's own that define members of families, as routers or costs, on every worker.

A plugin is loaded because the user names its file, never because a config or a checkpoint does: these hold
its name and digest, to say which file is missing. A config that is sent to another process takes the text
along, so that workers need no folder in common.
"""

import hashlib
import linecache
import os
import sys
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import fields, is_dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from moe.config import Family
from moe.guests import join_families
from orchestrator import storage
from orchestrator.errors import UsageError

T = TypeVar("T")

FOLDER = "plugins"  # of a run or a sweep, with copies of its plugins
_files: dict[str, bytes] = {}  # whose functions this process has loaded: path -> text
_texts: dict[str, bytes] = {}  # what this process has loaded: name@SHA-256 -> text, in that order


def load_plugins(paths: Iterable[str | Path]) -> tuple[str, ...]:
    """Loads files that define routers, models, optimisers or others that a config chooses by ``kind``.

    A file is loaded once. Returns ``name@SHA-256`` of each, as the configs that use it record it.

    Raises:
        UsageError: if there is no such file; if its code fails or defines nothing to choose; if another file
            of its name is loaded.
    """
    join_families()  # whose kinds a plugin may not take
    loaded = []
    for path in map(Path, paths):
        if not path.is_file():
            raise UsageError(f"no file {path}: a plugin is a Python file of your own")
        text = path.read_bytes()
        loaded.append(f"{path.name}@{hashlib.sha256(text).hexdigest()}")
        _load(loaded[-1], text)
    return tuple(loaded)


def function_of(reference: str) -> Callable[..., Any]:
    """Returns a function of a user's own file: ``path/to/file.py:function``.

    The file is a module as any other, executed once until its text changes. It may import files beside it, if
    neither ours nor installed modules have their names. Other processes get what it defines by value
    (`modules_by_value`).

    Raises:
        UsageError: if there is no such file or function, or its code fails.
    """
    path, _, function = reference.rpartition(":")
    if not Path(path).is_file():
        raise UsageError(f"no file {path}: a function of your own is path/to/file.py:function")
    file = str(Path(path).resolve())
    if not callable(found := getattr(_module_of(file), function, None)):
        raise UsageError(f"{path} has no function {function!r}")
    return found


def error_in(reference: str, error: Exception) -> UsageError:
    """Returns the error of a user's own file, or of its function, with the line of the file."""
    path = reference if Path(reference).is_file() else reference.rpartition(":")[0]
    line = _line(error, str(Path(path).resolve()))
    return UsageError(f"{reference}, line {line}: {type(error).__name__}: {error}")


def modules_by_value() -> list[ModuleType]:
    """Returns the modules of the user's own files and of those beside them, unknown to other processes."""
    folders = {os.path.dirname(file) for file in _files}
    loaded = [(module, getattr(module, "__file__", None)) for module in [*sys.modules.values()]]
    return [module for module, file in loaded if file and os.path.dirname(file) in folders]


def _module_of(file: str) -> ModuleType:
    text = Path(file).read_bytes()
    name = f"moe_file_{hashlib.sha256(file.encode()).hexdigest()[:8]}_{Path(file).stem}"
    if _files.get(file) == text:
        return sys.modules[name]
    if name in sys.modules:
        _forget(name)
    if (folder := os.path.dirname(file)) not in sys.path:
        sys.path.append(folder)  # last, so that a file called moe.py hides nothing
    module = sys.modules[name] = ModuleType(name)
    module.__file__ = file
    try:
        exec(compile(text, file, "exec"), module.__dict__)
    except Exception as error:  # the user's own code
        _forget(name)
        if isinstance(error, UsageError):
            raise
        raise error_in(file, error) from error
    _files[file] = text
    return module


def is_loaded(plugin: str) -> bool:
    return plugin in _texts


def check_loaded(plugins: Iterable[str]) -> None:
    """Raises UsageError naming the first plugin that a config was made with and that is not loaded."""
    for plugin in plugins:
        if plugin not in _texts:
            other = _of_this_name(plugin)
            raise UsageError(
                f"made with the plugin {_shown(plugin)}, and"
                f" {f'{_shown(other)} is' if other else 'it is not'} loaded: load that file (`plugin`, in"
                f" Python load_plugins); its run keeps a copy in {FOLDER}/"
            )


def plugins_of(config: Any) -> tuple[str, ...]:
    """Returns the plugins that define parts of a config, in the order in which they were loaded."""
    modules = {cls.__module__ for part in _parts(config) for cls in type(part).__mro__} if _texts else ()
    return tuple(plugin for plugin in _texts if _module(plugin) in modules)


def save_plugins(directory: str, plugins: Iterable[str]) -> None:
    """Keeps a copy of each in the directory of a run or a sweep."""
    for plugin in plugins:
        storage.write_bytes(storage.join(directory, FOLDER, _name(plugin)), _texts[plugin])


def shipped(plugins: Iterable[str]) -> dict[str, bytes]:
    """Returns plugins with their texts, for `unpickled` in another process."""
    return {plugin: _texts[plugin] for plugin in plugins}


def unpickled(plugins: dict[str, bytes], cls: type[T]) -> T:
    """Loads plugins, and returns an object whose fields, which need them, pickle sets next."""
    restored(plugins)
    return object.__new__(cls)


def restored(plugins: dict[str, bytes]) -> None:
    """Loads plugins by their texts, as `shipped` returns them."""
    for plugin, text in plugins.items():
        _load(plugin, text)


def _load(plugin: str, text: bytes) -> None:
    """Executes the text as a module that pickle and typing find by its name, as `inspect` finds its lines."""
    if plugin in _texts:
        return
    name, module = _name(plugin), ModuleType(_module(plugin))
    if other := _of_this_name(plugin):
        raise UsageError(
            f"{_shown(plugin)} cannot be loaded, because {_shown(other)} is: start a new process, or rename"
            " one"
        )
    module.__file__ = name
    linecache.cache[name] = (len(text), None, text.decode(errors="replace").splitlines(True), name)
    sys.modules[module.__name__] = module
    try:
        exec(compile(text, name, "exec"), module.__dict__)
        _check_members(name, _members(module.__name__))
    except Exception as error:
        _forget(module.__name__)
        if isinstance(error, UsageError):
            raise
        raise UsageError(f"{name}, line {_line(error, name)}: {type(error).__name__}: {error}") from error
    _texts[plugin] = text


def _check_members(name: str, members: Sequence[type[Family]]) -> None:
    """Raises UsageError if a file has no config to choose, or one that cannot be made."""
    if not members:
        listed = ", ".join(sorted(family.__name__ for family in _families()))
        raise UsageError(f"{name} defines no config with a kind, derived from one of {listed}")
    for cls in members:
        if "__dataclass_fields__" not in cls.__dict__:
            raise UsageError(f"{name}: {cls.__name__} is no dataclass: @dataclass(frozen=True, kw_only=True)")
        if missing := ", ".join(sorted(getattr(cls, "__abstractmethods__", ()))):
            raise UsageError(f"{name}: {cls.__name__} has no {missing}")


def _forget(module: str) -> None:
    """Undoes what a module that fails has done, so that the mended file can be loaded."""
    del sys.modules[module]
    for member in _members(module):
        del member.kinds[member.kind]


def _line(error: Exception, name: str) -> int | None:
    """Returns the line of the file at which the error arose, or which called what raised it."""
    if isinstance(error, SyntaxError) and error.filename == name:
        return error.lineno
    return next(
        (f.lineno for f in reversed(traceback.extract_tb(error.__traceback__)) if f.filename == name), 1
    )


def _families() -> list[type[Family]]:
    return [family for family in Family.__subclasses__() if "kinds" in family.__dict__]


def _members(module: str) -> list[type[Family]]:
    """Returns the configs with a kind that a module defines."""
    return [cls for family in _families() for cls in family.kinds.values() if cls.__module__ == module]


def _parts(config: Any) -> Iterator[Any]:
    if isinstance(config, tuple):
        for part in config:
            yield from _parts(part)
    elif is_dataclass(config):
        yield config
        for field in fields(config):
            yield from _parts(getattr(config, field.name))


def _name(plugin: str) -> str:
    return plugin.rpartition("@")[0]


def _module(plugin: str) -> str:
    return f"moe_plugin_{Path(_name(plugin)).stem}"


def _of_this_name(plugin: str) -> str | None:
    """Returns the loaded plugin whose module has the same name."""
    return next((other for other in _texts if _module(other) == _module(plugin)), None)


def _shown(plugin: str) -> str:
    return f"{_name(plugin)} (SHA-256 {plugin.rpartition('@')[2][:12]}..)"

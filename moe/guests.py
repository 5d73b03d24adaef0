"""The guests: packages beside this one whose configs join the families, and which the core never names.

The `__init__` of a guest imports nothing. It has tables: `MEMBERS`, the modules whose import adds models and
tasks to their families, and what commands offer by name (`offered`). An installed package with the name of
a guest but lies elsewhere is none. Names of packages here are imported on first use (`attach`).
"""

import ast
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGES = ("wings", "papers")
_BESIDE = Path(__file__).resolve().parent.parent


@cache
def guests() -> tuple[ModuleType, ...]:
    """Returns the packages of `PACKAGES` that lie beside this one."""
    return tuple(import_module(name) for name in PACKAGES if _lies_beside(name))


def _lies_beside(name: str) -> bool:
    spec = find_spec(name)
    file = _BESIDE / name / "__init__.py"
    return bool(spec and spec.origin and file.is_file() and file.samefile(spec.origin))


def offered(name: str) -> dict[str, Any]:
    """Returns what the guests have as `name`, such as ``SWEEPS``, in one table."""
    return {key: value for guest in guests() for key, value in getattr(guest, name, {}).items()}


@cache
def join_families() -> None:
    """Imports the modules whose classes join families. Called where a name is unknown without them."""
    for guest in guests():
        for module in guest.MEMBERS:
            import_module(module)


def attach(package: str, file: str) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """Returns `__getattr__`, `__dir__` and `__all__` of a package, by the stub beside its `__init__`."""
    stub = ast.parse(Path(file).with_suffix(".pyi").read_text())
    imports = [node for node in stub.body if isinstance(node, ast.ImportFrom)]
    homes = {alias.name: f"{package}.{node.module}" for node in imports for alias in node.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(homes[name]), name)

    return get, lambda: sorted(homes), sorted(homes)

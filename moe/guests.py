"""The guests: packages beside this one whose configs join the families, and which the core never names.

The `__init__` of a guest imports nothing. It has tables: `MEMBERS`, the modules whose import adds models and
tasks to their families, and what commands offer by name (`offered`). An installed package with the name of
a guest but lies elsewhere is none.
"""

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

"""The papers, which are guests: found by name, imported nowhere. Without them the product is whole."""

import pkgutil
from importlib.util import find_spec
from typing import Any


def from_papers(name: str, default: Any) -> Any:
    """Returns what the papers have as ``:SWEEPS`` or ``.scales:SCALES``; `default` if there are no papers."""
    return pkgutil.resolve_name(f"papers{name}") if find_spec("papers") else default

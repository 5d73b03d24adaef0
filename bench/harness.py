"""What the commands of this folder share: options, and functions in processes of their own."""

import argparse
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "bench/results"
Record = dict[str, Any]


def options(doc: str | None, **defaults: Any) -> argparse.Namespace:
    """Parses an option for each default, of its type: False is a switch, a tuple takes several values."""
    parser = argparse.ArgumentParser(description=doc, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in defaults.items():
        how: dict[str, Any] = {"type": type(default)}
        if default is False:
            how = {"action": "store_true"}
        elif isinstance(default, tuple):
            how = {"type": type(default[0]) if default else str, "nargs": "*"}
        parser.add_argument(f"--{name.replace('_', '-')}", default=default, **how)
    return parser.parse_args()


def processes(count: int = 1, setup: Callable[..., object] | None = None, *given: Any) -> ProcessPoolExecutor:
    """Fresh processes, which share nothing with this one but its environment."""
    return ProcessPoolExecutor(count, get_context("spawn"), initializer=setup, initargs=given)

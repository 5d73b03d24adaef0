"""Options of the commands in this folder, tables in pages, and functions in processes of their own."""

import argparse
import os
import re
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context, set_start_method
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


def with_block(page: str, name: str, block: str) -> str:
    """Returns the page with the text of a block replaced."""
    return re.sub(rf"(<!-- {name} -->\n).*?(<!-- end -->)", rf"\g<1>\n{block}\n\n\2", page, flags=re.DOTALL)


def processes(count: int = 1, setup: Callable[..., object] | None = None, *given: Any) -> ProcessPoolExecutor:
    """Fresh processes, which share nothing with this one but its environment, less settings of malloc."""
    for name in [name for name in os.environ if "MALLOC" in name]:
        del os.environ[name]
    return ProcessPoolExecutor(count, get_context("spawn"), initializer=_begin, initargs=(setup, *given))


def _begin(setup: Callable[..., object] | None, *given: Any) -> None:
    set_start_method(None, force=True)  # workers of loaders start as the platform has it
    if setup:
        setup(*given)

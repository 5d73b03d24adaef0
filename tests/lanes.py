"""Cases of a parametrised test in different lanes, and which guests' tests there are."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest

from moe.guests import PACKAGES, guests


def mostly_slow(cases: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    """Marks every case as slow but the `fast` ones. A case of several arguments is a tuple."""
    return _marked(cases, fast, pytest.mark.slow)


def mostly_smoke(cases: Iterable[Any], fast: Collection[Any]) -> list[Any]:
    return _marked(cases, fast, pytest.mark.smoke)


def _marked(cases: Iterable[Any], fast: Collection[Any], mark: pytest.MarkDecorator) -> list[Any]:
    def marked(case: Any) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        return case if case in fast else pytest.param(*values, marks=mark)

    return [marked(case) for case in cases]


def absent_guests() -> set[str]:
    """Returns the packages of `moe.guests` that are not beside the core. Tests marked `guests` need all."""
    return {*PACKAGES} - {guest.__name__ for guest in guests()}

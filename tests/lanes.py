"""Cases of a parametrised test in different lanes."""

from collections.abc import Collection, Iterable
from typing import Any

import pytest


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

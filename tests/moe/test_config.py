"""Configs check their fields when they are made: what is refused, and what the message says."""

import pickle
from dataclasses import dataclass, replace
from typing import Annotated, Any, Literal

import pytest

from moe.config import Bound, Config, PositiveInt


@dataclass(frozen=True, kw_only=True)
class Inner(Config):
    kind: Literal["inner"] = "inner"


@dataclass(frozen=True, kw_only=True)
class Other(Config):
    kind: Literal["other"] = "other"


@dataclass(frozen=True, kw_only=True)
class Example(Config):
    count: PositiveInt | None = None
    rate: float = 0.5
    part: Annotated[float, Bound(">=", 0), Bound("<", 1)] = 0.0
    switch: bool = False
    text: str = ""
    size: int | Literal["auto"] = "auto"
    places: tuple[int, ...] | str = ()
    inner: Inner | Other = Inner()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"count": 0}, "count must be at least 1, got 0"),
        ({"count": 1.5}, "count must be an integer or None, got 1.5"),
        ({"count": True}, "count must be an integer or None, got True"),
        ({"rate": "1e-3"}, "rate must be a number, got '1e-3'"),
        ({"rate": True}, "rate must be a number, got True"),
        ({"rate": float("nan")}, "rate must be finite, got nan"),
        ({"rate": float("inf")}, "rate must be finite, got inf"),
        ({"part": -0.5}, "part must not be negative, got -0.5"),
        ({"part": 1}, "part must be less than 1, got 1"),
        ({"switch": 1}, "switch must be true or false, got 1"),
        ({"text": None}, "text must be a string, got None"),
        ({"size": "aut"}, "size must be an integer or 'auto', got 'aut'; did you mean 'auto'?"),
        ({"size": ["auto"]}, "size must be an integer or 'auto', got ['auto']"),
        ({"places": [1]}, "places must be a tuple of integers or a string, got [1]"),
        ({"places": (1, 2.5)}, "places must be a tuple of integers or a string, got (1, 2.5)"),
        ({"inner": "other"}, "inner must be Inner(..) or Other(..), got 'other'; did you mean Other(..)?"),
        ({"inner": Example}, f"inner must be Inner(..) or Other(..), got {Example}"),
    ],
)
def test_a_refusal_names_the_field_the_value_and_what_is_allowed(fields: Any, message: str) -> None:
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        Example(**fields)
    assert str(caught.value) == message


def test_an_int_becomes_a_float_and_nothing_else_changes() -> None:
    made = Example(rate=1, count=3, size=2, places=(0, 2), inner=Other())
    assert (type(made.rate), made.rate) == (float, 1.0)
    assert made == Example(rate=1.0, count=3, size=2, places=(0, 2), inner=Other())
    assert pickle.loads(pickle.dumps(made)) == made == replace(made)
    with pytest.raises(ValueError, match="rate must be finite"):
        replace(made, rate=float("nan"))

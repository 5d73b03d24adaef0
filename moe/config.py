"""The base of all configs: a frozen dataclass that checks its fields when it is made.

Every field is checked against its annotation, so a value that means nothing is refused in Python as on the
command line. Annotations may be numbers, bool, str, None, `Literal`, tuples, classes, unions of these, and
numbers with bounds: ``Annotated[int, Bound("<=", 16)]``. Configs among which one is chosen by its ``kind``
are a `Family`.
"""

import difflib
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from types import NoneType, UnionType
from typing import (
    TYPE_CHECKING,
    Annotated,
    Any,
    ClassVar,
    Literal,
    NamedTuple,
    Union,
    get_args,
    get_origin,
    get_type_hints,
)

_SIGNS = {
    ">=": (operator.ge, "at least"),
    ">": (operator.gt, "more than"),
    "<=": (operator.le, "at most"),
    "<": (operator.lt, "less than"),
}
_NOT_FINITE = (math.inf, -math.inf)
_KINDS = {int: "an integer", float: "a number", bool: "true or false", str: "a string", NoneType: "None"}
_MANY = {int: "integers", float: "numbers", bool: "booleans", str: "strings"}


@dataclass(frozen=True)
class Bound:
    """A bound of a number, e.g. ``Bound(">=", 1)``."""

    sign: Literal[">=", ">", "<=", "<"]
    limit: float

    def holds(self, value: float) -> bool:
        return _SIGNS[self.sign][0](value, self.limit)

    def __str__(self) -> str:
        if self.limit == 0 and self.sign in (">=", ">"):
            return "not be negative" if self.sign == ">=" else "be positive"
        return f"be {_SIGNS[self.sign][1]} {self.limit}"


PositiveInt = Annotated[int, Bound(">=", 1)]
NonNegativeInt = Annotated[int, Bound(">=", 0)]
PositiveFloat = Annotated[float, Bound(">", 0)]
NonNegativeFloat = Annotated[float, Bound(">=", 0)]
Fraction = Annotated[float, Bound(">=", 0), Bound("<=", 1)]
DropoutRate = Annotated[float, Bound(">=", 0), Bound("<", 1)]


class Config:
    """The base of frozen dataclasses whose fields are checked when they are made.

    An int in a field for floats becomes a float; floats are finite. A subclass with a `__post_init__` of its
    own, for what involves several fields, calls this one first.

    Raises ValueError naming the first field whose value is refused, what the field takes, and the value.
    """

    def __post_init__(self) -> None:
        for name, hint, accepts, widens in _checks(type(self)):
            value = getattr(self, name)
            if not accepts(value):
                known = _choices(hint)
                near = did_you_mean(value, known, known.get)
                raise ValueError(f"{name} must {_requirement(hint, value)}, got {value!r}{near}")
            if widens and type(value) is int:
                object.__setattr__(self, name, float(value))


class Family(Config):
    """The base of configs of one purpose, as routers or optimisers: ``kind`` says which.

    A subclass with a default opens a family, and its own subclasses with a ``kind`` join by being defined:

        class RouterConfig(Family, default="token_choice"): ...

        @dataclass(frozen=True, kw_only=True)
        class SoftConfig(RouterConfig):
            kind: Literal["soft"] = "soft"

    A field of the type `RouterConfig` holds any of them. In JSON, a config without a ``kind`` is the default.

    Raises TypeError for a second class of the same kind.
    """

    kinds: ClassVar[dict[str, "type[Family]"]]
    default_kind: ClassVar[str]

    if TYPE_CHECKING:
        kind: Any  # a Literal of one word, a field of each member

    def __init_subclass__(cls, *, default: str = "", **options: Any) -> None:
        super().__init_subclass__(**options)
        if default:
            cls.kinds, cls.default_kind = {}, default
        elif isinstance(kind := cls.__dict__.get("kind"), str):
            if kind in cls.kinds:
                raise TypeError(f"{cls.__qualname__} and {cls.kinds[kind].__qualname__} both are {kind!r}")
            cls.kinds[kind] = cls


def did_you_mean(value: object, known: Iterable[str], show: Callable[[str], object] = repr) -> str:
    """Returns ``; did you mean 'gap'?`` for a string that is almost one of those known, else nothing."""
    near = difflib.get_close_matches(value, known, n=1) if isinstance(value, str) else ()
    return f"; did you mean {show(near[0])}?" if near else ""


def members(hint: Any) -> tuple[Any, ...]:
    """Returns the types of a union, those of a family with its default first, or the type itself."""
    if get_origin(hint) in (Union, UnionType):
        return tuple(member for arg in get_args(hint) for member in members(arg))
    if isinstance(hint, type) and issubclass(hint, Family) and "kinds" in hint.__dict__:
        return tuple(sorted(hint.kinds.values(), key=lambda cls: cls.kind != hint.default_kind))
    return (hint,)


class _Check(NamedTuple):
    name: str
    hint: Any
    accepts: Callable[[Any], bool]
    # Whether an int becomes a float.
    widens: bool


@cache
def _checks(cls: Any) -> tuple[_Check, ...]:
    hints, found = get_type_hints(cls, include_extras=True), []
    for name in (field.name for field in fields(cls)):
        kinds = [_bare(member) for member in members(hints[name])]
        found.append(_Check(name, hints[name], _accepts(hints[name]), float in kinds and int not in kinds))
    return tuple(found)


def _bare(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _accepts(hint: Any) -> Callable[[Any], bool]:
    """Returns a test of whether a value is of the type, and within its bounds."""
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, UnionType):
        tests = [_accepts(arg) for arg in args]
        return lambda value: any(test(value) for test in tests)
    if origin is Annotated:
        fits, bounds = _accepts(args[0]), args[1:]
        return lambda value: fits(value) and all(bound.holds(value) for bound in bounds)
    if origin is Literal:
        # A list, because a value may have no hash; and 1 and True are equal.
        return lambda value: value in [*args] and type(value) in [type(arg) for arg in args]
    if origin is tuple:
        fits = _accepts(args[0])
        return lambda value: isinstance(value, tuple) and all(fits(part) for part in value)
    if hint is Any or getattr(hint, "_is_protocol", False):
        return lambda value: True
    if hint is int:
        return lambda value: isinstance(value, int) and not isinstance(value, bool)
    if hint is float:
        return lambda value: (
            isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
        )
    return lambda value: isinstance(value, origin or hint)


def _requirement(hint: Any, value: Any) -> str:
    """Says what a refused value had to be: ``be at least 1``, ``be a number or None``."""
    for member in members(hint):
        if _bare(member) is float and isinstance(value, float) and not math.isfinite(value):
            return "be finite"
        if get_origin(member) is Annotated and _accepts(_bare(member))(value):
            return str(next(bound for bound in member.__metadata__ if not bound.holds(value)))
        if get_origin(member) is tuple and isinstance(value, tuple):
            entry = get_args(member)[0]
            of_kind = _accepts(_bare(entry))
            wrong = [part for part in value if not _accepts(entry)(part)]
            out = next((part for part in wrong if of_kind(part) or part in _NOT_FINITE or part != part), None)
            if out is not None:
                return f"be {_words(member)[0]}, and {out!r} must {_requirement(entry, out)}"
    words = [word for member in members(hint) for word in _words(_bare(member))]
    return "be " + " or ".join([", ".join(words[:-1]), words[-1]] if len(words) > 1 else words)


def _words(hint: Any) -> list[str]:
    if get_origin(hint) is Literal:
        return [repr(arg) for arg in get_args(hint)]
    if get_origin(hint) is tuple:
        entry = _bare(get_args(hint)[0])
        return [f"a tuple of {_MANY.get(entry) or f'{entry.__name__}(..)'}"]
    return [_KINDS.get(hint) or f"{getattr(hint, '__name__', hint)}(..)"]


def _choices(hint: Any) -> dict[str, str]:
    """Returns the words that a field takes, and the kinds of its configs: word -> what to write for it."""
    found = {}
    for member in members(hint):
        if get_origin(member) is Literal:
            found |= {arg: repr(arg) for arg in get_args(member) if isinstance(arg, str)}
        elif is_dataclass(member) and (kind := get_type_hints(member).get("kind")):
            found |= {arg: f"{getattr(member, '__name__', member)}(..)" for arg in get_args(kind)}
    return found

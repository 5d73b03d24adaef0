"""Answers to the questions of a space: kept as JSON beside an arm, and given again to the space."""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)


class Suggest(Protocol):
    """The part of `optuna.Trial` that a space may use. `name` is best the dotted field of the value."""

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any: ...
    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int: ...
    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float: ...


Space = Callable[[Suggest], Mapping[str, Any]]  # -> dotted changes of the base


class OutsideError(Exception):
    """A space does not ask for an answer, or does not offer it."""


def as_json(answers: Mapping[str, Any]) -> dict[str, Any]:
    """Returns answers as JSON keeps them: lists in place of tuples, and the text of other objects."""
    return json.loads(_text(answers))


def ask_again(
    space: Space, answers: Mapping[str, Any], fields: Mapping[str, Any] | None = None
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the answers in the space's own terms, and the changes that it makes of them.

    Args:
        answers: by the names of questions, as `as_json` returns them.
        fields: the flat config of a run, in which the answers to other questions are looked up.

    Raises:
        OutsideError: for a question without an answer, and for an answer that the space does not offer.
    """
    given = _Given(answers=answers, fields=fields or {})
    changes = dict(space(given))
    return given.params, changes


@dataclass(frozen=True, kw_only=True)
class _Given:
    """Answers a space, and keeps the answers in its terms."""

    answers: Mapping[str, Any]
    fields: Mapping[str, Any]
    params: dict[str, Any] = field(default_factory=dict)

    def suggest_categorical(self, name: str, choices: Sequence[Any]) -> Any:
        return self._answer(name, CategoricalDistribution(choices))

    def suggest_int(self, name: str, low: int, high: int, *, step: int = 1, log: bool = False) -> int:
        return self._answer(name, IntDistribution(low, high, log=log, step=step))

    def suggest_float(
        self, name: str, low: float, high: float, *, step: float | None = None, log: bool = False
    ) -> float:
        return self._answer(name, FloatDistribution(low, high, log=log, step=step))

    def _answer(self, name: str, distribution: BaseDistribution) -> Any:
        value = self.answers[name] if name in self.answers else self._of_run(name)
        # The value is checked at once, since the space may fail on a value that it does not offer.
        if isinstance(distribution, CategoricalDistribution):
            found = [choice for choice in distribution.choices if _same(choice, value)]
        else:
            number = isinstance(value, int | float) and not isinstance(value, bool)
            found = [value] if number and distribution._contains(value) else []
        if not found:
            raise OutsideError(f"{name}={value!r} is not in {distribution}")
        self.params[name] = found[0]
        return found[0]

    def _of_run(self, name: str) -> Any:
        # A field of a group that is None counts as None.
        absent = [group for group, value in self.fields.items() if value is None]
        if name not in self.fields and not name.startswith(tuple(f"{group}." for group in absent)):
            raise OutsideError(f"the run has no {name}")
        return self.fields.get(name)


def _same(choice: Any, value: Any) -> bool:
    """Returns whether a choice is a value, or what JSON makes of it."""
    return _text(choice) == _text(value) or (bool not in (type(choice), type(value)) and choice == value)


def _text(value: Any) -> str:
    return json.dumps(value, default=repr)

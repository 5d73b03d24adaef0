"""The fields of samples beside the image and its labels: bytes, whose place the index holds, or a number.

A data set's manifest names its fields. Which fields a run reads, and as what, its task says.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from orchestrator.errors import UsageError

Stored = Literal["bytes", "number"]


class Field(Protocol):
    """A field as a run reads it."""

    @property
    def stored(self) -> Stored: ...

    def empty(self, count: int) -> NDArray[Any]:
        """Returns the rows of `count` slots that no sample fills."""
        ...

    def decode(self, value: Any) -> Any:
        """Returns a slot's row, of the bytes or of the number. Raises `images.BadImage` for bytes that cannot
        be decoded: another sample then takes the slot.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class NumberField:
    """A number of each sample, (B,) float64."""

    stored: Stored = "number"

    def empty(self, count: int) -> NDArray[np.float64]:
        return np.zeros(count)

    def decode(self, value: float) -> float:
        return value


@dataclass(frozen=True, kw_only=True)
class BytesField:
    """The first `length` bytes of each sample, (B, length) uint8, 0 behind the end."""

    length: int
    stored: Stored = "bytes"

    def empty(self, count: int) -> NDArray[np.uint8]:
        return np.zeros((count, self.length), np.uint8)

    def decode(self, value: bytes) -> NDArray[np.uint8]:
        row = np.zeros(self.length, np.uint8)
        row[: len(value)] = np.frombuffer(value[: self.length], np.uint8)
        return row


def stored_as(value: bytes | float) -> Stored:
    return "bytes" if isinstance(value, bytes) else "number"


def check_fields(wanted: Mapping[str, Field], there: Mapping[str, Stored], path: str) -> None:
    """Raises UsageError if a data set lacks a field that is to be read."""
    for name, field in wanted.items():
        if there.get(name) != field.stored:
            listed = ", ".join(["image", "label", *(f"{name} ({stored})" for name, stored in there.items())])
            raise UsageError(
                f"{path} has no field {name!r} of {field.stored}, but {listed}: pack it with that field"
            )

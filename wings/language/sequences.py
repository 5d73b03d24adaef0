"""The field of decoders: sequences of bytes of equal length, of samples without images (`packing.text`)."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from orchestrator import storage
from orchestrator.data.fields import Stored, check_fields
from orchestrator.data.index import record_type
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError

SEQUENCE = "sequence"  # the field
LENGTH = 128  # bytes that a model reads of a sequence


@dataclass(frozen=True, kw_only=True)
class SequenceField:
    """All bytes of each sample, which are `length`, (B, length) uint8; zeros in a slot without a sample."""

    length: int
    stored: Stored = "bytes"

    def empty(self, count: int) -> NDArray[np.uint8]:
        return np.zeros((count, self.length), np.uint8)

    def decode(self, value: bytes) -> NDArray[np.uint8]:
        if len(value) != self.length:
            raise UsageError(
                f"a sequence of {len(value)} bytes, and the model reads {self.length - 1} and the one after:"
                f" set model.length={len(value) - 1}, or pack the text again"
            )
        return np.frombuffer(value, np.uint8)


def length_of(data_set: str) -> int:
    """Returns the bytes of the first sequence of a data set. Raises UsageError if it has none."""
    fields = open_manifest(data_set).fields
    check_fields({SEQUENCE: SequenceField(length=0)}, fields, data_set)
    kind = record_type(open_manifest(data_set).labels, fields)
    first = storage.read_range(storage.join(data_set, "train.index"), 0, kind.itemsize)
    return int(np.frombuffer(first.content, kind)[f"{SEQUENCE}.size"][0])

"""Parts of tensors as they lie in a file: numbers in row-major order, one part after the other."""

from collections.abc import Sequence
from typing import NamedTuple

import pyarrow as pa
import torch
from torch import Tensor
from torch.distributed.checkpoint.planner import ReadItem


class Place(NamedTuple):
    """Where a part of a tensor lies: `shape` of the part, `file`, first byte, bytes."""

    shape: tuple[int, ...]
    file: str
    begin: int
    bytes: int


class Window:
    """A file, read in one request where small parts lie side by side."""

    AHEAD = 1 << 20  # bytes

    def __init__(self, file: pa.NativeFile) -> None:
        self.file, self.begin, self.content = file, 0, b""

    def read(self, begin: int, length: int) -> memoryview:
        """Raises OSError if the file ends before."""
        if not self.begin <= begin <= begin + length <= self.begin + len(self.content):
            self.begin, self.content = begin, self.file.read_at(max(length, self.AHEAD), begin)
        found = memoryview(self.content)[begin - self.begin :][:length]
        if len(found) < length:
            raise OSError(f"{len(found)} bytes at {begin} where {length} should be")
        return found


def part_of(window: Window, place: Place, dtype: torch.dtype, item: ReadItem) -> Tensor:
    """Of what lies at `place`, what `item` asks for; rows that it does not ask for are not read."""
    shape, begin, length = list(place.shape), place.begin, place.bytes
    offsets = list(item.storage_offsets)
    if length and shape:
        row = length // shape[0]
        begin, length = begin + offsets[0] * row, item.lengths[0] * row
        offsets[0], shape[0] = 0, item.lengths[0]
    part = _tensor_of(window.read(begin, length), dtype, shape)
    for dim, (start, count) in enumerate(zip(offsets, item.lengths, strict=True)):
        part = part.narrow(dim, start, count)
    return part


def _tensor_of(content: memoryview, dtype: torch.dtype, shape: Sequence[int]) -> Tensor:
    if not content:  # `frombuffer` refuses no bytes at all
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(bytearray(content), dtype=dtype).view(shape)

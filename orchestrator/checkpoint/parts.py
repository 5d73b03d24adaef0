"""Parts of tensors as they lie in a file: numbers in row-major order, one part after the other."""

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

    def fill(self, target: memoryview, begin: int) -> None:
        """With the bytes from `begin` on. Raises OSError if the file ends before."""
        wanted, done = len(target), 0
        if wanted > self.AHEAD:
            self.file.seek(begin)
            while done < wanted and (count := self.file.readinto(target[done:])):
                done += count
        else:
            if not self.begin <= begin <= begin + wanted <= self.begin + len(self.content):
                self.begin, self.content = begin, self.file.read_at(self.AHEAD, begin)
            found = self.content[begin - self.begin :][:wanted]
            done = len(found)
            target[:done] = found
        if done < wanted:
            raise OSError(f"the file ends {wanted - done} bytes early")


def part_of(window: Window, place: Place, dtype: torch.dtype, item: ReadItem) -> Tensor:
    """Of what lies at `place`, what `item` asks for; rows that it does not ask for are not read."""
    shape, offsets, begin = list(place.shape), list(item.storage_offsets), place.begin
    if place.bytes and shape:
        begin += offsets[0] * (place.bytes // shape[0])
        offsets[0], shape[0] = 0, item.lengths[0]
    part = torch.empty(shape, dtype=dtype)
    if part.numel():
        window.fill(bytes_of(part), begin)
    for dim, (start, count) in enumerate(zip(offsets, item.lengths, strict=True)):
        part = part.narrow(dim, start, count)
    return part


def bytes_of(tensor: Tensor) -> memoryview:
    """Of a contiguous tensor in host memory; they share it."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data

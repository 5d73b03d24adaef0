"""How the steps that several workers read together are cut into numbered blocks."""

from typing import NamedTuple

from orchestrator.config import RunConfig
from orchestrator.data.stream import Split

# Decoded images per block: a small run gets its first batch early, a large run's feeds pass on fewer blocks.
BLOCK_BYTES, LARGE_BLOCK_BYTES = 32 << 20, 128 << 20
BLOCK_IMAGES, LARGE_BLOCK_IMAGES = 512, 1024
LARGE_WORKERS = 8

StepPart = tuple[int, range]  # a step, and slots of a worker's share of it


class ReadPlan(NamedTuple):
    """The steps of a split that the workers of a feed read together: `ranks` of all `workers`."""

    run: RunConfig
    split: Split
    start: int
    stop: int
    workers: int
    ranks: range

    def block_count(self) -> int:
        """Returns the number of blocks of all workers of the feed."""
        return self.chunk_count() * len(self.ranks)

    def block(self, number: int) -> tuple[int, list[StepPart]]:
        """Returns the rank that a block is for, and what it holds: chunk 0 of all workers, chunk 1 .."""
        chunk, worker = divmod(number, len(self.ranks))
        return self.ranks[worker], self.chunk(chunk)

    def chunk_count(self) -> int:
        """Returns the number of blocks that one worker's share of the steps is cut into."""
        parts, steps_each = self._cut()
        return -(-(self.stop - self.start) // steps_each) * len(parts)

    def chunk(self, number: int) -> list[StepPart]:
        """Returns what one block holds: several steps of a worker's share, or a part of one step."""
        parts, steps_each = self._cut()
        group, part = divmod(number, len(parts))
        first = self.start + group * steps_each
        return [(step, parts[part]) for step in range(first, min(first + steps_each, self.stop))]

    def _cut(self) -> tuple[list[range], int]:
        """Returns the parts of a worker's share of a step, and the steps per block: 1 if there are several
        parts.

        Parts have even sizes, because images are mixed in pairs.
        """
        most_bytes, most = BLOCK_BYTES, BLOCK_IMAGES
        if self.workers >= LARGE_WORKERS:
            most_bytes, most = LARGE_BLOCK_BYTES, LARGE_BLOCK_IMAGES
        images = max(2, min(most, most_bytes // self.run.pixels()) // 2 * 2)
        share = self.run.data.batch_size // self.workers
        count = -(-share // images)
        size = -(-share // count)
        size += size % 2
        parts = [range(first, min(first + size, share)) for first in range(0, share, size)]
        return parts, max(1, images // share)

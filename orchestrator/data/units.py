"""How much one task decodes: what a worker's share of some steps is cut into."""

from dataclasses import dataclass

from orchestrator.config import RunConfig

BLOCK_BYTES = 32 << 20  # of decoded images per task: it streams, and pays the task's cost
BLOCK_IMAGES = 512  # at most, of small ones

Part = tuple[int, range]  # a step, and slots of a worker's share of it


@dataclass(frozen=True, kw_only=True)
class Units:
    """How a worker's share of some steps is cut into tasks: several steps each, or a part of one.

    Attributes:
    slots: of a part; even, for images are mixed in pairs.
    steps_each: 1 where a step has several parts.
    """

    steps: range
    share: int
    slots: int
    steps_each: int

    def __len__(self) -> int:
        return -(-len(self.steps) // self.steps_each) * len(self._parts())

    def __getitem__(self, number: int) -> list[Part]:
        group, part = divmod(number, len(self._parts()))
        some = self.steps[group * self.steps_each : (group + 1) * self.steps_each]
        return [(step, self._parts()[part]) for step in some]

    def _parts(self) -> list[range]:
        return [
            range(first, min(first + self.slots, self.share)) for first in range(0, self.share, self.slots)
        ]


def cut(run: RunConfig, steps: range, *, workers: int) -> Units:
    images = min(BLOCK_IMAGES, BLOCK_BYTES // (3 * run.model.image_size**2))
    share = run.data.batch_size // workers
    return Units(
        steps=steps,
        share=share,
        slots=min(share, max(2, images // 2 * 2)),
        steps_each=max(1, images // share),
    )

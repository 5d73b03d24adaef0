"""Units of reading cover every slot of a worker's share once, in order."""

import itertools

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.units import cut


@pytest.mark.parametrize(("batch_size", "image_size"), [(48, 16), (48, 512), (6, 3000), (2048, 8), (30, 224)])
def test_units_cover_every_slot_in_order(batch_size: int, image_size: int) -> None:
    run = override(RunConfig(), {"data.batch_size": batch_size, "model.image_size": image_size})
    for workers, steps in itertools.product((1, 2, 3), (range(0), range(5, 6), range(3, 50))):
        units = cut(run, steps, workers=workers)
        slots = [(step, slot) for i in range(len(units)) for step, part in units[i] for slot in part]
        assert slots == [(step, slot) for step in steps for slot in range(batch_size // workers)]
        assert all(part.start % 2 == 0 for i in range(len(units)) for _, part in units[i])

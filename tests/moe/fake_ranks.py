"""One of many ranks, alone in its process: tensors have the sizes they would have, and nothing is sent."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.testing._internal.distributed.fake_pg import FakeStore


@contextmanager
def fake_ranks(count: int) -> Iterator[None]:
    """This process is the first of `count` ranks."""
    dist.init_process_group("fake", rank=0, world_size=count, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        _clear_sharding_prop_cache()  # it remembers the groups of this mesh, and would use them for the next

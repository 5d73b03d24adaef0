"""Reading in the process that trains: threads decode ahead, one for each of its cores."""

from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

from orchestrator.data.stream import Batch, Piece, Stream, to_batch
from orchestrator.threads import CORES

SLOTS = 16  # of a thread at a time; even, for images are mixed in pairs
AHEAD_BYTES = 64 << 20  # of decoded images, or two steps


def in_process(stream: Stream, steps: range) -> Iterator[Batch]:
    """This worker's batches of `steps`."""
    share = stream.share()
    parts = [range(first, min(first + SLOTS, share)) for first in range(0, share, SLOTS)]
    ahead = max(2, min(32, AHEAD_BYTES // (share * 3 * stream.transform.size**2)))
    waiting: deque[list[Future[Piece]]] = deque()
    pool = ThreadPoolExecutor(CORES, thread_name_prefix="decode")
    try:
        for step in steps:
            waiting.append([pool.submit(stream.read, step, part) for part in parts])
            if len(waiting) > ahead:
                yield to_batch([part.result() for part in waiting.popleft()])
        while waiting:
            yield to_batch([part.result() for part in waiting.popleft()])
    finally:
        pool.shutdown(wait=False, cancel_futures=True)

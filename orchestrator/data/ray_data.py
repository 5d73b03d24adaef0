"""Reading by Ray Data: one execution for all workers of a run decodes on any free CPU of the cluster.

An actor, the feed, runs the execution and hands out references: images go from the task that decoded them to
the worker that trains on them, and not through it. docs/data.md has the figures of other designs.
"""

import asyncio
import json
import logging
import threading
from collections import defaultdict, deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from itertools import count, islice
from typing import Any, NamedTuple

import numpy as np
import ray
import ray.data
from ray.data.block import BlockAccessor
from ray.exceptions import RayTaskError

from orchestrator.config import RunConfig
from orchestrator.data.stream import Bad, Batch, Piece, Reader, Split, Stream, open_stream, to_batch
from orchestrator.data.units import Part, Units, cut

AHEAD = 2  # blocks that a worker asks for before it needs them
READY_BLOCKS = 3  # per worker, decoded and not yet fetched
TASKS_PER_CPU = 8  # of one execution, and so what can be decoded before it is asked for


class Flow(NamedTuple):
    """What all workers of a run read together."""

    run: RunConfig
    split: Split
    start: int
    stop: int
    workers: int

    def units(self) -> Units:
        return cut(self.run, range(self.start, self.stop), workers=self.workers)


def by_ray_data(feed: Any) -> Reader:
    """Reads through `feed`, a `Feed` that all workers of the run share."""

    def read(stream: Stream, steps: range) -> Iterator[Batch]:
        flow = Flow(stream.run, stream.split, steps.start, steps.stop, stream.workers)
        number, units = _get(feed.join.remote(flow, stream.rank)), flow.units()
        tasks = iter(range(stream.rank, len(units) * stream.workers, stream.workers))
        asked = deque(feed.block.remote(number, task) for task in islice(tasks, AHEAD))
        pieces: list[Piece] = []
        for unit in range(len(units)):
            (block,) = _get(asked.popleft())
            asked.extend(feed.block.remote(number, task) for task in islice(tasks, 1))
            for (_, slots), piece in _pieces(units[unit], _get(block)):
                pieces.append(piece)
                if slots.stop == stream.share():
                    yield to_batch(pieces)
                    pieces = []

    return read


@ray.remote(num_cpus=0)
class Feed:
    """Runs what the workers of one run read, one flow of each split at a time.

    A flow begins when all workers have joined it, and ends the one before it: workers that died and came back
    join anew.
    """

    def __init__(self, tasks_each: int | None = None) -> None:
        """`tasks_each`: of an execution."""
        self._tasks_each = tasks_each or TASKS_PER_CPU * _cpus()
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # it explains each execution at length
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        # imports and Ray Data's first execution take seconds: they are made while the workers start
        self._imports = [_import_all.remote() for _ in range(_cpus())]
        threading.Thread(target=_first_execution, daemon=True).start()
        self._numbers = count()
        self._joined: dict[Flow, tuple[set[int], asyncio.Event, int]] = {}
        self._running: dict[int, _Running] = {}

    async def join(self, flow: Flow, rank: int) -> int:
        """The flow's number, when all workers are there."""
        ranks, complete, number = self._joined.setdefault(flow, (set(), asyncio.Event(), next(self._numbers)))
        ranks.add(rank)
        if len(ranks) == flow.workers:
            del self._joined[flow]
            for other in [n for n, one in self._running.items() if one.flow.split == flow.split]:
                self._running.pop(other).close()
            self._running[number] = _Running(flow, self._tasks_each, asyncio.get_running_loop())
            complete.set()
        await complete.wait()
        return number

    async def block(self, number: int, task: int) -> list[Any]:
        """Reference to what a task of the flow decoded. Raises UsageError for data that is not as packed."""
        return await self._running[number].block(task)


@ray.remote(num_cpus=0)
def _import_all() -> None:
    import_module("orchestrator.data.stream")


def _first_execution() -> None:
    ray.data.range(1).map_batches(lambda ids: ids, num_cpus=0.01).materialize()


class _Running:
    """An execution whose blocks wait for their workers, a few at a time."""

    def __init__(self, flow: Flow, tasks_each: int, loop: asyncio.AbstractEventLoop) -> None:
        self.flow = flow
        self._tasks_each = tasks_each
        self._loop = loop
        self._blocks: defaultdict[int, asyncio.Future[Any]] = defaultdict(loop.create_future)
        self._failed: Exception | None = None
        self._room = threading.Semaphore(READY_BLOCKS * flow.workers)
        self._closed = False
        threading.Thread(target=self._run, daemon=True).start()

    def close(self) -> None:
        self._closed = True
        self._room.release()

    async def block(self, task: int) -> list[Any]:
        if self._failed and task not in self._blocks:
            raise self._failed
        block = await self._blocks[task]
        del self._blocks[task]
        self._room.release()
        return [block]

    def _run(self) -> None:
        try:
            for task, block in enumerate(_blocks(self.flow, self._tasks_each)):
                self._room.acquire()
                if self._closed:
                    return
                self._loop.call_soon_threadsafe(self._arrived, task, block)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, _cause(error))

    def _arrived(self, task: int, block: Any) -> None:
        self._blocks[task].set_result(block)

    def _fail(self, error: Exception) -> None:
        self._failed = error
        for waiting in self._blocks.values():
            if not waiting.done():
                waiting.set_exception(error)


def _blocks(flow: Flow, size: int) -> Iterator[Any]:
    """References to blocks: unit 0 of all workers, unit 1 of all workers ..

    Executions follow each other; the next one starts while the last quarter of the one before it is decoded.
    """
    tasks = len(flow.units()) * flow.workers
    with ThreadPoolExecutor(1) as starter:
        following = starter.submit(_execute, flow, range(min(size, tasks)))
        for first in range(0, tasks, size):
            execution = following.result()
            for done, bundle in enumerate(execution, start=first + 1):
                if done == min(first + size * 3 // 4, tasks) and first + size < tasks:
                    following = starter.submit(
                        _execute, flow, range(first + size, min(first + 2 * size, tasks))
                    )
                for entry in bundle.blocks:
                    yield entry.ref


def _execute(flow: Flow, tasks: range) -> Iterator[Any]:
    parts = flow.units()

    def decode(ids: Any) -> Any:
        unit, rank = divmod(tasks[int(ids["id"][0])], flow.workers)
        stream = open_stream(flow.run, flow.split, rank, flow.workers)
        return _columns([stream.read(step, slots) for step, slots in parts[unit]])

    dataset = ray.data.range(len(tasks), override_num_blocks=len(tasks)).map_batches(decode, batch_size=None)
    dataset.context.raise_original_map_exception = True
    dataset.context.execution_options.preserve_order = True
    # its budgets wait for a coordinator that looks every 20 s, and until then run one task at a time
    dataset.context.set_config("backpressure_policies.enabled", [])
    return dataset.iter_internal_ref_bundles()


def _cpus() -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 0)))


def _columns(pieces: list[Piece]) -> dict[str, Any]:
    """A row per slot; what is bad in a piece is in its first."""
    columns = {name: np.concatenate([getattr(p, name) for p in pieces]) for name in Piece._fields[:-1]}
    bad = [[json.dumps(piece.bad)] + [""] * (len(piece.label) - 1) for piece in pieces]
    return columns | {"bad": [line for lines in bad for line in lines]}


def _pieces(unit: list[Part], block: Any) -> Iterator[tuple[Part, Piece]]:
    columns = BlockAccessor.for_block(block).to_numpy([*Piece._fields])
    assert isinstance(columns, dict)
    first = 0
    for part in unit:
        rows = slice(first, first + len(part[1]))
        first = rows.stop
        *arrays, bad = (columns[name][rows] for name in Piece._fields)
        yield part, Piece._make([*arrays, [Bad(*one) for one in json.loads(str(bad[0]))]])


def _get(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise _cause(error) from None


def _cause(error: Exception) -> Exception:
    """What a task raised, without what Ray wraps it in."""
    return error.cause if isinstance(error, RayTaskError) else error

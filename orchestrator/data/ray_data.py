"""Loading by Ray Data: one execution for all workers of a run decodes on any free CPU of the cluster.

An actor, the batch server, runs the execution and hands out references to blocks: images go from the task
that decoded them to the worker that trains on them, and not through the actor. docs/data.md has measurements
of other designs.
"""

import asyncio
import json
import logging
import pickle
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
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
from orchestrator.data.batch import Batch, DecodeError, PartialBatch, Traffic, join
from orchestrator.data.stream import Reader, Split, Stream, open_stream

CHUNK_BYTES = 32 << 20  # decoded images per task: small enough to stream, large enough to pay for the task
CHUNK_IMAGES = 512  # the most images per task
BLOCKS_AHEAD = 2  # blocks that a worker asks for before it needs them
READY_BLOCKS = 3  # blocks per worker that are decoded and not yet fetched
TASKS_PER_CPU = 8  # tasks of one execution, which bound what is decoded before it is asked for

ARRAYS = PartialBatch._fields[:-2]
Part = tuple[int, range]  # a step, and slots of a worker's share of it


class ReadPlan(NamedTuple):
    """The steps of a split that all workers of a run read together."""

    run: RunConfig
    split: Split
    start: int
    stop: int
    workers: int

    def chunk_count(self) -> int:
        """Returns the number of tasks that one worker's share of the steps is cut into."""
        parts, steps_each = self._cut()
        return -(-(self.stop - self.start) // steps_each) * len(parts)

    def chunk(self, number: int) -> list[Part]:
        """Returns what one task decodes: several steps of a worker's share, or a part of one step."""
        parts, steps_each = self._cut()
        group, part = divmod(number, len(parts))
        first = self.start + group * steps_each
        return [(step, parts[part]) for step in range(first, min(first + steps_each, self.stop))]

    def _cut(self) -> tuple[list[range], int]:
        """Returns the parts of a worker's share of a step, and the steps per chunk: 1 if there are several
        parts.

        Parts have even sizes, because images are mixed in pairs.
        """
        images = min(CHUNK_IMAGES, CHUNK_BYTES // (3 * self.run.model.image_size**2))
        share = self.run.data.batch_size // self.workers
        size = min(share, max(2, images // 2 * 2))
        parts = [range(first, min(first + size, share)) for first in range(0, share, size)]
        return parts, max(1, images // share)


def by_ray_data(server: Any) -> Reader:
    """Returns a reader of batches from `server`, a `BatchServer` that all workers of a run share."""

    def read(stream: Stream, steps: range) -> Iterator[Batch]:
        plan = ReadPlan(stream.run, stream.split, steps.start, steps.stop, stream.workers)
        number = _get(server.join.remote(plan, stream.rank))
        tasks = iter(range(stream.rank, plan.chunk_count() * stream.workers, stream.workers))
        asked = deque(server.block.remote(number, task) for task in islice(tasks, BLOCKS_AHEAD))
        parts: list[PartialBatch] = []
        for chunk in range(plan.chunk_count()):
            (block,) = _get(asked.popleft())
            asked.extend(server.block.remote(number, task) for task in islice(tasks, 1))
            for slots, part in _unpacked(plan.chunk(chunk), _get(block)):
                parts.append(part)
                if slots.stop == stream.share():
                    yield join(parts)
                    parts = []

    return read


@ray.remote(num_cpus=0)
class BatchServer:
    """Executes the read plans of one run, one plan of each split at a time.

    A plan begins when all workers have joined it, and ends the plan before it: workers that were restarted
    join again.
    """

    def __init__(self, tasks_each: int | None = None) -> None:
        """`tasks_each`: tasks per execution of Ray Data."""
        self._tasks_each = tasks_each or TASKS_PER_CPU * _cpus()
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # Ray Data logs many lines per execution
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        # Imports and Ray Data's first execution take seconds; they run while the workers start.
        self._imports = [_import_all.remote() for _ in range(_cpus())]
        threading.Thread(target=_first_execution, daemon=True).start()
        self._numbers = count()
        self._joined: dict[ReadPlan, tuple[set[int], asyncio.Event, int]] = {}
        self._running: dict[int, _Execution] = {}

    async def join(self, plan: ReadPlan, rank: int) -> int:
        """Returns the number of the plan's execution, once all workers have joined."""
        ranks, complete, number = self._joined.setdefault(plan, (set(), asyncio.Event(), next(self._numbers)))
        ranks.add(rank)
        if len(ranks) == plan.workers:
            del self._joined[plan]
            for other in [n for n, running in self._running.items() if running.plan.split == plan.split]:
                self._running.pop(other).close()
            self._running[number] = _Execution(plan, self._tasks_each, asyncio.get_running_loop())
            complete.set()
        await complete.wait()
        return number

    async def block(self, number: int, task: int) -> list[Any]:
        """Returns a reference to the images of a task. Raises UsageError for shards that have changed."""
        return await self._running[number].block(task)


@ray.remote(num_cpus=0)
def _import_all() -> None:
    import_module("orchestrator.data.stream")


def _first_execution() -> None:
    ray.data.range(1).map_batches(lambda ids: ids, num_cpus=0.01).materialize()


class _Execution:
    """A plan in execution. A few decoded blocks at a time wait for their workers."""

    def __init__(self, plan: ReadPlan, tasks_each: int, loop: asyncio.AbstractEventLoop) -> None:
        self.plan = plan
        self._tasks_each = tasks_each
        self._loop = loop
        self._blocks: defaultdict[int, asyncio.Future[Any]] = defaultdict(loop.create_future)
        self._failed: Exception | None = None
        self._room = threading.Semaphore(READY_BLOCKS * plan.workers)
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
            for task, block in enumerate(_blocks(self.plan, self._tasks_each)):
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


def _blocks(plan: ReadPlan, size: int) -> Iterator[Any]:
    """Yields references to blocks: chunk 0 of all workers, chunk 1 of all workers, ..

    Each execution runs `size` tasks. The next execution starts while the last quarter of the one before it is
    decoded.
    """
    tasks = plan.chunk_count() * plan.workers
    with ThreadPoolExecutor(1) as starter:
        following = starter.submit(_execute, plan, range(min(size, tasks)))
        for first in range(0, tasks, size):
            execution = following.result()
            for done, bundle in enumerate(execution, start=first + 1):
                if done == min(first + size * 3 // 4, tasks) and first + size < tasks:
                    following = starter.submit(
                        _execute, plan, range(first + size, min(first + 2 * size, tasks))
                    )
                for entry in bundle.blocks:
                    yield entry.ref


def _execute(plan: ReadPlan, tasks: range) -> Iterator[Any]:
    def decode(ids: Any) -> Any:
        chunk, rank = divmod(tasks[int(ids["id"][0])], plan.workers)
        stream = open_stream(plan.run, plan.split, rank, plan.workers)
        fetched = [stream.fetch(step, slots) for step, slots in plan.chunk(chunk)]
        return _packed([stream.decode(part) for part in fetched])

    dataset = ray.data.range(len(tasks), override_num_blocks=len(tasks)).map_batches(decode, batch_size=None)
    dataset.context.raise_original_map_exception = True
    dataset.context.execution_options.preserve_order = True
    # Ray Data's budgets wait for a coordinator that runs every 20 s; until then one task runs at a time.
    dataset.context.set_config("backpressure_policies.enabled", [])
    return dataset.iter_internal_ref_bundles()


def map_tasks(work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
    """Yields the result of `work` for each task, on any free CPU of the cluster, in any order."""

    def run(row: dict[str, Any]) -> dict[str, Any]:
        return {"result": pickle.dumps(work(pickle.loads(row["task"])))}

    rows = [{"task": pickle.dumps(task)} for task in tasks]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map(run)
    dataset.context.raise_original_map_exception = True
    dataset.context.enable_progress_bars = False
    logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # Ray Data logs many lines per execution
    try:
        for row in dataset.iter_rows():
            yield pickle.loads(row["result"])
    except RayTaskError as error:
        raise _cause(error) from None


def _cpus() -> int:
    return max(1, int(ray.cluster_resources().get("CPU", 0)))


def _packed(parts: list[PartialBatch]) -> dict[str, Any]:
    """Returns a block with a row per slot; the first row of each part holds its decode errors and traffic."""
    columns = {name: np.concatenate([getattr(p, name) for p in parts]) for name in ARRAYS}
    notes = [[json.dumps(part[len(ARRAYS) :])] + [""] * (len(part.label) - 1) for part in parts]
    return columns | {"notes": [line for lines in notes for line in lines]}


def _unpacked(chunk: list[Part], block: Any) -> Iterator[tuple[range, PartialBatch]]:
    """Yields the parts of a block: the inverse of `_packed`."""
    columns = BlockAccessor.for_block(block).to_numpy([*ARRAYS, "notes"])
    assert isinstance(columns, dict)
    first = 0
    for _, slots in chunk:
        rows = slice(first, first + len(slots))
        first = rows.stop
        bad, traffic = json.loads(str(columns["notes"][rows][0]))
        arrays = [columns[name][rows] for name in ARRAYS]
        errors = [DecodeError(*error) for error in bad]
        yield slots, PartialBatch._make([*arrays, errors, Traffic(*traffic)])


def _get(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise _cause(error) from None


def _cause(error: Exception) -> Exception:
    """Returns the exception that a task raised, without Ray's wrapper."""
    return error.cause if isinstance(error, RayTaskError) else error

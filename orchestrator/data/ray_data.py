"""Loading by Ray Data: any free CPU of the cluster decodes for all workers of a run.

An actor, the batch server, runs Ray Data's executions and hands out references to blocks: images go from the
task that decoded them to the worker that trains on them, and not through the actor. A server with its
executions is a feed; a large run has several. docs/data.md has measurements of designs.
"""

import asyncio
import logging
import pickle
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import import_module
from itertools import count, islice
from typing import Any

import numpy as np
import ray
import ray.data
from numpy.typing import NDArray
from ray import cloudpickle
from ray.data.block import BlockAccessor
from ray.exceptions import GetTimeoutError, RayTaskError

from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch, PartialBatch, join_batches
from orchestrator.data.read_plan import ReadPlan, StepPart
from orchestrator.data.stream import Fetch, Reader, Stream, fetches_whole_shards, open_stream

WORKERS_PER_FEED = 4
BLOCKS_AHEAD = 2  # blocks that a worker asks for before it needs them
READY_BLOCKS = 3  # blocks per worker, beside those of the tasks, that are decoded and not yet asked for
TASK_S = 30.0  # a task that is lost with its node repeats as much at most
BLOCKS_PER_TASK = 2  # claimed together; the images of one are read while another is decoded
IDLE_S = 10.0  # a task whose blocks have no room for longer ends
WARN_S = 60.0  # a worker that waits for longer says so

Task = tuple[int, int]  # an execution, and a task's number in it
log = logging.getLogger(__name__)


def start_feeds(run: RunConfig, strategy: Any) -> list[Any]:
    """Starts the batch servers of a run, one for `WORKERS_PER_FEED` workers.

    A single server is placed by `strategy`, several are spread over the nodes, whose CPUs they share.
    """
    nodes = sum(node["Alive"] and node["Resources"].get("CPU", 0) >= 1 for node in ray.nodes())
    whole = fetches_whole_shards(run, nodes=max(1, nodes))
    feeds = -(-run.scale.workers // WORKERS_PER_FEED)
    place = BatchServer.options(scheduling_strategy=strategy if feeds == 1 else "SPREAD")
    return [place.remote(max(1, _cpus() // feeds), whole=whole) for _ in range(feeds)]


def by_ray_data(feeds: Sequence[Any]) -> Reader:
    """Returns a reader of batches from a run's `BatchServer`s, each of which serves neighbouring ranks."""

    def read(stream: Stream, steps: range) -> Iterator[Batch]:
        each = -(-stream.workers // len(feeds))
        server, first = feeds[stream.rank // each], stream.rank // each * each
        ranks = range(first, min(first + each, stream.workers))
        plan = ReadPlan(stream.run, stream.split, steps.start, steps.stop, stream.workers, ranks)
        reading = _get(server.join.remote(plan, stream.rank))
        numbers = iter(range(ranks.index(stream.rank), plan.block_count(), len(ranks)))
        asked = deque(server.block.remote(reading, number) for number in islice(numbers, BLOCKS_AHEAD))
        parts: list[PartialBatch] = []
        for chunk in range(plan.chunk_count()):
            (block,) = _wait(asked.popleft())
            asked.extend(server.block.remote(reading, number) for number in islice(numbers, 1))
            number = chunk * len(ranks) + ranks.index(stream.rank)
            for slots, part in _unpacked(number, plan.chunk(chunk), _get(block)):
                parts.append(part)
                if slots.stop == stream.share():
                    yield join_batches(parts)
                    parts = []

    return read


@ray.remote(num_cpus=0)
class BatchServer:
    """Executes the read plans of the workers of a feed, one plan of each split at a time.

    A plan begins when all workers have joined it, and ends the plan before it: workers that were restarted
    join again.
    """

    def __init__(self, tasks: int | None = None, *, whole: bool = False, task_s: float = TASK_S) -> None:
        """`tasks`: the most tasks that decode at the same time, one per CPU of the cluster by default, for
        `task_s` each. `whole`: see `stream.fetches_whole_shards`.
        """
        self._tasks, self._whole, self._task_s = tasks or _cpus(), whole, task_s
        logging.getLogger("ray.data").setLevel(logging.ERROR)  # Ray Data logs many lines per execution
        context = ray.data.DataContext.get_current()
        context.enable_progress_bars = context.print_on_execution_start = False
        # Imports and Ray Data's first execution take seconds; they run while the workers start.
        threading.Thread(target=_first_execution, args=(self._tasks,), daemon=True).start()
        self._numbers = count()
        self._joined: dict[ReadPlan, tuple[set[int], asyncio.Event, int]] = {}
        self._running: dict[int, _Reading] = {}

    async def join(self, plan: ReadPlan, rank: int) -> int:
        """Returns the number of the plan's reading, once all workers of the feed have joined."""
        ranks, complete, number = self._joined.setdefault(plan, (set(), asyncio.Event(), next(self._numbers)))
        ranks.add(rank)
        if len(ranks) == len(plan.ranks):
            del self._joined[plan]
            for other in [n for n, running in self._running.items() if running.plan.split == plan.split]:
                self._running.pop(other).close()
            for running in self._running.values():
                running.pause()
            claim = partial(ray.get_runtime_context().current_actor.claim.remote, number)
            self._running[number] = _Reading(plan, claim, self._tasks, self._task_s, self._whole)
            complete.set()
        await complete.wait()
        return number

    async def block(self, number: int, block: int) -> list[Any]:
        """Returns a reference to a block. Raises UsageError for shards that have changed."""
        return await self._running[number].block(block)

    async def claim(self, number: int, task: Task, place: int) -> list[int | None]:
        """Returns the blocks that a task makes as its `place`th and following; None ends the task."""
        running = self._running.get(number)
        return await running.claim(task, place) if running else [None]


def _first_execution(tasks: int) -> None:
    """Starts the processes that will decode, on all nodes that have CPUs, and loads their libraries."""
    numbers = ray.data.range(tasks, override_num_blocks=tasks)
    numbers.map_batches(_import_all, batch_size=None, num_cpus=0.01).materialize()


def _import_all(batch: Any) -> Any:
    import_module("orchestrator.data.stream")
    return batch


class _Reading:
    """A plan that is being read, by a few long tasks of Ray Data.

    A task asks for each block that it makes. Blocks are given out in their order, and only while there is
    room: what is decoded ahead is bounded, the next block that a worker needs is always being made, and any
    number of the tasks may run. A task that waits for room does so in `ray.get`, which frees its CPU, for
    instance for validation.
    """

    def __init__(
        self, plan: ReadPlan, claim: Callable[..., Any], tasks: int, task_s: float, whole: bool
    ) -> None:
        self.plan = plan
        self._claim, self._task_s, self._whole = claim, task_s, whole
        self._tasks = min(tasks, plan.block_count())
        self._loop = asyncio.get_running_loop()
        self._window = READY_BLOCKS * len(plan.ranks) + BLOCKS_PER_TASK * self._tasks
        self._room = self._window  # blocks that may be claimed before another is handed out
        self._waiting: deque[asyncio.Future[bool]] = deque()  # tasks that wait for room
        self._executions, self._running_tasks = count(), 0
        self._claimed: defaultdict[Task, list[int | None]] = defaultdict(list)
        self._begun: dict[Task, float] = {}
        self._made: Counter[Task] = Counter()
        self._next = 0  # block to be claimed
        self._blocks: defaultdict[int, asyncio.Future[Any]] = defaultdict(self._loop.create_future)
        self._failed: Exception | None = None
        self._closed = False
        self._start_tasks()

    def close(self) -> None:
        self._closed = True
        self.pause()

    def pause(self) -> None:
        """Ends the tasks that wait for room, so that their processes can read another plan."""
        while self._waiting:
            _resolve(self._waiting.popleft(), False)

    async def block(self, block: int) -> list[Any]:
        if self._failed and block not in self._blocks:
            raise self._failed
        reference = await self._blocks[block]
        del self._blocks[block]
        self._free_room()
        self._start_tasks()
        return [reference]

    async def claim(self, task: Task, place: int) -> list[int | None]:
        """A task that is repeated, because its node was lost, gets the same blocks again."""
        claimed, begun = self._claimed[task], self._begun.setdefault(task, self._loop.time())
        in_time = place == 0 or self._loop.time() < begun + self._task_s
        if place == len(claimed) and in_time and self._left() and await self._has_room():
            # While the task waited, its repetition may have claimed the same.
            if place < len(claimed) or not self._left():
                self._free_room()
            else:
                # The last blocks are claimed singly, so that all tasks end together.
                last = self._left() <= 2 * BLOCKS_PER_TASK * self._tasks
                more = 0 if last else min(BLOCKS_PER_TASK - 1, self._room)
                self._room -= more
                claimed.extend(range(self._next, self._next + 1 + more))
                self._next += 1 + more
        if place == len(claimed):
            claimed.append(None)
            self._replace_if_ended(task)
        return claimed[place:]

    def _left(self) -> int:
        return self.plan.block_count() - self._next

    async def _has_room(self) -> bool:
        if self._room and not self._closed:
            self._room -= 1
            return True
        waiting = self._loop.create_future()
        self._waiting.append(waiting)
        self._loop.call_later(0 if self._closed else IDLE_S, _resolve, waiting, False)
        return await waiting

    def _free_room(self) -> None:
        while self._waiting:
            if _resolve(self._waiting.popleft(), True):
                return
        self._room += 1

    def _replace_if_ended(self, task: Task) -> None:
        """Starts other tasks once this task's last block has arrived. Earlier, Ray would start a process for
        them, although this task's will soon be free.
        """
        if self._claimed[task][self._made[task] :] == [None]:
            self._running_tasks -= 1
            self._start_tasks()

    def _start_tasks(self) -> None:
        """Starts an execution in place of tasks that have ended, if there is room for their blocks."""
        tasks = min(self._tasks - self._running_tasks, self._left())
        wanted = self._room and self._left() and not (self._closed or self._failed)
        if wanted and self._running_tasks <= self._tasks // 2:
            self._running_tasks += tasks
            # Blocks that are twice the window back have been read: they cannot be lost any more.
            for task, claimed in list(self._claimed.items()):
                if claimed[-1:] == [None] and all(
                    block is None or block < self._next - 2 * self._window for block in claimed
                ):
                    del self._claimed[task], self._begun[task], self._made[task]
            threading.Thread(target=self._execute, args=(next(self._executions), tasks), daemon=True).start()

    def _execute(self, execution: int, tasks: int) -> None:
        plan, claim, whole = self.plan, self._claim, self._whole

        def decode(ids: Any) -> Iterator[Any]:
            yield from _decoded(plan, partial(claim, (execution, int(ids["id"][0]))), whole)

        # `ray.data.range` would need a whole CPU.
        numbers = ray.data.from_items([{"id": task} for task in range(tasks)], override_num_blocks=tasks)
        dataset = numbers.map_batches(decode, batch_size=None, num_cpus=plan.run.scale.cpus_per_worker)
        context = dataset.context
        context.raise_original_map_exception = True
        # Blocks of a single row are neither split nor joined.
        context.target_max_block_size = 8
        context.execution_no_progress_timeout_s = -1
        # The room bounds the tasks. While one of them waits, Ray Data looks for blocks only every 0.1 s, and
        # would let the others make two between.
        context._max_num_blocks_in_streaming_gen_buffer = None  # pyright: ignore[reportAttributeAccessIssue]
        # Ray Data's budgets wait for a coordinator that runs every 20 s; until then one task runs at a time.
        context.set_config("backpressure_policies.enabled", [])
        try:
            for bundle in dataset.iter_internal_ref_bundles():
                for entry in bundle.blocks:
                    if self._closed:
                        return
                    stats = entry.metadata.exec_stats
                    assert stats
                    assert stats.task_idx is not None
                    task = (execution, stats.task_idx)
                    self._loop.call_soon_threadsafe(self._arrived, task, entry.ref)
        except Exception as error:
            self._loop.call_soon_threadsafe(self._fail, _cause(error))

    def _arrived(self, task: Task, block: Any) -> None:
        """A task's blocks arrive in the order in which it claimed them."""
        number = self._claimed[task][self._made[task]]
        self._made[task] += 1
        # A task that makes no block yields an empty one.
        if number is not None:
            self._blocks[number].set_result(block)
            self._replace_if_ended(task)

    def _fail(self, error: Exception) -> None:
        self._failed = error
        self.close()
        for waiting in self._blocks.values():
            if not waiting.done():
                waiting.set_exception(error)


def _resolve(future: asyncio.Future[bool], result: bool) -> bool:
    """Returns whether the future was still open."""
    if open := not future.done():
        future.set_result(result)
    return open


def _decoded(plan: ReadPlan, claim: Callable[[int], Any], whole: bool) -> Iterator[Any]:
    """Yields the blocks that a task claims. Begins to read the images of a block before it decodes the block
    before it, and claims more blocks meanwhile.
    """
    claimed: deque[int] = deque()
    fetched: deque[tuple[int, Stream, list[Fetch]]] = deque()
    place, asked, ended = 0, None, False
    while claimed or fetched or not ended:
        if not (claimed or asked or ended):
            asked = claim(place)
        if asked and (not fetched or ray.wait([asked], timeout=0)[0]):
            blocks: list[Any] = ray.get(asked)
            asked, place, ended = None, place + len(blocks), blocks[-1] is None
            claimed.extend(blocks[:-1] if ended else blocks)
        if claimed and len(fetched) < BLOCKS_PER_TASK:
            number = claimed.popleft()
            rank, chunk = plan.block(number)
            stream = open_stream(plan.run, plan.split, rank, plan.workers, whole=whole)
            fetched.append((number, stream, [stream.fetch(step, slots) for step, slots in chunk]))
        elif fetched:
            number, stream, parts = fetched.popleft()
            yield _packed(number, [stream.decode(part) for part in parts])


def map_tasks(work: Callable[[Any], Any], tasks: Sequence[Any]) -> Iterator[Any]:
    """Yields the result of `work` for each task, on any free CPU of the cluster, in any order."""

    def run(row: dict[str, Any]) -> dict[str, Any]:
        return {"result": pickle.dumps(work(pickle.loads(row["task"])))}

    rows = [{"task": cloudpickle.dumps(task)} for task in tasks]  # pyright: ignore[reportPrivateImportUsage]
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


def _packed(number: int, parts: list[PartialBatch]) -> dict[str, Any]:
    """Returns a block, a table of one row: the first field, images where there are any, and the rest of each
    part.
    """
    first = [_first(part) for part in parts]
    rest = pickle.dumps((number, [_with_first(part, _first(part)[:0]) for part in parts]))
    return {"first": (first[0] if len(first) == 1 else np.concatenate(first))[None], "rest": [rest]}


def _first(part: PartialBatch) -> NDArray[Any]:
    return next(iter(part.fields.values()))


def _with_first(part: PartialBatch, values: NDArray[Any]) -> PartialBatch:
    return part._replace(fields=part.fields | {next(iter(part.fields)): values})


def _unpacked(number: int, chunk: list[StepPart], block: Any) -> Iterator[tuple[range, PartialBatch]]:
    """Yields the parts of a block: the inverse of `_packed`."""
    columns: Any = BlockAccessor.for_block(block).to_numpy(["first", "rest"])
    made, parts = pickle.loads(columns["rest"][0])
    assert made == number, f"block {made} came as block {number}"
    first = 0
    for (_, slots), part in zip(chunk, parts, strict=True):
        yield slots, _with_first(part, columns["first"][0][first : first + len(slots)])
        first += len(slots)


def _wait(reference: Any) -> Any:
    """Waits for the server's answer, and logs what it waits for if that takes long."""
    try:
        return _get(reference, WARN_S)
    except GetTimeoutError:
        free, cpus = (of().get("CPU", 0) for of in (ray.available_resources, ray.cluster_resources))
        log.warning(
            "no images for %g s: %g of the cluster's %g CPUs are free, decoding needs 1, or 0.5 without GPUs",
            WARN_S,
            free,
            cpus,
        )
        return _get(reference)


def _get(reference: Any, timeout_s: float | None = None) -> Any:
    try:
        return ray.get(reference, timeout=timeout_s)
    except RayTaskError as error:
        raise _cause(error) from None


def _cause(error: Exception) -> Exception:
    """Returns the exception that a task raised, without Ray's wrapper."""
    return error.cause if isinstance(error, RayTaskError) else error

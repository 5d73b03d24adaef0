"""Reports on their way from a run's first worker to the process that asked for the run.

Sending one returns when it has been recorded. So a checkpoint never holds a step that was not: after a kill
of everything, the run that goes on from it leaves no gap. `ray.train.report` promises less (it returns when
the report is queued), and makes every worker wait for the controller's poll.
"""

import asyncio
import logging
from collections.abc import Callable
from typing import Any

import ray
import ray.train
import torch
import torch.distributed as dist

from moe.parallel import sum_over_ranks
from orchestrator.training.loop import Metrics
from orchestrator.training.worker import Report

log = logging.getLogger(__name__)


@ray.remote(num_cpus=0)
class Reports:
    """A mailbox whose `send` waits until the letter has been answered."""

    def __init__(self) -> None:
        self._letters: asyncio.Queue[tuple[Any, asyncio.Future[bool]]] = asyncio.Queue()
        self._answer: asyncio.Future[bool] | None = None

    async def send(self, step: int, metrics: Metrics) -> bool:
        answer = asyncio.get_running_loop().create_future()
        self._letters.put_nowait(((step, metrics), answer))
        return await answer

    async def say(self, line: str) -> None:
        """Queues a line of a worker's log."""
        self._letters.put_nowait((line, asyncio.get_running_loop().create_future()))

    async def close(self) -> None:
        self._letters.put_nowait((None, asyncio.get_running_loop().create_future()))

    async def take(self, answer: bool) -> Any:
        """The next report or line, or None at the end. `answer` is to the one before."""
        if self._answer is not None:
            self._answer.set_result(answer)
        letter, self._answer = await self._letters.get()
        return letter


class LogLines(logging.Handler):
    """Forwards the log of a worker to the process that started the run; Ray's own lines are not forwarded."""

    def __init__(self, reports: Any, prefix: str) -> None:
        super().__init__()
        self.setFormatter(logging.Formatter(f"{prefix}: %(message)s"))
        self._reports = reports

    def emit(self, record: logging.LogRecord) -> None:
        self._reports.say.remote(self.format(record))


class Sender:
    """What the workers of a run report to. The first one sends, and learns whether they are to leave."""

    def __init__(self, reports: Any) -> None:
        self._reports = reports
        self._asked_to_leave = False

    def report(self, step: int, metrics: Metrics) -> None:
        if dist.get_rank() == 0:
            self._asked_to_leave = bool(ray.get(self._reports.send.remote(step, metrics)))

    def leave(self) -> bool:
        """The same on all workers: more of them could train, or a node of theirs is about to go."""
        asked = sum_over_ranks(torch.tensor(float(self._asked_to_leave)))
        return bool(asked) or ray.train.get_preemption_info() is not None


def hand_on(reports: Any, report: Report, leave: Callable[[], bool]) -> None:
    """Calls `report` with every report, in their order, until they are closed, and logs the workers' lines.

    If `report` raises, workers fail.
    """
    try:
        answer = False
        while (arrived := ray.get(reports.take.remote(answer))) is not None:
            if isinstance(arrived, str):
                log.info(arrived)
                continue
            report(*arrived)
            answer = leave()
    except BaseException:
        ray.kill(reports)  # sending raises from now on
        raise

"""Reports on their way from a run's first worker to the process that asked for the run.

Sending one returns when it has been recorded. So a checkpoint never holds a step that was not: after a kill
of everything, the run that goes on from it leaves no gap. `ray.train.report` promises less (it returns when
the report is queued), and makes every worker wait for the controller's poll.
"""

import asyncio
from typing import Any

import ray
import torch.distributed as dist

from orchestrator.training.loop import Metrics
from orchestrator.training.worker import Report


@ray.remote(num_cpus=0)
class Reports:
    """A mailbox whose `send` waits until the letter has been dealt with."""

    def __init__(self) -> None:
        self._waiting: asyncio.Queue[tuple[Any, asyncio.Event]] = asyncio.Queue()
        self._taken = asyncio.Event()

    async def send(self, step: int, metrics: Metrics) -> None:
        done = asyncio.Event()
        self._waiting.put_nowait(((step, metrics), done))
        await done.wait()

    async def close(self) -> None:
        self._waiting.put_nowait((None, asyncio.Event()))

    async def take(self) -> Any:
        """The next one, or None at the end. To ask for it says that the one before has been dealt with."""
        self._taken.set()
        letter, self._taken = await self._waiting.get()
        return letter


def send_to(reports: Any) -> Report:
    """What the workers of a run report with: the first one does."""

    def report(step: int, metrics: Metrics) -> None:
        if dist.get_rank() == 0:
            ray.get(reports.send.remote(step, metrics))

    return report


def hand_on(reports: Any, report: Report) -> None:
    """Calls `report` with every report, in their order, until they are closed. If it raises, workers fail."""
    try:
        while (arrived := ray.get(reports.take.remote())) is not None:
            report(*arrived)
    except BaseException:
        ray.kill(reports)  # sending raises from now on
        raise

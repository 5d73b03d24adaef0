"""A follower of sweeps that looks away, unless it is told what to do when a trial ends."""

from collections.abc import Callable

from orchestrator.sweeps.queue import Job, Outcome
from orchestrator.training.loop import Metrics


class Unwatched:
    def __init__(self, ended: Callable[[str, Outcome], None] = lambda name, outcome: None) -> None:
        self._ended = ended

    def began(self, job: Job) -> None:
        pass

    def report(self, name: str, step: int, metrics: Metrics) -> None:
        pass

    def ended(self, name: str, outcome: Outcome) -> None:
        self._ended(name, outcome)

    def status(self) -> None:
        pass

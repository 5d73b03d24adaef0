"""The end of a tracked run: artifacts that workers left in the run's directory, and its status."""

from typing import Any, Protocol

from orchestrator import storage
from orchestrator.training.profile import TABLE
from orchestrator.training.seen import BAD_IMAGES
from orchestrator.training.worker import Result


class Artifacts(Protocol):
    def write_text(self, name: str, text: str) -> None: ...
    def tag(self, **tags: str) -> None: ...
    def finish(self, status: Any) -> None: ...


def log_left_behind(directory: str, tracked: Artifacts) -> None:
    """The list of bad images and the profile, as they were last written, if there are any."""
    for name in (BAD_IMAGES, TABLE):
        path = storage.join(directory, name)
        if storage.size(path) is not None:
            tracked.write_text(name, storage.read_bytes(path).decode())


def finish(directory: str, tracked: Artifacts, result: Result) -> None:
    """Ends the tracked run of a training that came to its end: one that diverged has failed."""
    log_left_behind(directory, tracked)
    if result.status == "diverged":
        tracked.tag(error=f"diverged at step {result.step}")
    tracked.finish("FAILED" if result.status == "diverged" else "FINISHED")

"""What workers leave in a run's directory that belongs among its artifacts."""

from typing import Protocol

from orchestrator import storage
from orchestrator.training.profile import TABLE
from orchestrator.training.seen import BAD_IMAGES


class Artifacts(Protocol):
    def write_text(self, name: str, text: str) -> None: ...


def log_left_behind(directory: str, tracked: Artifacts) -> None:
    """The list of bad images and the profile, as they were last written, if there are any."""
    for name in (BAD_IMAGES, TABLE):
        path = storage.join(directory, name)
        if storage.size(path) is not None:
            tracked.write_text(name, storage.read_bytes(path).decode())

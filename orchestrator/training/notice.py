"""A notice that this process will be ended soon: what trains in it saves and stops."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

_training = 0  # blocks that can save
_given = False


class Stopped(KeyboardInterrupt):
    """Training has stopped because it was asked to; `saved` has the last step in storage, by run."""

    def __init__(self, saved: Mapping[str, int]) -> None:
        super().__init__(saved)
        self.saved = saved

    def __str__(self) -> str:
        return ", ".join(
            f"{name} is saved at step {step}" if step else f"{name} had not saved any step"
            for name, step in self.saved.items()
        )


def give() -> bool:
    """Asks what trains in this process to save and stop; for signal handlers. Returns False if nothing does,
    so that the process can end at once.
    """
    global _given
    _given = _training > 0
    return _given


def given() -> bool:
    return _given


@contextmanager
def saving() -> Iterator[None]:
    """While the block lasts, training heeds a notice: it saves and stops, which raises `Stopped`."""
    global _training
    _training += 1
    try:
        yield
    finally:
        _training -= 1


def refuse() -> None:
    """Lets later notices end this process at once: what it trains belongs to another process."""
    global _training
    _training = -(1 << 30)

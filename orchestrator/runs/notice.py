"""A notice that this process will be ended soon: what trains in it saves and stops."""

import logging
import os
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

log = logging.getLogger(__name__)

_training = 0  # blocks that can save
_refused = False
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
    _given = _training > 0 and not _refused
    return _given


def given() -> bool:
    return _given


@contextmanager
def saving() -> Iterator[None]:
    """While the block lasts, training heeds a notice: it saves and stops, which raises `Stopped`."""
    global _training, _refused
    if _training == 0:
        _refused = False
    _training += 1
    try:
        yield
    finally:
        _training -= 1


@contextmanager
def on_interrupt() -> Iterator[None]:
    """While the block lasts, the first Ctrl-C, or stop button of a notebook, is a notice, and the second one
    an interrupt. Changes nothing outside of the main thread, and where a command or a program of the user's
    own handles Ctrl-C.
    """
    global _given
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return

    def stop(*_: Any) -> None:
        if _given or not give():
            raise KeyboardInterrupt
        say("saving; a second interrupt ends at once")

    signal.signal(signal.SIGINT, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        _given = False  # the same process may train again


@contextmanager
def on_request(asked: Callable[[], bool], every_s: float) -> Iterator[None]:
    """While the block lasts, what `asked` returns is a notice too. A thread calls it every few seconds, while
    something trains that can save.
    """
    global _given
    ended, gave = threading.Event(), False

    def look() -> None:
        nonlocal gave
        while not (ended.wait(every_s) or _given):
            with suppress(OSError):  # the storage may answer the next time
                if _training > 0 and asked():
                    gave = give()
                    log.warning("asked to stop: saving")

    thread = threading.Thread(target=look, daemon=True, name="requests")
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        if gave:
            _given = False  # the same process may train again


def refuse() -> None:
    """Lets notices end this process at once, until it trains something else: what it trains now belongs to
    another process.
    """
    global _refused
    _refused = True


def say(line: str) -> None:
    """Prints to stderr, also in a signal handler, which may have interrupted another print."""
    with suppress(OSError):  # nobody may read it
        os.write(2, f"{line}\n".encode())

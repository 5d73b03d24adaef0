"""How every command fails, and how it reads --set. Imports little: planning must not wait for Ray."""

import argparse
import json
import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from orchestrator.config import UsageError


@contextmanager
def command() -> Iterator[None]:
    """A user's mistake is one line and an exit code, never a traceback."""
    stop_as_by_ctrl_c()
    logging.basicConfig(format="%(message)s")
    logging.getLogger("orchestrator").setLevel(logging.INFO)
    try:
        yield
    except (UsageError, OSError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted; the same command continues")


def stop_as_by_ctrl_c() -> None:
    """SIGTERM, which `ray job stop`, Kubernetes and batch systems send, lets MLflow know as Ctrl-C does."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)


def at_least_one(text: str) -> int:
    """The type of a flag that counts something."""
    try:
        count = int(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no whole number") from None
    if count < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, got {count}")
    return count


def assignment(text: str) -> tuple[str, Any]:
    """FIELD=VALUE of a --set. Raises UsageError."""
    field, equals, value = text.partition("=")
    if not equals or not field:
        raise UsageError(f"--set {text!r}: write FIELD=VALUE")
    if value == "null" or value.startswith(("[", "{")):
        try:
            return field, json.loads(value)
        except ValueError as error:
            raise UsageError(f"--set {text!r}: {error}") from None
    return field, value

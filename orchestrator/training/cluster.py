"""The Ray cluster of this process."""

import logging
import os
import re
import socket
from collections.abc import Callable, Mapping
from typing import Any

import ray
from ray._private import worker

from orchestrator.errors import UsageError, reason_of

CONNECT_S = 10.0
# Where Ray's messages on dead processes turn into advice that fits every death, or into a dump of its state.
BREAKS = re.compile(r"\n|\. Some common causes|\. Possible reasons")


def connect(say: Callable[[str], None] = lambda line: None) -> None:
    """Joins the cluster of $RAY_ADDRESS or of this machine, else starts Ray here; once in a process.

    Args:
        say: prints a line before Ray starts, which takes seconds.

    Raises:
        UsageError: if no cluster answers.
    """
    if ray.is_initialized():
        return
    if (address := os.environ.get("RAY_ADDRESS", "")).startswith("http"):
        raise UsageError(
            f"RAY_ADDRESS={address} is the address for `ray job submit`: submit the command, as in"
            " `ray job submit --working-dir . -- python jobs/..`, or unset RAY_ADDRESS"
        )
    say("starting Ray, or joining the cluster of $RAY_ADDRESS or of this machine ..")
    try:
        host, colon, port = address.rpartition(":")
        if colon and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host.rpartition("/")[2].strip("[]"), int(port)), CONNECT_S).close()
        ray.init(logging_level=logging.ERROR, log_to_driver=False)
        _shorten_messages()
    except (OSError, OverflowError, RuntimeError) as error:
        raise UsageError(
            f"no Ray cluster answers at {address or 'the address that this machine remembers'}"
            f" ({reason_of(error)}): start it, or set RAY_ADDRESS=local for one that ends with this command"
        ) from None


def _shorten_messages() -> None:
    """Leaves the first sentence of each message by which Ray tells this terminal that a process has died."""
    whole = worker.print_to_stdstream
    if whole.__module__ == __name__:  # done before
        return

    def shortened(data: Mapping[str, Any], **options: Any) -> None:
        whole({**data, "lines": [BREAKS.split(line)[0] for line in data["lines"]]}, **options)

    worker.print_to_stdstream = shortened

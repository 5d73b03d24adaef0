"""The Ray cluster of this process."""

import logging
import os
import re
import secrets
import signal
import socket
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants, services, utils, worker

from orchestrator.errors import UsageError, reason_of
from orchestrator.output import redact_uri

CONNECT_S = 10.0
# Where Ray's messages on dead processes turn into advice that fits every death, or into a dump of its state.
BREAKS = re.compile(r"\n|\. Some common causes|\. Possible reasons")


def connect(say: Callable[[str], None] = lambda line: None) -> None:
    """Joins the cluster of $RAY_ADDRESS or of this machine, else starts Ray here, on loopback; once in a
    process.

    Args:
        say: prints a line before Ray starts, which takes seconds, and if a token is made for it.

    Raises:
        UsageError: if no cluster answers, or Ray cannot start.
    """
    if ray.is_initialized():
        return
    address = os.environ.get("RAY_ADDRESS", "")
    if "://" in address:
        what = "is the address for `ray job submit`"
        if not address.startswith("http"):  # ray:// of Ray Client
            what = "is no address to train at; `ray job submit` takes the http:// address of the dashboard"
        raise UsageError(
            f"RAY_ADDRESS={address} {what}: submit the command, as in"
            " `ray job submit --working-dir . -- python jobs/..`, or unset RAY_ADDRESS"
        )
    say("starting Ray, or joining the cluster of $RAY_ADDRESS or of this machine ..")
    starts = False
    try:
        host, colon, port = address.rpartition(":")
        if colon and port.isdigit():  # Ray itself would try for minutes
            socket.create_connection((host.strip("[]"), int(port)), CONNECT_S).close()
        # pyright does not know that Ray takes None for the address of the environment.
        starts = services.canonicalize_bootstrap_address(None) is None  # pyright: ignore[reportArgumentType]
        if starts:
            _make_token(say)
        with _deaf_to_hangup(), _without_passwords(), _on_loopback() if starts else nullcontext():
            ray.init(logging_level=logging.ERROR, log_to_driver=False)
        _shorten_messages()
    except Exception as error:  # of any type, Exception too: of a node that does not come up in time
        why = reason_of(error)
        raise UsageError(_cannot_start(why) if starts else _cannot_join(address, why)) from None


def _cannot_start(why: str) -> str:
    return (
        f"Ray cannot start here ({why}): it needs a folder with a short path and free space, which RAY_TMPDIR"
        " may name, as /tmp; and a HOME that can be written to"
    )


def _cannot_join(address: str, why: str) -> str:
    where = address or "the address that this machine remembers"
    return (
        f"no Ray cluster answers at {where} ({why}): start it, or set RAY_ADDRESS=local for one that ends"
        " with this command"
    )


def _make_token(say: Callable[[str], None]) -> None:
    """Makes the token of a cluster that starts here, unless there is one: Ray would make a file that every
    user of this machine can read.
    """
    if os.environ.get("RAY_AUTH_MODE", "token").lower() != "token" or os.environ.get("RAY_AUTH_TOKEN"):
        return
    path = Path(os.environ.get("RAY_AUTH_TOKEN_PATH") or Path.home() / ".ray/auth_token")
    if path.exists():
        if path.stat().st_uid == os.getuid() and path.stat().st_mode & 0o077:
            path.chmod(0o600)
            say(f"{path}, the token of your Ray clusters, could be read by others: it is your own now")
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent) as file:  # which its owner alone can read
        file.write(secrets.token_hex(32))
        file.flush()
        with suppress(FileExistsError):  # of another command, which began at the same time
            os.link(file.name, path)
            say(f"made the token of your Ray clusters: {path}")


@contextmanager
def _deaf_to_hangup() -> Iterator[None]:
    """Lets the processes that are started in the block, and theirs, outlive the terminal: it sends SIGHUP to
    all, and the command ends them once it has saved.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _on_loopback() -> Iterator[None]:
    """Lets a Ray that is started in the block listen on 127.0.0.1 alone, as it does on macOS: elsewhere its
    ports are open to the network, though with a token, and Ray replaces this address as an argument.
    """
    module: Any = ray_constants
    module.ENABLE_RAY_CLUSTER, before = False, module.ENABLE_RAY_CLUSTER
    try:
        yield
    finally:
        module.ENABLE_RAY_CLUSTER = before


@contextmanager
def _without_passwords() -> Iterator[None]:
    """Keeps passwords of URIs out of the command line of this driver that Ray's dashboard shows."""
    module: Any = utils
    whole = module.get_entrypoint_name
    module.get_entrypoint_name = lambda: " ".join(map(redact_uri, whole().split(" ")))
    try:
        yield
    finally:
        module.get_entrypoint_name = whole


def _shorten_messages() -> None:
    """Leaves the first sentence of each message by which Ray tells this terminal that a process has died."""
    whole = worker.print_to_stdstream
    if whole.__module__ == __name__:  # done before
        return

    def shortened(data: Mapping[str, Any], **options: Any) -> None:
        whole({**data, "lines": [BREAKS.split(line)[0] for line in data["lines"]]}, **options)

    worker.print_to_stdstream = shortened

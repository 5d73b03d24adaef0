"""Output that never ends what prints it, shows no passwords, and has times that a person reads."""

import os
import sys
from contextlib import suppress
from typing import Any, TextIO

IN_BITS = {"val/likelihood": "val/bits_per_byte"}  # qualities that readers know by another metric
UNKNOWN = "\N{EN DASH}"  # in place of a number


class UnfailingOutput:
    """A text stream that drops what cannot be written: its reader has gone (``.. | head``), its terminal was
    closed, the disk below it is full, or it is closed or was never open. Characters that it has no code for
    become question marks. In everything else it is the stream that it is made of.
    """

    def __init__(self, stream: TextIO | None) -> None:
        self._stream: TextIO = stream or open(os.devnull, "w")  # noqa: SIM115

    def write(self, text: str) -> int:
        with suppress(OSError, ValueError):  # ValueError: the stream is closed
            try:
                self._stream.write(text)
            except UnicodeEncodeError as error:
                self._stream.write(text.encode(error.encoding, "replace").decode(error.encoding))
        return len(text)

    def flush(self) -> None:
        with suppress(OSError, ValueError):
            self._stream.flush()

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):
            return self._stream.isatty()
        return False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


def protect_streams() -> None:
    """Lets no print of this process fail, and no file that it opens become its standard output."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # takes the lowest free number
    for name in ("stdout", "stderr"):
        if not isinstance(stream := getattr(sys, name), UnfailingOutput):
            setattr(sys, name, UnfailingOutput(stream))


def duration(seconds: float) -> str:
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


def redact_uri(uri: str) -> str:
    """Returns the URI without its password, and without its query, which may contain a password."""
    scheme, separator, rest = uri.partition("://")
    if not separator or scheme in ("sqlite", "file"):
        return uri
    shown, _, query = rest.partition("?")
    if "@" in query:  # the "?" may stand in a password, or the "@" in one of the query
        return f"{scheme}://***"
    user, at, place = shown.rpartition("@")
    name, colon, _ = user.partition(":")
    hidden = f"{name}:***" if colon else name
    return f"{scheme}://{hidden}{at}{place}"

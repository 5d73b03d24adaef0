"""Output that nobody takes."""

import io
import os
import sys

import pytest

from orchestrator.config import RunConfig
from orchestrator.output import UnfailingOutput, redact_uri
from orchestrator.sweeps.progress import SweepProgress
from orchestrator.sweeps.sweep import Sweep
from orchestrator.training.console import StepLines


def broken() -> io.TextIOWrapper:
    reader, writer = os.pipe()
    os.close(reader)
    return os.fdopen(writer, "w")


def full() -> io.TextIOWrapper:
    return open("/dev/full", "w")


def closed() -> io.StringIO:
    stream = io.StringIO()
    stream.close()
    return stream


def ascii_only() -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(), encoding="ascii")


@pytest.mark.parametrize("make", [broken, full, closed, ascii_only, lambda: None])
def test_a_training_prints_into_it(make, monkeypatch: pytest.MonkeyPatch) -> None:
    stream = make()
    monkeypatch.setattr(sys, "stdout", stream)
    lines = StepLines(RunConfig())
    for _ in range(2000):
        lines.say("step \u00d7")
    lines.show(1, {"train/loss": 1.0})
    with SweepProgress(Sweep(base=RunConfig(), arms={})) as _:
        pass
    assert not UnfailingOutput(stream).isatty()
    if isinstance(stream, io.TextIOWrapper) and isinstance(stream.buffer, io.BytesIO):
        stream.flush()
        assert stream.buffer.getvalue().startswith(b"step ?\n")


def test_what_is_written_again_is_not_lost_for_ever() -> None:
    """A disk that was full for a moment: the log goes on."""
    stream = io.StringIO()
    output = UnfailingOutput(stream)
    output.write("a\n")
    output.flush()
    assert (stream.getvalue(), output.getvalue()) == ("a\n", "a\n")


def test_passwords_are_not_shown() -> None:
    assert redact_uri("http://team:secret@host:5000/path") == "http://team:***@host:5000/path"
    assert redact_uri("--tracking-uri") == "--tracking-uri"

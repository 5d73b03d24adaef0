"""A driver that is killed at any moment, and started again."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from orchestrator.runs.metrics_file import read_metrics
from orchestrator.tracking.store import open_reader
from tests.mlflow_reader import children, newest_of
from tests.orchestrator.tracking.conftest import open_store
from tests.orchestrator.tracking.stores import Store

ROOT = Path(__file__).parents[3]


class Program:
    """The program of `writer.py`. A line that never comes, because the program has ended, is an error."""

    def __init__(self, process: "subprocess.Popen[str]") -> None:
        assert process.stdin
        assert process.stdout
        self._stdin, self._stdout = process.stdin, process.stdout

    def line(self) -> str:
        line = self._stdout.readline()
        assert line, "the program has ended: its error is above"
        return line.strip()

    def ask(self, line: str) -> str:
        self._stdin.write(f"{line}\n")
        self._stdin.flush()
        return self.line()


@contextmanager
def started(*arguments: str) -> Iterator[Program]:
    """Starts the program; whatever happens, it and the process that it has forked are ended."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.orchestrator.tracking.writer", *arguments],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )
    try:
        yield Program(process)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


@pytest.mark.parametrize(
    ("store", "kills"),
    [
        pytest.param("sqlite", 3, marks=pytest.mark.smoke),
        pytest.param("sqlite", 20, marks=pytest.mark.slow),
        pytest.param("server", 20, marks=pytest.mark.slow),
        pytest.param("postgres", 20, marks=pytest.mark.slow),
    ],
    indirect=["store"],
)
def test_what_killed_processes_reported_is_there_once(store: Store, kills: int, tmp_path: Path) -> None:
    """Again and again. Every number has one row, in order, and two runs were made in all."""
    open_store(store)  # makes the tables
    dice = random.Random(1)
    with started(store.uri, str(tmp_path)) as program:
        for kill in range(kills):
            process = int(program.ask(""))
            if kill % 5:
                assert program.line() == "writing"
            time.sleep(dice.uniform(0, 0.6))
            os.kill(process, signal.SIGKILL)
            while program.line() != "ended":  # it may have begun to write before the kill
                pass
        reached = int((tmp_path / "checkpoint").read_text())
        last = reached + 20
        program.ask(str(last))
        assert [program.line(), program.line()] == ["writing", "ended"]

    assert reached > kills
    reader = open_reader(store.uri)
    sweep = newest_of(reader, f"{tmp_path}/sweep")
    assert sweep is not None
    (child,) = children(reader, sweep.run_id)
    numbers = [(8 * n, float(n)) for n in range(1, last + 2)]
    assert [
        (row.images, row.metrics["number"]) for row in read_metrics(f"{tmp_path}/sweep/trials/child")
    ] == numbers
    assert child.history("number") == numbers
    assert child.history("square") == [(at, n**2) for at, n in numbers]
    assert (child.status, sweep.status) == ("FINISHED", "FINISHED")
    assert child.read_text("bad_images.csv") == "the end"

"""A driver that is killed at any moment, and started again."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.tracking.find import children, newest_of
from orchestrator.tracking.store import open_reader
from orchestrator.training.metrics_file import read_metrics
from tests.orchestrator.tracking.conftest import open_store
from tests.orchestrator.tracking.stores import Store

KILLS = 20
ROOT = Path(__file__).parents[3]


@pytest.mark.parametrize(
    "store",
    [
        pytest.param("sqlite", marks=pytest.mark.smoke),
        pytest.param("server", marks=pytest.mark.slow),
        pytest.param("postgres", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_what_killed_processes_reported_is_there_once(store: Store, tmp_path: Path) -> None:
    """Twenty times. Every number has one row, in order, and two runs were made in all."""
    open_store(store)  # makes the tables
    dice = random.Random(1)
    with subprocess.Popen(
        [sys.executable, "-m", "tests.orchestrator.tracking.writer", store.uri, str(tmp_path)],
        cwd=ROOT,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as program:
        assert program.stdin
        assert program.stdout

        def start(line: str) -> int:
            program.stdin.write(f"{line}\n")
            program.stdin.flush()
            return int(program.stdout.readline())

        for kill in range(KILLS):
            process = start("")
            if kill % 5:
                assert program.stdout.readline() == "writing\n"
            time.sleep(dice.uniform(0, 0.6))
            os.kill(process, signal.SIGKILL)
            while program.stdout.readline() != "ended\n":  # it may have got to write, where nobody waited
                pass
        reached = int((tmp_path / "checkpoint").read_text())
        last = reached + 20
        start(str(last))
        assert [program.stdout.readline() for _ in range(2)] == ["writing\n", "ended\n"]
        program.stdin.close()

    assert reached > KILLS
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

"""A driver that is killed at any moment, and started again."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from orchestrator.tracking import EXPERIMENT, children, find_runs, open_reader
from tests.orchestrator.tracking.conftest import Open
from tests.orchestrator.tracking.stores import Store

KILLS = 20


@pytest.mark.parametrize(
    "store",
    [
        pytest.param("sqlite", marks=pytest.mark.smoke),
        pytest.param("server", marks=pytest.mark.slow),
        pytest.param("postgres", marks=pytest.mark.slow),
    ],
    indirect=True,
)
def test_what_a_killed_process_said_is_there_once(reopen: Open, store: Store, tmp_path: Path) -> None:
    """Twenty times. Every number has one row, in order, and two runs were made in all."""
    reopen(store, spool="only to make the tables")
    dice = random.Random(1)
    with subprocess.Popen(
        [sys.executable, str(Path(__file__).with_name("writer.py")), store.uri, str(tmp_path)],
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
    (sweep,) = find_runs(reader, EXPERIMENT, f"tags.directory = '{tmp_path}'")
    (child,) = children(reader, sweep.run_id)
    numbers = list(range(last + 1))
    assert child.history("number") == [(n, float(n)) for n in numbers]
    assert child.history("square") == [(n, float(n**2)) for n in numbers]
    rows = reader.client.get_metric_history(child.run_id, "number")
    assert [row.timestamp for row in sorted(rows, key=lambda row: row.step)] == sorted(
        r.timestamp for r in rows
    )
    assert (child.status, sweep.status, child.tags["step"]) == ("FINISHED", "FINISHED", str(last))
    assert child.read_text("notes/end.txt") == "the end"
    assert not list(tmp_path.rglob("refused.jsonl"))

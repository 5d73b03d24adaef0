"""Signals: Ctrl-C, SIGTERM of `ray job stop` and Kubernetes, SIGUSR1 of Slurm. Training saves first."""

import json
import os
import pty
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from mlflow import MlflowClient

from jobs import _signals
from orchestrator.runs.state import directory_state
from tests.jobs.bare import run_bare

ROOT = Path(__file__).parents[2]

# a background job of a shell ignores SIGINT, and so does what it starts
START = """
import runpy, signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
INTERRUPT = """
import os, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)
from jobs._cli import command
with command("waiting"):
    os.kill(os.getpid(), int(sys.argv[1]))
    time.sleep(30)
"""


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP])
def test_a_command_says_how_to_go_on(sent):
    done = run_bare("-c", INTERRUPT, str(int(sent)))
    assert done.returncode == 128 + sent
    assert "Interrupted. Run the same command again to continue." in done.stderr


@pytest.mark.parametrize(
    ("submitted", "wait", "grace_s"), [(False, "", 25), (True, "", 2.5), (True, "60", 59.5)]
)
def test_the_grace_is_what_the_sender_leaves(submitted, wait, grace_s, monkeypatch):
    """`ray job stop` kills after 3 seconds, or after $RAY_JOB_STOP_WAIT_TIME_S."""
    monkeypatch.setattr(os, "environ", {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"} if submitted else {})
    if wait:
        os.environ["RAY_JOB_STOP_WAIT_TIME_S"] = wait
    assert _signals.default_grace_s() == grace_s


NEVER_S = 3600
SAVES = """
import os, signal, sys, time
from jobs._cli import command
from orchestrator.runs import notice
with command("training", grace=float(sys.argv[2])), notice.saving():
    for number in sys.argv[3:]:
        os.kill(os.getpid(), int(number))
    time.sleep(float(sys.argv[1]))
    raise notice.Stopped({"a": 7})
"""


@pytest.mark.parametrize(
    ("seconds", "grace", "signals", "code", "said"),
    [
        (0.1, 20, [signal.SIGUSR1], 138, "Interrupted: a is saved at step 7. Run the same command again"),
        (NEVER_S, 0.1, [signal.SIGTERM], 143, "Not saved within 0.1 s. Run the same command again"),
        (
            NEVER_S,
            20,
            [signal.SIGTERM, signal.SIGINT],
            130,
            "SIGTERM: saving within 20 s; a second signal",
        ),
        # A shell and its terminal each send one.
        (0.1, 20, [signal.SIGHUP, signal.SIGHUP], 129, "Interrupted: a is saved at step 7."),
    ],
)
def test_the_first_signal_saves_and_the_second_ends(seconds, grace, signals, code, said):
    done = run_bare("-c", SAVES, str(seconds), str(grace), *(str(int(number)) for number in signals))
    assert (done.returncode, said in done.stderr) == (code, True), done.stderr


IGNORED = """
import os, signal
signal.signal(signal.SIGHUP, signal.SIG_IGN)
from jobs._cli import command
with command("training"):
    os.kill(os.getpid(), signal.SIGHUP)
    print("goes on")
"""


def test_a_hangup_that_is_ignored_stays_so():
    """As by `nohup`."""
    done = run_bare("-c", IGNORED)
    assert (done.returncode, "goes on" in done.stdout) == (0, True)


PRINTS = """
import sys
from pathlib import Path
from jobs._cli import command, print_table
with command("training"):
    for step in range(2000):
        print(f"step {step} \u00d7", flush=True)
        print(f"step {step} \u00d7", file=sys.stderr, flush=True)
    print_table(["arm"], [["a \u00d7"]], title="\u00d7")
    Path(sys.argv[1]).touch()
    sys.exit(int(sys.argv[2]))
"""


@pytest.mark.parametrize("code", [0, 1])
@pytest.mark.parametrize(
    "output", ["| head -n 1", "> /dev/full", ">&-", "2>&-", ">&- 2>&- <&-", "| head -n 1 2>&1"]
)
def test_no_print_decides_how_a_command_ends(output, code, tmp_path):
    """A reader that has gone, a full disk, a stream that was closed before."""
    words = shlex.join([sys.executable, "-c", PRINTS, str(tmp_path / "done"), str(code)])
    bash = ["bash", "-c", f"{words} {output}; exit ${{PIPESTATUS[0]}}"]
    env = {"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"}
    done = subprocess.run(bash, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=120)
    assert (done.returncode, (tmp_path / "done").exists()) == (code, True), done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert "BrokenPipe" not in done.stderr


def test_an_output_of_ascii_costs_characters_alone(tmp_path):
    env = {"PYTHONPATH": str(ROOT), "PATH": "", "PYTHONIOENCODING": "ascii"}
    done = subprocess.run(
        [sys.executable, "-c", PRINTS, str(tmp_path / "done"), "0"],
        cwd=ROOT,
        env=env,
        capture_output=True,
        check=False,
    )
    assert done.returncode == 0
    assert b"a ?" in done.stdout


def start(home: Path, *command: str) -> subprocess.Popen[str]:
    places = {"MOE_FRONTIER_HOME": str(home), "RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [sys.executable, "-c", START, *command],
        cwd=ROOT,
        env=os.environ | places,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def interrupted(process: subprocess.Popen[str], sent: signal.Signals, after: Path) -> str:
    """Sends the signal once the file has a report of 20 steps. Returns what the command said."""
    return ended(process, after, lambda: process.send_signal(sent), 128 + sent)


def ended(process: subprocess.Popen[str], after: Path, end: Callable[[], object], code: int) -> str:
    """Calls `end` once the file has a report of 20 steps. Returns what the command said."""
    try:
        while max(steps_in(after), default=0) < 20:
            assert process.poll() is None, process.communicate()[0]
            time.sleep(0.1)
        end()
        said, _ = process.communicate(timeout=300)
    finally:
        process.kill()  # else it would train beside the other tests
    assert process.returncode == code, said
    return said


def rows_in(file: Path) -> list[dict[str, Any]]:
    lines = file.read_text().split("\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def steps_in(file: Path) -> list[int]:
    return [row["step"] for row in rows_in(file) if "metrics" in row]


def statuses(home: Path) -> set[str]:
    client = MlflowClient(f"sqlite:///{home}/mlflow.db")
    return {
        run.info.status for run in client.search_runs([e.experiment_id for e in client.search_experiments()])
    }


FIELDS = ("train.steps=400", "train.report_every=10", "checkpoint.every=400")


@pytest.mark.slow  # `test_cuts` saves two workers on a notice
@pytest.mark.parametrize(("sent", "workers"), [(signal.SIGINT, 2), (signal.SIGTERM, 2), (signal.SIGUSR1, 1)])
def test_a_run_saves_and_continues_without_repeating_a_step(sent, workers, tmp_path):
    command = ("jobs/train.py", "--name", "run", "--workers", str(workers), "--grace", "90", "--set", *FIELDS)
    file = tmp_path / "run" / "metrics.jsonl"
    said = interrupted(start(tmp_path, *command), sent, file)
    found = re.search(r"Interrupted: run is saved at step (\d+). Run the same command again", said)
    assert found, said
    assert 20 < int(found[1]) < 400
    assert statuses(tmp_path) == {"KILLED"}
    again = start(tmp_path, *command)
    said, _ = again.communicate(timeout=600)
    assert again.returncode == 0, said
    assert [row["resumed"] for row in rows_in(file) if "resumed" in row] == [int(found[1])]
    assert steps_in(file) == [*range(10, 401, 10)]


@pytest.mark.parametrize(
    "way",
    [
        pytest.param("terminal", marks=pytest.mark.smoke),
        # The fast lane has the request, which is a notice as a signal is (`test_housekeeping`).
        pytest.param("stop", marks=pytest.mark.slow),
        pytest.param("button", marks=pytest.mark.slow),
    ],
)
def test_a_sweep_saves_its_running_trials_however_it_is_stopped(way, tmp_path):
    """A closed terminal, `sweeps.py stop`, or the stop button of a notebook ends a sweep while two trials
    train and the third has not begun. After the button, the next cell of the notebook trains.
    """
    sweep, home = tmp_path / "sweep.py", tmp_path / "home"
    sweep.write_text(SWEEP)
    words = ["--confirm", "0", "--measure", "never", "--grace", "90"]
    command = ["jobs/pareto_sweep.py", "--sweep", f"{sweep}:make", *words]
    reports = home / "small/trials/a/metrics.jsonl"

    def stop() -> None:
        """Stops the sweep from another process, and waits for its end."""
        told, _ = (asks := start(home, "jobs/sweeps.py", "stop", "small")).communicate(timeout=300)
        assert (asks.returncode, "small is stopped; the same command continues it" in told) == (0, True), told

    said = ""
    match way:
        case "terminal":
            close_terminal(home, command, reports)
        case "stop":
            said = ended(start(home, *command), reports, stop, 130)
        case _:
            cells = tmp_path / "cells.py"
            cells.write_text(STOP_BUTTON)
            said, _ = (notebook := start(home, str(cells), f"{sweep}:make")).communicate(timeout=600)
            assert notebook.returncode == 0, said
            assert said.endswith("True\nfinished\n")
    assert statuses(home) == {"KILLED"}
    assert directory_state(f"{home}/small") == "stopped"
    saved = {arm: newest_step(home / f"small/trials/{arm}/checkpoints") for arm in "abc"}
    assert saved["a"] > saved["c"] == 0
    if way != "terminal":  # which takes no output
        named = dict(re.findall(r"small/trials/(\w+) is saved at step (\d+)", said))
        assert "a" in named, said
        assert "Traceback" not in said
        assert all(saved[arm] == int(step) for arm, step in named.items()), said
    said, _ = (again := start(home, *command)).communicate(timeout=600)
    assert again.returncode == 0, said
    for arm in "abc":
        file = home / f"small/trials/{arm}/metrics.jsonl"
        assert [row["resumed"] for row in rows_in(file) if "resumed" in row] == [saved[arm]] * (
            saved[arm] > 0
        )
        steps = 100 if arm == "c" else 600
        assert steps_in(file) == [*range(10, steps + 1, 10)], "no step is repeated"


def newest_step(checkpoints: Path) -> int:
    return max((int(path.name.partition("-")[2]) for path in checkpoints.glob("step-*")), default=0)


def close_terminal(home: Path, command: list[str], reports: Path) -> None:
    """Starts a command in a terminal, and closes it after 20 steps. That sends SIGHUP to the command,
    which leads its session, and then takes no output. Ray's processes end with the command, not with the
    terminal.
    """
    env = {"MOE_FRONTIER_HOME": str(home), "RAY_ADDRESS": "local", "PYTHONPATH": str(ROOT)}
    ours, theirs = pty.openpty()
    words = ["setsid", "--ctty", sys.executable, *command]
    process = subprocess.Popen(
        words, cwd=ROOT, env=os.environ | env, stdin=theirs, stdout=theirs, stderr=theirs
    )
    os.close(theirs)
    os.set_blocking(ours, False)  # a read of another thread would keep the terminal open
    try:
        while max(steps_in(reports), default=0) < 20:
            assert process.poll() is None
            with suppress(BlockingIOError):
                os.read(ours, 1 << 16)
            time.sleep(0.02)
        os.close(ours)
        assert process.wait(300) == 129
    finally:
        process.kill()


STOP_BUTTON = """
import os, signal, sys
from orchestrator import RunConfig, TrainConfig, run_sweep, train
from orchestrator.codec import override
from orchestrator.plugins import function_of
from orchestrator.sweeps.run import Watch

signal.signal(signal.SIGINT, signal.default_int_handler)

class Press(Watch):
    pressed = False
    def report(self, name, step, metrics):
        if not self.pressed and step >= 20:
            self.pressed = True
            os.kill(os.getpid(), signal.SIGINT)

sweep = function_of(sys.argv[1])()
try:
    run_sweep(sweep, progress=Press())
except KeyboardInterrupt as interrupt:
    print(interrupt)
print(signal.getsignal(signal.SIGINT) is signal.default_int_handler)
elsewhere = os.environ["MOE_FRONTIER_HOME"] + "-after"
after = RunConfig(name="after", storage=elsewhere, train=TrainConfig(steps=5))
print(train(after, progress=False).status)
"""


SWEEP = """
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.sweep import Sweep

def make():
    fields = {"train.steps": 600, "train.report_every": 10, "checkpoint.every": 600}
    arms = {name: {"model.mlp_dim": 32 * size} for size, name in enumerate("abc", 1)}
    arms["c"]["train.steps"] = 100
    return Sweep(base=override(RunConfig(), {"name": "small"} | fields), arms=arms)
"""

"""What a directory says of itself: whether somebody works there, was killed, or has ended."""

import errno
import fcntl
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.errors import UsageError
from orchestrator.runs import lock as lock_file
from orchestrator.runs.lock import InUse, holder_of, locked
from orchestrator.runs.run_directory import RunDir
from orchestrator.runs.state import directory_state
from orchestrator.sweeps.sweep import Sweep
from tests.made_directories import begin, begin_sweep, end, run_at
from tests.orchestrator.buckets import Bucket


def killed_in(directory: str, *, look: Callable[[], None] = lambda: None) -> int:
    """Kills a process that has locked the directory, after a look; returns its number."""
    read, write = os.pipe()
    if not (other := os.fork()):  # an interpreter would import the library for seconds
        try:
            with locked(directory):
                os.write(write, b"locked")
                time.sleep(600)
        finally:
            os._exit(1)
    os.close(write)
    try:
        with os.fdopen(read, "rb") as said:
            assert said.read(6) == b"locked"
        look()
    finally:
        os.kill(other, signal.SIGKILL)
        os.waitpid(other, 0)
    return other


def test_a_run_from_its_start_to_its_end(tmp_path: Path) -> None:
    run = run_at(tmp_path, "one")
    directory = RunDir.of(run).path
    assert directory_state(directory) is None
    with locked(directory):
        begin(run)
        assert directory_state(directory) == "running"
    assert directory_state(directory) == "stopped", "by Ctrl-C"

    def look() -> None:
        assert directory_state(directory) == "running"
        with (
            pytest.raises(InUse, match=r"another process works in .*one \(process \d+ on "),
            locked(directory),
        ):
            pass

    number = killed_in(directory, look=look)
    assert directory_state(directory) == "lost"
    holder = holder_of(directory)
    assert holder
    assert (holder.pid, holder.lives) == (number, False)
    with locked(directory):
        assert directory_state(directory) == "running"
    RunDir(directory).write_error("it broke")
    assert directory_state(directory) == "failed"
    storage.delete(RunDir(directory).error_file)
    end(run, 10, val__acc1=0.5)
    assert directory_state(directory) == "finished"


@pytest.mark.parametrize(
    ("status", "state"),
    [("running", "lost"), ("interrupted", "stopped"), ("failed", "failed"), ("finished", "finished")],
)
def test_a_sweep_and_its_trials(status: str, state: str, tmp_path: Path) -> None:
    sweep = Sweep(base=run_at(tmp_path, "s"), arms={"a": {}, "b": {}})
    directory = begin_sweep(sweep, status=status)
    trials = sweep.trials()
    one, other = (begin(trials[name].run) for name in "ab")
    end(trials["b"].run, 10, val__acc1=0.5)
    with locked(directory):
        assert [directory_state(place) for place in (directory, one, other)] == [
            "running",
            "running",
            "finished",
        ]
    assert [directory_state(place) for place in (directory, one, other)] == [state, "stopped", "finished"]
    killed_in(directory)
    assert [directory_state(place) for place in (one, other)] == ["lost", "finished"]


def test_who_only_looks_keeps_nobody_out(tmp_path: Path) -> None:
    directory = str(tmp_path)
    with locked(directory):
        pass
    with open(tmp_path / "lock", "rb") as file:
        fcntl.flock(file, fcntl.LOCK_SH)
        timer = threading.Timer(0.02, fcntl.flock, (file, fcntl.LOCK_UN))
        timer.start()
        with locked(directory):
            pass
        timer.join()


def test_a_holder_on_a_node_whose_locks_are_not_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """NFS that is mounted with local_lock: signs of life tell, while they come."""
    (tmp_path / "lock").write_text('{"host": "elsewhere", "pid": 7}')
    directory = str(tmp_path)
    assert holder_of(directory) == ("elsewhere", 7, True)
    os.utime(tmp_path / "lock", (0, time.time() - 2 * lock_file.LEASE_S))
    assert holder_of(directory) == ("elsewhere", 7, False)


def test_a_holder_touches_its_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lock_file, "LEASE_S", 0.09)
    with locked(str(tmp_path)):
        os.utime(tmp_path / "lock", (0, 0))
        while (tmp_path / "lock").stat().st_mtime == 0:
            time.sleep(0.01)
    assert holder_of(str(tmp_path)) is None


@pytest.mark.parametrize("scheme", ["s3"])
def test_a_lease(scheme: str, bucket_of: Callable[[str], Bucket], monkeypatch: pytest.MonkeyPatch) -> None:
    directory = bucket_of(scheme).uri("sweep")
    assert holder_of(directory) is None
    with locked(directory):
        holder = holder_of(directory)
        assert holder
        assert (holder.pid, holder.lives) == (os.getpid(), True)
    assert holder_of(directory) is None
    storage.write_bytes(f"{directory}/lock", b'{"holder": "h", "host": "elsewhere", "pid": 7}')
    monkeypatch.setattr(lock_file, "LEASE_S", -60.0)
    assert holder_of(directory) == ("elsewhere", 7, False)


@pytest.mark.parametrize("code", [errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP, errno.EIO, errno.ESTALE])
def test_a_file_system_without_locks_is_said(
    code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin(run := run_at(tmp_path, "one"))
    directory = RunDir.of(run).path
    with locked(directory):
        pass

    def without(file: object, operation: int) -> None:
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(fcntl, "flock", without)
    with (
        pytest.raises(UsageError, match=r"one/lock.* gives no locks|gives no locks") as refused,
        locked(directory),
    ):
        pass
    assert not isinstance(refused.value, InUse)
    assert os.strerror(code) in str(refused.value)
    assert directory_state(directory) == "stopped", "a list does not end because of it"

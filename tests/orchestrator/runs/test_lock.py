"""Two processes never work in one directory, whatever their clocks say and whoever was killed."""

import json
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from orchestrator import storage
from orchestrator.errors import UsageError
from orchestrator.runs import lock as lock_file
from orchestrator.runs.lock import InUse, locked
from orchestrator.runs.metrics_file import LineWriter
from tests.orchestrator.buckets import Bucket


def hold(directory: str, told: Connection) -> None:
    with locked(directory):
        told.send("locked")
        told.recv()


def test_two_processes_never_work_in_one_directory(tmp_path: Path) -> None:
    """The lock of a killed process is free at once."""
    directory, forked = f"{tmp_path}/run", multiprocessing.get_context("fork")
    ours, theirs = forked.Pipe()
    other = forked.Process(target=hold, args=(directory, theirs))
    other.start()
    assert ours.recv() == "locked"
    for fresh in (False, True):
        with (
            pytest.raises(UsageError, match=f"another process works in {directory}"),
            locked(directory, fresh=fresh),
        ):
            pass
    other.kill()
    other.join()
    with locked(directory):
        pass


def test_a_folder_that_is_moved_aside_between_opening_and_locking(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A lock on the folder that was moved aside does not protect the folder that takes its place."""
    directory, flock = f"{tmp_path}/run", lock_file.fcntl.flock
    inside: list[bool] = []

    def moved_before(*args: object) -> None:
        monkeypatch.setattr(lock_file.fcntl, "flock", flock)
        os.rename(directory, f"{directory}.old-1")
        flock(*args)  # pyright: ignore[reportArgumentType]

    monkeypatch.setattr(lock_file.fcntl, "flock", moved_before)
    with locked(directory), pytest.raises(InUse), locked(directory):
        inside.append(True)
    assert not inside


def write_lock(directory: str, holder: str) -> bytes:
    content = json.dumps({"holder": holder, "host": "elsewhere", "renewals": 1}).encode()
    storage.write_bytes(f"{directory}/lock", content)
    return content


@pytest.fixture(params=["s3", "gs", "az"])
def directory(
    request: pytest.FixtureRequest, bucket_of: Callable[[str], Bucket], monkeypatch: pytest.MonkeyPatch
) -> Iterator[str]:
    """In an object storage, whose leases are short."""
    monkeypatch.setattr(lock_file, "LEASE_S", 1.0)
    directory = bucket_of(request.param).uri("sweep")
    yield directory
    storage.allow_writes(directory)


def test_a_lease_is_free_once_its_block_has_ended(directory: str, caplog: pytest.LogCaptureFixture) -> None:
    """Also after Ctrl-C: the next command waits for nothing."""
    with pytest.raises(KeyboardInterrupt), locked(directory):
        raise KeyboardInterrupt
    with locked(directory):
        pass
    assert "waiting" not in caplog.text


def test_a_holder_that_renews_its_lease_is_never_taken_for_dead(
    directory: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also if the clock of its machine is days behind: only signs of life count."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() - 1e6)
    with locked(directory):
        monkeypatch.setattr(time, "time", real)
        with (
            pytest.raises(UsageError, match=r"a process on .* works in .*://.*: wait for it, or end it"),
            locked(directory),
        ):
            pass


def test_the_lease_of_a_killed_process_is_waited_for(
    directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """The command says for what, and for how long; one of two commands that wait gets it."""
    write_lock(directory, "dead")
    began, inside = time.monotonic(), []

    def enter() -> None:
        try:
            with locked(directory):
                inside.append("in")
                time.sleep(0.5)
                inside.append("out")
        except InUse:
            inside.append("refused")

    threads = [threading.Thread(target=enter) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    # The refusal falls within the other's stay, which begins a moment before its first word.
    assert inside in (["in", "refused", "out"], ["refused", "in", "out"])
    assert time.monotonic() - began > lock_file.LEASE_S
    assert "is locked by a process on elsewhere, which may have been killed: waiting up to 1 s" in caplog.text


def test_who_lost_the_lease_stops_and_writes_nothing(
    directory: str, caplog: pytest.LogCaptureFixture
) -> None:
    """It is interrupted in its work, and its other threads can neither write nor delete there."""
    lines, ended = LineWriter(directory, "metrics"), []
    handler = signal.signal(signal.SIGINT, signal.default_int_handler)

    def work() -> None:
        with locked(directory):
            lines.add({"n": 1})
            write_lock(directory, "other")
            try:
                time.sleep(30)
                ended.append(True)
            finally:
                for write in (lines.close, lambda: storage.delete(f"{directory}/lock")):
                    with pytest.raises(PermissionError, match="another process has taken over"):
                        write()

    try:
        with pytest.raises(InUse, match=r"another process has taken over .*://.* it stops"):
            work()
    finally:
        signal.signal(signal.SIGINT, handler)
    assert not ended
    assert storage.names(directory) == ["lock"]
    assert json.loads(storage.read_bytes(f"{directory}/lock"))["holder"] == "other"
    assert "another process has taken over" in caplog.text
    storage.write_bytes(f"{directory}-2/x", b"")  # other folders are not concerned


def test_who_lost_a_lease_may_write_once_it_has_another(directory: str) -> None:
    """A notebook goes on in the process that lost it."""
    storage.refuse_writes(directory)
    with locked(directory):
        storage.write_bytes(f"{directory}/x", b"")


def test_a_renewal_whose_answer_was_lost_is_no_other_process(directory: str) -> None:
    """The holder finds a lock of its own that it does not know."""
    with locked(directory):
        ours = json.loads(storage.read_bytes(f"{directory}/lock"))
        write_lock(directory, ours["holder"])
        time.sleep(0.5)
        assert json.loads(storage.read_bytes(f"{directory}/lock"))["host"] == ours["host"]


def test_nothing_is_moved_aside_in_an_object_storage(bucket: Bucket) -> None:
    storage.write_bytes(bucket.uri("run", "result.json"), b"{}")
    with (
        pytest.raises(UsageError, match="an object storage has no rename"),
        locked(bucket.uri("run"), fresh=True),
    ):
        pass
    assert storage.names(bucket.uri("run")) == ["lock", "result.json"]


def test_a_lock_that_was_deleted_by_hand_comes_back(directory: str) -> None:
    with locked(directory):
        storage.delete(f"{directory}/lock")
        time.sleep(0.5)
        assert storage.names(directory) == ["lock"]

"""The node's cache of files: made once, bounded in what the disk holds, left clean by killed processes."""

import os
import subprocess
import sys
import textwrap
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import BinaryIO

import pytest

from orchestrator.data import cache
from orchestrator.data.cache import CACHE_FOLDER, TOTAL, cached, open_cached
from orchestrator.errors import UsageError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(name: str, size: int = 10, limit: int = 1000) -> bytes:
    with cached(name, size, lambda to: to.write(name[0].encode() * size) and None, limit=limit) as file:
        return file.read()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} - {TOTAL}


def test_a_file_is_made_once_however_many_threads_want_it(folder: Path) -> None:
    calls, start = [], threading.Barrier(8)

    def want(_: int) -> bytes:
        start.wait()

        def make(to: BinaryIO) -> None:
            calls.append(to)
            to.write(b"x" * 100_000)

        with cached("name", 100_000, make, limit=10**6) as file:
            return file.read()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(want, range(8))) == {b"x" * 100_000}
    assert len(calls) == 1
    assert names(folder) == {"name"}
    assert folder.stat().st_mode & 0o077 == 0  # not readable by other users


def test_waiting_for_a_file_that_its_first_reader_keeps_open(folder: Path) -> None:
    """The reader ends when all have it."""
    start, all_have_it = threading.Barrier(8), threading.Barrier(8, timeout=20)

    def want(_: int) -> bytes:
        def make(to: BinaryIO) -> None:
            time.sleep(0.1)
            to.write(b"x")

        start.wait()
        with cached("name", 1, make, limit=10**6) as file:
            all_have_it.wait()
            return file.read()

    with ThreadPoolExecutor(8) as pool:
        assert [*pool.map(want, range(8))] == [b"x"] * 8


def test_the_least_recently_used_files_go(folder: Path) -> None:
    for number, name in enumerate("abc"):
        put(name)
        os.utime(folder / name, (number, number))
    assert put("a") == b"a" * 10  # used now
    put("d", limit=40)
    assert names(folder) == {"a", "b", "c", "d"}
    put("e", limit=40)
    assert names(folder) == {"a", "d", "e"}  # a tenth of the limit is freed beside the file's own room
    with pytest.raises(UsageError, match=r"1e-07 GB does not fit into data\.cache_gb=4e-08"):
        put("f", size=100, limit=40)


def test_the_disk_never_holds_more_than_the_limit(folder: Path) -> None:
    """A file that is open is not removed, since its bytes would stay taken."""
    held = [cached(name, 40, lambda to: to.write(b"x" * 40) and None, limit=100) for name in ("a", "b")]
    with pytest.raises(UsageError, match=r"in use: raise data\.cache_gb"):
        put("c", size=40, limit=100)
    assert names(folder) == {"a", "b"}
    held[0].close()
    assert put("c", size=40, limit=100) == b"c" * 40
    assert names(folder) == {"b", "c"}
    assert held[1].read() == b"x" * 40


def test_adding_files_does_not_list_the_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put("a")
    listed = []
    # Only while files are added: pathlib's own listings, below, use scandir from Python 3.13 on.
    with monkeypatch.context() as patched:
        patched.setattr(os, "scandir", lambda path: listed.append(path) or iter(()))
        for number in range(50):
            put(f"{number}")
    assert not listed
    assert len(names(folder)) == 51
    assert (folder / TOTAL).read_text() == "510"


def test_a_failure_leaves_no_file(folder: Path) -> None:
    def fails(to: BinaryIO) -> None:
        to.write(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        cached("name", 10, fails, limit=100)
    assert names(folder) == set()
    assert put("name") == b"n" * 10
    with pytest.raises(OSError, match="has 3 bytes rather than 5"):
        cached("other", 5, lambda to: to.write(b"abc") and None, limit=100)


def test_killed_processes(folder: Path) -> None:
    """Eight processes make and remove files; each is killed while it makes a file that others wait for."""
    code = """
        import os, random, signal, sys
        from orchestrator.data.cache import cached
        draws = random.Random(int(sys.argv[1]))
        def make(to):
            to.write(b"half")
            if draws.random() < 0.1:
                os.kill(os.getpid(), signal.SIGKILL)
            to.seek(0)
            to.write(bytes(100))
        while True:
            name = str(draws.randrange(30))
            cached(name, 100, make, limit=1500).close()
    """
    command = [sys.executable, "-c", textwrap.dedent(code)]
    processes = [subprocess.Popen([*command, str(seed)]) for seed in range(8)]
    assert [process.wait() for process in processes] == [-9] * 8
    for name in range(30):
        assert len(put(str(name), size=100, limit=1500)) == 100
    assert sum(path.stat().st_size for path in folder.iterdir() if path.name != TOTAL) <= 1500
    whole = [path for path in folder.iterdir() if path.suffix != ".part" and path.name != TOTAL]
    assert {path.stat().st_size for path in whole} == {100}


def test_a_file_that_is_removed_while_it_is_opened(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put("name")
    utime = os.utime

    def removed(file: int) -> None:
        utime(file)
        (folder / "name").unlink()

    monkeypatch.setattr(cache.os, "utime", removed)
    assert open_cached("name") is None


def test_a_folder_that_cannot_be_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cache.CACHE_FOLDER, "/proc/none")
    with pytest.raises(UsageError, match=r"cache .* cannot be at /proc/none .*: set \$MOE_FRONTIER_CACHE"):
        put("name")


def test_a_folder_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match=r"belongs to another user: set \$MOE_FRONTIER_CACHE"):
        put("name")

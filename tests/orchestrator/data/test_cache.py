"""Files of this node: made once for all who want them, whole or absent; the least recently used go first."""

import os
import subprocess
import sys
import textwrap
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from orchestrator.data.shards import CACHE_FOLDER, cached


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache"


def put(name: str, size: int = 10, limit: int = 1000) -> bytes:
    with cached(name, lambda to: to.write_bytes(name[0].encode() * size) and None, limit=limit) as file:
        return file.read()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock" and path.name != "lock"}


def test_made_once_however_many_threads_want_it(folder: Path) -> None:
    calls, start = [], threading.Barrier(8)

    def want(_: int) -> bytes:
        start.wait()

        def make(to: Path) -> None:
            calls.append(to)
            to.write_bytes(b"x" * 100_000)

        with cached("name", make, limit=10**6) as file:
            return file.read()

    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(want, range(8))) == {b"x" * 100_000}
    assert len(calls) == 1
    assert names(folder) == {"name"}
    assert folder.stat().st_mode & 0o077 == 0  # other users may not look


def test_the_least_recently_used_go(folder: Path) -> None:
    for number, name in enumerate("abc"):
        put(name)
        os.utime(folder / name, (number, number))
    assert put("a") == b"a" * 10  # used now
    put("d", limit=30)
    assert names(folder) == {"a", "c", "d"}
    assert put("e", size=100, limit=30) == b"e" * 100  # larger than the limit
    assert names(folder) == {"e"}


def test_an_open_file_can_be_read_after_it_is_removed(folder: Path) -> None:
    with cached("a", lambda to: to.write_bytes(b"a" * 10) and None, limit=15) as file:
        put("b", limit=15)
        assert names(folder) == {"b"}
        assert file.read() == b"a" * 10


def test_a_failure_leaves_nothing(folder: Path) -> None:
    def fails(to: Path) -> None:
        to.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        cached("name", fails, limit=100)
    assert names(folder) == set()
    assert put("name") == b"n" * 10


def test_a_process_that_is_killed_releases_its_lock(folder: Path) -> None:
    """While it makes a file, which others wait for."""
    code = """
        import os, signal, sys
        from orchestrator.data.shards import CACHE_FOLDER, cached
        def make(to):
            to.write_bytes(b"half")
            os.kill(os.getpid(), signal.SIGKILL)
        cached("name", make, limit=100)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(code)]).returncode == -9
    assert put("name") == b"n" * 10


def test_a_folder_of_another_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 12345)
    with pytest.raises(PermissionError, match=r"belongs to another user: set \$MOE_FRONTIER_CACHE"):
        put("name")

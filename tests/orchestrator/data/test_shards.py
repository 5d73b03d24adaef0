"""Reading any image of a shard; refusing a shard that changed; the node's cache of files."""

import hashlib
import os
import subprocess
import sys
import textwrap
import threading
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from orchestrator import storage
from orchestrator.data.manifest import Format, Manifest, Shard, open_manifest
from orchestrator.data.shards import CACHE_FOLDER, DataSet, Rows, cached
from orchestrator.errors import UsageError
from tests.orchestrator.buckets import Bucket
from tests.orchestrator.data.images import parquet as write_parquet
from tests.orchestrator.data.images import tar as write_tar

Pack = Callable[..., tuple[str, Manifest]]
IMAGES = [np.random.default_rng(n).bytes(50 + 100 * n) for n in range(20)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    return tmp_path / "cache"


def parquet(folder: Path, compression: str = "none", images: list[bytes] = IMAGES) -> bytes:
    numbers = range(len(images))
    columns = {"image": images, "label": [n % 3 for n in numbers], "key": [f"key-{n}" for n in numbers]}
    path = write_parquet(folder / "made.parquet", columns, compression=compression, row_group_size=7)
    return path.read_bytes()


def tar(folder: Path) -> bytes:
    images = [(f"key-{n}.jpg", image) for n, image in enumerate(IMAGES)]
    labels = [(f"key-{n}.cls", str(n % 3).encode()) for n in range(len(IMAGES))]
    return write_tar(folder / "made.tar", [*images, *labels]).read_bytes()


def described(path: str, content: bytes, format: Format = "parquet", rows: int = 20) -> Shard:
    return Shard(
        path=path, rows=rows, bytes=len(content), sha256=hashlib.sha256(content).hexdigest(), format=format
    )


def data_set(path: str, *shards: Shard, classes: tuple[str, ...] = ("a", "b", "c")) -> DataSet:
    manifest = Manifest(classes=classes, splits={"train": shards, "val": shards})
    return DataSet(path=path, manifest=manifest, cache_bytes=10**9)


def assert_all_there(rows: Rows) -> None:
    assert [rows.image(n) for n in reversed(range(20))] == IMAGES[::-1]
    assert rows.labels.tolist() == [n % 3 for n in range(20)]
    assert rows.keys == [f"key-{n}" for n in range(20)]


@pytest.fixture(params=["local", "s3"])
def root(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return str(tmp_path) if request.param == "local" else request.getfixturevalue("bucket").uri("data")


@pytest.mark.parametrize("kind", ["none", "zstd", "tar"])
def test_every_row(kind: str, root: str, tmp_path: Path) -> None:
    content = tar(tmp_path) if kind == "tar" else parquet(tmp_path, kind)
    storage.write_bytes(storage.join(root, "shard"), content)
    format: Format = "webdataset" if kind == "tar" else "parquet"
    for _ in range(2):  # the second time, the index is in the cache
        rows = data_set(root, described("shard", content, format)).open("train", 0)
        assert rows.location == storage.join(root, "shard")
        assert_all_there(rows)


def test_images_that_repeat_and_hold_each_other(tmp_path: Path) -> None:
    """Offsets are found one after the other."""
    images = [b"aaaa", b"aa", b"aaaa", b"", b"a", b"", b"aaaa" * 200, b"aaaa" * 199]
    content = parquet(tmp_path, images=images)
    (tmp_path / "shard").write_bytes(content)
    rows = data_set(str(tmp_path), described("shard", content, rows=8)).open("train", 0)
    assert [rows.image(n) for n in range(8)] == images


def test_labels(tmp_path: Path) -> None:
    """Names become numbers; labels that are not among the classes are refused."""
    columns = {"image": IMAGES[:3], "label": ["cat", "dog", "cat"], "key": list("xyz")}
    content = write_parquet(tmp_path / "shard", columns).read_bytes()
    shard, path = described("shard", content, rows=3), str(tmp_path)
    found = data_set(path, shard, classes=("dog", "cat")).open("train", 0).labels
    assert found.tolist() == [1, 0, 1]
    with pytest.raises(UsageError, match=r"shard: y has label 'dog', the data set has 1 classes"):
        data_set(path, shard, classes=("cat",)).open("train", 0)
    (tmp_path / "shard").write_bytes(content := parquet(tmp_path))
    with pytest.raises(UsageError, match=r"shard: key-2 has label 2, the data set has 2 classes"):
        data_set(str(tmp_path), described("shard", content), classes=("a", "b")).open("train", 0)


def test_flipped_byte(root: str, tmp_path: Path, own_cache: Path) -> None:
    content = bytearray(parquet(tmp_path))
    shard = described("shard", bytes(content))
    content[len(content) // 2] ^= 1
    storage.write_bytes(storage.join(root, "shard"), bytes(content))
    with pytest.raises(UsageError, match=rf"shard {root}/shard changed since it was packed"):
        data_set(root, shard).open("train", 0)
    assert names(own_cache) == set()


def test_a_change_after_it_was_indexed(tmp_path: Path) -> None:
    """The old index is not used. A shard that is gone is an OSError."""
    (tmp_path / "shard").write_bytes(content := parquet(tmp_path))
    assert_all_there(data_set(str(tmp_path), described("shard", content)).open("train", 0))
    (tmp_path / "shard").write_bytes(zlib.compress(content)[: len(content)])
    with pytest.raises(UsageError, match="changed since it was packed"):
        data_set(str(tmp_path), described("shard", content)).open("train", 0)
    with pytest.raises(FileNotFoundError, match="nothing"):
        data_set(str(tmp_path), described("nothing", b"")).open("train", 0)


class TestS3:
    @pytest.fixture
    def data(self, bucket: Bucket, tmp_path: Path) -> DataSet:
        content = parquet(tmp_path)
        storage.write_bytes(bucket.uri("data/shard"), content)
        bucket.proxy.requests.clear()
        return data_set(bucket.uri("data"), described("shard", content))

    def test_a_shard_is_fetched_once_per_node(self, data: DataSet, bucket: Bucket) -> None:
        assert_all_there(data.open("train", 0))
        fetched = len(bucket.proxy.requests)
        again = DataSet(path=data.path, manifest=data.manifest, cache_bytes=data.cache_bytes)
        assert_all_there(again.open("train", 0))
        assert len(bucket.proxy.requests) == fetched > 0

    def test_what_is_open_survives_its_eviction(self, data: DataSet, own_cache: Path) -> None:
        rows = data.open("train", 0)
        for path in own_cache.iterdir():
            path.unlink()
        assert_all_there(rows)
        again = DataSet(path=data.path, manifest=data.manifest, cache_bytes=data.cache_bytes)
        assert_all_there(again.open("train", 0))


def test_packed_shards(pack_greys: Pack) -> None:
    """Training opens shards as they were packed."""
    path, _ = pack_greys(train=10, val=3)
    manifest = open_manifest(path)
    data = DataSet(path=path, manifest=manifest, cache_bytes=10**9)
    rows = [data.open("train", shard) for shard in range(3)]
    assert [key for shard in rows for key in shard.keys] == [f"grey-{n}" for n in range(10)]
    assert [label for shard in rows for label in shard.labels] == list(range(10))


def put(name: str, size: int = 10, limit: int = 1000) -> bytes:
    with cached(name, lambda to: to.write_bytes(name[0].encode() * size) and None, limit=limit) as file:
        return file.read()


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir() if path.suffix != ".lock" and path.name != "lock"}


def test_a_file_is_made_once_however_many_threads_want_it(own_cache: Path) -> None:
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
    assert names(own_cache) == {"name"}
    assert own_cache.stat().st_mode & 0o077 == 0  # not readable by other users


def test_the_least_recently_used_files_go(own_cache: Path) -> None:
    for number, name in enumerate("abc"):
        put(name)
        os.utime(own_cache / name, (number, number))
    assert put("a") == b"a" * 10  # used now
    put("d", limit=30)
    assert names(own_cache) == {"a", "c", "d"}
    assert put("e", size=100, limit=30) == b"e" * 100  # larger than the limit
    assert names(own_cache) == {"e"}


def test_a_failure_leaves_no_file(own_cache: Path) -> None:
    def fails(to: Path) -> None:
        to.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space left"):
        cached("name", fails, limit=100)
    assert names(own_cache) == set()
    assert put("name") == b"n" * 10


def test_a_process_that_is_killed_releases_its_lock(own_cache: Path) -> None:
    """It is killed while it makes a file that others wait for."""
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

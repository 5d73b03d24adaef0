"""Reading any image of a shard by its range, from disk and from S3; refusing a shard that changed."""

import hashlib
import time
import tracemalloc
import zlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from queue import Queue
from threading import Thread

import numpy as np
import pyarrow.parquet as pq
import pytest

from orchestrator import storage
from orchestrator.data import shards
from orchestrator.data.cache import CACHE_FOLDER, TOTAL, cached
from orchestrator.data.images import BadImage
from orchestrator.data.index import RECORD, IndexedShard, records_of, sample_ids, write_index
from orchestrator.data.manifest import Manifest, Shard, open_manifest
from orchestrator.data.shards import DataSet, fetch_whole
from orchestrator.errors import UsageError
from orchestrator.packing.pack import Encoded, pack_shard, write_shards
from orchestrator.packing.samples import Sample
from tests.orchestrator.buckets import Bucket
from tests.orchestrator.data.images import parquet as write_parquet

Pack = Callable[..., tuple[str, Manifest]]
RNG = np.random.default_rng(0)
IMAGES = [RNG.bytes(50 + 100 * n) for n in range(20)]
KEYS = [f"key-{n}" for n in range(20)]
LABELS = [n % 3 for n in range(20)]


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The cache of a node that has read nothing before; this process has begun no fetches either."""
    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    shards._fetching.clear()
    shards._etags.clear()
    return tmp_path / "cache"


def data_set(root: str, *, whole: bool = False) -> DataSet:
    """Packs `IMAGES` into three shards."""
    samples = [Sample(*each) for each in zip(IMAGES, LABELS, KEYS, strict=True)]
    done = [pack_shard(root, iter, Encoded, (f"{i}", samples[i : i + 7])) for i in range(0, 20, 7)]
    found, indexed = zip(*(packed.shard for packed in done if packed.shard), strict=True)
    index = {split: write_index(root, split, indexed) for split in ("train", "val")}
    splits = {"train": found, "val": found}
    manifest = Manifest(classes=("a", "b", "c"), splits=splits, index=index, val_majority=1)
    return DataSet(path=root, manifest=manifest, cache_bytes=10**9, whole=whole)


def names(cache: Path) -> list[str]:
    """Returns the names of shards in a cache."""
    return [path.name for path in cache.iterdir() if path.name != TOTAL and path.suffix != ".index"]


def read(data: DataSet, rows: np.ndarray) -> list[bytes]:
    """Reads images by their number in the data set."""
    shard, row = rows // 7, rows % 7
    return [image() for image in data.images("train", shard, data.records("train", shard, row))[0]]


def test_every_row_in_any_order(root: str) -> None:
    data, rows = data_set(root), RNG.permutation(20)
    assert read(data, rows) == [IMAGES[n] for n in rows]
    records = data.records("train", rows // 7, rows % 7)
    assert records["label"].tolist() == [LABELS[n] for n in rows]
    assert records["sample"].tolist() == sample_ids(KEYS)[rows].tolist()
    assert data.labels("val").tolist() == LABELS
    assert [key for shard in range(3) for key in data.keys("train", shard)] == KEYS
    assert data.location("train", 1) == storage.join(root, "7")


def test_a_sample_id_is_the_beginning_of_a_sha256() -> None:
    digest = hashlib.sha256(b"key-3").digest()
    assert sample_ids(["key-3"]).tolist() == [int.from_bytes(digest[:8], "big") >> 1]


def test_a_record_takes_at_most_28_bytes(tmp_path: Path) -> None:
    data_set(str(tmp_path))
    assert (tmp_path / "train.index").stat().st_size == 20 * RECORD.itemsize <= 20 * 28


def test_an_index_of_other_images(tmp_path: Path) -> None:
    data = data_set(str(tmp_path))
    for count in (19, 21):
        (tmp_path / "train.index").write_bytes(bytes(count * RECORD.itemsize))
        with pytest.raises(UsageError, match=f"describes {count} images, the manifest 20"):
            data.records("train", np.array([0]), np.array([0]))


def test_an_index_costs_a_process_no_memory(tmp_path: Path) -> None:
    """400 million images in 10,000 shards, in a sparse file."""
    with (tmp_path / "train.index").open("wb") as file:
        file.truncate(400_000_000 * RECORD.itemsize)
    shards = (Shard(path="0", rows=40_000, bytes=1, sha256=""),) * 10_000
    manifest = Manifest(classes=("a",), splits={"train": shards}, index={"train": ""}, val_majority=1)
    data = DataSet(path=str(tmp_path), manifest=manifest, cache_bytes=10**9)
    data.places("train", np.array([0]))
    tracemalloc.start()
    shard, row = RNG.integers(0, 10_000, 1000), RNG.integers(0, 40_000, 1000)
    assert not data.records("train", shard, row)["size"].any()
    assert tracemalloc.get_traced_memory()[1] < 1e6
    tracemalloc.stop()


def compressed(folder: str, tmp_path: Path) -> DataSet:
    """A shard of compressed images, as another project wrote it; row 5 has no image."""
    images = [*IMAGES[:5], None, *IMAGES[5:]]
    columns = {"image": images, "label": [0] * 21, "key": [f"{n}" for n in range(21)]}
    path = write_parquet(tmp_path / "made", columns, compression="zstd", row_group_size=4)
    content = path.read_bytes()
    storage.write_bytes(storage.join(folder, "shard"), content)
    sizes, crcs = [len(image) for image in IMAGES], [zlib.crc32(image) for image in IMAGES]
    records = records_of(np.cumsum([0, *sizes[:-1]]), sizes, crcs, LABELS, KEYS)
    sha256 = hashlib.sha256(content).hexdigest()
    shard = Shard(path="shard", rows=20, bytes=len(content), sha256=sha256, unpacked=sum(sizes))
    index = {"train": write_index(folder, "train", [IndexedShard(records, KEYS)])}
    manifest = Manifest(classes=("a",), splits={"train": (shard,)}, index=index, val_majority=1)
    return DataSet(path=folder, manifest=manifest, cache_bytes=10**6)


def test_compressed_images_are_unpacked_once(root: str, tmp_path: Path, own_cache: Path) -> None:
    data = compressed(root, tmp_path)
    rows = np.arange(20)
    records = data.records("train", rows * 0, rows)
    for _ in range(2):
        assert [image() for image in data.images("train", rows * 0, records)[0]] == IMAGES
        assert [name for name in names(own_cache) if name.endswith(".images")] == names(own_cache)
        storage.delete(storage.join(root, "shard"))


def test_a_compressed_shard_that_is_damaged(root: str, tmp_path: Path, own_cache: Path) -> None:
    data = compressed(root, tmp_path)
    content = storage.read_bytes(storage.join(root, "shard"))
    storage.write_bytes(storage.join(root, "shard"), content[:4] + bytes(8) + content[12:])
    first = np.array([0])
    (read,) = data.images("train", first, data.records("train", first, first))[0]
    with pytest.raises(UsageError, match="shard changed since it was packed"):
        read()


def test_threads_read_one_file_at_once(tmp_path: Path) -> None:
    """Though it is opened once, none moves another to a wrong place."""
    content, places = RNG.bytes(1 << 20), RNG.integers(0, (1 << 20) - 20_000, 2500).tolist()
    (tmp_path / "0").write_bytes(content)
    read = partial(shards._from_disk, str(tmp_path / "0"), Shard(path="0", rows=1, bytes=1 << 20, sha256=""))
    with ThreadPoolExecutor(8) as pool:
        found = [*pool.map(lambda at: read(at, 20_000), places)]
    assert found == [content[at : at + 20_000] for at in places]


def test_shards_that_changed(tmp_path: Path) -> None:
    data = data_set(str(tmp_path))
    content = (tmp_path / "0").read_bytes()
    (tmp_path / "0").write_bytes(content[:200])
    with pytest.raises(UsageError, match=r"/0 is shorter than the \d+ bytes of its manifest"):
        read(data, np.arange(7))
    (tmp_path / "7").unlink()
    with pytest.raises(FileNotFoundError, match="/7"):
        read(data, np.arange(7, 8))


@pytest.mark.parametrize("compress", [False, True])
def test_a_flipped_bit_makes_a_bad_image(compress: bool, root: str, tmp_path: Path, own_cache: Path) -> None:
    """In a local shard, on S3, and among the images of a compressed shard that lie in the cache."""
    data = compressed(root, tmp_path) if compress else data_set(root)
    shard, row = np.array([0, 0, 0]), np.arange(3)
    read = data.images("train", shard, data.records("train", shard, row))[0]
    read[0]()  # a request that ended later would leave the ETag of the whole file
    if compress:
        (path,) = [str(own_cache / name) for name in names(own_cache)]
    else:
        path = data.location("train", 0)
    content = storage.read_bytes(path)
    at = content.index(IMAGES[1])
    storage.write_bytes(path, content[: at + 7] + bytes([content[at + 7] ^ 4]) + content[at + 8 :])
    shards._open.cache_clear()
    shards._etags.clear()
    read = data.images("train", shard, data.records("train", shard, row))[0]
    assert [read[0](), read[2]()] == [IMAGES[0], IMAGES[2]]
    with pytest.raises(BadImage, match="its bytes are not those that were indexed"):
        read[1]()


def test_packed_shards(pack_greys: Pack) -> None:
    """Training opens shards as they were packed."""
    path, _ = pack_greys(train=10, val=3)
    data = DataSet(path=path, manifest=open_manifest(path), cache_bytes=10**9)
    assert [key for shard in range(3) for key in data.keys("train", shard)] == [
        f"grey-{n}" for n in range(10)
    ]
    assert data.labels("train").tolist() == list(range(10))


def test_a_data_set_of_an_older_version(tmp_path: Path) -> None:
    samples = [Sample(b"x", 0, "0")]
    write_shards(str(tmp_path), ["a"], {"train": samples, "val": samples})
    text = (tmp_path / "manifest.json").read_text().replace('"format": 2,', "")
    (tmp_path / "manifest.json").write_text(text)
    with pytest.raises(UsageError, match=r"another version, in format 1, .*: pack it again, with `fresh`"):
        open_manifest(str(tmp_path))


GAP, MOST = 32 << 10, 8 << 20


@pytest.mark.parametrize(
    ("place", "together"),
    [
        ((0, 150, 10), True),
        ((0, 150 + GAP, 10), True),
        ((0, 151 + GAP, 10), False),
        ((0, 149, 10), False),  # it comes before the end of the other
        ((0, 0, 10), False),
        ((1, 150, 10), False),
        ((0, 150, MOST - 50), True),
        ((0, 150, MOST - 49), False),
    ],
)
def test_neighbours_that_one_request_fetches(place: shards.Place, together: bool) -> None:
    """Beside 50 bytes at 100 of shard 0: of the same shard, at most 32 KiB on, and 8 MiB in all."""
    first = (0, 100, 50)
    assert [*shards._runs([first, place])] == ([[first, place]] if together else [[first], [place]])


def test_no_request_grows_with_the_number_of_neighbours() -> None:
    """An image of its own may be larger."""
    places = [(0, n * (1 << 20), 1 << 20) for n in range(20)] + [(0, 20 << 20, 2 * MOST), (0, 36 << 20, 1)]
    runs = [*shards._runs(places)]
    assert [place for run in runs for place in run] == places
    assert [len(run) for run in runs] == [8, 8, 4, 1, 1]


class TestS3:
    @pytest.fixture
    def data(self, bucket: Bucket) -> DataSet:
        data = data_set(bucket.uri("data"))
        bucket.proxy.requests.clear()
        return data

    def test_the_first_images_cost_their_own_bytes(self, data: DataSet, bucket: Bucket) -> None:
        """A request for each image, and one for the index."""
        shard, row = np.array([0, 2, 1]), np.array([3, 1, 5])
        images, traffic = data.images("train", shard, data.records("train", shard, row))
        wanted = [IMAGES[3], IMAGES[15], IMAGES[12]]
        assert [image() for image in images] == wanted
        assert traffic == (3, sum(map(len, wanted)))
        assert len(bucket.proxy.requests) == 4

    def test_a_node_fetches_the_index_once(self, data: DataSet, bucket: Bucket) -> None:
        """However many processes want it: each locks a file that it opened, as the threads do here."""
        with ThreadPoolExecutor(8) as pool:
            found = [*pool.map(lambda _: shards._index.__wrapped__(data, "train"), range(8))]
        assert [index.records["label"].tolist() for index in found] == [LABELS] * 8
        for number in RNG.permutation(20):
            data.records("train", np.array([number // 7]), np.array([number % 7]))
        assert len(bucket.proxy.requests) == 1

    def test_a_mapped_index_stays_in_the_cache(self, data: DataSet, own_cache: Path) -> None:
        def put(size: int) -> None:
            cached("other", size, lambda to: to.write(bytes(size)) and None, limit=1000).close()

        first = np.array([0]), np.array([0])
        data = replace(data, cache_bytes=1000)
        assert data.records("train", *first)["label"] == LABELS[0]
        with pytest.raises(UsageError, match=r"5.6e-07 GB are in use: raise data\.cache_gb"):
            put(500)
        (index,) = own_cache.glob("*.index")
        shards._index.cache_clear()  # as when the process ends
        put(500)
        assert not index.exists()
        with pytest.raises(UsageError, match=r"does not fit into data\.cache_gb=1e-07"):
            replace(data, cache_bytes=100).records("train", *first)

    def test_without_a_cache_the_index_takes_memory(self, data: DataSet, own_cache: Path) -> None:
        data = replace(data, cache_bytes=0)
        assert read(data, np.arange(20)) == IMAGES
        assert not own_cache.exists()

    @pytest.mark.parametrize("cache_bytes", [0, 10**9])
    def test_a_damaged_index(self, cache_bytes: int, data: DataSet, own_cache: Path) -> None:
        location = storage.join(data.path, "train.index")
        whole = storage.read_bytes(location)
        for content in (whole[: -RECORD.itemsize], whole + b"-", bytes([whole[0] ^ 1]) + whole[1:], b""):
            storage.write_bytes(location, content)
            with pytest.raises(UsageError, match=r"train\.index changed since it was packed"):
                read(replace(data, cache_bytes=cache_bytes), np.array([0]))
        assert not [*own_cache.glob("*.*")]
        storage.write_bytes(location, whole)
        assert read(data, np.array([0])) == [IMAGES[0]]

    def test_neighbours_share_a_request(self, data: DataSet, bucket: Bucket) -> None:
        rows = np.array([2, 3, 4, 6, 8, 9, 1, 0])
        shard, row = rows // 7, rows % 7
        images, traffic = data.images("train", shard, data.records("train", shard, row))
        assert [image() for image in images] == [IMAGES[n] for n in rows]
        # 2 to 6 (5 lies between them), 8 and 9, then 1 and 0, which come in the wrong order.
        assert traffic.requests == 4 == len(bucket.proxy.requests) - 1
        assert traffic.bytes < 1.1 * sum(len(IMAGES[n]) for n in (2, 3, 4, 5, 6, 8, 9, 1, 0))

    def test_a_replaced_shard(self, data: DataSet) -> None:
        assert read(data, np.array([0])) == [IMAGES[0]]
        location = data.location("train", 0)
        content = storage.read_bytes(location)
        storage.write_bytes(location, content[::-1])
        with pytest.raises(UsageError, match="data/0 was replaced since it was packed, or while"):
            read(data, np.array([0]))
        shards._etags.clear()  # another process
        storage.write_bytes(location, content + b"x")
        with pytest.raises(UsageError, match="data/0 was replaced"):
            read(data, np.array([0]))
        for shorter in (content[:100], b""):
            storage.write_bytes(location, shorter)
            with pytest.raises(UsageError, match="data/0 was replaced"):
                read(data, np.array([3]))
        storage.delete(location)
        with pytest.raises(FileNotFoundError, match="data/0"):
            read(data, np.array([0]))

    def test_whole_shards_are_fetched_once_beside_ranges(self, bucket: Bucket, own_cache: Path) -> None:
        data = data_set(bucket.uri("data"), whole=True)
        rows = RNG.permutation(20)
        assert read(data, rows) == [IMAGES[n] for n in rows]
        shards._wanted().join()
        assert len(names(own_cache)) == 3
        bucket.proxy.requests.clear()
        assert read(data, rows) == [IMAGES[n] for n in rows]
        images, traffic = data.images("train", rows // 7, data.records("train", rows // 7, rows % 7))
        assert [image() for image in images] == [IMAGES[n] for n in rows]
        assert traffic == (0, 0)
        assert bucket.proxy.requests == []

    def test_a_request_that_fails_is_no_replaced_shard(
        self, data: DataSet, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If the file has its size."""

        def busy(*_: object) -> None:
            raise OSError("busy")

        monkeypatch.setattr(storage, "read_range", busy)
        with pytest.raises(OSError, match="busy"):
            read(data, np.array([0]))

    def test_a_shard_is_asked_for_once(self, bucket: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
        """However many of its images are read before it is there."""
        data, asked = data_set(bucket.uri("data"), whole=True), Queue()
        monkeypatch.setattr(shards, "_wanted", lambda: asked)
        for _ in range(2):
            read(data, RNG.permutation(20))
        wanted = [asked.get_nowait() for _ in range(asked.qsize())]
        whole = [(data.location("train", n), data.manifest.splits["train"][n], 10**9) for n in range(3)]
        assert sorted(wanted) == sorted(whole)

    def test_a_flipped_byte_in_a_whole_shard(
        self, bucket: Bucket, own_cache: Path, caplog: pytest.LogCaptureFixture
    ) -> None:
        data = data_set(bucket.uri("data"), whole=True)
        content = bytearray(storage.read_bytes(data.location("train", 0)))
        content[-1] ^= 1
        storage.write_bytes(data.location("train", 0), bytes(content))
        assert read(data, np.array([0])) == [IMAGES[0]]
        shards._wanted().join()
        assert "data/0 changed since it was packed" in caplog.text
        assert names(own_cache) == []


def test_a_shard_that_cannot_be_fetched_ends_no_thread(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """It would fetch no other either."""
    queue, gone = Queue(), Shard(path="gone", rows=1, bytes=1, sha256="0")
    for _ in range(2):
        queue.put((str(tmp_path / "gone"), gone, 10**9))
    Thread(target=shards._fetch_shards, args=[queue], daemon=True).start()
    give_up = time.monotonic() + 5
    while queue.unfinished_tasks and time.monotonic() < give_up:
        time.sleep(0.01)
    assert [record.getMessage().count("gone is read by ranges alone") for record in caplog.records] == [1, 1]


def test_the_rule_for_whole_shards() -> None:
    shard = Shard(path="0", rows=5, bytes=10**9, sha256="")
    manifest = Manifest(classes=(), splits={"train": (shard,), "val": (shard,)}, index={}, val_majority=1)

    def rule(cache: float, reads: float, nodes: int) -> tuple[bool, str]:
        return fetch_whole(manifest, cache_bytes=cache, reads=reads, nodes=nodes)

    assert rule(0.9e9, 90, 1) == (False, "1.0 GB of shards exceed the cache of 0.9 GB per node")
    assert rule(2e9, 90, 1) == (True, "ranges would fetch 90.0 GB, whole shards 1.0 GB")
    assert rule(2e9, 1, 1) == (False, "ranges would fetch 1.0 GB, whole shards 1.0 GB")
    assert rule(2e9, 4, 8) == (False, "ranges would fetch 4.0 GB, whole shards 8.0 GB")


def test_row_groups_of_keys(tmp_path: Path) -> None:
    data_set(str(tmp_path))
    assert pq.ParquetFile(tmp_path / "train.keys").num_row_groups == 3

"""A file is as it was written, or not there: on a disk and on S3."""

import os
import threading

import pytest

from orchestrator import storage
from orchestrator.errors import UsageError


def test_write_then_read(root):
    location = f"{root}/new/deep/file"
    assert storage.size(location) is None
    storage.write_bytes(location, b"first, and longer")
    storage.write_bytes(location, b"second")
    assert storage.read_bytes(location) == b"second"
    assert storage.size(location) == 6
    assert storage.names(f"{root}/new/deep") == ["file"]
    assert storage.size(f"{root}/new") is None
    storage.write_bytes(location, b"")
    assert storage.read_bytes(location) == b""
    assert storage.size(location) == 0


def test_reading_a_missing_file(root):
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(f"{root}/nothing")
    with pytest.raises(FileNotFoundError), storage.open_to_read(f"{root}/nothing"):
        pass


def test_ranges(root):
    """A range may be empty; one that passes the end is refused."""
    storage.write_bytes(f"{root}/file", b"content")
    for offset, size in ((0, 7), (2, 3), (6, 1), (3, 0), (7, 0)):
        found = storage.read_range(f"{root}/file", offset, size)
        assert (found.content, found.whole_bytes) == (b"content"[offset : offset + size], 7)
        assert (found.etag is None) == storage.is_local(root)
    for offset, size in ((5, 3), (8, 1)):
        with pytest.raises(OSError, match="file"):
            storage.read_range(f"{root}/file", offset, size)
    for size in (0, 1):
        with pytest.raises(FileNotFoundError):
            storage.read_range(f"{root}/nothing", 0, size)


def test_streams(root):
    storage.make_folder(root)
    with storage.open_to_write(f"{root}/file") as stream:
        for i in range(100):
            stream.write(bytes([i]) * 1000)
    with storage.open_to_read(f"{root}/file") as file:
        assert file.size() == 100_000
        assert file.read_at(3, 41_999) == b"\x29\x2a\x2a"
        assert file.read_at(10, 99_999) == b"\x63"
        file.seek(0)
        assert file.read(1001) == bytes(1000) + b"\1"


def test_large_files(root):
    """On S3 they are sent in parts; they can be read in pieces."""
    content = os.urandom(11 << 20) * 2
    storage.make_folder(root)
    with storage.open_to_write(f"{root}/file") as stream:
        stream.write(content)
    assert storage.read_bytes(f"{root}/file") == content
    pieces = list(storage.pieces(f"{root}/file"))
    assert len(pieces) == 2
    assert len(pieces[0]) < 17 << 20
    assert b"".join(pieces) == content


def test_the_first_of_many_writers_wins(root):
    storage.make_folder(root)
    outcomes = []

    def write(i: int) -> None:
        try:
            storage.write_new(f"{root}/file", f"by {i}".encode())
            outcomes.append(f"by {i}")
        except FileExistsError:
            outcomes.append("late")

    threads = [threading.Thread(target=write, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    (first,) = (outcome for outcome in outcomes if outcome != "late")
    assert len(outcomes) == 8
    assert storage.read_bytes(f"{root}/file") == first.encode()
    assert storage.names(root) == ["file"]


def test_a_lost_answer(bucket, monkeypatch):
    """If the connection dies after the object was written, the retry meets it: the write succeeded."""
    client, answers = storage._s3(), []
    put = client.put_object

    def put_twice(**kwargs):
        answers.append(put(**kwargs))
        return put(**kwargs)

    monkeypatch.setattr(client, "put_object", put_twice)
    storage.write_new(bucket.uri("file"), b"mine")
    assert len(answers) == 1
    assert storage.read_bytes(bucket.uri("file")) == b"mine"


def test_names_and_files(root):
    assert storage.names(root) == []
    assert storage.files(root) == {}
    for name in ("b", "a/x", "a/y/z", "ab", ".hidden", "with space", "100%"):
        storage.write_bytes(f"{root}/{name}", b"content")
    assert storage.names(root) == [".hidden", "100%", "a", "ab", "b", "with space"]
    assert storage.names(f"{root}/a") == ["x", "y"]
    assert storage.names(f"{root}/a/") == ["x", "y"]
    assert storage.names(f"{root}/b") == []
    assert list(storage.files(f"{root}/")) == [
        ".hidden",
        "100%",
        "a/x",
        "a/y/z",
        "ab",
        "b",
        "with space",
    ]
    assert storage.files(f"{root}/a") == {"x": 7, "y/z": 7}


@pytest.mark.slow
def test_more_names_than_a_page_holds(bucket):
    for i in range(1003):
        storage._s3().put_object(Bucket=bucket.name, Key=f"a/{i}", Body=b"")
    assert len(storage.names(bucket.uri("a"))) == 1003
    storage.delete(bucket.uri("a"))
    assert storage.names(bucket.uri("a")) == []


def test_delete(root):
    for name in ("a/x", "a/y/z", "ab", "a.json"):
        storage.write_bytes(f"{root}/{name}", b"content")
    storage.delete(f"{root}/a/x")
    assert storage.names(f"{root}/a") == ["y"]
    storage.delete(f"{root}/a")
    storage.delete(f"{root}/a")
    storage.delete(f"{root}/nothing")
    assert storage.names(root) == ["a.json", "ab"]
    storage.delete(f"{root}/ab")
    assert storage.names(root) == ["a.json"]


def test_deleting_links_and_empty_folders(tmp_path):
    """A link is deleted and not followed; a folder that is not empty stays."""
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs" / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "theirs")
    storage.delete(str(tmp_path / "link"))
    (tmp_path / "empty").mkdir()
    for name in ("empty", "theirs", "nothing"):
        storage.delete_empty_folder(f"{tmp_path}/{name}")
    assert os.listdir(tmp_path) == ["theirs"]
    assert os.listdir(tmp_path / "theirs") == ["file"]


def test_renaming_folders(tmp_path):
    for name in ("old", "taken"):
        storage.write_bytes(f"{tmp_path}/{name}/file", name.encode())
    storage.write_bytes(f"{tmp_path}/file", b"content")
    for target in ("taken", "file"):
        with pytest.raises(FileExistsError, match=f"{target} exists already"):
            storage.rename_folder(f"{tmp_path}/old", f"{tmp_path}/{target}")
    with pytest.raises(FileNotFoundError):
        storage.rename_folder(f"{tmp_path}/nothing", f"{tmp_path}/new")
    storage.rename_folder(f"{tmp_path}/old", f"{tmp_path}/new")
    assert storage.read_bytes(f"{tmp_path}/new/file") == b"old"
    assert storage.names(str(tmp_path)) == ["file", "new", "taken"]


def test_a_renamed_folder_survives_a_power_cut(tmp_path, monkeypatch):
    """The folder is flushed before it is renamed, and its parent afterwards."""
    flushed = []
    monkeypatch.setattr(storage, "flush", lambda location: flushed.append((location, os.path.exists(new))))
    old, new = f"{tmp_path}/old", f"{tmp_path}/new"
    os.mkdir(old)
    storage.rename_folder(old, new)
    assert flushed == [(old, False), (str(tmp_path), True)]


def test_unfinished_uploads(bucket):
    for key in ("a/one", "a/two", "ab/one"):
        storage._s3().create_multipart_upload(Bucket=bucket.name, Key=key)
    storage.abort_uploads(bucket.uri("a"), "tw")
    assert bucket.uploads() == ["a/one", "ab/one"]
    storage.abort_uploads(bucket.uri("a"))
    assert bucket.uploads() == ["ab/one"]
    storage.abort_uploads("/anywhere")


def test_local_writes_are_whole(tmp_path):
    """A failed write leaves no file; a reader that has the old file open reads the old bytes."""
    (tmp_path / "taken").mkdir()
    with pytest.raises(OSError, match="taken"):
        storage.write_bytes(str(tmp_path / "taken"), b"content")
    assert os.listdir(tmp_path) == ["taken"]
    location = tmp_path / "file"
    storage.write_bytes(str(location), b"old")
    with location.open("rb") as reader:
        storage.write_bytes(str(location), b"new")
        assert reader.read() == b"old"


@pytest.mark.parametrize("fault", ["busy", "cut upload", "short"])
def test_an_upload_that_fails(fault, bucket):
    """The old content stays, or there is no file; never a part of the new content."""
    storage.write_bytes(bucket.uri("file"), b"old")
    with (
        bucket.failing(fault, lambda request: request.startswith("PUT")),
        pytest.raises(OSError, match="file"),
    ):
        storage.write_bytes(bucket.uri("file"), b"new content")
    if fault == "short":
        assert storage.size(bucket.uri("file")) is None
    else:
        assert storage.read_bytes(bucket.uri("file")) == b"old"


def test_what_another_process_wrote_meanwhile_stays(bucket, monkeypatch):
    """Its size differs from ours, but ours was not cut off."""
    size = storage.size

    def meanwhile(location: str) -> int | None:
        monkeypatch.setattr(storage, "size", size)
        storage.write_bytes(location, b"theirs")
        return size(location)

    monkeypatch.setattr(storage, "size", meanwhile)
    with pytest.raises(OSError, match="6 bytes after 4 were written"):
        storage.write_bytes(bucket.uri("file"), b"ours")
    assert storage.read_bytes(bucket.uri("file")) == b"theirs"


@pytest.mark.parametrize("name", ["a%20b", "100% ", "x#y", "x?y=1&z=2", "a+b", "ü", "~", "a:b"])
def test_names_are_taken_as_they_are(name, root):
    storage.write_bytes(f"{root}/{name}/file", b"content")
    assert storage.names(root) == [name]
    assert storage.read_bytes(f"{root}/{name}/file") == b"content"
    assert storage.size(f"{root}/{name}/file") == 7
    assert storage.size(f"{root}/{name[:-1]}x/file") is None
    storage.delete(f"{root}/{name}")
    assert storage.names(root) == []


def test_file_uris(tmp_path):
    storage.write_bytes(f"file://{tmp_path}/a/b%20c", b"content")
    assert storage.read_bytes(f"{tmp_path}/a/b%20c") == b"content"
    assert storage.size(f"file://{tmp_path}/a/b%20c") == 7
    assert storage.is_local(f"file://{tmp_path}")
    storage.delete(f"file://{tmp_path}/a")
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("location", ["gs://bucket/key", "http://host/key", "S3://bucket/key"])
def test_unknown_places(location):
    scheme = location.partition(":")[0]
    for act in (storage.absolute, storage.read_bytes, storage.size, storage.names, storage.delete):
        with pytest.raises(UsageError, match=f"{scheme}:// is not supported: name a local path or s3://buck"):
            act(location)
        with pytest.raises(UsageError, match="names no bucket: name a local path or s3://buck"):
            act("s3://")


def test_writing_to_a_missing_bucket(bucket):
    for write in (storage.write_bytes, storage.write_new):
        with pytest.raises(OSError, match="NoSuchBucket"):
            write("s3://there-is-none/file", b"content")


def test_join():
    assert storage.join("s3://bucket/data/", "train", "0.parquet") == "s3://bucket/data/train/0.parquet"
    assert storage.join("/data", "manifest.json") == "/data/manifest.json"


def test_absolute(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    assert storage.absolute("runs/../data") == f"{tmp_path.resolve()}/data"
    assert storage.absolute("~/data") == f"{tmp_path.resolve()}/data"
    assert storage.absolute("s3://bucket/../data") == "s3://bucket/../data"
    assert storage.absolute(f"file://{tmp_path}/a/../b") == f"{tmp_path.resolve()}/b"

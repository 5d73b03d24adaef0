"""A file is as it was written, or not there: on a disk, on S3, on Google Cloud Storage and on Azure."""

import os
import threading

import pytest
from obstore.exceptions import GenericError

from orchestrator import credentials, storage, stores
from orchestrator.errors import UsageError

ATTEMPTS = stores.ATTEMPTS  # tests make fewer
CLOUDS = ["s3", "gs", "az"]
everywhere = pytest.mark.parametrize("root", ["local", *CLOUDS], indirect=True)
in_every_cloud = pytest.mark.parametrize("bucket", CLOUDS, indirect=True)


def is_put(request: str) -> bool:
    return request.startswith("PUT")


@everywhere
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


@everywhere
def test_reading_a_missing_file(root):
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(f"{root}/nothing")
    with pytest.raises(FileNotFoundError), storage.open_to_read(f"{root}/nothing"):
        pass


@everywhere
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


@everywhere
def test_streams(root):
    storage.make_folder(root)
    with storage.open_to_write(f"{root}/file") as stream:
        for i in range(100):
            stream.write(bytes([i]) * 1000)
    with storage.open_to_read(f"{root}/file") as file:
        assert file.seek(0, os.SEEK_END) == 100_000
        assert file.read(1) == b""
        file.seek(41_999)
        assert file.read(3) == b"\x29\x2a\x2a"
        file.seek(-1, os.SEEK_END)
        assert file.read(10) == b"\x63"
        file.seek(0)
        assert file.read(1001) == bytes(1000) + b"\1"


@everywhere
def test_large_files(root):
    """They are sent to an object storage in parts, and can be read in pieces."""
    content = os.urandom(11 << 20) * 2
    storage.make_folder(root)
    with storage.open_to_write(f"{root}/file") as stream:
        stream.write(content)
    assert storage.read_bytes(f"{root}/file") == content
    pieces = list(storage.pieces(f"{root}/file"))
    assert len(pieces) == 2
    assert len(pieces[0]) < 17 << 20
    assert b"".join(pieces) == content


@everywhere
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


@in_every_cloud
def test_a_lost_answer(bucket):
    """If the connection dies after the object was written, the retry meets it: the write succeeded."""
    with bucket.failing("lost answer", is_put, attempts=3, times=1):
        storage.write_new(bucket.uri("file"), b"mine")
    assert storage.read_bytes(bucket.uri("file")) == b"mine"
    with pytest.raises(FileExistsError):
        storage.write_new(bucket.uri("file"), b"theirs")


@in_every_cloud
@pytest.mark.smoke
def test_a_storm(bucket, monkeypatch):
    """A second of refusals, again and again, delays everything and fails nothing. Pauses are short here:
    `test_a_storage_that_refuses_for_seconds` has the usual ones.
    """
    monkeypatch.setattr(stores, "PAUSE_S", 0.2)
    with bucket.failing("busy", for_s=1, attempts=ATTEMPTS):
        storage.write_new(bucket.uri("a", "new"), b"new")
    acts = {
        "write": lambda: storage.write_bytes(bucket.uri("a", "b"), b"content"),
        "read": lambda: storage.read_bytes(bucket.uri("a", "b")) == b"content",
        "size": lambda: storage.size(bucket.uri("a", "b")) == 7,
        "range": lambda: storage.read_range(bucket.uri("a", "b"), 1, 2).content == b"on",
        "names": lambda: storage.names(bucket.uri("a")) == ["b", "new"],
        "files": lambda: storage.files(bucket.uri()) == {"a/b": 7, "a/new": 3},
        "delete": lambda: storage.delete(bucket.uri("a")),
    }
    for name, act in acts.items():
        with bucket.failing("busy", times=3, attempts=8):
            assert act() in (None, True), name
    assert storage.names(bucket.uri()) == []


@pytest.mark.smoke
def test_a_storage_that_refuses_for_seconds(bucket):
    """The usual number of attempts outlasts 6 s in which S3 refuses every request."""
    with bucket.failing("busy", for_s=6, attempts=ATTEMPTS):
        storage.write_bytes(bucket.uri("file"), b"content")
    assert storage.read_bytes(bucket.uri("file")) == b"content"


@in_every_cloud
def test_conditional_writes(bucket):
    """An object is created if there is none, and replaced if it is as it was read."""
    location = bucket.uri("d", "ü%41 b")
    first = storage.write_if(location, b"first", None)
    with pytest.raises(FileExistsError):
        storage.write_if(location, b"late", None)
    content, read = storage.read_with_version(location)
    assert (content, read) == (b"first", first)
    second = storage.write_if(location, b"second", read)
    assert second not in ({}, first)
    with pytest.raises(FileExistsError):
        storage.write_if(location, b"stale", first)
    assert storage.read_with_version(location) == (b"second", second)
    storage.delete(location)
    with pytest.raises(FileExistsError):
        storage.write_if(location, b"gone", second)
    assert storage.names(bucket.uri()) == []
    with pytest.raises(FileNotFoundError):
        storage.read_with_version(location)


@everywhere
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


@in_every_cloud
@pytest.mark.slow
def test_more_names_than_a_page_holds(bucket):
    for i in range(1003):
        storage.write_bytes(bucket.uri("a", str(i)), b"")
    assert len(storage.names(bucket.uri("a"))) == 1003
    storage.delete(bucket.uri("a"))
    assert storage.names(bucket.uri("a")) == []


@everywhere
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
        stores.s3().create_multipart_upload(Bucket=bucket.name, Key=key)
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


@in_every_cloud
@pytest.mark.parametrize("fault", ["busy", "cut upload", "short"])
def test_an_upload_that_fails(fault, bucket):
    """The old content stays, or there is no file; never a part of the new content."""
    storage.write_bytes(bucket.uri("file"), b"old")
    with (
        bucket.failing(fault, is_put),
        pytest.raises(OSError, match="file"),
    ):
        storage.write_bytes(bucket.uri("file"), b"new content")
    if fault == "short" and bucket.scheme != "az":  # on Azure the length is signed
        assert storage.size(bucket.uri("file")) is None
    else:
        assert storage.read_bytes(bucket.uri("file")) == b"old"


def test_what_another_process_wrote_meanwhile_stays(bucket, monkeypatch):
    """Its size differs from ours, but ours was not cut off."""
    size = stores.head

    def meanwhile(location: str) -> int | None:
        monkeypatch.setattr(stores, "head", size)
        storage.write_bytes(location, b"theirs")
        return size(location)

    monkeypatch.setattr(stores, "head", meanwhile)
    with pytest.raises(OSError, match="6 bytes after 4 were written"):
        storage.write_bytes(bucket.uri("file"), b"ours")
    assert storage.read_bytes(bucket.uri("file")) == b"theirs"


@pytest.mark.parametrize("name", ["a%20b", "100% ", "x#y", "x?y=1&z=2", "a+b", "ü", "~", "a:b"])
@everywhere
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


@pytest.mark.parametrize("location", ["ftp://bucket/key", "abfs://host/key", "S3://bucket/key"])
def test_unknown_places(location):
    scheme = location.partition(":")[0]
    for act in (storage.absolute, storage.read_bytes, storage.size, storage.names, storage.delete):
        with pytest.raises(UsageError, match=f"{scheme}:// is not supported: name a local path, s3://buck"):
            act(location)
        with pytest.raises(UsageError, match="names no bucket: name a local path, s3://buck"):
            act("gs://")


ACTS = {
    "write": lambda location: storage.write_bytes(location, b"content"),
    "write new": lambda location: storage.write_new(location, b"content"),
    "write if": lambda location: storage.write_if(location, b"content", {"e_tag": "1", "version": "1"}),
    "read": storage.read_bytes,
    "range": lambda location: storage.read_range(location, 0, 1),
    "names": storage.names,
    "files": storage.files,
    "delete": storage.delete,
}


@pytest.mark.parametrize("act", ACTS.values(), ids=ACTS)
@in_every_cloud
def test_a_missing_bucket(bucket, act):
    """It is named at once, without the storage's XML. (A size is None: HEAD does not say what is missing.)"""
    missing = f"{bucket.scheme}://there-is-none"
    with pytest.raises(UsageError, match=f"^{missing}: there is no such (bucket|container)$"):
        act(f"{missing}/file")
    assert len(bucket.proxy.requests) == 1


def unset_credentials(monkeypatch, tmp_path):
    """Leaves the endpoints alone; nobody has logged in, and this is no cloud's machine."""
    for name in os.environ:
        if name.startswith(("AWS_", "GOOGLE_", "AZURE_")) and not name.endswith(("ENDPOINT_URL", "ENDPOINT")):
            monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AZURE_STORAGE_ACCOUNT_NAME", "testing")
    monkeypatch.setattr(credentials, "METADATA_HOSTS", ())
    stores.forget()


@pytest.mark.parametrize(("scheme", "hint"), [("s3", "AWS_ACCESS_KEY_ID"), ("gs", "GOOGLE_APPLICATION")])
def test_without_credentials(scheme, hint, monkeypatch, tmp_path):
    unset_credentials(monkeypatch, tmp_path)
    message = f"^{scheme}://flowers: no credentials: set {hint}.*, or, for a public bucket, .*=true$"
    for act in (storage.files, storage.size, storage.read_bytes):
        with pytest.raises(UsageError, match=message):
            act(f"{scheme}://flowers/data")


def test_credentials_that_a_machine_does_not_give(monkeypatch, tmp_path):
    """Azure is asked for them at the first request."""
    unset_credentials(monkeypatch, tmp_path)
    refused = GenericError("Error performing token request: HTTP error\nDebug source: ..")
    message = r"^az://a/b: .*HTTP error; set AZURE_STORAGE_ACCOUNT_KEY .*=true$"
    with pytest.raises(OSError, match=message), stores._opened("az://a/b"):
        raise refused
    stores.forget()


@pytest.mark.parametrize(("name", "value"), [("AWS_NO_SIGN_REQUEST", "YES"), ("AWS_SKIP_SIGNATURE", "1")])
def test_a_public_bucket(name, value, bucket, monkeypatch, tmp_path):
    """It is read without credentials, if a variable says so; what is not public is refused in words."""
    for key, acl in (("data/open", "public-read"), ("data/closed", "private")):
        stores.s3().put_object(Bucket=bucket.name, Key=key, Body=b"content", ACL=acl)
    unset_credentials(monkeypatch, tmp_path)
    monkeypatch.setenv(name, value)
    assert storage.files(bucket.uri("data")) == {"closed": 7, "open": 7}
    assert storage.read_bytes(bucket.uri("data", "open")) == b"content"
    with pytest.raises(OSError, match="403 Forbidden"):
        storage.read_bytes(bucket.uri("data", "closed"))
    for no in ("false", "0", ""):
        monkeypatch.setenv(name, no)
        stores.forget()
        with pytest.raises(UsageError, match="no credentials"):
            storage.files(bucket.uri("data"))


@pytest.mark.parametrize("value", ["true", "Yes", "1"])
@pytest.mark.parametrize(("scheme", "prefix"), [("s3", "AWS"), ("gs", "GOOGLE"), ("az", "AZURE")])
def test_requests_to_public_buckets_are_not_signed(scheme, prefix, value, monkeypatch, tmp_path):
    unset_credentials(monkeypatch, tmp_path)
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv(f"{prefix}_SKIP_SIGNATURE", value)
    assert stores._open(scheme, "flowers").config["skip_signature"]


def test_markers_of_folders(bucket):
    """A console makes an object "empty/" for a folder; an empty file and an unreadable one stay."""
    for key in ("data/full/", "data/empty/", "data/v1.0/", "data/full/x", "data/file", "data/a/file"):
        stores.s3().put_object(Bucket=bucket.name, Key=key, Body=b"")
    assert storage.files(bucket.uri("data")) == {"a/file": 0, "file": 0, "full/x": 0}
    assert storage.files(bucket.uri()) == {"data/a/file": 0, "data/file": 0, "data/full/x": 0}
    with bucket.failing("busy", lambda request: request.startswith("HEAD")):
        assert "empty" in storage.files(bucket.uri("data"))


@pytest.mark.parametrize("key", ["data//x", "data/./x"])
def test_keys_that_no_path_has(key, bucket):
    """They are named, in one line."""
    stores.s3().put_object(Bucket=bucket.name, Key=key, Body=b"")
    with pytest.raises(OSError, match=f'^{bucket.uri("data")}: [^\n]*"{key}"[^\n]*$'):
        storage.files(bucket.uri("data"))


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

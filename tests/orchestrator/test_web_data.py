"""Data are read from web servers and from the hub, and never written there."""

import threading
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

from orchestrator import storage, stores
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.cache import CACHE_FOLDER
from orchestrator.data.manifest import check_shards, open_manifest
from orchestrator.data.stream import in_process, open_stream
from orchestrator.errors import UsageError
from orchestrator.packing import open_source, pack as packing
from orchestrator.packing.in_place import index_external_shards
from orchestrator.packing.pack import write_shards
from tests.orchestrator.data.test_stream import equal

READ_ONLY = "can be read file by file, but neither listed nor written"


class Web(ThreadingHTTPServer):
    """Serves the files of a folder. `asked` has path and Authorization of each request.

    busy: answers of 429 that come first.
    moved: the server that the files are at, to which requests are redirected.
    """

    daemon_threads = True

    def __init__(self, folder: Path) -> None:
        self.folder, self.busy, self.moved = folder, 0, ""
        self.asked: list[tuple[str, str | None]] = []
        super().__init__(("127.0.0.1", 0), partial(_Handler))
        self.url = f"http://127.0.0.1:{self.server_port}"
        threading.Thread(target=self.serve_forever, daemon=True).start()


class _Handler(BaseHTTPRequestHandler):
    server: Web  # pyright: ignore[reportIncompatibleVariableOverride]

    def do_GET(self) -> None:
        self.server.asked.append((self.path, self.headers["Authorization"]))
        path = unquote(urlsplit(self.path).path)
        file = self.server.folder / path.rpartition("/resolve/main/")[2].lstrip("/")
        if self.server.busy:
            self.server.busy -= 1
            self.answer(429, b"", {"RateLimit": '"resolvers";r=0;t=1'})
        elif self.server.moved:
            self.answer(302, b"", {"Location": f"{self.server.moved}{self.path}"})
        elif not file.is_file():
            self.answer(404, b"")
        else:
            content = file.read_bytes()
            begin, _, end = self.headers.get("Range", "").removeprefix("bytes=").partition("-")
            if begin:
                last = min(int(end), len(content) - 1)
                shown = {"Content-Range": f"bytes {begin}-{last}/{len(content)}"}
                self.answer(206, content[int(begin) : last + 1], shown)
            else:
                self.answer(200, content)

    do_HEAD = do_PUT = do_GET

    def answer(self, status: int, content: bytes, headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def serve(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Callable[[], Web]]:
    """Starts servers of one folder."""
    servers: list[Web] = []

    def start() -> Web:
        servers.append(Web(tmp_path / "served"))
        return servers[-1]

    monkeypatch.setenv(CACHE_FOLDER, str(tmp_path / "cache"))
    stores.forget()
    yield start
    stores.forget()
    for server in servers:
        server.shutdown()
        server.server_close()


@pytest.fixture
def packed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """The digits, packed into the folder that is served."""
    digits = open_source("digits")
    monkeypatch.setattr(packing, "ROWS_PER_SHARD", 500)
    write_shards(str(tmp_path / "served"), digits.classes, digits.splits)
    return str(tmp_path / "served")


@pytest.fixture(params=["http", "hf"])
def place(
    request: pytest.FixtureRequest, serve: Callable[[], Web], monkeypatch: pytest.MonkeyPatch
) -> tuple[str, Web]:
    """A URI of the folder, and its server."""
    web = serve()
    if request.param == "http":
        return web.url, web
    monkeypatch.setenv("HF_ENDPOINT", web.url)
    return "hf://datasets/owner/name", web


def batches(path: str) -> list:
    changes = {"data.path": path, "data.batch_size": 64, "data.lanes": 8}
    return list(in_process(open_stream(override(RunConfig(), changes), "train", 0, 1), range(3)))


def test_a_packed_data_set_is_trained_on(place: tuple[str, Web], packed: str) -> None:
    """Its batches are those of the local copy."""
    uri, web = place
    manifest = open_manifest(uri)
    assert manifest == open_manifest(packed)
    check_shards(uri, manifest, verify=True)
    web.asked.clear()
    assert all(equal(a, b) for a, b in zip(batches(uri), batches(packed), strict=True))
    assert {path.rpartition("/")[2].rpartition(".")[2] for path, _ in web.asked} == {
        "index",
        "json",
        "parquet",
    }


def test_a_data_set_whose_shard_is_missing(place: tuple[str, Web], packed: str) -> None:
    shard = open_manifest(packed).splits["train"][0].path
    Path(packed, shard).unlink()
    with pytest.raises(UsageError, match=f"{shard} is missing"):
        check_shards(place[0], open_manifest(packed))


def test_files_are_read(place: tuple[str, Web], packed: str) -> None:
    uri, web = place
    web.busy = 2
    Path(packed, "ü%41 b.txt").write_bytes(b"content")
    assert storage.read_bytes(f"{uri}/ü%41 b.txt") == b"content"
    assert storage.size(f"{uri}/ü%41 b.txt") == 7
    assert storage.read_range(f"{uri}/ü%41 b.txt", 2, 3).content == b"nte"
    with storage.open_to_read(f"{uri}/ü%41 b.txt") as file:
        file.seek(4)
        assert file.read() == b"ent"
    assert storage.size(f"{uri}/nothing") is None
    with pytest.raises(FileNotFoundError):
        storage.read_bytes(f"{uri}/nothing")


def test_nothing_is_written_or_listed(place: tuple[str, Web], packed: str) -> None:
    uri, web = place
    writes: list[Callable[[str], object]] = [
        lambda file: storage.write_bytes(file, b""),
        lambda file: storage.write_new(file, b""),
        lambda file: storage.write_if(file, b"", None),
        lambda file: storage.upload(f"{packed}/manifest.json", file),
        storage.delete,
        storage.names,
        storage.files,
    ]
    for write in writes:
        with pytest.raises(UsageError, match=READ_ONLY):
            write(f"{uri}/file")
    with pytest.raises(UsageError, match=READ_ONLY), storage.open_to_write(f"{uri}/file"):
        pass
    assert web.asked == []
    with pytest.raises(UsageError, match=f"no data set at .*, and .* {READ_ONLY}"):
        index_external_shards(f"{uri}/elsewhere", packed)


def test_the_hub_gets_the_token_and_no_other_host(
    serve: Callable[[], Web], packed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It redirects to the hosts of large files."""
    hub, files = serve(), serve()
    hub.moved = files.url.replace("127.0.0.1", "localhost")
    monkeypatch.setenv("HF_ENDPOINT", hub.url)
    monkeypatch.setenv("HF_TOKEN", "secret")
    for revision, expected in (("", "main"), ("@v1.0", "v1.0"), ("@refs%2Fconvert", "refs%2Fconvert")):
        storage.size(f"hf://datasets/owner/name{revision}/train/x.parquet")
        wanted = f"/datasets/owner/name/resolve/{expected}/train/x.parquet"
        assert (hub.asked[-1], files.asked[-1]) == ((wanted, "Bearer secret"), (wanted, None))
    assert storage.read_range("hf://datasets/owner/name/manifest.json", 0, 1).content == b"{"


@pytest.mark.parametrize("uri", ["hf://owner/name/file", "hf://datasets/name", "hf://models/owner/name/file"])
def test_what_the_hub_does_not_have(uri: str) -> None:
    with pytest.raises(UsageError, match=r"names no data set: hf://datasets/OWNER/NAME@REVISION/path"):
        storage.absolute(uri)

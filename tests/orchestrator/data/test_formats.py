"""The samples of tars and parquet files of any origin: places of images, labels, keys."""

import gzip
import hashlib
import io
import json
import os
import subprocess
import tarfile
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from orchestrator import storage
from orchestrator.data.manifest import Shard
from orchestrator.data.parquet import BY_NAME, ImageColumn, unpacked_images
from orchestrator.errors import UsageError
from orchestrator.packing import open_source
from orchestrator.packing.in_place import index_file
from orchestrator.packing.pack import Sample, write_shards
from orchestrator.packing.parquet import read_places
from orchestrator.packing.tars import TAR_IMAGES, Forward
from tests.orchestrator.data.images import parquet, samples, tar

BYTES = [b"a", b"bb", b"ccc"]
NUMBERS, NAMES = [0, 1, 2], ["x", "y", "x"]
FILES = ["0.jpg", "1.jpg", "2.jpg"]
UNNAMED = ["x.parquet:0", "x.parquet:1", "x.parquet:2"]
LARGE = pa.array(BYTES, pa.large_binary())
VIEWS = pa.struct([("bytes", pa.binary_view()), ("path", pa.string_view())])
HF = pa.array([{"bytes": b, "path": f"{n}.jpg"} for n, b in enumerate(BYTES)])


def read(path: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Returns the samples of a file, each image read at its place, and the lines about other samples."""
    part = index_file(str(path))
    content = path.read_bytes()
    assert part.shard
    assert part.shard == Shard(
        path=str(path),
        rows=len(part.keys),
        bytes=len(content),
        sha256=hashlib.sha256(content).hexdigest(),
        unpacked=part.shard.unpacked,
    )
    if part.shard.unpacked is not None:
        content = b"".join(unpacked_images(str(path)))
        assert len(content) == part.shard.unpacked
    images = [content[offset : offset + size] for offset, size in part.places]
    assert [zlib.crc32(image) for image in images] == part.crcs
    found = zip(images, part.labels, part.keys, strict=True)
    lines = [line.replace(f"{path}: ", "NAME: ") for line in part.skipped]
    return [{"image": image, "label": label, "key": key} for image, label, key in found], lines


def rows(labels: list[Any], keys: list[str]) -> list[dict[str, Any]]:
    found = zip(BYTES, labels, keys, strict=True)
    return [{"image": image, "label": label, "key": key} for image, label, key in found]


@pytest.mark.parametrize(
    ("columns", "labels", "keys"),
    [
        ({"image": BYTES, "label": NUMBERS}, NUMBERS, UNNAMED),
        ({"image": HF, "label": NUMBERS, "id": [7, 8, 9]}, NUMBERS, ["7", "8", "9"]),
        ({"jpg": BYTES, "cls": NAMES, "__key__": ["a", None, "c"]}, NAMES, ["a", "x.parquet:1", "c"]),
        ({"image": LARGE, "target": pa.array(NUMBERS, pa.uint8())}, NUMBERS, UNNAMED),
        ({"img": HF, "mask": BYTES, "fine_label": NUMBERS, "coarse_label": [9, 9, 9]}, NUMBERS, FILES),
        ({"image": BYTES, "label": pa.array(NAMES).dictionary_encode()}, NAMES, UNNAMED),
        ({"image": BYTES, "label": [True, False, True]}, [1, 0, 1], UNNAMED),
        ({"image": BYTES, "label": NAMES, "path": FILES}, NAMES, FILES),
        ({"image": BYTES, "label": pa.array([2**64 - 1, 0, 1], pa.uint64())}, [2**64 - 1, 0, 1], UNNAMED),
        ({"image": pa.array(BYTES, pa.binary_view()), "label": NUMBERS}, NUMBERS, UNNAMED),
        ({"image": pa.array(BYTES).dictionary_encode(), "label": NUMBERS}, NUMBERS, UNNAMED),
        ({"image": BYTES, "label": NAMES, "key": pa.array(FILES, pa.string_view())}, NAMES, FILES),
        ({"image": BYTES, "label": NAMES, "key": pa.array(FILES).dictionary_encode()}, NAMES, FILES),
        *(
            ({"image": BYTES, "label": pa.array(NAMES, kind)}, NAMES, UNNAMED)
            for kind in (pa.string_view(), pa.large_string(), pa.binary(), pa.binary_view(), pa.binary(1))
        ),
        ({"image": BYTES, "label": pa.array([b"x", b"y", b"x"]).dictionary_encode()}, NAMES, UNNAMED),
        ({"image": BYTES, "label": pa.array([1, 0, 1]).dictionary_encode()}, [1, 0, 1], UNNAMED),
        *(
            ({"image": BYTES, "label": pa.array([[name] for name in NAMES], kind)}, NAMES, UNNAMED)
            for kind in (
                pa.large_list(pa.string()),
                pa.list_view(pa.string()),
                pa.list_(pa.string_view()),
                pa.list_(pa.binary()),
                pa.list_(pa.dictionary(pa.int32(), pa.string())),
            )
        ),
    ],
)
def test_parquet(columns: dict[str, Any], labels: list[Any], keys: list[str], tmp_path: Path) -> None:
    for options in ({"compression": "zstd"}, {"compression": "none", "use_dictionary": False}):
        found = read(parquet(tmp_path / "x.parquet", columns, row_group_size=2, **options))
        assert found == (rows(labels, keys), [])


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"image": BYTES, "y": NUMBERS}, r"has no label column \(label, .* image \(binary\), y \(int64\)"),
        ({"image": BYTES, "label": [0.5, 1, 2]}, "label 0.5 of x.parquet:0 is not a whole number"),
        ({"image": [[b"a", b"b"]], "label": [0]}, r"column image is list<.*binary>, .* several images: give"),
        (
            {"image": [[{"bytes": b"a", "path": "p"}]], "label": [0]},
            "column image is list<.*, .* several ima",
        ),
    ],
)
def test_parquet_that_does_not_fit(columns: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"x.parquet:? .*{message}"):
        read(parquet(tmp_path / "x.parquet", columns))


@pytest.mark.parametrize("column", ["label", "key"])
def test_parquet_whose_names_are_not_utf8(column: str, tmp_path: Path) -> None:
    offsets = pa.array([0, 1, 2, 3], pa.int32()).buffers()[1]
    names = pa.Array.from_buffers(pa.string(), 3, [None, offsets, pa.py_buffer(b"a\xffb")])
    columns = {"image": BYTES, "label": NUMBERS, column: names}
    with pytest.raises(UsageError, match=r"x\.parquet is not a whole parquet file: .*Invalid UTF8"):
        read(parquet(tmp_path / "x.parquet", columns))


def test_rows_without_image_or_label_are_named(tmp_path: Path) -> None:
    image = pa.array(
        [{"bytes": b"a", "path": "0"}, {"bytes": None, "path": "1"}, None, {"bytes": b"d", "path": "3"}]
    )
    found, problems = read(parquet(tmp_path / "x.parquet", {"image": image, "label": [0, 1, 2, None]}))
    assert [row["key"] for row in found] == ["0"]
    only_a_path = "NAME: 1: no image, only a path, which is not read: 1"
    assert problems == [only_a_path, "NAME: x.parquet:2: no image", "NAME: 3: no label"]
    table = {"image": [b"", b"b", b"c"], "label": [0, 1, 2]}
    found, problems = read(parquet(tmp_path / "x.parquet", table, compression="none", use_dictionary=False))
    assert [row["image"] for row in found] == [b"b", b"c"]
    assert problems == ["NAME: x.parquet:0: no image"]


@pytest.mark.parametrize("bytes_of", [None, b"a"])
def test_images_of_which_only_paths_are_there(bytes_of: bytes | None, tmp_path: Path) -> None:
    """Hugging Face's `datasets` writes them if it does not embed the files; there may be no bytes at all."""
    image = pa.array([{"bytes": bytes_of, "path": "a"}, *({"bytes": None, "path": f"/b/{n}"} for n in "cd")])
    columns = {"image": image, "label": [0, 1, 1], "id": ["x", "y", "z"]}
    found, problems = read(parquet(tmp_path / "x.parquet", columns))
    assert [row["key"] for row in found] == (["x"] if bytes_of else [])
    reason = "no image, only a path, which is not read"
    assert problems[-2:] == [f"NAME: y: {reason}: /b/c", f"NAME: z: {reason}: /b/d"]
    assert len(problems) == 3 - len(found)


def test_views_in_structs(tmp_path: Path) -> None:
    """pyarrow writes them into a single row group."""
    found, _ = read(parquet(tmp_path / "x.parquet", {"image": HF.cast(VIEWS), "label": NUMBERS}))
    assert found == rows(NUMBERS, FILES)


def test_images_of_one_size(tmp_path: Path) -> None:
    """numpy's arrays of bytes are written so."""
    values = [b"aaa", b"bbb", b"ccc"]
    for options in ({"compression": "zstd"}, {"compression": "none", "use_dictionary": False}):
        for image in (pa.array(values, pa.binary(3)), pa.array([values[0], None, values[2]], pa.binary(3))):
            columns = {"image": image, "label": [0, 1, 0]}
            found, problems = read(parquet(tmp_path / "x.parquet", columns, row_group_size=2, **options))
            assert [row["image"] for row in found] == [value for value in image.to_pylist() if value]
            assert len(problems) == image.null_count


def test_webdataset(tmp_path: Path) -> None:
    """Members come in any order, with folders and other members between them."""
    members = [
        ("a/b.1.jpg", b"not an image: its extension is 1.jpg"),
        ("a/0001.JPG", b"a"),
        ("a/0001.cls", b" wolf\n"),
        ("0001.json", json.dumps({"caption": "-", "class": "dog"}).encode()),
        ("a/0001.json", b'{"label": 4}'),
        ("0001.webp", b"bb"),
        ("0002.seg.png", b"-"),
        ("0002.png", b"-"),
        ("0002.jpg", b"ccc"),
        ("0002.cls.txt", b"cat"),
        ("._0002.jpg", b"-"),
        ("a/.DS_Store", b"-"),
        ("README", b"-"),
    ]
    found, problems = read(tar(tmp_path / "x.tar", members, format=1))
    assert found == rows(["wolf", "dog", "cat"], ["a/0001", "0001", "0002"])
    images = f"(.{', .'.join(TAR_IMAGES)})"
    assert problems == [f"NAME: a/b: no image {images}, but .1.jpg"]
    # GNU and pax tars store long names in members of their own.
    name = f"{'folder/' * 30}ümlaut"
    for format in (1, 2):
        path = tar(tmp_path / f"{format}.tar", [(f"{name}.jpg", b"a"), (f"{name}.cls", b"0")], format=format)
        assert read(path) == ([{"image": b"a", "label": 0, "key": name}], [])


@pytest.mark.parametrize("extension", ["avif", "jp2", "J2K", "jpx", "jpf", "j2c", "jpc", "bmp", "tif"])
def test_images_of_every_extension_in_tars(extension: str, tmp_path: Path) -> None:
    found, problems = read(tar(tmp_path / "x.tar", [(f"0.{extension}", b"a"), ("0.cls", b"1")]))
    assert (found, problems) == ([{"image": b"a", "label": 1, "key": "0"}], [])


@pytest.mark.parametrize(
    ("members", "problem"),
    [
        ([("0.cls", b"1")], "no image"),
        ([("0.jpg", b"-")], "no label"),
        ([("0.jpg", b"-"), ("0.cls", b"")], "no label"),
        ([("0.jpg", b"-"), ("0.json", b'{"label": {"id": 1}}')], "label {'id': 1} is neither"),
        ([("0.jpg", b"-"), ("0.json", b'["label"]')], "no label"),
        ([("0.jpg", b"-"), ("0.json", b"{")], "Expecting property name"),
        ([("0.jpg", b"-"), ("0.json", b"[" * 100_000)], "recursion"),
        ([("0.jpg", b"-"), ("0.json", b'{"label": "\\ud800"}')], "surrogates not allowed"),
        ([("0.jpg", b"-"), ("0.cls", "café".encode("latin-1"))], "can't decode byte 0xe9"),
        ([("0.jpg", b""), ("0.cls", b"1")], ".jpg is empty"),
    ],
)
def test_members_that_are_not_a_sample(
    members: list[tuple[str, bytes]], problem: str, tmp_path: Path
) -> None:
    found, problems = read(tar(tmp_path / "x.tar", [*members, *samples(5, 1)]))
    assert [row["key"] for row in found] == ["0005"]
    assert len(problems) == 1
    assert problems[0].startswith("NAME: 0: ")
    assert problem in problems[0]


def test_repeated_members(tmp_path: Path) -> None:
    found, problems = read(tar(tmp_path / "x.tar", [("0.jpg", b"a"), ("0.cls", b"0"), ("0.jpg", b"bb")]))
    assert found == [{"image": b"a", "label": 0, "key": "0"}]
    assert problems == ["NAME: 0: two members .jpg, the first is taken"]


LONG, LATIN = f"{'folder/' * 20}name", b"caf\xe9".decode(errors="surrogateescape")
DIALECTS = {
    "v7": ["--format=v7"],
    "ustar": ["--format=ustar"],
    "gnu": ["--format=gnu"],
    "pax": ["--format=pax"],
    "gnu sparse": ["--format=gnu", "--sparse"],
    "pax sparse 0.0": ["--format=pax", "--sparse-version=0.0"],
    "pax sparse 0.1": ["--format=pax", "--sparse-version=0.1"],
    "pax sparse 1.0": ["--format=pax", "--sparse-version=1.0"],
}


def folder_of_kinds(folder: Path) -> dict[str, bytes]:
    """Writes samples of all kinds, in folders, and returns the images that are stored as they are."""
    images = {"0": b"a", "a/1": b"b" * 512, "sparse": b"c" * 4096 + bytes(1 << 20) + b"c", LONG: b"d"}
    images["a/linked"] = images["0"]
    for key, image in (images | {LATIN: b"e", "a/name.of.parts": b"f", "empty": b""}).items():
        path = folder / key
        path.parent.mkdir(parents=True, exist_ok=True)
        if key != "a/linked":
            path.with_name(f"{path.name}.png").write_bytes(image)
            path.with_name(f"{path.name}.cls").write_bytes(b"1")
    for kind in ("png", "cls"):
        (folder / f"a/linked.{kind}").hardlink_to(folder / f"0.{kind}")
        (folder / f"symbolic.{kind}").symlink_to(f"0.{kind}")
    with (folder / "sparse.png").open("wb") as file:
        file.write(b"c" * 4096)
        file.seek(4096 + (1 << 20))
        file.write(b"c")
    return images | {"café": b"e"}


@pytest.mark.parametrize("end", ["nothing", "zeros", "the same again", "garbage", "zeros and garbage"])
@pytest.mark.parametrize("dialect", DIALECTS)
def test_no_sample_of_a_tar_is_lost_in_silence(dialect: str, end: str, tmp_path: Path) -> None:
    """Links, sparse and empty files, names in other encodings, joined tars: all are read or named."""
    images = folder_of_kinds(tmp_path / "made")
    path, options = tmp_path / "x.tar", ["--sort=name", *DIALECTS[dialect]]
    prefix = "./" if "pax" in dialect else ""
    if dialect == "v7":
        options.append("--exclude=folder")  # longer than its names can be
        del images[LONG]
    if "sparse" in dialect:
        options.append("--sparse")
        del images["sparse"]
    names = ["./"] if prefix else sorted(os.listdir(tmp_path / "made"))
    subprocess.run(["tar", *options, "-cf", path, *names], cwd=tmp_path / "made", check=True)
    whole = path.read_bytes()
    following = {
        "nothing": b"",
        "zeros": bytes(100_001),
        "the same again": whole,
        "garbage": b"garbage" * 100,
        "zeros and garbage": bytes(2000) + b"garbage" * 100,
    }
    path.write_bytes(whole + following[end])
    found, lines = read(path)
    expected = {f"{prefix}{key}": image for key, image in images.items()}
    assert {row["key"]: row["image"] for row in found} == expected
    assert {row["label"] for row in found} == {1}
    named = {
        "symbolic": ".png is a symbolic link to 0.png",
        "empty": ".png is empty",
        "a/name": f"no image (.{', .'.join(TAR_IMAGES)}), but .of.parts.cls, .of.parts.png",
    }
    if "sparse" in dialect:
        named["sparse"] = ".png is a sparse file, which is not stored in one piece"
    wanted = {f"NAME: {prefix}{key}: {reason}" for key, reason in named.items()}
    if "garbage" in end:
        wanted.add(f"NAME: the 700 bytes from byte {path.stat().st_size - 700} on are not a tar")
    assert {*lines} == wanted
    repeats = 2 if end == "the same again" else 1
    assert (len(found), len(lines)) == (repeats * len(expected), repeats * len(wanted))


def test_hard_links_to_what_is_not_read(tmp_path: Path) -> None:
    """The target is absent, comes later, holds no image, or is left out itself."""
    with tarfile.open(tmp_path / "x.tar", "w") as file:
        for name, target, content in (
            ("0.png", "none.png", b""),
            ("1.png", "later.png", b""),
            ("2.png", "0.cls", b""),
            ("empty.png", "", b""),
            ("3.png", "empty.png", b""),
            ("later.png", "", b"a"),
            ("0.cls", "", b"1"),
            ("1.cls", "0.cls", b""),
            ("2.cls", "1.cls", b""),
            ("3.cls", "0.cls", b""),
            ("later.cls", "names/1", b""),
            ("4.jpg", "later.png", b""),
            ("4.cls.txt", "0.cls", b""),
        ):
            info = tarfile.TarInfo(name)
            info.size, info.linkname = len(content), target
            info.type = tarfile.LNKTYPE if target else tarfile.REGTYPE
            file.addfile(info, io.BytesIO(content))
    found, lines = read(tmp_path / "x.tar")
    assert found == [{"image": b"a", "label": 1, "key": "4"}]
    assert lines == [
        "NAME: 0: .png is a hard link to none.png, which is not read",
        "NAME: 1: .png is a hard link to later.png, which is not read",
        "NAME: 2: .png is a hard link to 0.cls, which is not read",
        "NAME: empty: .png is empty",
        "NAME: 3: .png is a hard link to empty.png, which is not read",
        "NAME: later: .cls is a hard link to names/1, which is not read",
    ]


@pytest.mark.parametrize("piece", [512, 700, 16 << 20])
def test_tars_that_are_read_in_pieces(piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "PIECE_BYTES", piece)
    members = [("0.jpg", bytes(range(256)) * 9), ("0.cls", b"0"), ("1.jpg", b"b" * 512), ("1.cls", b"7")]
    found, _ = read(tar(tmp_path / "x.tar", members))
    assert [(row["image"], row["label"]) for row in found] == [(members[0][1], 0), (members[2][1], 7)]


def test_files_that_are_cut_short(tmp_path: Path) -> None:
    """A tar is cut at and between members, a parquet file at any byte."""
    path = tar(tmp_path / "x.tar", samples(0, 4))
    whole = path.read_bytes()
    end = whole.rstrip(b"\0")
    for size in range(0, len(end) // 512 * 512 + 512, 256):
        path.write_bytes(whole[:size])
        with pytest.raises(UsageError, match=f"{path} is not a whole uncompressed tar"):
            index_file(str(path))
    path = parquet(tmp_path / "x.parquet", {"image": BYTES, "label": [0, 1, 2]})
    whole = path.read_bytes()
    for size in range(0, len(whole), 7):
        path.write_bytes(whole[:size])
        with pytest.raises(UsageError, match=f"{path} is not a whole parquet file"):
            index_file(str(path))


def test_damaged_parquet(tmp_path: Path) -> None:
    """Any block of it is overwritten: samples are found, or the file is named."""
    path = parquet(tmp_path / "x.parquet", {"image": BYTES, "label": NAMES}, compression="zstd")
    whole, refused = path.read_bytes(), list[str]()
    for first in range(0, len(whole), 8):
        path.write_bytes(whole[:first] + b"\xff" * 8 + whole[first + 8 :])
        try:
            index_file(str(path))
        except UsageError as error:
            refused.append(str(error))
    assert refused
    assert all(str(path) in message for message in refused)


def test_damaged_and_compressed_tars(tmp_path: Path) -> None:
    path = tar(tmp_path / "x.tar", samples(0, 4))
    whole = bytearray(path.read_bytes())
    header = next(at for at in range(1024, len(whole), 512) if whole[at : at + 4] == b"0001")
    whole[header] ^= 1
    path.write_bytes(whole)
    with pytest.raises(UsageError, match=rf"{path} is not a whole uncompressed tar: .*damaged at byte"):
        index_file(str(path))
    path.write_bytes(gzip.compress(bytes(whole)))
    with pytest.raises(UsageError, match=f"{path} is not a whole uncompressed tar"):
        index_file(str(path))


SEVERAL = [bytes([n % 251]) * (n % 40) for n in range(700)]
ONE_GROUP: dict[str, Any] = {"row_group_size": 10**6, "write_batch_size": 8, "data_page_size": 1 << 16}
SOURCES = ["snappy", "zstd", "none"]


@pytest.mark.parametrize("rows", [1, 7, 64, 1000])
def test_images_by_row(rows: int, tmp_path: Path) -> None:
    """In rising order, with gaps, and backwards; whatever the row groups are."""
    images = [None if n % 10 == 3 else image for n, image in enumerate(SEVERAL)]
    path = parquet(tmp_path / "x", {"image": images}, row_group_size=rows, compression="zstd")
    column = ImageColumn(str(path), BY_NAME)
    wanted = [*range(700), *range(5, 700, 90), 699, 3, 2, 2, 64, 63, 128, 0]
    assert [column.read(row) for row in wanted] == [images[row] or b"" for row in wanted]
    assert [*unpacked_images(str(path))] == [image or b"" for image in images]


@pytest.mark.parametrize("compression", SOURCES)
def test_a_large_row_group_takes_little_memory(
    compression: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """pandas writes a million rows into a group; they are never in memory together."""
    images = [bytes(100_000 + n) for n in range(400)]
    columns = {"image": images, "label": [n % 2 for n in range(400)]}
    path = str(
        parquet(tmp_path / "x.parquet", columns, compression=compression, use_dictionary=False, **ONE_GROUP)
    )
    largest = [0]
    read_at = Forward.read_at

    def measured(self: Forward, offset: int, size: int) -> bytes:
        largest.append(size)
        return read_at(self, offset, size)

    monkeypatch.setattr(Forward, "read_at", measured)
    before = pa.total_allocated_bytes()
    index_file(path)
    column = ImageColumn(path, BY_NAME)
    for read in (lambda: unpacked_images(path), lambda: (column.read(row) for row in range(400))):
        for row, image in enumerate(read()):
            assert len(image) == 100_000 + row
            assert pa.total_allocated_bytes() - before < 20e6
    assert max(largest) < 2e6


def test_packing_unpacks_a_file_once_for_each_split(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once before, to measure its images, however many shards there are."""
    columns = {"image": SEVERAL, "label": [n % 2 for n in range(700)]}
    path = parquet(tmp_path / "x.parquet", columns, compression="snappy")
    unpacked = []
    batches = ImageColumn.batches

    def counted(self: ImageColumn, group: int = 0) -> Iterator[tuple[range, pa.ChunkedArray]]:
        for rows, images in batches(self, group):
            unpacked.append(len(rows))
            yield rows, images

    monkeypatch.setattr(ImageColumn, "batches", counted)
    source = open_source(f"parquet:{path}", val_frac=0.2)
    assert sum(unpacked) == 700
    for number, split in enumerate(source.splits.values(), start=2):
        found = [*chain(*(source.fetch([s.image for s in split[i : i + 10]]) for i in range(0, 700, 10)))]
        assert found == [SEVERAL[int(sample.key.split(":")[1])] for sample in split]
        assert sum(unpacked) <= number * 700


def test_a_file_that_changes_between_two_packings(tmp_path: Path) -> None:
    for images in (SEVERAL, [image + b"!" for image in SEVERAL]):
        columns = {"image": images, "label": [n % 2 for n in range(700)]}
        source = open_source(f"parquet:{parquet(tmp_path / 'x.parquet', columns, compression='snappy')}")
        train = source.splits["train"]
        assert [*source.fetch([train[0].image])] == [images[int(train[0].key.split(":")[1])]]


def test_threads_do_not_share_an_open_file(tmp_path: Path) -> None:
    columns = {"image": SEVERAL, "label": [n % 2 for n in range(700)]}
    path = parquet(tmp_path / "x.parquet", columns, compression="snappy")
    places = [[(str(path), row) for row in range(first, 700, 8)] for first in range(8)]
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda rows: [*read_places(BY_NAME, "a", rows)], places)
        assert [*found] == [SEVERAL[first::8] for first in range(8)]


def test_our_own_shards(tmp_path: Path) -> None:
    """They hold images verbatim, for readers of offsets."""
    mine = [Sample(bytes([n]) * 50, n % 7, f"k{n}") for n in range(200)]
    write_shards(str(tmp_path), "abcdefg", {"train": mine, "val": mine[:1]})
    path = tmp_path / "train" / "000000.parquet"
    found, problems = read(path)
    assert [tuple(row.values()) for row in found] == [sample[:3] for sample in mine]
    assert problems == []
    content, at = path.read_bytes(), 0
    for sample in mine:
        at = content.index(sample.image, at) + 50
    metadata = pq.read_metadata(path)
    assert [metadata.row_group(g).num_rows for g in range(metadata.num_row_groups)] == [64, 64, 64, 8]
    image = metadata.row_group(0).column(0)
    assert image.statistics is None
    assert (image.compression, image.encodings) == ("UNCOMPRESSED", ("RLE", "PLAIN"))

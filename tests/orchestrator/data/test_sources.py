"""Sources of images of every kind, and files that are not images."""

import hashlib
import struct
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from orchestrator import storage
from orchestrator.data.images import decode
from orchestrator.data.index import sample_ids
from orchestrator.data.parquet import Columns
from orchestrator.errors import UsageError
from orchestrator.packing import open_source
from tests.orchestrator.data.images import (
    IMAGES,
    JPEG,
    KEPT,
    PNG,
    RNG,
    everything,
    numbered,
    parquet,
    pixels,
    raw_png,
    samples,
    tar,
    write,
)


def many(classes: int, images: int) -> dict[str, bytes]:
    return {f"{c}/{n}.png": numbered(n) for c in range(classes) for n in range(images)}


def write_tar(path: Path, first: int, count: int) -> None:
    tar(path.with_suffix(".tar"), samples(first, count))


def write_parquet(path: Path, first: int, count: int) -> None:
    numbers = range(first, first + count)
    image = pa.array([{"bytes": numbered(n), "path": f"{n:04d}.png"} for n in numbers])
    columns = {"image": image, "label": [n % 2 for n in numbers]}
    parquet(path.with_suffix(".parquet"), columns, row_group_size=7, compression="zstd")


EVERY_KIND = pytest.mark.parametrize(
    ("kind", "write_shard"),
    [pytest.param("webdataset", write_tar, id="tar"), pytest.param("parquet", write_parquet, id="pq")],
)


class TestFolder:
    def test_every_kind_of_image_is_stored_as_training_sees_it(self, tmp_path: Path) -> None:
        """Common formats stay as they are; others become PNG of the same pixels."""
        files = {f"cat/{name}": content for name, content in IMAGES.items()}
        others = {"dog/a/b/1.png": PNG, "dog/2.png": PNG}
        source = open_source(f"folder:{write(tmp_path, files | others)}")
        found, bad = everything(source)
        assert source.skipped == ()
        assert bad == []
        assert {*found} == {*files, *others}
        for key, content in files.items():
            np.testing.assert_array_equal(pixels(found[key].image), pixels(content), err_msg=key)
            assert (found[key].image == content) == (key.removeprefix("cat/") in KEPT), key
            assert found[key].image == content or found[key].image.startswith(b"\x89PNG"), key

    def test_files_that_are_not_images_are_named(self, tmp_path: Path) -> None:
        bomb = raw_png(width=60_000, height=60_000, bits=8, rows=b"")
        bad = {"cat/cut.jpg": JPEG[:300], "dog/empty.png": b"", "dog/bomb.png": bomb, "dog/x": b"text"}
        by_name = {"cat/notes.txt": b"-", "cat/labels.xml": b"<a/>", "loose.png": PNG, "dog/README.md": b""}
        hidden = (".DS_Store", "._1.png", "Thumbs.db", ".cache/1.png", "desktop.ini")
        write(tmp_path, bad | by_name | {f"cat/{name}": b"?" for name in hidden})
        good = {f"{c}/{n}.png": PNG for c in ("cat", "dog") for n in range(4)}
        source = open_source(f"folder:{write(tmp_path, good)}")
        found, skipped = everything(source)
        assert {*found} == {*good}
        assert {*skipped} == {*bad}
        named = sorted(line.split(": ")[0] for line in source.skipped)
        assert named == sorted(f"{tmp_path}/{name}" for name in by_name)

    def test_links(self, tmp_path: Path) -> None:
        """Links are followed, but not in a circle. A broken link is named."""
        store = write(tmp_path / "store", {f"{n}.png": numbered(n) for n in (1, 2)})
        folder = write(tmp_path / "set", {"dog/4.png": numbered(4), "dog/5.png": PNG, "cat/6.png": PNG})
        for link, target in {
            "cat/1.png": store / "1.png",
            "cat/more": store,
            "cat/gone.png": store / "gone.png",
            "cat/circle": folder,
        }.items():
            (folder / link).symlink_to(target)
        source = open_source(f"folder:{folder}")
        found, skipped = everything(source)
        pets = ["cat/1.png", "cat/6.png", "cat/more/1.png", "cat/more/2.png", "dog/4.png", "dog/5.png"]
        assert sorted(found) == pets
        assert skipped == ["cat/gone.png"]

    @pytest.mark.parametrize("val", ["valid", "test"])
    def test_own_split(self, val: str, tmp_path: Path) -> None:
        """Validation may lack a class. Test images are not used if there are validation images."""
        trained = ("train/b/1.png", "train/a/x/1.png", "train/c/1.png")
        files = (*trained, f"{val}/b/2.png", f"{val}/c/3.png", "extra/a/1.png")
        source = open_source(f"folder:{write(tmp_path, dict.fromkeys(files, PNG))}")
        assert source.classes == ("a", "b", "c")
        expected = {
            "train/b/1.png": ("train", 1),
            "train/a/x/1.png": ("train", 0),
            "train/c/1.png": ("train", 2),
            f"{val}/b/2.png": ("val", 1),
            f"{val}/c/3.png": ("val", 2),
        }
        assert {key: taken[:2] for key, taken in everything(source)[0].items()} == expected
        line = f"{tmp_path}/extra/a/1.png: neither in train nor in a folder of validation images"
        assert source.skipped == (line,)
        if val == "valid":
            write(tmp_path, {"test/a/4.png": PNG})
            source = open_source(f"folder:{tmp_path}")
            assert {*everything(source)[0]} == {*expected}
            assert source.notes == ("the test split is left out (1 file)",)
        else:
            assert source.notes == ("validation is the test split, because there is no other",)

    def test_train_as_a_class_and_as_the_only_split(self, tmp_path: Path) -> None:
        names = [f"{c}/{n}.png" for c in ("bus", "train") for n in range(4)]
        source = open_source(f"folder:{write(tmp_path / 'a', dict.fromkeys(names, PNG))}")
        assert source.classes == ("bus", "train")
        write(tmp_path / "b" / "train", many(2, 30))
        found, _ = everything(open_source(f"folder:{tmp_path}/b"))
        assert len(found) == 60
        assert Counter(taken.split for taken in found.values())["val"] > 2

    def test_split_by_key_is_stable(self, tmp_path: Path) -> None:
        """A sample keeps its split when others come; a fifth is for validation."""
        write(tmp_path, {f"{n % 2}/{n:03d}.png": PNG for n in range(0, 200)})
        before, _ = everything(open_source(f"folder:{tmp_path}"))
        write(tmp_path, {f"{n % 2}/{n:03d}.png": PNG for n in range(200, 400)})
        after, _ = everything(open_source(f"folder:{tmp_path}"))
        assert len(after) == 400
        assert all(after[key].split == taken.split for key, taken in before.items())
        assert 55 < sum(taken.split == "val" for taken in after.values()) < 105

    @pytest.mark.parametrize("val_frac", [0.01, 0.5, 0.99])
    def test_a_class_of_two_has_an_image_in_each_split(self, val_frac: float, tmp_path: Path) -> None:
        """A single image is for training."""
        write(tmp_path, {**many(20, 2), "single/1.png": PNG, **{f"big/{n}.png": PNG for n in range(300)}})
        found, _ = everything(open_source(f"folder:{tmp_path}", val_frac=val_frac))
        count = Counter((t.split, t.label) for key, t in found.items() if key[0] not in "sb")
        assert count == Counter({(split, label): 1 for split in ("train", "val") for label in range(20)})
        val = sum(taken.split == "val" for key, taken in found.items() if key[0] == "b")
        assert abs(val / 300 - val_frac) < 0.1
        assert found["single/1.png"].split == "train"

    def test_every_part_of_the_order_holds_all_classes(self, tmp_path: Path) -> None:
        source = open_source(f"folder:{write(tmp_path, many(4, 60))}")
        for first in range(0, 150, 30):
            assert {sample.label for sample in source.splits["train"][first : first + 30]} == {0, 1, 2, 3}

    def test_on_s3(self, bucket) -> None:
        for name, content in many(2, 5).items():
            storage.write_bytes(bucket.uri("set", name), content)
        storage.write_bytes(bucket.uri("set", "0", ".hidden.png"), PNG)
        source = open_source(f"folder:{bucket.uri('set')}")
        found, skipped = everything(source)
        assert {key: taken.image for key, taken in found.items()} == many(2, 5)
        assert skipped == []
        with pytest.raises(UsageError, match="no files below s3://"):
            open_source(f"folder:{bucket.uri('nothing')}")
        with bucket.failing("busy"), pytest.raises(OSError, match="503"):
            everything(source)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ([], "no files below"),
        (["image.png"], "no class folders with images; 1 files, the first: .*image.png: in no class folder"),
        (["cat/1.txt"], "has no class folders with images.*is not an image by its name"),
        (["cat/1.png"], "only one class .cat."),
        (["train/1.png", "val/1.png"], "has no class folders with images"),
        (["cat/1.png", "dog/1.png"], "none of the 2 images is for (train|val)"),
        (["cat/\udcff.png"], "is not UTF-8: rename it"),
    ],
)
def test_folders_that_cannot_be_packed(files: list[str], message: str, tmp_path: Path) -> None:
    write(tmp_path, dict.fromkeys(files, PNG))
    with pytest.raises(UsageError, match=message):
        open_source(f"folder:{tmp_path}")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "imagenet",
            "unknown source 'imagenet'; known: cluttered-digits, csv:PATH, digits,",
        ),
        ("folder:", "unknown source 'folder:'"),
        ("folder:/not/there", "no folder /not/there"),
        ("webdataset:/not/there", "no folder /not/there"),
        ("torchvision:FashonMNIST", "has no 'FashonMNIST'; it has .*; did you mean 'FashionMNIST'?"),
        ("torchvision:mnist", "torchvision.datasets has no 'mnist'; it has .*MNIST"),  # the name of a module
        (
            "torchvision:CIFAR10",
            "CIFAR10 below '/not/there': its files are not there: let `download` fetch them",
        ),
        ("torchvision:ImageFolder", "torchvision:ImageFolder below '/not/there': .*No such file"),
        ("torchvision:CocoDetection", "torchvision:CocoDetection below '/not/there': .*annFile"),
        ("torchvision:EMNIST", "torchvision:EMNIST below '/not/there': .*split"),
        ("torchvision:FakeData?size=0", "torchvision:FakeData below '/not/there': it has no images"),
    ],
)
def test_unknown_sources(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_source(name, root="/not/there")
    with pytest.raises(UsageError, match=r"`val_frac` must be finite, got nan"):
        open_source("digits", val_frac=float("nan"))


def test_files_that_are_still_packed_are_named(tmp_path: Path) -> None:
    packed = tmp_path / "FashionMNIST/raw/train-images-idx3-ubyte.gz"
    packed.parent.mkdir(parents=True)
    packed.touch()
    with pytest.raises(UsageError, match=f"are not there: unpack {packed} and its like, or let `download`"):
        open_source("torchvision:FashionMNIST", root=str(tmp_path))


class TestShards:
    @EVERY_KIND
    def test_images_labels_and_order(self, kind: str, write_shard, tmp_path: Path) -> None:
        """Files lie at any depth; samples are split by key. The samples of tars are mixed; those of
        compressed parquet files keep their order.
        """
        write_shard(tmp_path / "b", 0, 30)
        write_shard(tmp_path / "a" / "z", 30, 30)
        source = open_source(f"{kind}:{tmp_path}")
        found, skipped = everything(source)
        assert skipped == []
        assert source.skipped == ()
        key = "{:04d}" if kind == "webdataset" else "{:04d}.png"
        expected = {key.format(n): (n % 2, numbered(n)) for n in range(60)}
        assert {k: (t.label, t.image) for k, t in found.items()} == expected
        for split in ("train", "val"):
            mine = [int(k[:4]) for k, taken in found.items() if taken.split == split]
            listed = sorted(mine, key=lambda n: (n < 30, n))
            by_hash = sorted(mine, key=lambda n: sample_ids([key.format(n)])[0])
            assert mine == (by_hash if kind == "webdataset" else listed)
            assert 3 < len(mine) < 57

    @EVERY_KIND
    @pytest.mark.parametrize(("train", "val"), [("train/0", "validation/0"), ("x-train-0of1", "x-test-0of1")])
    def test_own_split(self, kind: str, write_shard, train: str, val: str, tmp_path: Path) -> None:
        write_shard(tmp_path / train, 0, 6)
        write_shard(tmp_path / val, 6, 3)
        found, _ = everything(open_source(f"{kind}:{tmp_path}"))
        splits = sorted((int(k[:4]), taken.split) for k, taken in found.items())
        assert splits == [(n, "train" if n < 6 else "val") for n in range(9)]

    @EVERY_KIND
    def test_patterns_and_single_files(self, kind: str, write_shard, tmp_path: Path) -> None:
        suffix = {"webdataset": ".tar", "parquet": ".parquet"}[kind]
        for n in range(3):
            write_shard(tmp_path / "test" / f"shard-{n}", 100 * n, 40)
        for pattern, count in (("shard-[01]*", 80), (f"shard-?{suffix}", 120), (f"shard-2{suffix}", 40)):
            found, _ = everything(open_source(f"{kind}:{tmp_path}/test/{pattern}"))
            assert len(found) == count, pattern
            assert {taken.split for taken in found.values()} == {"train", "val"}
        with pytest.raises(UsageError, match=rf"no {suffix} files at .*x\*; there are shard-0{suffix}"):
            open_source(f"{kind}:{tmp_path}/test/x*")

    @EVERY_KIND
    def test_on_s3(self, kind: str, write_shard, bucket, tmp_path: Path) -> None:
        write_shard(tmp_path / "train-0", 0, 10)
        write_shard(tmp_path / "val-0", 10, 4)
        for path in tmp_path.iterdir():
            storage.write_bytes(bucket.uri("set", path.name), path.read_bytes())
        for place in (bucket.uri("set"), bucket.uri("set", "*-0.*")):
            found, _ = everything(open_source(f"{kind}:{place}"))
            assert [found[key].image for key in sorted(found)] == [numbered(n) for n in range(14)]

    def test_repeated_keys_are_numbered(self, tmp_path: Path) -> None:
        for name in ("train-0", "train-1", "val-0"):
            write_tar(tmp_path / name, 0, 4)
        found, _ = everything(open_source(f"webdataset:{tmp_path}"))
        assert sorted(key for key in found if key.startswith("0000")) == ["0000", "0000#2", "0000#3"]
        assert len(found) == 12

    def test_names_of_numbers(self, tmp_path: Path) -> None:
        columns = {"image": [numbered(n) for n in range(9)], "label": [n % 3 for n in range(9)]}
        names = ["zebra", "ape", "cat", "none of it"]
        for split in ("train", "test"):
            parquet(tmp_path / f"{split}.parquet", columns, names=names)
        source = open_source(f"parquet:{tmp_path}")
        assert source.classes == tuple(names)
        assert [sample.label for sample in source.splits["train"]] == [0, 1, 2] * 3
        parquet(tmp_path / "test.parquet", columns, names=names[::-1])
        with pytest.raises(UsageError, match=r"test.* and .*train.parquet name their labels differently"):
            open_source(f"parquet:{tmp_path}")
        for split in ("train", "test"):
            parquet(tmp_path / f"{split}.parquet", columns, names=["zebra", "ape"])
        with pytest.raises(UsageError, match=r"label 2 of test.parquet:2: classes are numbered 0 to 1"):
            open_source(f"parquet:{tmp_path}")

    @pytest.mark.parametrize(
        ("labels", "message"),
        [
            ([-2, 0], "label -2 of x.parquet:0: classes are numbered 0 to 0"),
            ([2**40, 0], "label 1099511627776 of x.parquet:0: .* 0 to 999999"),
            (["x", "x"], r"only one class \(x\)"),
        ],
    )
    def test_labels_that_cannot_be(self, labels: list, message: str, tmp_path: Path) -> None:
        path = parquet(tmp_path / "x.parquet", {"image": [PNG, PNG], "label": labels})
        with pytest.raises(UsageError, match=message):
            open_source(f"parquet:{path}")

    def test_columns_can_be_named(self, tmp_path: Path) -> None:
        columns = {"image": ["a", "b"] * 5, "scan": [PNG] * 10, "label": [0] * 10, "kind": ["cat", "dog"] * 5}
        path = parquet(tmp_path / "x.parquet", columns)
        source = open_source(f"parquet:{path}", columns=Columns("scan", "kind"))
        assert source.classes == ("cat", "dog")
        assert {taken.image for taken in everything(source)[0].values()} == {PNG}

    def test_incomplete_samples_are_named(self, tmp_path: Path) -> None:
        image = pa.array([{"bytes": numbered(n) if n != 3 else None, "path": f"{n}"} for n in range(8)])
        labels = [n % 2 if n != 5 else None for n in range(8)]
        source = open_source(f"parquet:{parquet(tmp_path / 'x.parquet', {'image': image, 'label': labels})}")
        found, skipped = everything(source)
        assert sorted(found) == ["0", "1", "2", "4", "6", "7"]
        assert skipped == []
        reasons = ("3: no image, only a path, which is not read: 3", "5: no label")
        assert source.skipped == tuple(f"{tmp_path}/x.parquet: {reason}" for reason in reasons)
        members = [*samples(0, 6), ("lost.jpg", b"-"), ("0001.txt", b"a caption")]
        source = open_source(f"webdataset:{tar(tmp_path / 'x.tar', members)}")
        assert source.skipped[0].startswith(f"{tmp_path}/x.tar: lost: no label")
        assert len(everything(source)[0]) == 6

    def test_files_without_a_split_and_damaged_files(self, tmp_path: Path) -> None:
        for name in ("train-0", "val-0", "more"):
            write_tar(tmp_path / name, 0, 4)
        message = r"more.tar is neither for training nor for validation, but others are"
        with pytest.raises(UsageError, match=message):
            open_source(f"webdataset:{tmp_path}")
        (tmp_path / "more.tar").write_bytes((tmp_path / "val-0.tar").read_bytes()[:3000])
        with pytest.raises(UsageError, match=r"more.tar is not a whole uncompressed tar"):
            open_source(f"webdataset:{tmp_path}/more.tar")
        (tmp_path / "b.parquet").write_bytes(b"PAR1")
        with pytest.raises(UsageError, match=r"b.parquet is not a whole parquet file"):
            open_source(f"parquet:{tmp_path}")
        for name in ("train-0.tar", "more.tar"):
            (tmp_path / name).unlink()
        write_tar(tmp_path / "val-1", 4, 4)
        with pytest.raises(UsageError, match="has images for val, none for train"):
            open_source(f"webdataset:{tmp_path}")


class TestTorchvision:
    def test_files_are_packed_as_they_are(self, tmp_path: Path) -> None:
        files = {f"{c}/{n}.png": numbered(10 * len(c) + n) for c in ("ape", "zebra") for n in range(10)}
        source = open_source("torchvision:ImageFolder", root=str(write(tmp_path, files)))
        assert source.classes == ("ape", "zebra")
        found, _ = everything(source)
        expected = {f"{n:07d}": (n // 10, content) for n, content in enumerate(files.values())}
        assert {key: (t.label, t.image) for key, t in found.items()} == expected
        assert {taken.split for taken in found.values()} == {"train", "val"}

    @pytest.mark.parametrize(
        ("name", "folder", "prefixes"),
        [
            ("MNIST", "MNIST/raw", ("train", "t10k")),
            ("EMNIST?split=letters", "EMNIST/raw", ("emnist-letters-train", "emnist-letters-test")),
        ],
    )
    def test_train_is_true_or_false(
        self, name: str, folder: str, prefixes: list[str], tmp_path: Path
    ) -> None:
        images = RNG.integers(0, 256, (9, 28, 28), dtype=np.uint8)
        labels = np.array([0, 1, 2, 3, 4, 5, 0, 1, 2], dtype=np.uint8)
        for prefix, part in zip(prefixes, (slice(6), slice(6, 9)), strict=True):
            pixel_header = struct.pack(">BBBBIII", 0, 0, 8, 3, *images[part].shape)
            label_header = struct.pack(">BBBBI", 0, 0, 8, 1, len(labels[part]))
            files = {
                f"{prefix}-images-idx3-ubyte": pixel_header + images[part].tobytes(),
                f"{prefix}-labels-idx1-ubyte": label_header + labels[part].tobytes(),
            }
            write(tmp_path / folder, files)
        source = open_source(f"torchvision:{name}", root=str(tmp_path))
        found, _ = everything(source)
        assert len(source.classes) == (10 if name == "MNIST" else 27)
        for n in range(9):
            taken = found[f"train{n:07d}" if n < 6 else f"val{n - 6:07d}"]
            assert (taken.split, taken.label) == ("train" if n < 6 else "val", labels[n])
            np.testing.assert_array_equal(pixels(taken.image)[..., 0], images[n])

    def test_validation_rather_than_test(self, tmp_path: Path) -> None:
        """Test images are not used where there are validation images."""
        files = {f"images/images/{c}/{n}.jpg": JPEG for c in ("apple", "zoo") for n in range(6)}
        for at, split in enumerate(("train", "val", "test")):
            names = [f"{c}/{n}.jpg" for c in ("apple", "zoo") for n in (2 * at, 2 * at + 1)]
            files[f"labels/{split}1.txt"] = "\n".join(names).encode()
        write(tmp_path / "dtd" / "dtd", files)
        source = open_source("torchvision:DTD", root=str(tmp_path))
        assert source.classes == ("apple", "zoo")
        numbers = {split: {Path(s.image).stem for s in part} for split, part in source.splits.items()}
        assert numbers == {"train": {"0", "1"}, "val": {"2", "3"}}
        assert all(taken.image == JPEG for taken in everything(source)[0].values())

    def test_without_files_or_split(self) -> None:
        source = open_source("torchvision:FakeData?size=30&num_classes=3")
        found, _ = everything(source)
        assert source.classes == ("0", "1", "2")
        assert len(found) == 30


@pytest.mark.smoke
def test_cluttered_digits() -> None:
    """The images are the same on every machine; a digit is in one split, and whole in each of its images."""
    source, plain = open_source("cluttered-digits"), open_source("digits")
    assert source.classes == plain.classes
    assert {split: len(samples) for split, samples in source.splits.items()} == {
        "train": 11_440,
        "val": 2_202,
    }
    digest = hashlib.sha256()
    for split, drawn in source.splits.items():
        digits = {sample.key: sample for sample in plain.splits[split]}
        for number, sample in enumerate(drawn):
            canvas, digit = decode(sample.image)[0].numpy(), digits[sample.key.rpartition("-")[0]]
            digest.update(canvas.tobytes())
            assert sample.label == digit.label
            if number % 50 == 0:
                windows = np.lib.stride_tricks.sliding_window_view(canvas, (8, 8))
                assert (windows == decode(digit.image)[0].numpy()).all((2, 3)).any(), sample.key
    assert digest.hexdigest()[:16] == "c1ca03b44ea50a6e"

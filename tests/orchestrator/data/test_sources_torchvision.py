"""Sets of torchvision, without a network."""

import struct
from pathlib import Path

import numpy as np
import pytest

from orchestrator.data.sources import open_source
from orchestrator.errors import UsageError
from tests.orchestrator.data.images import JPEG, RNG, everything, numbered, pixels, write


def test_files_are_packed_as_they_are(tmp_path: Path) -> None:
    files = {f"{c}/{n}.png": numbered(10 * len(c) + n) for c in ("ape", "zebra") for n in range(10)}
    source = open_source("torchvision:ImageFolder", root=str(write(tmp_path, files)))
    assert source.classes == ("ape", "zebra")
    found, _ = everything(source)
    assert {key: (t.label, t.image) for key, t in found.items()} == {
        f"{number:07d}": (number // 10, content) for number, content in enumerate(files.values())
    }
    assert {taken.split for taken in found.values()} == {"train", "val"}


def write_idx(folder: Path, prefix: str, images: np.ndarray, labels: np.ndarray) -> None:
    header = struct.pack(">BBBBIII", 0, 0, 8, 3, *images.shape)
    write(
        folder,
        {
            f"{prefix}-images-idx3-ubyte": header + images.tobytes(),
            f"{prefix}-labels-idx1-ubyte": struct.pack(">BBBBI", 0, 0, 8, 1, len(labels)) + labels.tobytes(),
        },
    )


@pytest.mark.parametrize(
    ("name", "folder", "prefixes"),
    [
        ("MNIST", "MNIST/raw", ("train", "t10k")),
        ("EMNIST?split=letters", "EMNIST/raw", ("emnist-letters-train", "emnist-letters-test")),
    ],
)
def test_train_is_true_or_false(name: str, folder: str, prefixes: tuple[str, str], tmp_path: Path) -> None:
    images = RNG.integers(0, 256, (9, 28, 28), dtype=np.uint8)
    labels = np.array([0, 1, 2, 3, 4, 5, 0, 1, 2], dtype=np.uint8)
    write_idx(tmp_path / folder, prefixes[0], images[:6], labels[:6])
    write_idx(tmp_path / folder, prefixes[1], images[6:], labels[6:])
    source = open_source(f"torchvision:{name}", root=str(tmp_path))
    found, _ = everything(source)
    assert len(source.classes) == (10 if name == "MNIST" else 27)
    for n in range(9):
        taken = found[f"train{n:07d}" if n < 6 else f"val{n - 6:07d}"]
        assert (taken.split, taken.label) == ("train" if n < 6 else "val", labels[n])
        np.testing.assert_array_equal(pixels(taken.image)[..., 0], images[n])


def test_validation_rather_than_test(tmp_path: Path) -> None:
    """Test images are for the end."""
    files = {f"images/images/apple/{n}.jpg": JPEG for n in range(6)}
    files |= {f"images/images/zoo/{n}.jpg": JPEG for n in range(6)}
    for at, split in enumerate(("train", "val", "test")):
        names = [f"{c}/{n}.jpg" for c in ("apple", "zoo") for n in (2 * at, 2 * at + 1)]
        files[f"labels/{split}1.txt"] = "\n".join(names).encode()
    write(tmp_path / "dtd" / "dtd", files)
    source = open_source("torchvision:DTD", root=str(tmp_path))
    found, _ = everything(source)
    assert source.classes == ("apple", "zoo")
    numbers = {split: {Path(s.image).stem for s in part} for split, part in source.splits.items()}
    assert numbers == {"train": {"0", "1"}, "val": {"2", "3"}}
    assert all(taken.image == JPEG for taken in found.values())


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("NoSuchSet", r"torchvision.datasets has no 'NoSuchSet'$"),
        ("Cifar10", r"torchvision.datasets has no 'Cifar10'; did you mean CIFAR10 or CIFAR100"),
        ("mnist", "torchvision.datasets has no 'mnist'; did you mean .*MNIST"),  # a module there
        ("CIFAR10", "torchvision:CIFAR10 below '/not/there': Dataset not found .*; --download fetches it"),
        ("ImageFolder", "torchvision:ImageFolder below '/not/there': .*No such file"),
        ("CocoDetection", "torchvision:CocoDetection below '/not/there': .*annFile"),
        ("EMNIST", "torchvision:EMNIST below '/not/there': .*split"),
    ],
)
def test_sets_that_are_not_there(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        open_source(f"torchvision:{name}", root="/not/there")


def test_without_files_or_split() -> None:
    source = open_source("torchvision:FakeData?size=30&num_classes=3")
    found, _ = everything(source)
    assert source.classes == ("0", "1", "2")
    assert len(found) == 30
    again, _ = everything(open_source("torchvision:FakeData?size=30&num_classes=3"))
    assert again == found
    with pytest.raises(UsageError, match="torchvision:FakeData below 'data': it has no images"):
        open_source("torchvision:FakeData?size=0")
    with pytest.raises(UsageError, match=r"torchvision:CIFAR10 below 'data': .*colour'$"):
        open_source("torchvision:CIFAR10?colour=1")

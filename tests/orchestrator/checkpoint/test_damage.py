"""Whatever happened to the files of a checkpoint: it is noticed, named, and the one before is taken."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.manifest import DamagedError
from orchestrator.checkpoint.run import Checkpoints
from tests.orchestrator.checkpoint.counted import (
    IN_STEP,
    flip,
    folder,
    odd,
    restored,
    said,
    save,
    saved,
    step_restored,
)

KINDS = ["weights-*.bin", "optimizer-*.bin", "weights.*.json", "optimizer.*.json", "manifest.json"]


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3; not to be written to."""
    return saved(tmp_path_factory.mktemp("damage") / "checkpoints", 1, 2, 3)


@pytest.fixture
def copy(three: Path, tmp_path: Path) -> Path:
    return shutil.copytree(three, tmp_path / "checkpoints")


def one(path: Path, kind: str) -> Path:
    (file,) = path.glob(kind)
    return file


def test_whole(copy, caplog):
    assert step_restored(copy) == 3
    assert said(caplog) == []


@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_bit(kind, copy, caplog):
    """At 12 places of the file, both ends among them."""
    file, rng = one(folder(copy, 3), kind), random.Random(kind)
    whole = file.read_bytes()
    places = [0, len(whole) - 1, *rng.sample(range(len(whole)), 10)]
    for place in places:
        flip(file, place, rng.randrange(8))
        caplog.clear()
        assert step_restored(copy) == 2, place
        (line,) = said(caplog)
        assert f"{copy}/step-00000003 is damaged ({file.name})" in line
        file.write_bytes(whole)
    assert step_restored(copy) == 3


def test_every_byte_of_the_manifest(copy):
    """Digits, names, quotes, white space: all of it counts."""
    file = one(folder(copy, 3), "manifest.json")
    content = bytearray(file.read_bytes())
    for place in range(len(content)):
        bit = 1 << place % 8
        content[place] ^= bit
        file.write_bytes(content)
        with pytest.raises(DamagedError, match=r"manifest\.json"):
            manifests.read(str(file.parent))
        content[place] ^= bit
    file.write_bytes(content)
    assert manifests.read(str(file.parent)).step == 3


def move_between_steps(path: Path) -> None:
    """As large, and a checkpoint's; but another's."""
    theirs, mine = one(folder(path.parent, 1), "weights-*.bin"), one(path, "weights-*.bin")
    mine.write_bytes(theirs.read_bytes())


def edit(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """Valid JSON, as if somebody had corrected it by hand."""

    def damage(path: Path) -> None:
        file = path / "manifest.json"
        body = json.loads(file.read_bytes())
        change(body)
        file.write_text(json.dumps(body, indent=1))

    return damage


DAMAGES: dict[str, Callable[[Path], object]] = {
    "weights cut short": lambda path: cut(one(path, "weights-*.bin")),
    "a byte more": lambda path: append(one(path, "optimizer-*.bin")),
    "empty weights": lambda path: one(path, "weights-*.bin").write_bytes(b""),
    "weights are gone": lambda path: one(path, "weights-*.bin").unlink(),
    "index is gone": lambda path: one(path, "optimizer.*.json").unlink(),
    "weights of another step": move_between_steps,
    "manifest is gone": lambda path: (path / "manifest.json").unlink(),
    "manifest cut short": lambda path: cut(path / "manifest.json"),
    "manifest in upper case": lambda path: upper(path / "manifest.json"),
    "manifest with a line more": lambda path: append(path / "manifest.json", b"\n"),
    "manifest of another step": lambda path: shutil.copy(folder(path.parent, 1) / "manifest.json", path),
    "folder of another step": lambda path: (
        shutil.rmtree(path),
        shutil.copytree(folder(path.parent, 1), path),
    ),
    "another step by hand": edit(lambda body: body.update(step=7)),
    "another size by hand": edit(lambda body: next(iter(body["files"].values())).update(bytes=1)),
    "no file vouched for": edit(lambda body: body.update(files={})),
    "no digest": edit(lambda body: body.pop("sha256")),
    "a field more": edit(lambda body: body.update(more=1)),
    "no folder": shutil.rmtree,
    "empty folder": lambda path: (shutil.rmtree(path), path.mkdir()),
}
FOREIGN = [
    b"",
    b" ",
    b"[]",
    b"{}",
    b"null",
    b"7",
    b'"step"',
    b"\xff\xfe\xff",
    b"[" * 100_000,
    b'{"sha256": 1}',
]
FOREIGN += [b'{"sha256": "", "files": {"x": 1}}', b'{"sha256": "", "files": [], "step": 3}']
SILENT = {"manifest is gone", "no folder", "empty folder"}  # that is no checkpoint


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


def append(file: Path, more: bytes = b"\0") -> None:
    file.write_bytes(file.read_bytes() + more)


def upper(file: Path) -> None:
    file.write_bytes(file.read_bytes().upper())


@pytest.mark.parametrize("damage", DAMAGES)
def test_falls_back(damage, copy, caplog):
    for step in (3, 2):
        caplog.clear()
        DAMAGES[damage](folder(copy, step))
        assert step_restored(copy) == step - 1
        assert sum("is damaged" in line for line in said(caplog)) == (0 if damage in SILENT else 4 - step)


@pytest.mark.parametrize("content", FOREIGN, ids=lambda content: repr(content[:12]))
def test_foreign_manifests(content, copy):
    (folder(copy, 3) / "manifest.json").write_bytes(content)
    assert step_restored(copy) == 2


def test_no_whole_one_is_left(copy, caplog):
    """The run starts anew, and says so; the damaged ones go when it has saved again, not before."""
    for step in (1, 2, 3):
        flip(one(folder(copy, step), "weights-*.bin"), step)
    assert step_restored(copy) is None
    assert f"no checkpoint in {copy} is whole: the run starts anew" in caplog.text
    assert manifests.steps(str(copy)) == [1, 2, 3]


def test_the_damaged_ones_make_room(copy):
    """They must not push out the good ones that come now."""
    flip(one(folder(copy, 3), "weights-*.bin"), 9)
    flip(one(folder(copy, 2), "manifest.json"), 9)
    checkpoints = Checkpoints(str(copy), IN_STEP)
    save(checkpoints, 4)  # did not restore: knows of no damage but that of manifests
    assert manifests.steps(str(copy)) == [1, 3, 4]
    flip(one(folder(copy, 4), "weights-*.bin"), 9)
    checkpoints = Checkpoints(str(copy), IN_STEP)
    manifest = checkpoints.restore(*odd())
    assert manifest
    assert manifest.step == 1
    save(checkpoints, 2)
    assert manifests.steps(str(copy)) == [1, 2]
    save(checkpoints, 3)
    assert manifests.steps(str(copy)) == [1, 2, 3]
    assert step_restored(copy) == 3


def test_nothing_there(tmp_path):
    assert restored(tmp_path / "nothing") is None
    assert not (tmp_path / "nothing").exists()

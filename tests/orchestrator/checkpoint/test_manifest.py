"""The manifest vouches for every byte: damage is noticed and named, and the checkpoint before is taken."""

import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.checkpoint.manifest import DamagedError
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


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3; not to be written to."""
    return saved(tmp_path_factory.mktemp("damage") / "checkpoints", 1, 2, 3)


@pytest.fixture
def copy(three: Path, tmp_path: Path) -> Path:
    return shutil.copytree(three, tmp_path / "checkpoints")


def one(path: Path, kind: str) -> Path:
    (file,) = path.glob(f"{kind}*")
    return file


@pytest.mark.parametrize("kind", ["weights", "optimizer", "manifest"])
def test_one_flipped_bit(kind, copy, caplog):
    """At both ends of the file and at random places between them."""
    file, rng = one(folder(copy, 3), kind), random.Random(kind)
    whole = file.read_bytes()
    for place in [0, len(whole) - 1, *rng.sample(range(len(whole)), 6)]:
        flip(file, place, rng.randrange(8))
        caplog.clear()
        assert step_restored(copy) == 2, place
        (line,) = said(caplog)
        assert f"{copy}/step-00000003 is damaged ({file.name})" in line
        file.write_bytes(whole)
    caplog.clear()
    assert step_restored(copy) == 3
    assert said(caplog) == []


def test_every_byte_of_the_manifest(copy):
    """Digits, names, quotes, white space: all of it counts."""
    file = one(folder(copy, 3), "manifest")
    content = file.read_bytes()
    for place in range(len(content)):
        flip(file, place, place % 8)
        with pytest.raises(DamagedError, match=r"manifest\.json"):
            manifests.read(str(file.parent))
        file.write_bytes(content)
    assert manifests.read(str(file.parent)).step == 3


def edit(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """Valid JSON, as if it had been corrected by hand."""

    def damage(path: Path) -> None:
        file = path / "manifest.json"
        body = json.loads(file.read_bytes())
        change(body)
        file.write_text(json.dumps(body, indent=1))

    return damage


def append(file: Path, more: bytes = b"\0") -> None:
    file.write_bytes(file.read_bytes() + more)


def cut(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "weights cut short": lambda path: cut(one(path, "weights")),
    "a byte more": lambda path: append(one(path, "optimizer")),
    "weights are gone": lambda path: one(path, "weights").unlink(),
    "weights of another step": lambda path: shutil.copy(
        one(folder(path.parent, 1), "weights"), one(path, "weights")
    ),
    "manifest is gone": lambda path: (path / "manifest.json").unlink(),
    "manifest cut short": lambda path: cut(path / "manifest.json"),
    "manifest with a line more": lambda path: append(path / "manifest.json", b"\n"),
    "folder of another step": lambda path: (
        shutil.rmtree(path),
        shutil.copytree(folder(path.parent, 1), path),
    ),
    "another size by hand": edit(lambda body: next(iter(body["files"].values())).update(bytes=1)),
    "no file listed": edit(lambda body: body.update(files={})),
    "no digest": edit(lambda body: body.pop("sha256")),
    "a field more": edit(lambda body: body.update(more=1)),
    "no folder": shutil.rmtree,
}
FOREIGN = [b"", b"[]", b"{}", b"7", b"\xff\xfe\xff", b"[" * 100_000, b'{"sha256": "", "files": {"x": 1}}']
SILENT = {"manifest is gone", "no folder"}  # then it is not a checkpoint


@pytest.mark.parametrize("damage", DAMAGES)
def test_falls_back(damage, copy, caplog):
    DAMAGES[damage](folder(copy, 3))
    assert step_restored(copy) == 2
    assert sum("is damaged" in line for line in said(caplog)) == (damage not in SILENT)


def test_foreign_manifests(copy):
    for content in FOREIGN:
        (folder(copy, 3) / "manifest.json").write_bytes(content)
        assert step_restored(copy) == 2, content[:12]


def test_no_whole_one_is_left(copy, caplog):
    """The run starts anew, and says so; the damaged ones go when it has saved again, not before."""
    for step in (1, 2, 3):
        flip(one(folder(copy, step), "weights"), step)
    assert step_restored(copy) is None
    assert f"no checkpoint in {copy} is whole: the run starts anew" in caplog.text
    assert manifests.steps(str(copy)) == [1, 2, 3]


def test_the_damaged_ones_make_room(copy):
    """They must not push out the good ones that come now."""
    flip(one(folder(copy, 3), "weights"), 9)
    flip(one(folder(copy, 2), "manifest"), 9)
    save(Checkpoints(str(copy), IN_STEP), 4)  # it did not restore: it sees the damage of manifests alone
    assert manifests.steps(str(copy)) == [1, 3, 4]
    flip(one(folder(copy, 4), "weights"), 9)
    checkpoints = Checkpoints(str(copy), IN_STEP)
    manifest = checkpoints.restore(*odd())
    assert manifest
    assert manifest.step == 1
    save(checkpoints, 2)
    assert manifests.steps(str(copy)) == [1, 2]
    save(checkpoints, 3)
    assert step_restored(copy) == 3


def test_nothing_in_a_manifest_is_lost(tmp_path):
    progress = {"a": None, "b": [1.5, {"c": 'ü \\ " \n'}], "nan": float("nan"), "pair": (1, 2), "big": 2**70}
    Checkpoints(str(tmp_path), IN_STEP).save(
        7, *odd(), images=10**12, progress=progress, config={"x": {"y": [True, -0.0, 1e-300]}}
    )
    manifest = manifests.read(str(folder(tmp_path, 7)))
    assert manifest.images == 10**12
    assert repr(manifest.progress) == repr(progress | {"pair": [1, 2]})
    assert repr(manifest.config) == "{'x': {'y': [True, -0.0, 1e-300]}}"


def test_a_large_number_of_steps(tmp_path):
    """Beyond eight digits their names sort otherwise than they do."""
    saved(tmp_path, 99_999_999, 100_000_000, 1_000_000_000)
    assert manifests.steps(str(tmp_path)) == [99_999_999, 100_000_000, 1_000_000_000]
    assert step_restored(tmp_path) == 1_000_000_000


@pytest.mark.parametrize("name", ["step-1", "step-000000001", "step-00000001x", "step-0000000१"])
def test_names_that_are_almost_steps(name, tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "step-00000001").rename(tmp_path / name)
    assert manifests.steps(str(tmp_path)) == []
    assert step_restored(tmp_path) is None
    assert Path(tmp_path, name).exists()


def test_nothing_there(tmp_path):
    assert restored(tmp_path / "nothing") is None
    assert not (tmp_path / "nothing").exists()

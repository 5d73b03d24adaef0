"""Damage to any byte of a checkpoint is noticed and named, and the checkpoint before it is used."""

import json
import math
import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.manager import Checkpoints, drop_optimizer
from orchestrator.checkpoint.manifest import DamagedError
from tests.orchestrator.checkpoint.counted import (
    IN_STEP,
    file_of,
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


def test_one_flipped_bit(copy, caplog):
    """Bits are flipped at both ends of files and at random places, in the manifest in every byte."""
    for kind in ("weights", "optimizer"):
        file, rng = file_of(folder(copy, 3), kind), random.Random(kind)
        whole = file.read_bytes()
        for place in [0, len(whole) - 1, *rng.sample(range(len(whole)), 4)]:
            flip(file, place, rng.randrange(8))
            caplog.clear()
            assert step_restored(copy) == 2, place
            (line,) = said(caplog)
            assert f"{copy}/step-00000003 is damaged ({file.name})" in line
            file.write_bytes(whole)
    caplog.clear()
    assert step_restored(copy) == 3
    assert said(caplog) == []
    file = folder(copy, 3) / "manifest.json"
    whole = file.read_bytes()
    for place in range(len(whole)):
        flip(file, place, place % 8)
        with pytest.raises(DamagedError, match=r"manifest\.json"):
            manifests.read(str(file.parent))
        file.write_bytes(whole)
    assert manifests.read(str(file.parent)).step == 3


def edit(change: Callable[[dict], object]) -> Callable[[Path], object]:
    """Returns a function that makes valid JSON again of a manifest, as an edit by hand would."""

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
    "weights cut short": lambda path: cut(file_of(path, "weights")),
    "a byte more": lambda path: append(file_of(path, "optimizer")),
    "weights are gone": lambda path: file_of(path, "weights").unlink(),
    "weights of another step": lambda path: shutil.copy(
        file_of(folder(path.parent, 1), "weights"), file_of(path, "weights")
    ),
    "manifest is gone": lambda path: (path / "manifest.json").unlink(),
    "manifest cut short": lambda path: cut(path / "manifest.json"),
    "folder of another step": lambda path: (
        shutil.rmtree(path),
        shutil.copytree(folder(path.parent, 1), path),
    ),
    "another size by hand": edit(lambda body: next(iter(body["files"].values())).update(bytes=1)),
    "no digest": edit(lambda body: body.pop("sha256")),
    "a field more": edit(lambda body: body.update(more=1)),
}
FOREIGN = [b"", b"[]", b"{}", b"7", b"\xff\xfe\xff", b"[" * 100_000, b'{"sha256": "", "files": {"x": 1}}']


@pytest.mark.parametrize("damage", DAMAGES)
def test_falls_back(damage, copy, caplog):
    DAMAGES[damage](folder(copy, 3))
    assert step_restored(copy) == 2
    # Without a manifest, the folder is not a checkpoint.
    assert sum("is damaged" in line for line in said(caplog)) == (damage != "manifest is gone")


def test_foreign_manifests(copy):
    for content in FOREIGN:
        (folder(copy, 3) / "manifest.json").write_bytes(content)
        assert step_restored(copy) == 2, content[:12]


@pytest.mark.parametrize("name", ["../../victim", "{absolute}", "..", "a/b"])
def test_names_outside_of_the_folder(name, copy, tmp_path):
    """Nothing there is read, written or deleted."""
    victim = tmp_path / "victim"
    victim.write_bytes(b"mine")
    name = name.format(absolute=victim)
    manifest = manifests.read(str(folder(copy, 3)))
    foreign = replace(manifest, files={**manifest.files, name: manifests.hashed(str(victim))})
    (folder(copy, 3) / "manifest.json").write_bytes(manifests.encode(foreign))
    with pytest.raises(DamagedError, match=f"names a file outside of its folder: {name}"):
        manifests.read(str(folder(copy, 3)))
    assert step_restored(copy) == 2
    drop_optimizer(str(copy))
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("place", [0, -1])
def test_no_whole_checkpoint_is_left(place, copy, caplog):
    """The run starts anew with a warning, and with none of the numbers that were read before the damage was
    seen; the damaged checkpoints go only when it has saved again.
    """
    for step in (1, 2, 3):
        weights = file_of(folder(copy, step), "weights")
        flip(weights, place % weights.stat().st_size)
    model, optimizer = odd()
    assert Checkpoints(str(copy), IN_STEP).restore(model, optimizer) is None
    assert not any(value.any() for state in optimizer.state.values() for value in state.values())
    assert f"no checkpoint in {copy} is whole: the run starts anew" in caplog.text
    assert manifests.steps(str(copy)) == [1, 2, 3]


def test_damaged_checkpoints_are_replaced(copy):
    flip(file_of(folder(copy, 3), "weights"), 9)
    flip(file_of(folder(copy, 2), "manifest"), 9)
    # Without `restore`, only the damage of manifests is seen.
    save(Checkpoints(str(copy), IN_STEP), 4)
    assert manifests.steps(str(copy)) == [1, 3, 4]
    flip(file_of(folder(copy, 4), "weights"), 9)
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


def test_names_of_steps(tmp_path):
    """Beyond eight digits the order of names is not that of numbers. Similar names are ignored."""
    assert restored(tmp_path / "nothing") is None
    assert not (tmp_path / "nothing").exists()
    saved(tmp_path, 99_999_999, 100_000_000, 1_000_000_000)
    for name in ("step-1", "step-000000001", "step-00000001x", "step-0000000१"):
        shutil.copytree(folder(tmp_path, 99_999_999), tmp_path / name)
    assert manifests.steps(str(tmp_path)) == [99_999_999, 100_000_000, 1_000_000_000]
    assert step_restored(tmp_path) == 1_000_000_000


def test_a_quality_that_is_no_number_is_never_the_best(tmp_path):
    checkpoints = Checkpoints(str(tmp_path), IN_STEP)
    for step, quality in ((1, math.nan), (2, 0.5)):
        save(checkpoints, step, quality=quality)
    checkpoints.finish()
    assert manifests.best_checkpoint(str(tmp_path)) == (2, 0.5)

"""What a run resumes from, and what it refuses; whatever lies in its directory."""

import hashlib
import json
import shutil
from pathlib import Path

import pyarrow as pa
import pytest
import torch
from torch import nn

from moe.vit import ViT
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.parts import Window, bytes_of
from orchestrator.checkpoint.run import Checkpoints
from orchestrator.checkpoint.state import load, state_of
from orchestrator.codec import to_dict
from orchestrator.config import CheckpointConfig
from tests.orchestrator.checkpoint.counted import (
    IN_STEP,
    Odd,
    fill,
    folder,
    odd,
    restored,
    said,
    save,
    saved,
    step_restored,
    wrong,
)
from tests.orchestrator.checkpoint.small_runs import RUNS, assert_same, built, train, whole_state

REPORT = {"images": 0, "progress": {}, "config": {}}


@pytest.mark.parametrize("name", RUNS)
def test_goes_on_as_if_nothing_had_happened(name, tmp_path):
    model, optimizer = built(name, seed=0)
    train(model, optimizer, range(3))
    progress = {"device_s": 4.5, "reported": 2, "metrics": {"val/acc1": 0.5}, "best": [0.5, 2]}
    config = to_dict(RUNS[name])
    checkpoints = Checkpoints(str(tmp_path), IN_STEP)
    checkpoints.save(3, model, optimizer, images=24, progress=progress, config=config)
    state = whole_state(model, optimizer)
    losses = train(model, optimizer, range(3, 6))

    again, its_optimizer = built(name, seed=9)
    manifest = Checkpoints(str(tmp_path), IN_STEP).restore(again, its_optimizer)
    assert manifest
    assert (manifest.step, manifest.images, manifest.progress) == (3, 24, progress)
    assert manifest.config == json.loads(json.dumps(config))
    assert_same(whole_state(again, its_optimizer), state)
    assert train(again, its_optimizer, range(3, 6)) == losses


def test_every_shape_and_type(place):
    """Scalars, tensors without rows, columns first, integers, bfloat16, truth values."""
    saved(place, 3)
    assert step_restored(place) == 3


def test_nothing_in_a_manifest_is_lost(tmp_path):
    progress = {"a": None, "b": [1.5, {"c": 'ü \\ " \n'}], "nan": float("nan"), "pair": (1, 2), "big": 2**70}
    model, optimizer = odd()
    Checkpoints(str(tmp_path), IN_STEP).save(
        7, model, optimizer, images=10**12, progress=progress, config={"x": {"y": [True, -0.0, 1e-300]}}
    )
    manifest = manifests.read(str(folder(tmp_path, 7)))
    assert manifest.images == 10**12
    assert repr(manifest.progress) == repr(progress | {"pair": [1, 2]})
    assert repr(manifest.config) == "{'x': {'y': [True, -0.0, 1e-300]}}"


def other(change: str) -> tuple[Odd, torch.optim.Optimizer]:
    model = Odd(rows=41 if change == "shape" else 40)
    if change == "missing":
        model.more = nn.Parameter(torch.zeros(2))
    if change == "unknown":
        del model.cube
    if change == "float64":
        model.double()
    if change == "bfloat16":
        model.bfloat16()
    if change == "optimiser":
        return model, torch.optim.SGD(model.parameters(), momentum=0.9)
    if change == "less optimiser":
        return model, torch.optim.SGD(model.parameters())
    return model, torch.optim.AdamW(model.parameters())


REFUSED = {
    "missing": r"step-00000002 is of another model: .*weights.more is not in it",
    "unknown": r"weights.cube has no place",
    "shape": r"weights.matrix is torch.float32 \(40, 33\) there, torch.float32 \(41, 33\) here",
    "float64": r"weights.cube is torch.float32 \(2, 3, 5\) there, torch.float64 \(2, 3, 5\) here",
    "bfloat16": r"weights.cube is torch.float32 \(2, 3, 5\) there, torch.bfloat16 \(2, 3, 5\) here",
    "optimiser": r"optimizer.state.cube.momentum_buffer is not in it; .*; and 7 more",
    "less optimiser": r"optimizer.state.cube.exp_avg has no place",
}


@pytest.mark.parametrize("change", REFUSED)
def test_another_model(change, tmp_path):
    """Named, and nothing was changed in it; no older checkpoint is tried instead."""
    saved(tmp_path, 1, 2)
    model, optimizer = other(change)
    fill(model, optimizer, 9)
    with pytest.raises(ValueError, match=REFUSED[change]):
        Checkpoints(str(tmp_path), IN_STEP).restore(model, optimizer)
    assert wrong(model, optimizer, 9) == []


def test_an_optimiser_that_has_state_already(tmp_path):
    saved(tmp_path, 2)
    model, optimizer = odd()
    fill(model, optimizer, 5)
    assert Checkpoints(str(tmp_path), IN_STEP).restore(model, optimizer)
    assert wrong(model, optimizer, 2) == []


def test_settings_of_the_optimiser_are_the_runs(tmp_path):
    """They are no state: the schedule and the config say them."""
    saved(tmp_path, 2)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.123, weight_decay=0.4, betas=(0.1, 0.2))
    Checkpoints(str(tmp_path), IN_STEP).restore(model, optimizer)
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.123, 0.4, (0.1, 0.2))


def test_asking_for_the_state_is_no_update():
    model, optimizer = odd()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = state_of(model, optimizer)
    assert_same(model.state_dict(), before)
    assert not any(tensor.any() for name, tensor in state.items() if name.startswith("optimizer."))
    assert all(param.grad is None for param in model.parameters())


def test_weights_of_a_model_alone(tmp_path):
    saved(tmp_path, 2)
    path = str(folder(tmp_path, 2))
    model, optimizer = odd()
    load(path, manifests.read(path), model)
    assert all(name.startswith("optimizer.") for name in wrong(model, optimizer, 2))


NAMES = ["a b", "100%", "a%20b", "x#y?z=1", "ü", "-rf", "quote'\"", "*", "step-00000001"]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_directories(name, tmp_path):
    saved(tmp_path / name / "checkpoints", 1, 2)
    assert step_restored(tmp_path / name / "checkpoints") == 2
    assert [path.name for path in tmp_path.iterdir()] == [name]


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_ways_to_say_a_directory(prefix, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(f"{prefix}{tmp_path}/a/", 1)
    assert step_restored(f"{prefix}{tmp_path}/a") == 1
    saved("b", 2)
    assert step_restored(tmp_path / "b") == 2


def test_a_file_where_a_step_should_be(tmp_path, caplog):
    saved(tmp_path, 1)
    (tmp_path / "step-00000002").write_text("mine")
    checkpoints = Checkpoints(str(tmp_path), IN_STEP)
    save(checkpoints, 2)
    assert checkpoints.failures == 1
    assert "step-00000002 exists already" in caplog.text
    assert (tmp_path / "step-00000002").read_text() == "mine"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["step-00000001", "step-00000002"]
    save(checkpoints, 3)
    assert step_restored(tmp_path) == 3


def test_a_folder_of_somebody_else_where_a_step_should_be(tmp_path):
    (tmp_path / "step-00000002").mkdir()
    (tmp_path / "step-00000002" / "notes").write_text("mine")
    assert step_restored(tmp_path) is None
    checkpoints = Checkpoints(str(tmp_path), IN_STEP)
    save(checkpoints, 2)
    assert checkpoints.failures == 1
    assert (tmp_path / "step-00000002" / "notes").read_text() == "mine"


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "checkpoints").write_text("mine")
    assert restored(tmp_path / "checkpoints") is None
    checkpoints = Checkpoints(str(tmp_path / "checkpoints"), IN_STEP)
    save(checkpoints, 1)
    with pytest.raises(OSError, match="checkpoints"):
        checkpoints.finish()
    assert (tmp_path / "checkpoints").read_text() == "mine"


@pytest.mark.parametrize("asynchronous", [True, False], ids=["beside training", "in step"])
def test_a_directory_that_vanishes(asynchronous, tmp_path, monkeypatch):
    """Between saves it is made anew; in the middle of one, that one fails."""
    directory = tmp_path / "checkpoints"
    checkpoints = Checkpoints(str(directory), CheckpointConfig(asynchronous=asynchronous))
    save(checkpoints, 1)
    checkpoints.settle()
    shutil.rmtree(directory)
    save(checkpoints, 2)
    checkpoints.settle()
    assert checkpoints.failures == 0
    assert step_restored(directory) == 2
    open_to_write = storage.open_to_write

    def vanish(location: str):
        if "/optimizer-" in location:
            shutil.rmtree(directory)
        return open_to_write(location)

    monkeypatch.setattr(storage, "open_to_write", vanish)
    save(checkpoints, 3)
    checkpoints.settle()
    monkeypatch.undo()
    assert checkpoints.failures == 1
    assert not directory.exists()
    save(checkpoints, 4)
    checkpoints.finish()
    assert step_restored(directory) == 4


def test_a_directory_that_may_only_be_read(tmp_path, monkeypatch, caplog):
    """It can be resumed from, though nothing in it can be tidied up or saved."""
    saved(tmp_path, 1)
    (tmp_path / "step-00000002.0123abcd.tmp").mkdir()

    def refuse(location: str, *_):
        raise PermissionError(f"{location} is read-only")

    for name in ("make_folder", "open_to_write", "delete", "write_bytes"):
        monkeypatch.setattr(storage, name, refuse)
    assert step_restored(tmp_path) == 1
    assert "read-only" in caplog.text
    checkpoints = Checkpoints(str(tmp_path), IN_STEP)
    save(checkpoints, 2)
    assert checkpoints.failures == 1
    assert len(said(caplog)) >= 2


def test_a_large_number_of_steps(tmp_path):
    """Beyond eight digits their names sort otherwise than they do."""
    saved(tmp_path, 99_999_999, 100_000_000, 1_000_000_000)
    assert manifests.steps(str(tmp_path)) == [99_999_999, 100_000_000, 1_000_000_000]
    assert step_restored(tmp_path) == 1_000_000_000


@pytest.mark.parametrize(
    "name", ["step-1", "step-000000001", "step-00000001x", "xstep-00000001", "step-0000000१"]
)
def test_names_that_are_almost_steps(name, tmp_path):
    saved(tmp_path, 1)
    (tmp_path / "step-00000001").rename(tmp_path / name)
    assert manifests.steps(str(tmp_path)) == []
    assert step_restored(tmp_path) is None
    assert Path(tmp_path, name).exists()


def test_many_small_tensors(tmp_path):
    """A thousand of them: the index stays a small part."""
    model = nn.ParameterDict({f"a{i}": nn.Parameter(torch.full((7, 3), float(i))) for i in range(1000)})
    optimizer = torch.optim.SGD(model.parameters())
    Checkpoints(str(tmp_path), IN_STEP).save(1, model, optimizer, **REPORT)
    index = next(folder(tmp_path, 1).glob("weights.*.json"))
    assert index.stat().st_size < 130 * 1000
    again = nn.ParameterDict({f"a{i}": nn.Parameter(torch.zeros(7, 3)) for i in range(1000)})
    Checkpoints(str(tmp_path), IN_STEP).restore(again, torch.optim.SGD(again.parameters()))
    assert_same(dict(again), {name: param.detach() for name, param in model.items()})


def test_small_tensors_are_read_together(tmp_path, monkeypatch):
    """On S3 every request takes tens of milliseconds."""
    model = nn.ParameterDict({f"a{i}": nn.Parameter(torch.full((7, 3), float(i))) for i in range(100)})
    checkpoints = Checkpoints(str(tmp_path), IN_STEP)
    checkpoints.save(1, model, torch.optim.SGD(model.parameters()), **REPORT)
    requests, open_to_read = [], storage.open_to_read

    class Counted:
        def __init__(self, file) -> None:
            self.file = file

        def __enter__(self):
            return self

        def __exit__(self, *_):
            self.file.close()

        def readinto(self, _: memoryview) -> int:
            raise NotImplementedError

        def read_at(self, count: int, offset: int) -> bytes:
            requests.append(count)
            return self.file.read_at(count, offset)

    path = str(folder(tmp_path, 1))
    manifest = manifests.read(path)
    monkeypatch.setattr(
        storage,
        "open_to_read",
        lambda location: Counted(open_to_read(location)) if ".bin" in location else open_to_read(location),
    )
    again = nn.ParameterDict({f"a{i}": nn.Parameter(torch.zeros(7, 3)) for i in range(100)})
    load(path, manifest, again)
    assert len(requests) == 1
    assert_same(dict(again), {name: param.detach() for name, param in model.items()})


def test_parts_that_are_far_from_each_other_are_read_again(monkeypatch):
    """Beyond what one request read, across its end, and before its first byte."""
    monkeypatch.setattr(Window, "AHEAD", 8)
    window = Window(pa.BufferReader(bytes(range(100))))
    for begin in (10, 14, 16, 90, 2):
        target = bytearray(4)
        window.fill(memoryview(target), begin)
        assert list(target) == list(range(begin, begin + 4))


@pytest.mark.slow
def test_more_bytes_than_32_bits_count(tmp_path):
    """A tensor, and a file, beyond 4 GiB."""
    model, rng = nn.Module(), torch.Generator().manual_seed(0)
    model.register_buffer("before", torch.arange(5))
    model.register_buffer("large", torch.empty(2**32 + 11, dtype=torch.uint8).random_(generator=rng))
    model.register_buffer("then", torch.arange(7))
    model.one = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD(model.parameters())
    Checkpoints(str(tmp_path), IN_STEP).save(1, model, optimizer, **REPORT)
    digest = hashlib.sha256(bytes_of(model.large)).digest()
    for tensor in model.buffers():
        tensor.zero_()
    assert Checkpoints(str(tmp_path), IN_STEP).restore(model, optimizer)
    shutil.rmtree(tmp_path / "step-00000001")
    assert model.then.tolist() == list(range(7))
    assert hashlib.sha256(bytes_of(model.large)).digest() == digest


def test_a_model_of_the_package(tmp_path):
    """Names are those of its state dict."""
    run = RUNS["soft, AdamW"]
    model, optimizer = built("soft, AdamW", seed=0)
    names = {name for name in state_of(model, optimizer) if name.startswith("weights.")}
    assert names == {f"weights.{name}" for name in ViT(run.model).state_dict()}

"""What a run resumes from, and which checkpoints it refuses to load."""

import hashlib
import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from moe.models.vit import ViT
from orchestrator import storage
from orchestrator.checkpoint import files, manifest as manifests
from orchestrator.checkpoint.files import load_state, state_of
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.codec import override, to_dict
from tests.orchestrator.checkpoint.counted import (
    IN_STEP,
    Odd,
    expected,
    fill,
    flip,
    folder,
    odd,
    saved,
    step_restored,
    wrong,
)
from tests.orchestrator.checkpoint.small_runs import RUNS, assert_same, built, train, whole_state

REPORT = {"images": 0, "progress": {}, "config": {}}


@pytest.mark.parametrize("name", RUNS)
def test_resuming_continues_bit_for_bit(name, tmp_path):
    """The files are named as in the model, and the safetensors library alone reads them."""
    model, optimizer = built(name, seed=0)
    train(model, optimizer, range(3))
    progress = {"device_s": 4.5, "reported": 2, "metrics": {"val/acc1": 0.5}, "best": [0.5, 2]}
    config = to_dict(RUNS[name])
    checkpoints = Checkpoints(str(tmp_path), IN_STEP)
    checkpoints.save(3, model, optimizer, images=24, progress=progress, config=config)
    state = whole_state(model, optimizer)
    (path,) = folder(tmp_path, 3).glob("weights-*")
    assert_same(load_file(path), {key: state[key] for key in ViT(RUNS[name].model).state_dict()})
    losses = train(model, optimizer, range(3, 6))

    again, its_optimizer = built(name, seed=9)
    manifest = Checkpoints(str(tmp_path), IN_STEP).restore(again, its_optimizer)
    assert manifest
    assert (manifest.step, manifest.images, manifest.progress) == (3, 24, progress)
    assert manifest.config == json.loads(json.dumps(config))
    assert_same(whole_state(again, its_optimizer), state)
    assert train(again, its_optimizer, range(3, 6)) == losses


def test_every_shape_and_type(place):
    """Scalars, tensors without rows, column-major tensors, integers, bfloat16, booleans."""
    saved(place, 3)
    assert step_restored(place) == 3


def test_large_states_are_spread_over_files(tmp_path, monkeypatch):
    """Only a part of the state is in memory twice. Other files in the folder are not read."""
    monkeypatch.setattr(files, "FILE_BYTES", 3000)
    saved(tmp_path, 2)
    sizes = [path.stat().st_size for path in folder(tmp_path, 2).glob("*.safetensors")]
    assert len(sizes) > 4
    assert max(sizes) < 40 * 33 * 4 + 3000
    stray = {"matrix": torch.zeros(40, 33), "more": torch.zeros(2)}
    save_file(stray, folder(tmp_path, 2) / "weights-00001-001.0123abcd.safetensors")
    (folder(tmp_path, 2) / "mine.safetensors").write_bytes(b"noise")
    assert step_restored(tmp_path) == 2


def test_a_file_is_hashed_when_it_is_read(tmp_path, monkeypatch):
    """Not all files before the first tensor: they would come from the disk twice if memory is short."""
    monkeypatch.setattr(files, "FILE_BYTES", 1)
    saved(tmp_path, 1)
    pieces, reader, events = storage.pieces, files.HuggingFaceStorageReader, []
    read_data = reader.read_data

    def read(*args):
        events.append("read")
        return read_data(*args)

    def hashed(path):
        events.extend(["hash"] if path.endswith(".safetensors") else [])
        return pieces(path)

    monkeypatch.setattr(storage, "pieces", hashed)
    monkeypatch.setattr(reader, "read_data", read)
    assert step_restored(tmp_path) == 1
    count = len(list(folder(tmp_path, 1).glob("*.safetensors")))
    assert events.count("hash") == count > files.THREADS
    assert events.index("read") <= files.THREADS


def test_every_file_is_verified(tmp_path, monkeypatch, caplog):
    """One without any number too, and headers: a damaged header may describe another model."""
    monkeypatch.setattr(files, "FILE_BYTES", 1)
    saved(tmp_path, 1, 2)
    for file in folder(tmp_path, 2).glob("*.safetensors"):
        whole = file.read_bytes()
        names = [whole.index(b'"shape"') + 1, whole.index(b'"of_') + 2] if b'"of_' in whole else []
        for place in (7, 8, *names, len(whole) - 1):
            flip(file, place)
            caplog.clear()
            assert step_restored(tmp_path) == 1, (file.name, place)
            assert f"step-00000002 is damaged ({file.name})" in caplog.text
            file.write_bytes(whole)
    assert step_restored(tmp_path) == 2


def test_a_new_optimizer_has_no_momentum():
    """torch makes its state by an update, which decays weights."""
    run = override(RUNS["mixture, SGD"], {"train.optimizer.weight_decay": 0.1})
    model = ViT(run.model)
    state = state_of(model, run.train.optimizer.build(model))
    momentum = [value for name, value in state.items() if name.startswith("optimizer.state")]
    assert len(momentum) == len(list(model.parameters()))
    assert not any(value.any() for value in momentum)


def changed(change: str) -> tuple[Odd, torch.optim.Optimizer]:
    model = Odd(rows=41 if change == "shape" else 40)
    if change == "missing":
        model.more = nn.Parameter(torch.zeros(2))
    if change == "unknown":
        del model.cube
    if change == "dtype":
        model.bfloat16()
    if change == "optimiser":
        return model, torch.optim.SGD(model.parameters())
    return model, torch.optim.AdamW(model.parameters())


REFUSED = {
    "missing": r"step-00000002 holds another model: .*more is not in it",
    "unknown": r"cube has no place",
    "shape": r"matrix is torch.float32 \(40, 33\) in the checkpoint, torch.float32 \(41, 33\) in the model",
    "dtype": r"cube is torch.float32 \(2, 3, 5\) in the checkpoint, torch.bfloat16 \(2, 3, 5\) in the model",
    "optimiser": r"optimizer.state.cube.exp_avg has no place; .*; and 4 more",
}


@pytest.mark.parametrize("change", REFUSED)
def test_another_model_is_refused(change, tmp_path):
    """The difference is named, the model is unchanged, and no older checkpoint is tried instead."""
    saved(tmp_path, 1, 2)
    model, optimizer = changed(change)
    fill(model, optimizer, 9)
    with pytest.raises(ValueError, match=REFUSED[change]):
        Checkpoints(str(tmp_path), IN_STEP).restore(model, optimizer)
    assert wrong(model, optimizer, 9) == []


def test_settings_of_the_optimiser_are_not_restored(tmp_path):
    """The state is the checkpoint's; settings come from the schedule and the config."""
    saved(tmp_path, 2)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.123, weight_decay=0.4, betas=(0.1, 0.2))
    fill(model, optimizer, 5)
    assert Checkpoints(str(tmp_path), IN_STEP).restore(model, optimizer)
    assert wrong(model, optimizer, 2) == []
    (group,) = optimizer.param_groups
    assert (group["lr"], group["weight_decay"], group["betas"]) == (0.123, 0.4, (0.1, 0.2))


def test_weights_load_without_the_optimisers_files(tmp_path):
    saved(tmp_path, 2)
    path = str(folder(tmp_path, 2))
    next(folder(tmp_path, 2).glob("optimizer-*")).unlink()
    model, _ = odd()
    load_state(path, manifests.read(path), model)
    assert_same(model.state_dict(), {n: expected(n, 2, t) for n, t in model.state_dict().items()})


def test_names_of_directories(tmp_path, monkeypatch):
    for name in ("100%20b", "x#y?z=1", "-rf", "quote'\"* ", "step-00000001"):
        saved(tmp_path / name / "checkpoints", 1, 2)
        assert step_restored(tmp_path / name / "checkpoints") == 2
    monkeypatch.chdir(tmp_path)
    saved(f"file://{tmp_path}/a/", 1)
    assert step_restored(f"file://{tmp_path}/a") == step_restored("a/") == 1


@pytest.mark.slow
def test_more_bytes_than_32_bits_count(tmp_path):
    """A tensor, and a file, beyond 4 GiB."""
    model, rng = nn.Module(), torch.Generator().manual_seed(0)
    model.register_buffer("large", torch.empty(2**32 + 11, dtype=torch.uint8).random_(generator=rng))
    model.register_buffer("then", torch.arange(7))
    model.one = nn.Parameter(torch.ones(1))
    optimizer = torch.optim.SGD(model.parameters())
    Checkpoints(str(tmp_path), IN_STEP).save(1, model, optimizer, **REPORT)
    digest = hashlib.sha256(model.large.numpy()).digest()
    for tensor in model.buffers():
        tensor.zero_()
    assert Checkpoints(str(tmp_path), IN_STEP).restore(model, optimizer)
    shutil.rmtree(Path(tmp_path, "step-00000001"))
    assert model.then.tolist() == list(range(7))
    assert hashlib.sha256(model.large.numpy()).digest() == digest

"""What a run resumes from, and what it refuses; whatever lies in its directory."""

import hashlib
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

from moe.vit import ViT
from orchestrator.checkpoint import files
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.files import load, state_of
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.codec import to_dict
from tests.orchestrator.checkpoint.counted import (
    IN_STEP,
    Odd,
    expected,
    fill,
    folder,
    odd,
    save,
    saved,
    step_restored,
    wrong,
)
from tests.orchestrator.checkpoint.small_runs import RUNS, assert_same, built, train, whole_state

REPORT = {"images": 0, "progress": {}, "config": {}}


@pytest.mark.parametrize("name", RUNS)
def test_continues_as_if_nothing_had_happened(name, tmp_path):
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


READ = """
import json, sys
from pathlib import Path
from safetensors.torch import load_file

assert not {"moe", "orchestrator"} & sys.modules.keys()
tensors = {}
for path in Path(sys.argv[1]).glob("weights-*.safetensors"):
    tensors |= load_file(path)
found = {name: (str(t.dtype), list(t.shape), t.double().flatten().tolist()) for name, t in tensors.items()}
print(json.dumps(found))
"""


def test_weights_load_without_this_project(tmp_path):
    """In a process that has torch and safetensors alone."""
    model, optimizer = odd()
    del model.of_bytes
    fill(model, optimizer, 3)
    Checkpoints(str(tmp_path), IN_STEP).save(3, model, optimizer, **REPORT)
    command = [sys.executable, "-I", "-c", READ, str(folder(tmp_path, 3))]
    job = subprocess.run(command, capture_output=True, text=True, check=False, cwd="/")
    assert job.returncode == 0, job.stderr
    assert json.loads(job.stdout) == {
        name: [str(t.dtype), list(t.shape), t.double().flatten().tolist()]
        for name, t in model.state_dict().items()
    }


def test_names_are_those_of_the_model(tmp_path):
    run = RUNS["soft, AdamW"]
    model, optimizer = built("soft, AdamW", seed=0)
    Checkpoints(str(tmp_path), IN_STEP).save(1, model, optimizer, **REPORT)
    (path,) = folder(tmp_path, 1).glob("weights-*")
    with safe_open(path, "pt") as file:
        assert set(file.keys()) == set(ViT(run.model).state_dict())


def test_large_states_are_spread_over_files(tmp_path, monkeypatch):
    """So that no more than a part of the state is in memory twice."""
    monkeypatch.setattr(files, "FILE_BYTES", 3000)
    saved(tmp_path, 2)
    sizes = [path.stat().st_size for path in folder(tmp_path, 2).glob("*.safetensors")]
    assert len(sizes) > 4
    assert max(sizes) < 40 * 33 * 4 + 3000
    assert step_restored(tmp_path) == 2


def test_other_files_in_the_folder_are_not_read(tmp_path):
    saved(tmp_path, 2)
    stray = {"matrix": torch.zeros(40, 33), "more": torch.zeros(2)}
    save_file(stray, folder(tmp_path, 2) / "weights-00001-001.0123abcd.safetensors")
    (folder(tmp_path, 2) / "mine.safetensors").write_bytes(b"noise")
    assert step_restored(tmp_path) == 2


def other(change: str) -> tuple[Odd, torch.optim.Optimizer]:
    model = Odd(rows=41 if change == "shape" else 40)
    if change == "missing":
        model.more = nn.Parameter(torch.zeros(2))
    if change == "unknown":
        del model.cube
    if change == "bfloat16":
        model.bfloat16()
    if change == "optimiser":
        return model, torch.optim.SGD(model.parameters(), momentum=0.9)
    if change == "less optimiser":
        return model, torch.optim.SGD(model.parameters())
    return model, torch.optim.AdamW(model.parameters())


REFUSED = {
    "missing": r"step-00000002 holds another model: .*more is not in it",
    "unknown": r"cube has no place",
    "shape": r"matrix is torch.float32 \(40, 33\) there, torch.float32 \(41, 33\) here",
    "bfloat16": r"cube is torch.float32 \(2, 3, 5\) there, torch.bfloat16 \(2, 3, 5\) here",
    "optimiser": r"optimizer.state.cube.exp_avg has no place; .*; and 7 more",
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


def test_an_optimiser_that_has_state_and_settings(tmp_path):
    """The state is the checkpoint's; settings are no state: the schedule and the config say them."""
    saved(tmp_path, 2)
    model = Odd()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.123, weight_decay=0.4, betas=(0.1, 0.2))
    fill(model, optimizer, 5)
    assert Checkpoints(str(tmp_path), IN_STEP).restore(model, optimizer)
    assert wrong(model, optimizer, 2) == []
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
    next(folder(tmp_path, 2).glob("optimizer-*")).unlink()  # nobody asks for it
    model, _ = odd()
    load(path, manifests.read(path), model)
    assert_same(model.state_dict(), {n: expected(n, 2, t) for n, t in model.state_dict().items()})


@pytest.mark.parametrize("name", ["a b", "100%20b", "x#y?z=1", "-rf", "quote'\"*", "step-00000001"])
def test_names_of_directories(name, tmp_path):
    saved(tmp_path / name / "checkpoints", 1, 2)
    assert step_restored(tmp_path / name / "checkpoints") == 2
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_ways_to_name_a_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    saved(f"file://{tmp_path}/a/", 1)
    assert step_restored(f"file://{tmp_path}/a") == step_restored(f"{tmp_path}/a/") == 1
    saved("b", 2)
    assert step_restored(tmp_path / "b") == 2


def test_a_directory_that_is_a_file(tmp_path):
    (tmp_path / "checkpoints").write_text("mine")
    checkpoints = Checkpoints(str(tmp_path / "checkpoints"), IN_STEP)
    assert checkpoints.restore(*odd()) is None
    save(checkpoints, 1)
    with pytest.raises(OSError, match="checkpoints"):
        checkpoints.finish()
    assert (tmp_path / "checkpoints").read_text() == "mine"


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
    digest = hashlib.sha256(model.large.numpy()).digest()
    for tensor in model.buffers():
        tensor.zero_()
    assert Checkpoints(str(tmp_path), IN_STEP).restore(model, optimizer)
    shutil.rmtree(Path(tmp_path, "step-00000001"))
    assert model.then.tolist() == list(range(7))
    assert hashlib.sha256(model.large.numpy()).digest() == digest

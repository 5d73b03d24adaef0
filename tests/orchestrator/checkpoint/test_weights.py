"""A checkpoint's weights as one file: bit for bit, whole or not at all, and a model again."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from moe.load import CONFIG, DTYPES, WEIGHTS
from moe.vit import ViT
from orchestrator.checkpoint import single_file
from orchestrator.checkpoint.retention import drop_optimizer
from orchestrator.checkpoint.run import Checkpoints
from orchestrator.checkpoint.weights import export, export_folder, load_exported, load_newest
from orchestrator.codec import from_dict, override, to_dict
from orchestrator.config import CheckpointConfig, RunConfig
from orchestrator.errors import UsageError
from orchestrator.training.optim import build_optimizer

RUNS = {
    kind: override(RunConfig(), {"model.moe.router.kind": kind, "model.width": 16, "model.mlp_dim": 32})
    for kind in ("soft", "mixture")  # the second has a buffer
}


@pytest.fixture
def saved(tmp_path: Path) -> Callable[..., tuple[str, ViT]]:
    """``saved("soft", 3)``: a directory with a checkpoint of step 3, and its model; no weight is zero."""

    def save(kind: str, *steps: int) -> tuple[str, ViT]:
        run, directory = RUNS[kind], f"{tmp_path}/checkpoints"
        model = ViT(run.model)
        optimizer = build_optimizer(run.train.optimizer, model)
        checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=False, keep_last=9))
        for step in steps:
            with torch.no_grad():
                for tensor in model.state_dict().values():
                    tensor.normal_(generator=torch.Generator().manual_seed(step))
            checkpoints.save(step, model, optimizer, images=0, progress={}, config=to_dict(run))
        checkpoints.finish()
        return directory, model

    return save


def assert_same(got: ViT, expected: ViT) -> None:
    torch.testing.assert_close(dict(got.state_dict()), dict(expected.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize("kind", RUNS)
def test_a_model_again(kind, saved, tmp_path):
    directory, model = saved(kind, 3)
    export(directory, f"{tmp_path}/new/folder/model.safetensors")
    loaded = load_exported(f"{tmp_path}/new/folder/model.safetensors")
    assert_same(loaded, model)
    assert loaded.config == RUNS[kind].model
    assert not loaded.training
    assert all(param.requires_grad for param in loaded.parameters())
    images = torch.randn(2, 3, 8, 8)
    assert torch.equal(loaded(images).logits, model.eval()(images).logits)
    assert [path.name for path in (tmp_path / "new/folder").iterdir()] == ["model.safetensors"]


def test_anybody_can_read_it(saved, tmp_path):
    """The library itself: the tensors, and of which run and checkpoint they are."""
    directory, model = saved("soft", 3)
    path = tmp_path / "model.safetensors"
    export(directory, str(path))
    torch.testing.assert_close(load_file(path), dict(model.state_dict()), rtol=0, atol=0)
    neighbour = tmp_path / "neighbour"
    neighbour.touch()
    assert path.stat().st_mode == neighbour.stat().st_mode
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert from_dict(RunConfig, json.loads(metadata.pop("config"))) == RUNS["soft"]
    manifest = Path(directory, "step-00000003/manifest.json").read_bytes()
    assert metadata == {
        "format": "pt",
        "version": "1",
        "step": "3",
        "classes": "null",  # of shards that are not there
        "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
    }


def test_weights_are_all_it_needs(saved, tmp_path):
    directory, model = saved("soft", 3)
    assert drop_optimizer(directory) > 0
    export(f"{directory}/step-00000003", f"{tmp_path}/model.safetensors")
    assert_same(load_exported(f"{tmp_path}/model.safetensors"), model)


def test_the_newest_whole_one(saved, tmp_path, caplog):
    _, expected = saved("soft", 3)
    directory, _ = saved("soft", 3, 6)
    Path(directory, "step-00000006/manifest.json").write_text("{}")
    export(directory, f"{tmp_path}/model.safetensors")
    assert_same(load_exported(f"{tmp_path}/model.safetensors"), expected)
    assert "step-00000006 is damaged (manifest.json); trying the one before" in caplog.text
    loaded = ViT(RUNS["soft"].model)
    assert load_newest(directory, loaded).step == 3
    assert_same(loaded, expected)
    with pytest.raises(UsageError, match=r"step-00000006 is damaged: manifest\.json"):
        export(f"{directory}/step-00000006", f"{tmp_path}/other.safetensors")
    assert not (tmp_path / "other.safetensors").exists()


def test_a_file_that_is_there_stays(saved, tmp_path):
    directory, model = saved("soft", 3)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"precious")
    with pytest.raises(UsageError, match=r"model\.safetensors exists already; --force"):
        export(directory, str(path))
    assert path.read_bytes() == b"precious"
    export(directory, str(path), force=True)
    assert_same(load_exported(str(path)), model)


def test_a_write_that_fails_leaves_what_was_there(saved, tmp_path, monkeypatch):
    directory, _ = saved("soft", 3)
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"precious")

    def disk_full(name):
        assert len(Path(name).read_bytes()) > 1000
        raise OSError("no space left on device")

    monkeypatch.setattr(single_file.storage, "flush", disk_full)
    with pytest.raises(OSError, match="no space left"):
        export(directory, str(path), force=True)
    assert path.read_bytes() == b"precious"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["checkpoints", "model.safetensors"]


def test_a_folder_never_describes_other_weights(saved, tmp_path, monkeypatch):
    """The second export fails while it writes weights: the description of the first is gone."""
    directory, _ = saved("soft", 3)
    folder = tmp_path / "folder"
    export_folder(directory, str(folder))
    assert {path.name for path in folder.iterdir()} == {CONFIG, WEIGHTS}

    def disk_full(_):
        raise OSError("no space left on device")

    monkeypatch.setattr(single_file.storage, "flush", disk_full)
    with pytest.raises(OSError, match="no space left"):
        export_folder(directory, str(folder), force=True)
    assert not (folder / CONFIG).exists()


@pytest.mark.parametrize("out", ["s3://bucket/model.safetensors", "model.pt"])
def test_names_that_are_refused(out, tmp_path):
    with pytest.raises(UsageError, match=r"local file that ends in \.safetensors"):
        export(str(tmp_path), out)


def test_no_export(tmp_path):
    path = str(tmp_path / "model.safetensors")
    save_file({"head.bias": torch.zeros(10)}, path, {"format": "pt"})
    with pytest.raises(UsageError, match=r"no export of version 1: its metadata is \{'format': 'pt'\}"):
        load_exported(path)
    with pytest.raises(FileNotFoundError):
        load_exported(str(tmp_path / "nothing.safetensors"))


@pytest.mark.parametrize("change", ["missing", "unknown", "shape"])
def test_an_export_of_another_model(change, saved, tmp_path):
    """The metadata may have been copied to other tensors: nothing may stay as it was in memory."""
    directory, _ = saved("soft", 3)
    path = str(tmp_path / "model.safetensors")
    export(directory, path)
    tensors, metadata = load_file(path), dict(single_file.read_header(path).metadata)
    if change == "missing":
        del tensors["blocks.0.norm1.bias"]
    else:
        tensors["head.bias" if change == "shape" else "stray"] = torch.zeros(3)
    save_file(tensors, path, metadata)
    with pytest.raises(UsageError, match=r"does not hold the model that its config describes"):
        load_exported(path)


def test_tensors_of_every_dtype(tmp_path):
    """Small ones between large ones: the library demands that there is no gap and that they are aligned."""
    path = str(tmp_path / "weights.safetensors")
    tensors = {f"{i}": torch.ones(3, 1, dtype=dtype) for i, dtype in enumerate(DTYPES.values())}
    tensors = {"scalar": torch.tensor(True), **tensors, "none": torch.empty(0, 4)}
    single_file.write(path, tensors, {"some": "words"})
    torch.testing.assert_close(load_file(path), tensors, rtol=0, atol=0)
    header = single_file.read_header(path)
    assert header.metadata == {"some": "words"}
    for entry in header.tensors.values():
        assert (header.begin + entry["data_offsets"][0]) % DTYPES[entry["dtype"]].itemsize == 0

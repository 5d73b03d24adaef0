"""Models that start from other models' weights, alone and sharded; exports of weights."""

import hashlib
import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe.exported import CONFIG, WEIGHTS, load as load_exported
from moe.layer import MoEConfig
from moe.models.vit import ViT
from moe.parallel import build_sharded, make_mesh
from moe.routers import SoftConfig
from moe.signature import read_signature
from orchestrator import storage
from orchestrator.checkpoint.card import CARD, PREPROCESSOR
from orchestrator.checkpoint.export import export
from orchestrator.checkpoint.files import load_state
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.checkpoint.manifest import find_checkpoint
from orchestrator.checkpoint.start import start_from
from orchestrator.checkpoint.weights import signature_of
from orchestrator.codec import override, read_config, to_dict
from orchestrator.config import CheckpointConfig, RunConfig
from orchestrator.errors import UsageError
from tests.moe.parity import spawn
from tests.moe.parts import upcycle
from tests.orchestrator.checkpoint.counted import file_of, flip
from tests.orchestrator.checkpoint.small_runs import assert_same

SMALL = {"model.width": 16, "model.mlp_dim": 32, "data.batch_size": 8, "train.schedule.warmup_steps": 0}
DENSE = override(RunConfig(), SMALL)
SOFT = override(DENSE, {"model.moe.router.kind": "soft", "model.moe.num_experts": 4})
LAYOUTS = [(1, 2), (2, 1)]  # (dp, ep)
UPCYCLED = replace(SOFT.model, image_size=12, num_classes=7)
CASES = {  # source -> models that start from it
    "dense": {"the same": DENSE.model, "upcycled": UPCYCLED, "deeper": replace(DENSE.model, depth=3)},
    "soft": {
        "the same": SOFT.model,
        "finer": replace(SOFT.model, image_size=12),
        "dense": DENSE.model,
        "more experts": replace(SOFT.model, moe=MoEConfig(router=SoftConfig(), num_experts=8)),
    },
}


def save_trained(run: RunConfig, directory: str, *steps: int) -> ViT:
    """Saves a checkpoint of random weights at each step; returns the model of the last step."""
    model = ViT(run.model)
    optimizer = run.train.optimizer.build(model)
    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=False, keep_last=9))
    for step in steps:
        with torch.no_grad():
            for tensor in model.state_dict().values():
                tensor.normal_(generator=torch.Generator().manual_seed(step))
        checkpoints.save(step, model, optimizer, images=8 * step, progress={}, config=to_dict(run))
    checkpoints.finish()
    return model.eval()


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[str, ViT]]:
    """Source -> its directory of checkpoints (steps 2 and 4), and the model; not to be written to."""
    folder = tmp_path_factory.mktemp("trained")
    return {
        name: (f"{folder}/{name}", save_trained(run, f"{folder}/{name}", 2, 4))
        for name, run in {"dense": DENSE, "soft": SOFT}.items()
    }


@pytest.fixture
def dense(trained: dict[str, tuple[str, ViT]]) -> tuple[str, ViT]:
    return trained["dense"]


def test_the_same_model(dense):
    directory, model = dense
    started = ViT(DENSE.model, seed=9)
    report = start_from(started, directory)
    assert_same(started.state_dict(), model.state_dict())
    assert (report.source, report.step) == (f"{directory}/step-00000004", 4)
    assert report.transfer.copied == tuple(model.state_dict())
    assert report.numbers == sum(p.numel() for p in model.parameters())
    assert "\n" not in str(report)
    assert start_from(ViT(DENSE.model), f"{directory}/step-00000002").step == 2


def test_upcycled_to_finer_images_and_other_classes(dense):
    """The same as `upcycle`, which has no head for other classes."""
    directory, model = dense
    started, fresh = ViT(UPCYCLED, seed=9), ViT(UPCYCLED, seed=9).state_dict()
    report = start_from(started, directory)
    expected = upcycle(model.state_dict(), replace(UPCYCLED, num_classes=10), seed=9)
    expected |= {name: fresh[name] for name in ("head.weight", "head.bias")}
    assert_same(started.state_dict(), expected)
    assert report.numbers == sum(
        tensor.numel() for name, tensor in expected.items() if "router" not in name and "head." not in name
    )
    assert str(report).splitlines() == [
        f"started from {directory}/step-00000004, step 4: 28 tensors as they are, 5 converted, 8,512 numbers",
        "  converted position_SD: resized from 4 x 4 to 6 x 6 patches",
        "  converted blocks.1.mlp.experts.w_in_EDF, blocks.1.mlp.experts.b_in_EF,"
        " blocks.1.mlp.experts.w_out_EFD, blocks.1.mlp.experts.b_out_ED: each expert a copy of the block's"
        " MLP",
        "  as initialised blocks.1.mlp.router.phi_DEC, blocks.1.mlp.router.scale: not in the checkpoint",
        "  as initialised head.weight: (10, 16) in the checkpoint, (7, 16) in the model",
        "  as initialised head.bias: (10,) in the checkpoint, (7,) in the model",
    ]


def test_a_foreign_file(dense, tmp_path, monkeypatch):
    """A relative path, an unknown tensor, metadata of another kind."""
    monkeypatch.chdir(tmp_path)
    weights = dict(dense[1].state_dict())
    save_file(weights | {"teacher.weight": torch.zeros(2)}, "weights.safetensors", {"step": "last"})
    started = ViT(DENSE.model, seed=9)
    report = start_from(started, "weights.safetensors")
    assert_same(started.state_dict(), weights)
    assert (report.step, report.transfer.unused) == (None, ("teacher.weight",))
    assert str(report).endswith("\n  not used teacher.weight")


def test_another_width_or_dtype_is_refused(dense, tmp_path):
    """Some vectors would fit the other width: those of the heads' norms, and the classes'."""
    model = ViT(replace(DENSE.model, width=32, heads=4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    message = r"nothing in .*step-00000004 fits .* position_SD: \(16, 16\) in the checkpoint, "
    with pytest.raises(UsageError, match=message):
        start_from(model, dense[0])
    assert_same(model.state_dict(), before)
    half = {name: tensor.bfloat16() for name, tensor in dense[1].state_dict().items()}
    save_file(half, tmp_path / "half.safetensors")
    message = r"holds other dtypes: .*: torch.bfloat16 in the file, torch.float32 in the model; cast them"
    for config in (DENSE.model, UPCYCLED):
        with pytest.raises(UsageError, match=message):
            start_from(ViT(config), f"{tmp_path}/half.safetensors")


def test_a_damaged_source(dense, tmp_path, caplog):
    """In a directory the checkpoint before is used; a damaged folder or a directory without is refused."""
    directory, model = tmp_path / "copy", ViT(DENSE.model, seed=9)
    shutil.copytree(dense[0], directory)
    flip(file_of(directory / "step-00000004", "weights"), 100)
    flip(file_of(directory / "step-00000002", "optimizer"), 100)  # not needed
    assert start_from(ViT(DENSE.model), str(directory)).step == 2
    assert "step-00000004 is damaged (weights-00000-001." in caplog.text
    with pytest.raises(UsageError, match=r"step-00000004 is damaged: weights-00000-001\.\w+\.safetensors"):
        start_from(model, f"{directory}/step-00000004")
    assert_same(model.state_dict(), ViT(DENSE.model, seed=9).state_dict())
    flip(file_of(directory / "step-00000002", "weights"), 100)
    with pytest.raises(FileNotFoundError, match="copy holds no whole checkpoint"):
        start_from(model, str(directory))
    for location in ("nowhere", "nowhere/model.safetensors"):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            start_from(model, f"{tmp_path}/{location}")


def test_a_damaged_file(dense, tmp_path):
    path = tmp_path / "weights.safetensors"
    for content in (b"", b"\xff" * 100, b"\x02" + bytes(7) + b"[]"):
        path.write_bytes(content)
        with pytest.raises(UsageError, match="is not a safetensors file"):
            start_from(ViT(DENSE.model), str(path))
    save_file(dense[1].state_dict(), path)
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(UsageError, match="holds no whole safetensors file"):
        start_from(ViT(DENSE.model), str(path))


def test_from_s3(dense, bucket, tmp_path):
    directory, model = dense
    export(directory, f"{tmp_path}/dense.safetensors")
    storage.write_bytes(bucket.uri("dense.safetensors"), (tmp_path / "dense.safetensors").read_bytes())
    for file in Path(directory).rglob("*.*"):
        storage.write_bytes(bucket.uri("dense", str(file.relative_to(directory))), file.read_bytes())
    expected = upcycle(model.state_dict(), SOFT.model)
    for location in ("dense", "dense/step-00000004", "dense.safetensors"):
        started = ViT(SOFT.model)
        report = start_from(started, bucket.uri(location))
        assert_same(started.state_dict(), expected)
        assert report.step == 4
    with pytest.raises(FileNotFoundError, match=r"soft\.safetensors"):
        start_from(ViT(SOFT.model), bucket.uri("soft.safetensors"))


def test_an_exported_file(trained, tmp_path):
    """It is a model again; its metadata names the run and the checkpoint; all users may read it."""
    directory, model = trained["soft"]
    path, neighbour = tmp_path / "new/folder/model.safetensors", tmp_path / "neighbour"
    export(directory, str(path))
    loaded = load_exported(path)
    assert_same(loaded.state_dict(), model.state_dict())
    assert_same(load_file(path), model.state_dict())
    assert loaded.config == SOFT.model
    assert [path.name for path in path.parent.iterdir()] == ["model.safetensors"]
    neighbour.touch()
    assert path.stat().st_mode == neighbour.stat().st_mode
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    assert read_config(RunConfig, json.loads(metadata.pop("config"))) == SOFT
    # The data set is not there.
    assert read_signature(metadata.pop("signature")) == signature_of(SOFT)
    manifest = Path(directory, "step-00000004/manifest.json").read_bytes()
    assert metadata == {
        "format": "pt",
        "version": "1",
        "step": "4",
        "manifest_sha256": hashlib.sha256(manifest).hexdigest(),
    }


def test_the_newest_whole_checkpoint_is_exported(dense, tmp_path, caplog):
    directory, out = tmp_path / "copy", f"{tmp_path}/model.safetensors"
    shutil.copytree(dense[0], directory)
    (directory / "step-00000004/manifest.json").write_text("{}")
    export(str(directory), out)
    assert "step-00000004 is damaged (manifest.json); trying the one before" in caplog.text
    loaded = ViT(DENSE.model)
    folder, manifest = find_checkpoint(str(directory))
    load_state(folder, manifest, loaded)
    assert manifest.step == 2
    assert_same(load_file(out), loaded.state_dict())
    with pytest.raises(UsageError, match=r"step-00000004 is damaged: manifest\.json"):
        export(f"{directory}/step-00000004", f"{tmp_path}/other.safetensors")
    assert not (tmp_path / "other.safetensors").exists()


def test_exports_replace_nothing_by_halves(dense, tmp_path, monkeypatch):
    """An existing file stays unless `fresh` is given and the whole export succeeds; after a failed export, no
    description of other weights is left in a folder.
    """
    path, folder = tmp_path / "out/model.safetensors", tmp_path / "folder"
    path.parent.mkdir()
    path.write_bytes(b"precious")
    with pytest.raises(UsageError, match=r"model\.safetensors exists already; `fresh`"):
        export(dense[0], str(path))
    export(dense[0], str(folder))
    assert {path.name for path in folder.iterdir()} == {CARD, CONFIG, WEIGHTS, PREPROCESSOR}
    assert_same(load_exported(folder).state_dict(), dense[1].state_dict())
    with pytest.raises(UsageError, match="folder holds an export already; `fresh`"):
        export(dense[0], str(folder))

    def disk_full(name):
        assert len(Path(name).read_bytes()) > 1000
        raise OSError("no space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(storage, "flush", disk_full)
        for out in (path, folder):
            with pytest.raises(OSError, match="no space left"):
                export(dense[0], str(out), fresh=True)
    assert path.read_bytes() == b"precious"
    assert [p.name for p in path.parent.iterdir()] == ["model.safetensors"]
    assert not (folder / CONFIG).exists()
    assert not (folder / CARD).exists()
    export(dense[0], str(path), fresh=True)
    assert_same(load_exported(path).state_dict(), dense[1].state_dict())


def worker(rank: int, ranks: int, folder: str) -> None:
    """Every case on every layout equals the result of one process; errors reach both workers."""
    group = dist.new_group(backend="gloo")
    for dp, ep in LAYOUTS:
        mesh = make_mesh("cpu", ep=ep)
        for path in sorted(Path(folder).glob("expected/*.safetensors")):
            name, case = path.stem.split("-")
            model = build_sharded(CASES[name][case], mesh, seed=9)
            parts = {name: local(param).data_ptr() for name, param in model.named_parameters()}
            suffix = ".safetensors" if dp == 2 else ""  # both kinds of sources
            report = start_from(model, f"{folder}/{name}{suffix}", group=group)
            assert_same(whole(model), load_file(path))
            assert parts == {name: local(param).data_ptr() for name, param in model.named_parameters()}
            expected = path.with_suffix(".txt").read_text().splitlines()
            assert str(report).splitlines()[1:] == expected[1:], path
            if (name, case) == ("soft", "the same"):
                optimizer = SOFT.train.optimizer.build(model)
                checkpoints = Checkpoints(f"{folder}/saved-{dp}-{ep}", CheckpointConfig(asynchronous=False))
                checkpoints.save(4, model, optimizer, images=32, progress={}, config=to_dict(SOFT))
                checkpoints.finish()
    model = build_sharded(DENSE.model, mesh, seed=9)
    assert start_from(model, f"{folder}/damaged", group=group).step == 2
    with pytest.raises(UsageError, match="step-00000004 is damaged"):
        start_from(model, f"{folder}/damaged/step-00000004", group=group)
    for suffix in ("", ".safetensors"):
        with pytest.raises(FileNotFoundError, match="nowhere"):
            start_from(model, f"{folder}/nowhere{suffix}", group=group)


def local(param: Tensor) -> Tensor:
    assert isinstance(param, DTensor)
    return param.to_local()


def whole(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()
        for name, tensor in model.state_dict().items()
    }


@pytest.mark.smoke
def test_two_workers(trained, tmp_path):
    """They start from what one process starts from; what they saved is exported bit for bit."""
    (tmp_path / "expected").mkdir()
    for name, cases in CASES.items():
        directory, _ = trained[name]
        shutil.copytree(directory, tmp_path / name)
        export(directory, f"{tmp_path}/{name}.safetensors")
        for case, config in cases.items():
            model = ViT(config, seed=9)
            report = start_from(model, directory)
            save_file(model.state_dict(), tmp_path / "expected" / f"{name}-{case}.safetensors")
            (tmp_path / "expected" / f"{name}-{case}.txt").write_text(str(report))
    shutil.copytree(trained["dense"][0], tmp_path / "damaged")
    flip(file_of(tmp_path / "damaged/step-00000004", "weights"), 100)
    spawn(2, worker, str(tmp_path), timeout_s=60)
    for dp, ep in LAYOUTS:
        folder = tmp_path / f"saved-{dp}-{ep}"
        assert len([*folder.glob("step-00000004/weights-*")]) == 2
        export(str(folder), f"{folder}.safetensors")
        assert_same(load_exported(f"{folder}.safetensors").state_dict(), trained["soft"][1].state_dict())

"""What a model takes over from another's weights: alone and sharded, from folders, files and S3."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import boto3
import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from moto.server import ThreadedMotoServer
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe.adapt import upcycle
from moe.layer import MoEConfig
from moe.parallel import build_sharded, make_mesh
from moe.routers import RouterConfig, SoftConfig, TokenChoiceConfig
from moe.vit import ViT, ViTConfig
from orchestrator import storage
from orchestrator.checkpoint.run import Checkpoints
from orchestrator.checkpoint.start import start_from
from orchestrator.checkpoint.weights import export, load_exported
from orchestrator.codec import override, to_dict
from orchestrator.config import CheckpointConfig, RunConfig
from orchestrator.data.batch import Batch
from orchestrator.errors import UsageError
from orchestrator.training.loop import train_step
from orchestrator.training.optim import build_optimizer
from tests.orchestrator.training.batches import make_batch

SMALL = {"model.width": 16, "model.mlp_dim": 32, "data.batch_size": 8, "train.schedule.warmup_steps": 0}
DENSE = override(RunConfig(), SMALL)
SOFT = override(DENSE, {"model.moe.router.kind": "soft", "model.moe.num_experts": 4})
LAYOUTS = [(1, 2), (2, 1)]  # (dp, ep)


def with_experts(router: RouterConfig, **fields: int) -> ViTConfig:
    return replace(DENSE.model, moe=MoEConfig(router=router, num_experts=4), **fields)


UPCYCLED = with_experts(SoftConfig(), image_size=12, num_classes=7)
CASES = {  # source -> what starts from it
    "dense": {"the same": DENSE.model, "upcycled": UPCYCLED, "deeper": replace(DENSE.model, depth=3)},
    "soft": {
        "the same": SOFT.model,
        "finer": replace(SOFT.model, image_size=12),
        "dense": DENSE.model,
        "more experts": replace(SOFT.model, moe=MoEConfig(router=SoftConfig(), num_experts=8)),
    },
}


def random_batch(seed: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    image = torch.randint(256, (8, 3, 8, 8), generator=rng, dtype=torch.uint8)
    return make_batch(image, torch.randint(10, (8,), generator=rng))


def save_trained(run: RunConfig, directory: str, *steps: int) -> ViT:
    """Trains to the last of `steps`, with a checkpoint at each."""
    model = ViT(run.model, seed=1)
    optimizer = build_optimizer(run.train.optimizer, model)
    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=False, keep_last=9))
    for step in range(1, max(steps) + 1):
        train_step(model, optimizer, random_batch(step), run, step=step - 1)
        if step in steps:
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


def assert_same(got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    torch.testing.assert_close(dict(got), dict(expected), rtol=0, atol=0)


def images(side: int = 8) -> Tensor:
    return torch.randn(4, 3, side, side, generator=torch.Generator().manual_seed(2))


def test_the_same_model(dense):
    directory, model = dense
    started = ViT(DENSE.model, seed=9)
    report = start_from(started, directory)
    assert_same(started.state_dict(), model.state_dict())
    assert (report.source, report.step) == (f"{directory}/step-00000004", 4)
    assert report.transfer.copied == tuple(model.state_dict())
    assert report.numbers == sum(p.numel() for p in model.parameters())
    assert "\n" not in str(report)


def test_one_folder(dense):
    report = start_from(ViT(DENSE.model), f"{dense[0]}/step-00000002")
    assert report.step == 2


def test_upcycled_to_finer_images_and_other_classes(dense):
    """Everything at once, against `upcycle`, which has no head of other classes."""
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
        "  converted blocks.1.mlp.experts.* (4 each): each expert a copy of the block's MLP",
        "  as initialised blocks.1.mlp.router.phi_DEC, blocks.1.mlp.router.scale: absent there",
        "  as initialised head.weight: (10, 16) there, (7, 16) here",
        "  as initialised head.bias: (10,) there, (7,) here",
    ]


@pytest.mark.parametrize(
    "router",
    [
        SoftConfig(total_slots=16, dispatch="identity", combine="identity"),
        TokenChoiceConfig(k=4, capacity_factor=1.0),  # a softmax over all experts, room for every token
    ],
    ids=lambda router: router.kind,
)
def test_upcycled_computes_what_the_trained_dense_model_did(dense, router):
    directory, model = dense
    started = ViT(with_experts(router)).eval()
    start_from(started, directory)
    assert model(images()).logits.abs().min() > 1e-4
    torch.testing.assert_close(started(images()).logits, model(images()).logits)


def test_upcycled_goes_on_training(dense):
    run = override(SOFT, {"train.lr": 1e-2})
    model = ViT(run.model)
    start_from(model, dense[0])
    optimizer = build_optimizer(run.train.optimizer, model)
    losses = [
        train_step(model, optimizer, random_batch(4), run, step=step)["train/loss"].item()
        for step in range(10)
    ]
    assert losses[-1] < losses[0]
    w_in_EDF = model.blocks[1].mlp.experts.w_in_EDF
    assert not torch.equal(w_in_EDF[0], w_in_EDF[1])  # each goes its own way


def test_experts_to_dense(trained):
    started, fresh = ViT(DENSE.model, seed=9), ViT(DENSE.model, seed=9).state_dict()
    report = start_from(started, trained["soft"][0])
    mlp = {name: tensor for name, tensor in fresh.items() if name.startswith("blocks.1.mlp.")}
    assert report.transfer.initial == dict.fromkeys(mlp, "absent there")
    assert all(torch.equal(started.state_dict()[name], tensor) for name, tensor in mlp.items())
    assert str(report).splitlines()[1:] == [
        "  as initialised blocks.1.mlp.* (4 each): absent there",
        "  not used blocks.1.mlp.* (6 each)",
    ]


def test_an_exported_file_is_as_good(dense, tmp_path):
    export(dense[0], f"{tmp_path}/dense.safetensors")
    one, other = ViT(UPCYCLED, seed=9), ViT(UPCYCLED, seed=9)
    by_folder, by_file = start_from(one, dense[0]), start_from(other, f"{tmp_path}/dense.safetensors")
    assert_same(other.state_dict(), one.state_dict())
    assert by_file.source == f"{tmp_path}/dense.safetensors"
    assert (by_file.step, by_file.numbers) == (by_folder.step, by_folder.numbers) == (4, 8512)
    assert str(by_file).splitlines()[1:] == str(by_folder).splitlines()[1:]


def test_a_file_of_somebody_else(dense, tmp_path, monkeypatch):
    """A relative path, an unknown tensor, metadata of another kind."""
    monkeypatch.chdir(tmp_path)
    weights = dict(dense[1].state_dict())
    save_file(weights | {"teacher.weight": torch.zeros(2)}, "weights.safetensors", {"step": "last"})
    started = ViT(DENSE.model, seed=9)
    report = start_from(started, "weights.safetensors")
    assert_same(started.state_dict(), weights)
    assert (report.step, report.transfer.unused) == (None, ("teacher.weight",))


def test_another_width_is_refused(dense):
    """Some vectors would fit: those of the heads' norms, and the classes'."""
    model = ViT(replace(DENSE.model, width=32, heads=4))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(
        UsageError, match=r"nothing in .*step-00000004 fits .* position_SD: \(16, 16\) there, "
    ):
        start_from(model, dense[0])
    assert_same(model.state_dict(), before)


def test_another_dtype_is_refused(dense, tmp_path):
    half = {name: tensor.bfloat16() for name, tensor in dense[1].state_dict().items()}
    save_file(half, tmp_path / "half.safetensors")
    message = r"half.safetensors holds other dtypes: .*: torch.bfloat16 there, torch.float32 here; cast them"
    for config in (DENSE.model, UPCYCLED):
        with pytest.raises(UsageError, match=message):
            start_from(ViT(config), f"{tmp_path}/half.safetensors")


def damage(folder: Path, pattern: str = "weights-*.bin") -> None:
    (file,) = folder.glob(pattern)
    content = bytearray(file.read_bytes())
    content[100] ^= 1
    file.write_bytes(content)


def test_a_damaged_source(dense, tmp_path, caplog):
    """Of a directory the one before is taken; a folder is what was asked for, or nothing."""
    directory = tmp_path / "copy"
    shutil.copytree(dense[0], directory)
    damage(directory / "step-00000004")
    report = start_from(ViT(DENSE.model), str(directory))
    assert report.step == 2
    assert "step-00000004 is damaged (weights-00000." in caplog.text
    damage(directory / "step-00000002", "optimizer-*.bin")  # nobody asks for it
    assert start_from(ViT(DENSE.model), str(directory)).step == 2
    model = ViT(DENSE.model, seed=9)
    with pytest.raises(UsageError, match=r"step-00000004 is damaged: weights-00000\.\w+\.bin"):
        start_from(model, f"{directory}/step-00000004")
    assert_same(model.state_dict(), ViT(DENSE.model, seed=9).state_dict())
    damage(directory / "step-00000002")
    with pytest.raises(FileNotFoundError, match="copy holds no whole checkpoint"):
        start_from(model, str(directory))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is no safetensors file"),
        (b"\xff" * 100, "is no safetensors file"),
        (b"\x02" + bytes(7) + b"[]", "is no safetensors file"),
        (None, r"has \d+ bytes, its header says \d+: it is not whole"),
    ],
    ids=["empty", "noise", "no object", "cut"],
)
def test_a_damaged_file(content, message, dense, tmp_path):
    path = tmp_path / "weights.safetensors"
    save_file(dense[1].state_dict(), path)
    path.write_bytes(path.read_bytes()[:-1] if content is None else content)
    with pytest.raises(UsageError, match=message):
        start_from(ViT(DENSE.model), str(path))


def test_unknown_dtype_of_a_file(tmp_path):
    save_file({"head.bias": torch.zeros(10, dtype=torch.complex64)}, tmp_path / "weights.safetensors")
    with pytest.raises(UsageError, match="holds C64; known: F64, F32, "):
        start_from(ViT(DENSE.model), f"{tmp_path}/weights.safetensors")


@pytest.mark.parametrize("location", ["nowhere", "nowhere/model.safetensors"])
def test_nothing_there(location, tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        start_from(ViT(DENSE.model), f"{tmp_path}/{location}")


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    server = ThreadedMotoServer(port=0)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    storage._s3.cache_clear()
    storage._file_system.cache_clear()
    boto3.client("s3").create_bucket(Bucket="runs")
    yield "s3://runs"
    server.stop()
    storage._s3.cache_clear()
    storage._file_system.cache_clear()


def test_from_s3(dense, bucket, tmp_path):
    directory, model = dense
    export(directory, f"{tmp_path}/dense.safetensors")
    storage.write_bytes(f"{bucket}/dense.safetensors", (tmp_path / "dense.safetensors").read_bytes())
    for file in Path(directory).rglob("*.*"):
        storage.write_bytes(f"{bucket}/dense/{file.relative_to(directory)}", file.read_bytes())
    expected = upcycle(model.state_dict(), SOFT.model)
    for location in ("dense", "dense/step-00000004", "dense.safetensors"):
        started = ViT(SOFT.model)
        report = start_from(started, f"{bucket}/{location}")
        assert_same(started.state_dict(), expected)
        assert report.step == 4
    with pytest.raises(FileNotFoundError, match="s3://runs/soft holds no whole checkpoint"):
        start_from(ViT(SOFT.model), f"{bucket}/soft")
    with pytest.raises(FileNotFoundError, match=r"soft\.safetensors"):
        start_from(ViT(SOFT.model), f"{bucket}/soft.safetensors")


def worker(rank: int, folder: str) -> None:
    """Every case on every layout equals what one process got; then what goes wrong goes wrong on both."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
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
                optimizer = build_optimizer(SOFT.train.optimizer, model)
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
    dist.destroy_process_group()


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
    """What each started from is what one process gets; what they saved is exported bit for bit."""
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
    damage(tmp_path / "damaged/step-00000004", "weights.*.json")  # the second of the weights' files
    mp.spawn(worker, (str(tmp_path),), nprocs=2)  # pyright: ignore[reportPrivateImportUsage]
    for dp, ep in LAYOUTS:
        folder = tmp_path / f"saved-{dp}-{ep}"
        assert len([*folder.glob("step-00000004/weights-*.bin")]) == 2
        export(str(folder), f"{folder}.safetensors")
        assert_same(load_exported(f"{folder}.safetensors").state_dict(), trained["soft"][1].state_dict())

"""A checkpoint is whole or it does not exist; loading one goes on as if nothing had happened."""

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from moe.vit import ViT
from orchestrator.codec import override, to_dict
from orchestrator.config import RunConfig
from orchestrator.data.stream import Batch
from orchestrator.training import checkpoint
from orchestrator.training.loop import train_step
from orchestrator.training.optim import build_optimizer

SMALL = {"model.width": 16, "model.mlp_dim": 32, "data.batch_size": 4, "train.schedule.warmup_steps": 0}
RUNS = {
    "adamw": {"model.moe.router.kind": "soft"},
    "sgd": {"model.moe.router.kind": "token_choice", "train.optimizer.kind": "sgd"},
    "sgd without momentum": {"train.optimizer.kind": "sgd", "train.optimizer.momentum": 0},
}


def small_run(kind: str = "adamw") -> RunConfig:
    return override(RunConfig(), SMALL | RUNS[kind])


def random_batch(seed: int) -> Batch:
    rng = torch.Generator().manual_seed(seed)
    image = torch.randint(256, (4, 3, 8, 8), generator=rng, dtype=torch.uint8)
    return Batch(image, torch.randint(10, (4,), generator=rng), torch.ones(4), torch.arange(4))


def built(run: RunConfig, seed: int = 0) -> tuple[ViT, torch.optim.Optimizer]:
    model = ViT(run.model, seed=seed)
    return model, build_optimizer(run.train.optimizer, model)


def steps(run: RunConfig, model: ViT, optimizer: torch.optim.Optimizer, *numbers: int) -> list[float]:
    return [train_step(model, optimizer, random_batch(n), run, step=n)["train/loss"].item() for n in numbers]


def save(
    directory: Path, run: RunConfig, step: int, model: nn.Module, optimizer: Any, *, keep: int = 2
) -> None:
    progress = {"trained_s": 1.5 * step}
    checkpoint.save(directory, step, model, optimizer, config=to_dict(run), progress=progress, keep=keep)


def tensors(state: dict[str, Any]) -> dict[str, Tensor]:
    """Every tensor of a state dict by its path."""
    found = {}

    def walk(node: Any, path: str) -> None:
        if isinstance(node, Tensor):
            found[path] = node.clone()
        elif isinstance(node, dict | list):
            for key, child in node.items() if isinstance(node, dict) else enumerate(node):
                walk(child, f"{path}/{key}")

    walk(state, "")
    return found


@pytest.mark.parametrize("kind", RUNS)
def test_goes_on_as_if_nothing_had_happened(kind: str, tmp_path: Path) -> None:
    run = small_run(kind)
    model, optimizer = built(run)
    steps(run, model, optimizer, 0, 1, 2)
    save(tmp_path, run, 3, model, optimizer)
    before = tensors(model.state_dict()), tensors(optimizer.state_dict())
    expected = steps(run, model, optimizer, 3, 4, 5)

    again, its_optimizer = built(run, seed=9)
    path = checkpoint.newest(tmp_path)
    assert path == tmp_path / "step-00000003"
    manifest = checkpoint.load(path, again, its_optimizer)
    assert (manifest["step"], manifest["progress"]) == (3, {"trained_s": 4.5})
    assert manifest["config"] == json.loads(json.dumps(to_dict(run)))
    after = tensors(again.state_dict()), tensors(its_optimizer.state_dict())
    torch.testing.assert_close(after, before, rtol=0, atol=0)
    if kind != "sgd without momentum":
        assert any(value.any() for value in before[1].values())
    assert steps(run, again, its_optimizer, 3, 4, 5) == expected


def test_saving_changes_nothing(tmp_path: Path) -> None:
    run = small_run()
    model, optimizer = built(run)
    other, its_optimizer = built(run)
    for n in range(3):
        save(tmp_path, run, n + 1, other, its_optimizer) if n else None
        assert steps(run, model, optimizer, n) == steps(run, other, its_optimizer, n)


def test_weights_alone(tmp_path: Path) -> None:
    run = small_run()
    model, optimizer = built(run)
    steps(run, model, optimizer, 0, 1)
    save(tmp_path, run, 2, model, optimizer)
    other = ViT(run.model, seed=9)
    checkpoint.load_weights(tmp_path / "step-00000002", other)
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=0, atol=0)


@pytest.mark.parametrize(("keep", "left"), [(1, [12]), (2, [9, 12]), (9, [3, 6, 9, 12])])
def test_the_newest_stay(keep: int, left: list[int], tmp_path: Path) -> None:
    run = small_run()
    model, optimizer = built(run)
    for step in (3, 6, 9, 12):
        save(tmp_path, run, step, model, optimizer, keep=keep)
    assert sorted(path.name for path in tmp_path.iterdir()) == [f"step-{step:08d}" for step in left]


def test_saving_a_step_again_replaces_it(tmp_path: Path) -> None:
    """As a run does that was resumed from before its newest checkpoint."""
    run = small_run()
    model, optimizer = built(run)
    save(tmp_path, run, 1, model, optimizer)
    steps(run, model, optimizer, 0, 1)
    (tmp_path / "step-00000001.tmp").mkdir()
    (tmp_path / "step-00000001.tmp" / "left over").write_text("by a crash")
    save(tmp_path, run, 1, model, optimizer)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    other = ViT(run.model, seed=9)
    checkpoint.load_weights(tmp_path / "step-00000001", other)
    torch.testing.assert_close(dict(other.state_dict()), dict(model.state_dict()), rtol=0, atol=0)
    assert checkpoint.newest(tmp_path) == tmp_path / "step-00000001"


def data_file(path: Path) -> Path:
    return next(path.glob("*.distcp"))


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-1])


DAMAGES: dict[str, Callable[[Path], object]] = {
    "flipped bit": lambda path: flip(data_file(path)),
    "cut short": lambda path: truncate(data_file(path)),
    "missing file": lambda path: data_file(path).unlink(),
    "flipped bit of metadata": lambda path: flip(path / ".metadata"),
    "no manifest": lambda path: (path / "manifest.json").unlink(),
    "manifest cut short": lambda path: truncate(path / "manifest.json"),
    "empty manifest": lambda path: (path / "manifest.json").write_bytes(b""),
    "another manifest": lambda path: (path / "manifest.json").write_text("[]"),
    "manifest without text": lambda path: (path / "manifest.json").write_bytes(b"\xff\xfe\xff"),
    "empty": lambda path: (shutil.rmtree(path), path.mkdir()),
}


@pytest.fixture(scope="module")
def three(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Checkpoints of steps 1, 2 and 3; not to be written to."""
    directory, run = tmp_path_factory.mktemp("three"), small_run()
    model, optimizer = built(run)
    for step in (1, 2, 3):
        save(directory, run, step, model, optimizer, keep=9)
    return directory


@pytest.mark.parametrize("damage", DAMAGES)
def test_falls_back_over_damage(
    damage: str, three: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    directory = tmp_path / "checkpoints"
    shutil.copytree(three, directory)
    file = data_file(directory / "step-00000003").name
    with caplog.at_level(logging.WARNING):
        assert checkpoint.newest(directory) == directory / "step-00000003"
        assert not caplog.records
        DAMAGES[damage](directory / "step-00000003")
        assert checkpoint.newest(directory) == directory / "step-00000002"
    (record,) = caplog.records
    assert f"checkpoint {directory}/step-00000003 is damaged" in record.getMessage()
    if damage in ("flipped bit", "cut short", "missing file"):
        assert file in record.getMessage()
    if "metadata" in damage:
        assert ".metadata" in record.getMessage()
    DAMAGES[damage](directory / "step-00000002")
    assert checkpoint.newest(directory) == directory / "step-00000001"
    DAMAGES[damage](directory / "step-00000001")
    assert checkpoint.newest(directory) is None


def test_unfinished_ones_do_not_exist(three: Path, tmp_path: Path) -> None:
    directory = tmp_path / "checkpoints"
    shutil.copytree(three, directory)
    (directory / "step-00000003").rename(directory / "step-00000004.tmp")
    (directory / "notes").mkdir()
    assert checkpoint.newest(directory) == directory / "step-00000002"


def test_no_directory(tmp_path: Path) -> None:
    assert checkpoint.newest(tmp_path / "nothing") is None
    assert checkpoint.agree(tmp_path) == tmp_path
    assert checkpoint.agree(None) is None


def test_after_a_fallback_the_damaged_later_one_makes_room(tmp_path: Path) -> None:
    """It must not push out the good ones that come now."""
    run = small_run()
    model, optimizer = built(run)
    for step in (5, 15):
        save(tmp_path, run, step, model, optimizer, keep=1)
    flip(data_file(tmp_path / "step-00000015"))
    save(tmp_path, run, 6, model, optimizer, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000006"]

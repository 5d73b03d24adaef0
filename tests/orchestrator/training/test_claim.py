"""A directory starts, continues or steps aside; it never changes hands silently."""

import json
import os
from pathlib import Path

import pytest

from orchestrator.codec import flat, override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.training.claim import Mode, claim

RUN = RunConfig()


def fields(**changes) -> dict:
    return flat(override(RUN, {name.replace("__", "."): value for name, value in changes.items()}))


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


@pytest.mark.parametrize("mode", ["auto", "fresh"])
def test_start(mode: Mode, tmp_path: Path) -> None:
    claim(str(tmp_path / "sweeps" / "run"), fields(), mode)
    assert json.loads((tmp_path / "sweeps" / "run" / "fields.json").read_text()) == fields()
    assert os.listdir(tmp_path / "sweeps") == ["run"]


@pytest.mark.parametrize("mode", ["auto", "resume"])
def test_continue(mode: Mode, tmp_path: Path) -> None:
    """Tuples come back from JSON as lists; that is no change."""
    layers = {**fields(), "model.moe.layers": (0, 1)}
    claim(str(tmp_path / "run"), layers, "auto")
    (tmp_path / "run" / "result").write_text("kept")
    before = content(tmp_path)
    claim(str(tmp_path / "run"), layers, mode)
    assert content(tmp_path) == before


@pytest.mark.parametrize("mode", ["auto", "resume"])
def test_another_config_is_refused_and_every_change_named(mode: Mode, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    claim(str(directory), fields(), "auto")
    (directory / "metrics").write_text("trained")
    before = content(directory)
    with pytest.raises(UsageError) as caught:
        claim(str(directory), fields(train__lr=0.5, data__augment="inception", scale__workers=2), mode)
    for part in (str(directory), "train.lr: 0.001 -> 0.5", "data.augment: 'none' -> 'inception'", "--fresh"):
        assert part in str(caught.value)
    assert "scale.workers" not in str(caught.value)
    assert content(directory) == before


@pytest.mark.parametrize("mode", ["auto", "resume"])
def test_how_it_is_split_and_where_it_lies_may_change(mode: Mode, tmp_path: Path) -> None:
    claim(str(tmp_path), fields(), "auto")
    elsewhere = fields(
        scale__workers=4, scale__ep=1, scale__use_gpu=True, train__microbatch=4, storage="/new"
    )
    claim(str(tmp_path), elsewhere, mode)


def test_nothing_to_resume(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=f"nothing to resume at {tmp_path}/run; leave out --resume to start"):
        claim(str(tmp_path / "run"), fields(), "resume")
    assert not (tmp_path / "run").exists()


def test_fresh_moves_aside_as_often_as_it_must(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    for n in range(3):
        claim(str(directory), fields(train__seed=n), "fresh")
        (directory / "checkpoints").mkdir()
        (directory / "checkpoints" / "weights").write_text(f"weights {n}")
    assert sorted(os.listdir(tmp_path)) == ["run", "run.old-1", "run.old-2"]
    for name, n in (("run.old-1", 0), ("run.old-2", 1), ("run", 2)):
        assert json.loads((tmp_path / name / "fields.json").read_text())["train.seed"] == n
        assert (tmp_path / name / "checkpoints" / "weights").read_text() == f"weights {n}"


def test_a_run_that_never_trained_leaves_its_name_free(tmp_path: Path) -> None:
    """Its MLflow run too: params of a run never change there."""
    directory = tmp_path / "run"
    claim(str(directory), fields(), "auto")
    for name in ("mlflow_run.json", "error.txt", "refused.txt"):
        (directory / name).write_text("{}")
    (directory / "ray").mkdir()
    (directory / "ray" / "snapshot.json").write_text("{}")
    claim(str(directory), fields(train__lr=0.5), "auto")
    assert json.loads((directory / "fields.json").read_text())["train.lr"] == 0.5
    assert sorted(os.listdir(directory)) == ["fields.json", "ray"]


def test_changed_data_are_said_to_be_so(tmp_path: Path) -> None:
    digest = {"data.digest": "71cb"}
    claim(str(tmp_path), fields(data__path="/shards") | digest, "auto")
    (tmp_path / "result.json").write_text("{}")
    with pytest.raises(UsageError, match=r"the data at /shards changed since .* was started"):
        claim(str(tmp_path), fields(data__path="/shards") | {"data.digest": "3d9c"}, "auto")


@pytest.mark.parametrize("mode", ["auto", "fresh"])
def test_a_run_never_takes_the_place_of_a_sweep(mode: Mode, tmp_path: Path) -> None:
    """Models are registered by where they lie; `--fresh` with a mistyped name would move them."""
    claim(str(tmp_path / "mini"), fields() | {"quality": "val/acc1"}, "auto")
    with pytest.raises(UsageError, match="mini belongs to a sweep, and this is a run: use another --name"):
        claim(str(tmp_path / "mini"), fields(), mode)
    assert os.listdir(tmp_path) == ["mini"]

"""A directory starts, continues or is refused; two processes never share it."""

import os
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.codec import override, to_dict
from orchestrator.config import CheckpointConfig, RunConfig
from orchestrator.errors import UsageError
from orchestrator.runs.lock import locked, move_aside
from orchestrator.runs.run_directory import Result, RunDir, StartMode, acquire_run_dir, write_json

DIGEST = "71cb"


def run_at(folder: Path, **changes) -> RunConfig:
    named = {name.replace("__", "."): value for name, value in changes.items()}
    return override(RunConfig(), {"storage": str(folder), "name": "run", **named})


def content(directory: Path) -> dict[str, bytes]:
    return {str(p.relative_to(directory)): p.read_bytes() for p in directory.rglob("*") if p.is_file()}


def test_start(tmp_path: Path) -> None:
    run = run_at(tmp_path, name="sweeps/run")
    record = acquire_run_dir(run, DIGEST, labels={"role": "train"})
    assert RunDir(f"{tmp_path}/sweeps/run").record() == record
    assert (record.config["name"], record.data_digest) == ("sweeps/run", DIGEST)
    assert record.labels == {"role": "train"}
    assert sorted(os.listdir(tmp_path / "sweeps" / "run")) == ["config.json", "config.toml"]


@pytest.mark.parametrize("mode", ["auto", "resume"])
def test_continue(mode: StartMode, tmp_path: Path) -> None:
    """The record stays, though how the run is split has changed; an old error is removed."""
    first = acquire_run_dir(run_at(tmp_path), DIGEST)
    (tmp_path / "run" / "error.txt").write_text("killed")
    elsewhere = run_at(tmp_path, scale__workers=4, scale__use_gpu=True, train__microbatch=4)
    assert acquire_run_dir(elsewhere, DIGEST, mode) == first
    assert sorted(os.listdir(tmp_path / "run")) == ["config.json", "config.toml"]


@pytest.mark.parametrize("mode", ["auto", "resume"])
def test_another_config_is_refused_and_every_change_named(mode: StartMode, tmp_path: Path) -> None:
    directory = tmp_path / "run"
    acquire_run_dir(run_at(tmp_path), DIGEST)
    (directory / "metrics.jsonl").write_text("{}")
    before, changed = content(directory), run_at(tmp_path, train__lr=0.5, data__augment="inception")
    with pytest.raises(UsageError) as caught:
        acquire_run_dir(override(changed, {"scale.workers": 2}), DIGEST, mode)
    for part in (
        str(directory),
        "train.lr: 0.001 -> 0.5",
        "data.augment: [] -> ['inception']",
        "`mode=fresh`",
    ):
        assert part in str(caught.value)
    assert "scale.workers" not in str(caught.value)
    assert content(directory) == before


def test_a_longer_run_is_told_how(tmp_path: Path) -> None:
    """Another run from its weights; a branch, if a checkpoint from before the cooldown is there."""
    run = run_at(tmp_path, train__steps=100, model__width=8)
    acquire_run_dir(run, DIGEST)
    own, model = RunDir.of(run), run.model.build(seed=0)
    checkpoints = Checkpoints(own.checkpoints, CheckpointConfig(asynchronous=False, keep_last=9))
    cosine = run_at(tmp_path, name="cosine", train__schedule__kind="cosine", train__steps=100)

    def refusal(was: RunConfig, **changes: float | str) -> str:
        with pytest.raises(UsageError) as caught:
            acquire_run_dir(override(was, {n.replace("__", "."): v for n, v in changes.items()}), DIGEST)
        return str(caught.value)

    weights = f"train.init_from={own.checkpoints} train.init_optimizer=true train.schedule.warmup_steps=0"
    branch = f"train.trunk={own.checkpoints}/step-00000080 train.schedule.warmup_steps=10"
    for step in (100, 90, 80, 40):
        optimizer = run.train.optimizer.build(model)
        checkpoints.save(step, model, optimizer, images=1, progress={}, config=to_dict(run))
        checkpoints.finish()
        said = refusal(run, train__steps=200)
        assert weights in said
        assert (branch in said) == (step <= 80), step
        assert ("before its cooldown at step 80" in said) == (step > 80), step
    assert weights in refusal(run, train__lr=0.5)
    assert "train.trunk" not in refusal(run, train__lr=0.5, train__steps=200)
    assert "train.init_from" not in refusal(run, train__steps=200, train__seed=3)
    acquire_run_dir(cosine, DIGEST)
    Path(RunDir.of(cosine).path, "metrics.jsonl").write_text("{}")
    assert "cooldown" not in (said := refusal(cosine, train__steps=200))
    assert "train.init_from" in said


def test_other_refusals(tmp_path: Path) -> None:
    """Nothing to resume, changed data, a sweep in the directory, a damaged record."""
    directory = tmp_path / "run"
    with pytest.raises(UsageError, match=f"nothing to resume at {directory}; leave out `mode=resume`"):
        acquire_run_dir(run_at(tmp_path), DIGEST, "resume")
    assert not directory.exists()
    acquire_run_dir(run_at(tmp_path, data__path="/shards"), DIGEST)
    (directory / "result.json").write_text("{}")
    with pytest.raises(UsageError, match=r"the data at /shards changed since .* was started"):
        acquire_run_dir(run_at(tmp_path, data__path="/shards"), "3d9c")
    (directory / "config.json").write_text('{"key"')
    with pytest.raises(UsageError, match=r"run/config.json is damaged: delete it to start over"):
        acquire_run_dir(run_at(tmp_path), DIGEST)
    (directory / "sweep.json").write_text("{}")
    with pytest.raises(UsageError, match="run belongs to a sweep, and this is a run: use another `name`"):
        acquire_run_dir(run_at(tmp_path), DIGEST)


def test_a_run_that_never_trained_leaves_its_name_free(tmp_path: Path) -> None:
    """It gets another key too: params of a run never change in MLflow."""
    directory = tmp_path / "run"
    first = acquire_run_dir(run_at(tmp_path), DIGEST)
    for name in ("error.txt", "refused.txt", "lock"):
        (directory / name).write_text("x")
    (directory / "metrics.jsonl").touch()
    second = acquire_run_dir(run_at(tmp_path, train__lr=0.5), DIGEST)
    assert second.key != first.key
    assert second.config["train"]["lr"] == 0.5
    assert sorted(os.listdir(directory)) == ["config.json", "config.toml", "lock"]


def saved_by(run: RunConfig, step: int, forget: str = "") -> Path:
    """Makes a checkpoint of `run`, whose config lacks a field of `train`; there is no config.json."""
    config = to_dict(run)
    if forget:
        del config["train"][forget]
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    directory = RunDir.of(run).checkpoints
    checkpoints = Checkpoints(directory, CheckpointConfig(asynchronous=False))
    checkpoints.save(step, model, optimizer, images=8, progress={}, config=config)
    return Path(manifests.folder_of(directory, step))


def test_checkpoints_alone_have_a_config(tmp_path: Path) -> None:
    """It is compared like the directory's record; a field that it lacks, as it is older, had its default."""
    run, directory = run_at(tmp_path, train__lr=0.25), tmp_path / "run"
    saved_by(run, 1, forget="seed")
    newest = saved_by(run, 2, forget="seed")
    before = content(directory)
    for mode in ("auto", "resume"):
        with pytest.raises(UsageError) as caught:
            acquire_run_dir(run_at(tmp_path, train__lr=0.5, train__seed=7), DIGEST, mode)
        for part in (
            str(directory),
            "(train.lr: 0.25 -> 0.5; train.seed: 0 -> 7)",
            "old values",
            "`mode=fresh`",
        ):
            assert part in str(caught.value)
        assert content(directory) == before
    record = acquire_run_dir(override(run, {"scale.workers": 2, "data.cache_gb": 3}), DIGEST, "resume")
    assert record.config["train"]["lr"] == 0.25

    (directory / "config.json").unlink()
    (newest / "manifest.json").write_text("{")  # the one before is the newest that can be read
    with pytest.raises(UsageError, match=r"train.lr: 0.25 -> 0.5"):
        acquire_run_dir(run_at(tmp_path, train__lr=0.5), DIGEST)


def test_checkpoints_of_another_config_beside_the_record(tmp_path: Path) -> None:
    acquire_run_dir(run_at(tmp_path), DIGEST)
    saved_by(run_at(tmp_path, train__lr=0.25), 1)
    with pytest.raises(UsageError, match=r"train.lr: 0.25 -> 0.001"):
        acquire_run_dir(run_at(tmp_path), DIGEST)


def test_a_record_that_is_older_than_a_field(tmp_path: Path) -> None:
    record = acquire_run_dir(run_at(tmp_path), DIGEST)
    del record.config["train"]["seed"]
    write_json(str(tmp_path / "run" / "config.json"), asdict(record))
    assert acquire_run_dir(run_at(tmp_path), DIGEST).key == record.key
    record.config["train"]["magic"] = 1
    write_json(str(tmp_path / "run" / "config.json"), asdict(record))
    with pytest.raises(
        UsageError, match=r"run was started with a config .* \(unknown field train.magic; .*`mode=fresh`"
    ):
        acquire_run_dir(run_at(tmp_path), DIGEST)


def test_moving_aside_takes_the_next_free_name(tmp_path: Path) -> None:
    directory = tmp_path / "run"
    for n in range(3):
        with locked(str(directory), fresh=True) as aside:
            assert aside == (f"{directory}.old-{n}" if n else None)
            (directory / "weights").write_text(f"weights {n}")
    assert move_aside(f"{tmp_path}/nothing") is None
    assert sorted(os.listdir(tmp_path)) == ["run", "run.old-1", "run.old-2"]
    assert (tmp_path / "run.old-2" / "weights").read_text() == "weights 1"


def test_results_and_pauses(tmp_path: Path) -> None:
    run = run_at(tmp_path)
    ends = [
        Result(status="paused", step=100, metrics={"val/acc1": 0.5}),
        Result(status="paused", step=20, metrics={"val/acc1": 0.25}),
        Result(status="diverged", step=120, metrics={"train/loss": float("inf")}, checkpoint="checkpoints/x"),
    ]
    assert RunDir.of(run).result() is None
    for end in ends:
        RunDir.of(run).write_result(end)
    assert RunDir.of(run).pauses() == [ends[1], ends[0]]
    assert [RunDir.of(run).pause(step) for step in (20, 21, 101)] == [ends[1], ends[0], None]
    assert RunDir.of(run).result() == ends[2]
    with pytest.raises(UsageError, match=f"{tmp_path}/.*/checkpoints/x holds no whole checkpoint"):
        RunDir.of(run).result().load()
    with pytest.raises(UsageError, match="is paused and has no checkpoint to load"):
        RunDir.of(run).pause(20).load()


def test_the_reason_of_a_failure_is_its_last_line(tmp_path: Path) -> None:
    assert RunDir(str(tmp_path)).error() == ""
    RunDir(str(tmp_path)).write_error("Traceback ..\n  File ..\nValueError: too large\n")
    RunDir(str(tmp_path)).write_error("its process died")  # the first error says more
    assert RunDir(str(tmp_path)).error() == "ValueError: too large"

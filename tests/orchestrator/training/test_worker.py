"""One worker without Ray: it resumes to the bit, starts from other weights, and survives failed checkpoints
and images that cannot be decoded.
"""

import csv
import errno
import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

from moe import init
from moe.cost import train_flops_6mac
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.manifest import MANIFEST, newest
from orchestrator.codec import override, to_dict
from orchestrator.config import RunConfig
from orchestrator.data.stream import in_process
from orchestrator.errors import UsageError
from orchestrator.packing.pack import Sample, write_shards
from orchestrator.runs.metrics_file import Metrics
from orchestrator.runs.run_directory import RunDir
from orchestrator.schedules import ScheduleConfig
from orchestrator.training.worker import check_trunk, train_worker
from tests.lanes import mostly_slow
from tests.orchestrator.buckets import Bucket
from tests.orchestrator.checkpoint.counted import flip
from tests.orchestrator.checkpoint.small_runs import ADAFACTOR
from tests.parts import png

SMALL = {
    "model.width": 16,
    "model.mlp_dim": 32,
    "model.moe.num_experts": 4,
    "data.batch_size": 16,
    "train.steps": 24,
    "train.report_every": 1,
    "train.eval_every": 6,
    "checkpoint.every": 5,
    "checkpoint.asynchronous": False,  # a crash in a test kills no thread that still writes
}
Reports = list[tuple[int, Metrics]]


class UnpluggedError(Exception):
    pass


@pytest.fixture
def run(few_digits: str, tmp_path: Path) -> RunConfig:
    return override(RunConfig(), {**SMALL, "data.path": few_digits, "storage": str(tmp_path)})


@pytest.fixture(autouse=True)
def no_group_left() -> Iterator[None]:
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def trained(run: RunConfig, *, stop_at: int | None = None) -> Reports:
    """Returns the reports of the run, up to a crash in the report of step `stop_at`."""
    reports: Reports = []

    def report(step: int, metrics: Metrics) -> None:
        if step == stop_at:
            raise UnpluggedError
        reports.append((step, metrics))

    if stop_at is None:
        train_worker(run, report=report, read=in_process)
    else:
        with pytest.raises(UnpluggedError):
            train_worker(run, report=report, read=in_process)
    return reports


def numbers(reports: Reports) -> dict[int, tuple[float, ...]]:
    names = ("train/loss", "train/grad_norm", "train/acc1", "val/loss", "val/acc1")
    return {step: tuple(metrics[name] for name in names if name in metrics) for step, metrics in reports}


def test_a_checkpoint_says_what_was_done(run: RunConfig) -> None:
    (*_, (_, metrics)), (folder, manifest) = trained(run), newest(RunDir.of(run).checkpoints)
    assert folder.endswith("step-00000024")
    assert (manifest.step, manifest.images, manifest.progress["reported"]) == (24, 24 * 16, 24)
    assert manifest.progress["device_s"] == metrics["cost/device_s"] > 0
    assert manifest.config["train"]["steps"] == 24


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("optimizer", "tolerance"),
    [({"train.optimizer.state_dtype": "bfloat16"}, 1e-3), (ADAFACTOR, 0.1)],
    ids=["AdamW", "Adafactor"],
)
def test_a_first_moment_in_bfloat16(
    run: RunConfig, optimizer: dict[str, Any], tolerance: float, digits: str
) -> None:
    """The run learns as AdamW in float32, its checkpoints hold the moment so, and it goes on to the bit."""
    run = override(run, {"data.path": digits})
    exact = trained(override(run, {"name": "exact", "train.lr": 1e-2}))
    run = override(run, {"train.lr": 1e-2} | optimizer)
    undisturbed = override(run, {"name": "whole"})
    whole = trained(undisturbed)
    assert whole[-1][1]["val/loss"] == pytest.approx(exact[-1][1]["val/loss"], rel=tolerance)
    assert whole[-1][1]["val/loss"] < 0.97 * math.log(10)
    assert numbers(whole) != numbers(exact)
    files = Path(newest(RunDir.of(undisturbed).checkpoints)[0]).glob("optimizer-*")
    state = {name: tensor.dtype for file in files for name, tensor in load_file(file).items()}
    assert {dtype for name, dtype in state.items() if name.endswith(".exp_avg")} == {torch.bfloat16}
    assert {dtype for name, dtype in state.items() if not name.endswith(".exp_avg")} == {torch.float32}
    seen = numbers(trained(run, stop_at=13))
    assert seen | numbers(trained(run)) == numbers(whole)


@contextmanager
def drawing() -> Iterator[list[str]]:
    """Fills memory that is not set with NaN, and lists the weights that are drawn."""
    drawn, numbers = list[str](), init._numbers
    torch.use_deterministic_algorithms(True)
    with patch.object(
        init, "_numbers", lambda draw, key, shape: drawn.append(key) or numbers(draw, key, shape)
    ):
        try:
            yield drawn
        finally:
            torch.use_deterministic_algorithms(False)


SHARDED = {"scale.activation_checkpointing": True}


@pytest.mark.parametrize("changes", [{}, SHARDED], ids=["plain", "sharded"])
def test_weights_that_a_checkpoint_overwrites_are_not_drawn(changes: dict[str, Any], run: RunConfig) -> None:
    """All others are, and buffers: those of a router that anneals, before its first step."""
    small = {"train.steps": 4, "checkpoint.every": 2, "model.moe.router.kind": "mixture"}
    run = override(run, small | changes)
    with drawing() as drawn:
        whole = numbers(trained(override(run, {"name": "whole"})))
        first = len(drawn)
        assert len({*drawn}) == first > 10
        seen = numbers(trained(run, stop_at=4))
        assert len(drawn) == 2 * first
        seen |= numbers(trained(run))
        assert len(drawn) == 2 * first
        trunk = manifests.folder_of(RunDir.of(run).checkpoints, 2)
        branch = override(run, {"name": "branch", "train.trunk": trunk})
        assert numbers(trained(branch)) == {step: whole[step] for step in (3, 4)}
        assert len(drawn) == 2 * first
    assert seen == whole


def test_a_run_without_a_whole_checkpoint_starts_anew(run: RunConfig) -> None:
    """What was read of a damaged checkpoint does not count."""
    whole = numbers(trained(override(run, {"name": "whole", "train.steps": 8})))
    run = override(run, {"train.steps": 8})
    trained(run, stop_at=6)
    (file,) = Path(RunDir.of(run).checkpoints).glob("step-00000005/optimizer-*")
    flip(file, -1)
    assert numbers(trained(run)) == whole


@pytest.mark.parametrize("hot", [20, 29], ids="from update {}".format)
def test_a_run_that_diverges_keeps_its_last_good_checkpoints(
    hot: int, run: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It ends at the save between two reports, by an update whose own loss is finite too."""
    changes = {"train.steps": 60, "train.report_every": 50, "train.eval_every": 60, "checkpoint.every": 10}
    run, rate = override(run, changes), ScheduleConfig.rate

    def too_hot(config: ScheduleConfig, step: int, *, peak: float, total: int) -> float:
        return 1e39 if step >= hot else rate(config, step, peak=peak, total=total)

    monkeypatch.setattr(ScheduleConfig, "rate", too_hot)
    ((step, metrics),) = trained(run)
    assert (step, math.isfinite(metrics["train/loss"])) == (30, hot == 29)
    directory, result = RunDir.of(run).checkpoints, RunDir.of(run).result()
    assert manifests.steps(directory) == [10, 20]
    for path in Path(directory).rglob("*.safetensors"):
        assert all(tensor.isfinite().all() for tensor in load_file(path).values())
    assert result
    assert (result.status, result.step, result.checkpoint) == ("diverged", 30, "checkpoints/step-00000020")
    what = "hold numbers that are not finite" if hot == 29 else "train/loss is nan"
    assert result.reason.endswith(f"{what} at step 30")
    assert (
        f"{run.name} diverged: {result.reason}; steps 10, 20 are kept: continue in another run, with"
        f" train.init_from={directory} and a smaller train.lr"
    ) in caplog.text


def test_it_ends_once_it_is_good_enough(run: RunConfig) -> None:
    """At the first evaluation that says so, with a checkpoint and a result, which are found again."""
    run = override(run, {"train.stop_at": 0.0, "checkpoint.keep_best": 0})
    reports = trained(run)
    assert [step for step, _ in reports] == [1, 2, 3, 4, 5, 6]
    result, (_, kept) = RunDir.of(run).result(), newest(RunDir.of(run).checkpoints)
    assert result
    assert (result.status, result.step, kept.step) == ("finished", 6, 6)
    assert kept.progress["scheduled"], "its last checkpoint is kept as any other's"
    assert result.metrics == reports[-1][1]
    assert result.metrics["cost/train_flops_6mac"] == train_flops_6mac(run.model, images=6 * 16)

    storage.delete(storage.join(RunDir.of(run).path, "result.json"))
    assert trained(run) == [], "only its result was missing"
    again = RunDir.of(run).result()
    assert again
    assert replace(again, time_s=result.time_s) == result


def test_what_is_not_good_enough_goes_on(run: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    trained(override(run, {"train.stop_at": 1.0, "checkpoint.keep_best": 0}))
    assert f"{run.name} never reached stop_at=1: best val/acc1 0." in caplog.text
    result = RunDir.of(run).result()
    assert result
    assert (result.status, result.step) == ("finished", 24)


def test_a_pause_has_the_quality_of_its_own_step(run: RunConfig) -> None:
    """The last report was another. A pause that lies behind changes nothing; none is after the end."""
    run, reports = override(run, {"train.report_every": 100, "train.lr": 0.01}), dict[int, Metrics]()
    for until in (8, 2, 99):
        train_worker(
            run, report=lambda step, metrics: reports.update({step: metrics}), read=in_process, until=until
        )
        if until < 99:
            assert reports.keys() == {6, 8}
    assert reports[8]["val/loss"] != reports[6]["val/loss"]
    assert reports[8]["cost/train_flops_6mac"] == train_flops_6mac(run.model, images=8 * 16)
    result = RunDir.of(run).result()
    assert result
    assert (result.status, result.step) == ("finished", 24)


def test_a_branch_goes_on_after_its_trunk_at_the_same_rates(run: RunConfig) -> None:
    """How often it reports and evaluates is its own."""
    often = override(run, {"name": "often", "train.report_every": 3, "train.eval_every": 2})
    check_trunk(to_dict(run), 10, often)
    with pytest.raises(UsageError, match=r"often: train.steps=24 end before its trunk, at step 24"):
        check_trunk(to_dict(run), 24, often)
    with pytest.raises(UsageError, match=r"cannot branch from train at step 1: at step 0 its learning rate"):
        check_trunk(to_dict(override(run, {"train.schedule.warmup_steps": 0})), 1, run)


def test_it_says_from_where_it_goes_on(run: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    before = dict(trained(run, stop_at=17))
    best = max((before[step]["val/acc1"], -step) for step in (6, 12))
    with caplog.at_level(logging.INFO, "orchestrator"):
        (step, metrics), *others = trained(run)
    assert (step, metrics["resumed/step"]) == (16, 15)
    assert not any("resumed/step" in each for _, each in others), "it is said once"
    (line,) = [r.getMessage() for r in caplog.records if "resumes from" in r.getMessage()]
    assert line == f"train: resumes from step 15 of 24, best val/acc1 {best[0]:.4g} at step {-best[1]}"


def test_a_branch_has_its_own_best_and_its_own_costs(
    run: RunConfig, caplog: pytest.LogCaptureFixture
) -> None:
    """All its evaluations are as good as the first of its trunk, because nothing changes at a rate of 0."""
    same = {"train.lr": 0.0, "train.eval_every": 4, "checkpoint.every": 10, "train.stop_at": 1.0}
    trunk, branch = (override(run, same | {"name": name}) for name in ("trunk", "branch"))
    trained(trunk, stop_at=11)
    at = manifests.folder_of(RunDir.of(trunk).checkpoints, 10)
    kept = manifests.read(at).progress
    assert kept["best_k"][0][1] == 4
    caplog.clear()
    reports = trained(override(branch, {"train.trunk": at, "train.steps": 16}))
    assert [step for step, _ in reports] == [*range(11, 17)]
    best = [step for _, step in newest(RunDir.of(branch).checkpoints)[1].progress["best_k"]]
    result = RunDir.of(branch).result()
    assert result
    assert (best, result.best_checkpoint) == ([12], "checkpoints/step-00000012")
    assert " at step 12" in caplog.text
    for step, metrics in reports:
        images = (step - 10) * run.data.batch_size
        assert metrics["cost/marginal_train_flops_6mac"] == train_flops_6mac(run.model, images=images)
        own = metrics["cost/device_s"] - kept["device_s"]
        assert metrics["cost/marginal_device_s"] == own > 0


def test_reports_are_stored_before_the_checkpoint_that_contains_them(run: RunConfig, bucket: Bucket) -> None:
    """Else a process that is killed after the save would leave a run with fewer reports for good."""
    storing = {"storage": bucket.uri("home"), "train.steps": 6, "checkpoint.every": 2}
    trained(override(run, storing))
    puts = [request for request in bucket.proxy.requests if request.startswith("PUT")]
    kinds = ["metrics" if "/metrics-" in r else "manifest" for r in puts if "/metrics-" in r or MANIFEST in r]
    assert kinds == ["metrics", "manifest"] * 3


def test_it_starts_from_other_weights_once(run: RunConfig, caplog: pytest.LogCaptureFixture) -> None:
    dense = override(run, {"name": "dense", "model.moe": None, "train.lr": 0.02})
    trained(dense)
    changes = {
        "train.init_from": RunDir.of(dense).checkpoints,
        "train.lr": 0.0,
        "model.moe.router.kind": "soft",
        "checkpoint.keep_best": 0,  # else it is saved at its first evaluation too
    }
    with caplog.at_level(logging.INFO, "orchestrator"):
        first = trained(override(run, changes), stop_at=9)
        assert "each expert a copy of the block's MLP" in caplog.text
        caplog.clear()
        again = trained(override(run, changes))
    assert "resumes from step 5" in caplog.text
    assert "started from" not in caplog.text
    assert numbers(again)[6] == numbers(first)[6]
    # the mean of all experts' answers over soft slots is not the MLP's answer for each token, but near it
    fresh = trained(override(run, {"name": "fresh", "train.lr": 0.0, "model.moe.router.kind": "soft"}))
    assert dict(first)[6]["val/loss"] < dict(fresh)[6]["val/loss"] - 0.01


def fails_at(monkeypatch: pytest.MonkeyPatch, *steps: int) -> None:
    """The disk is full whenever one of these steps is saved."""
    write = storage.open_to_write

    def maybe(location: str) -> Any:
        if any(f"step-{step:08d}" in location for step in steps):
            raise OSError(errno.ENOSPC, "No space left on device", location)
        return write(location)

    monkeypatch.setattr(storage, "open_to_write", maybe)


@pytest.mark.parametrize("asynchronous", mostly_slow([True, False], fast=[True]))
def test_a_save_that_fails_does_not_stop_training(
    asynchronous: bool, run: RunConfig, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    run = override(run, {"checkpoint.asynchronous": asynchronous})
    whole = numbers(trained(override(run, {"name": "whole"})))
    fails_at(monkeypatch, 10, 15)
    reports = trained(run)
    assert numbers(reports) == whole
    assert reports[-1][1]["checkpoint/failed"] == 2
    assert all("checkpoint/failed" not in metrics for step, metrics in reports if step <= 10)
    ours = [r for r in caplog.records if r.name.startswith("orchestrator")]
    errors = [r.getMessage() for r in ours if r.levelno == logging.ERROR]
    assert [next(s for s in (10, 15) if f"step {s} " in line) for line in errors] == [10, 15]
    assert all("No space left on device" in line for line in errors)
    result = RunDir.of(run).result()
    assert result is not None
    assert result.step == 24


def test_a_run_is_not_complete_without_its_weights(run: RunConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as full:
        fails_at(full, 24)
        with pytest.raises(OSError, match=r"saving step 24 .*No space left"):
            trained(run)
    assert RunDir.of(run).result() is None
    assert newest(RunDir.of(run).checkpoints)[1].step == 20
    assert [step for step, _ in trained(run)] == [21, 22, 23, 24]
    assert RunDir.of(run).result() is not None


@pytest.mark.parametrize(
    ("changes", "least", "most"),
    [
        ({"scale.activation_checkpointing": True}, 0, 1e-5),
        ({"train.compute_dtype": "bfloat16"}, 1e-5, 0.02),
        ({"scale.deterministic": True}, 0, 0),
    ],
)
def test_options_of_one_worker_change_no_more_than_rounding(
    changes: dict[str, Any], least: float, most: float, run: RunConfig, digits: str
) -> None:
    """Whatever it computes with, its checkpoints hold float32 weights."""
    run = override(
        run, {"data.path": digits, "train.steps": 6, "train.eval_every": 6, "model.moe.router.kind": "soft"}
    )
    plain = trained(override(run, {"name": "plain"}))
    spread = trained(override(run, {"name": "spread", **changes}))
    pairs = zip(plain, spread, strict=True)
    errors = [abs(b["train/loss"] / a["train/loss"] - 1) for (_, a), (_, b) in pairs]
    assert least <= max(errors)
    assert all(error <= most for error in errors)
    _, manifest = newest(RunDir.of(override(run, {"name": "spread"})).checkpoints)
    folder = manifests.folder_of(RunDir.of(override(run, {"name": "spread"})).checkpoints, 6)
    tensors = [t for name in manifest.weights() for t in load_file(f"{folder}/{name}").values()]
    assert {tensor.dtype for tensor in tensors} == {torch.float32}  # the masters
    assert torch.isfinite(torch.tensor(spread[-1][1]["val/loss"]))


BAD = (7, 20, 33)  # training images


@pytest.fixture
def broken(tmp_path: Path) -> RunConfig:
    """40 training images, three of which are cut short, and a validation set with one more."""
    images = [png(np.full((8, 8), n)) for n in range(50)]
    for number in (*BAD, 45):
        images[number] = images[number][:30]
    samples = [Sample(image, n % 10, f"grey-{n}") for n, image in enumerate(images)]
    path = str(tmp_path / "data")
    write_shards(path, map(str, range(10)), {"train": samples[:40], "val": samples[40:]})
    changes = {"storage": str(tmp_path), "data.path": path, "data.batch_size": 8, "train.steps": 10}
    return override(RunConfig(), SMALL | changes | {"train.report_every": 5, "train.eval_every": None})


def test_too_many_bad_images_end_the_run_which_continues_with_a_higher_limit(broken: RunConfig) -> None:
    """The first epoch has those of training, the evaluation at the end the other one."""
    with pytest.raises(UsageError, match=r"3 of 40 images cannot be decoded, .* data.max_bad_frac=0.01") as e:
        trained(broken)
    assert all(f"grey-{number}: " in str(e.value) for number in BAD)
    counts = [
        metrics["data/bad_images"] for _, metrics in trained(override(broken, {"data.max_bad_frac": 0.2}))
    ]
    assert counts[-1] == 4
    assert counts == sorted(counts)
    with Path(RunDir.of(broken).path, "bad_images.csv").open() as file:
        assert {row["key"] for row in csv.DictReader(file)} == {f"grey-{n}" for n in (*BAD, 45)}

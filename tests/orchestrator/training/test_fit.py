"""Real Ray Train workers on this machine: the same numbers as one process, also when a worker is killed."""

import json
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import psutil
import pytest
from ray.exceptions import RayError

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.training import fit as fit_file
from orchestrator.training.fit import ATTEMPTS, MissingWorkers, check_data, fit, fit_on_workers
from orchestrator.training.metrics_file import read_metrics
from orchestrator.training.resources import check_resources
from orchestrator.training.run_directory import run_directory
from orchestrator.training.worker import Report

pytestmark = pytest.mark.usefixtures("cluster")

SOFT = {"model.moe.router.kind": "soft", "model.moe.num_experts": 4, "train.report_every": 1}


@pytest.fixture
def run(digits: str, tmp_path: Path) -> RunConfig:
    return override(RunConfig(), {**SOFT, "data.path": digits, "storage": str(tmp_path)})


def to_file(path: Path) -> Report:
    """Reports reach the process that asked for the run."""

    def report(step: int, metrics: dict[str, float]) -> None:
        with path.open("a") as file:
            file.write(json.dumps([step, metrics]) + "\n")

    return report


NAMES = ("train/loss", "train/grad_norm", "data/fingerprint")


def trained(run: RunConfig, path: Path, *, inline: bool, **changes: object) -> dict[int, tuple[float, ...]]:
    """Loss, gradient norm and fingerprint of what was read, as reported and as in the run's directory."""
    run = override(run, changes)
    fit(run, to_file(path), inline=inline)
    reported = dict(map(json.loads, path.read_text().splitlines()))
    written = {row.step: row.metrics for row in read_metrics(run_directory(run))}
    assert reported == written
    return {step: tuple(metrics[name] for name in NAMES) for step, metrics in written.items()}


def assert_same(a: dict[int, tuple[float, ...]], b: dict[int, tuple[float, ...]]) -> None:
    assert a.keys() == b.keys()
    for step in a:
        assert a[step][:2] == pytest.approx(b[step][:2], rel=1e-5), step
        assert a[step][2] == b[step][2], step


def kill_a_worker(ready: Callable[[], bool]) -> threading.Thread:
    """SIGKILL for the last started Ray Train worker, once `ready`."""

    def kill() -> None:
        while not ready():
            time.sleep(0.05)
        workers = [
            process
            for process in psutil.Process().children(recursive=True)
            if "RayTrainWorker" in "".join(process.cmdline())
        ]
        workers[-1].kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


def test_two_workers_equal_one(run, tmp_path):
    """FSDP and expert parallelism by Ray Train, fed by Ray Data."""
    run = override(run, {"train.steps": 10})
    alone = trained(run, tmp_path / "alone.jsonl", inline=True, name="alone")
    two = trained(
        run, tmp_path / "two.jsonl", inline=False, name="two", **{"scale.workers": 2, "scale.ep": 2}
    )
    assert_same(alone, two)


@pytest.mark.smoke  # workers are started twice
def test_a_worker_is_killed(run, tmp_path):
    """Half-way: the losses of one undisturbed process."""
    run = override(run, {"train.steps": 120, "checkpoint.every": 10})
    alone = trained(run, tmp_path / "alone.jsonl", inline=True, name="alone")

    log = tmp_path / "two.jsonl"
    killer = kill_a_worker(lambda: log.exists() and len(log.read_text().splitlines()) > 45)
    two = trained(run, log, inline=False, name="two", **{"scale.workers": 2, "scale.ep": 2})
    killer.join(timeout=1)
    assert not killer.is_alive()
    reported = [json.loads(line)[0] for line in log.read_text().splitlines()]
    assert len(reported) > 120, "nothing was replayed: the kill came too late"
    assert_same(alone, two)


@pytest.mark.slow  # workers of its own
def test_data_parallel_and_microbatches_equal_one(run, tmp_path):
    run = override(run, {"train.steps": 10})
    alone = trained(run, tmp_path / "alone.jsonl", inline=True, name="alone")
    quarter = trained(run, tmp_path / "q.jsonl", inline=True, name="quarter", **{"train.microbatch": 16})
    two = trained(run, tmp_path / "two.jsonl", inline=False, name="two", **{"scale.workers": 2})
    assert_same(alone, quarter)
    assert_same(alone, two)


def test_a_resumed_run_reports_what_an_undisturbed_one_does(run, tmp_path):
    """Checkpoints fall between reports, and the crash between both."""
    run = override(run, {"train.steps": 20, "train.report_every": 5, "checkpoint.every": 4})
    alone = trained(run, tmp_path / "alone.jsonl", inline=True, name="alone")

    def crash_at_15(step: int, metrics: dict[str, float]) -> None:
        if step == 15:
            raise RuntimeError("unplugged")
        to_file(tmp_path / "resumed.jsonl")(step, metrics)

    resumed = override(run, {"name": "resumed"})
    with pytest.raises(RuntimeError, match="unplugged"):
        fit(resumed, crash_at_15, inline=True)
    assert_same(alone, trained(resumed, tmp_path / "resumed.jsonl", inline=True))


def test_data_that_changed_in_place_is_refused(run, tmp_path, digits):
    copy = tmp_path / "copy"
    shutil.copytree(digits, copy)
    run = override(run, {"data.path": str(copy), "train.steps": 2})
    fit(run, lambda step, metrics: None, inline=True)
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"0"', '"zero"'))
    with pytest.raises(UsageError, match="changed since"):
        fit(run, lambda step, metrics: None, inline=True)


@pytest.mark.slow
def test_a_shard_that_changed_ends_the_run_at_once(run, tmp_path, digits):
    """It is the user's to mend: workers are not started again for it."""
    copy = tmp_path / "copy"
    shutil.copytree(digits, copy)
    for shard in (copy / "train").iterdir():
        content = bytearray(shard.read_bytes())
        content[200] ^= 1
        shard.write_bytes(content)
    run = override(run, {"data.path": str(copy), "train.steps": 5, "scale.workers": 2})
    with pytest.raises(UsageError, match=r"^shard .*parquet changed since it was packed"):
        fit(run, lambda step, metrics: None, inline=False)


def test_a_batch_holds_at_most_all_images(run, digits):
    images = open_manifest(digits).rows("train")
    check_data(override(run, {"data.batch_size": images, "data.lanes": 1}))
    with pytest.raises(UsageError, match=f"more than the {images} training images .*: use at most {images}"):
        check_data(override(run, {"data.batch_size": images + 1, "data.lanes": 1}))


@pytest.mark.parametrize("saves", [True, False])
def test_attempts_count_from_the_last_checkpoint(saves, run, monkeypatch):
    """Workers die in every attempt: it goes on where each attempt saved a checkpoint, else ATTEMPTS times."""
    tried = []

    def die(*_) -> None:
        tried.append(len(tried))
        raise RayError("a worker died")

    monkeypatch.setattr(fit_file, "can_schedule", lambda *_, **__: True)
    monkeypatch.setattr(fit_file, "_train_on", die)
    monkeypatch.setattr(fit_file, "result_of", lambda _: len(tried) == 2 * ATTEMPTS)
    monkeypatch.setattr(fit_file.manifests, "steps", lambda _: tried if saves else [])
    with nullcontext() if saves else pytest.raises(RayError):
        fit_on_workers(run, MissingWorkers(), None, [])
    assert len(tried) == (2 * ATTEMPTS if saves else ATTEMPTS)


def test_too_many_workers_are_refused_with_the_arithmetic(run):
    with pytest.raises(
        UsageError, match=r"4 workers x 0.5 CPU \+ 1 CPU for data = 3 CPUs, .* at most 2: use at most 2"
    ):
        check_resources(override(run, {"scale.workers": 4}))
    with pytest.raises(UsageError, match="1 workers need 1 GPUs, the cluster has at most 0"):
        check_resources(override(run, {"scale.use_gpu": True}))


@pytest.mark.slow  # workers of its own
def test_a_report_that_cannot_be_recorded_ends_the_run(run):
    """At the first, with its reason: to train it again would not record it."""
    tried = []

    def full(step: int, metrics: dict[str, float]) -> None:
        tried.append(step)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        fit(override(run, {"train.steps": 5, "scale.workers": 2}), full, inline=False)
    assert tried == [1]

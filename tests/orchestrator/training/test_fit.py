"""Real Ray Train workers on this machine: the same numbers as one process, also when a worker is killed; and
the sizes that a run can shrink to.
"""

import json
import shutil
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import psutil
import pytest
from ray.exceptions import RayError
from ray.train import WorkerGroupError

from orchestrator.checkpoint import manifest as manifests
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.packing.pack import Sample, write_shards
from orchestrator.runs import notice
from orchestrator.runs.metrics_file import read_metrics
from orchestrator.runs.run_directory import RunDir
from orchestrator.training import elastic
from orchestrator.training.elastic import (
    ATTEMPTS,
    MissingWorkers,
    cause_of,
    fit_on_workers,
    largest_schedulable,
    resize,
)
from orchestrator.training.fit import check_data, fit, start
from orchestrator.training.heartbeat import HeartbeatMonitor
from orchestrator.training.worker import Report
from tests.lanes import mostly_slow
from tests.orchestrator.training.recipe import RECIPE
from tests.parts import command_of, png

pytestmark = pytest.mark.usefixtures("cluster")

SOFT = {"model.moe.router.kind": "soft", "model.moe.num_experts": 4, "train.report_every": 1}
NAMES = ("train/loss", "train/grad_norm", "data/fingerprint")


@pytest.fixture
def run(digits: str, tmp_path: Path) -> RunConfig:
    return override(RunConfig(), {**SOFT, "data.path": digits, "storage": str(tmp_path)})


def to_file(path: Path) -> Report:
    """Reports reach the process that asked for the run, in a thread that never keeps it from ending."""

    def report(step: int, metrics: dict[str, float]) -> None:
        assert threading.current_thread() is threading.main_thread() or threading.current_thread().daemon
        with path.open("a") as file:
            file.write(json.dumps([step, metrics]) + "\n")

    return report


def trained(run: RunConfig, path: Path, **changes: object) -> dict[int, tuple[float, ...]]:
    """Loss, gradient norm and fingerprint of what was read, as reported and as in the run's directory."""
    run = override(run, changes)
    fit(run, to_file(path))
    reported = dict(map(json.loads, path.read_text().splitlines()))
    written = {row.step: row.metrics for row in read_metrics(RunDir.of(run).path)}
    assert reported == written
    return {step: tuple(metrics[name] for name in NAMES) for step, metrics in written.items()}


def assert_same(a: dict[int, tuple[float, ...]], b: dict[int, tuple[float, ...]]) -> None:
    assert a.keys() == b.keys()
    for step in a:
        assert a[step][:2] == pytest.approx(b[step][:2], rel=1e-5), step
        assert a[step][2] == b[step][2], step


def kill_a_worker(ready: Callable[[], bool]) -> threading.Thread:
    """Sends SIGKILL to the last started Ray Train worker, once `ready`."""

    def kill() -> None:
        while not ready():
            time.sleep(0.05)
        family = psutil.Process().children(recursive=True)
        [each for each in family if "RayTrainWorker" in command_of(each)][-1].kill()

    thread = threading.Thread(target=kill, daemon=True)
    thread.start()
    return thread


@pytest.mark.slow
def test_two_workers_equal_one(run, tmp_path):
    """FSDP and expert parallelism by Ray Train, fed by Ray Data."""
    run = override(run, {"train.steps": 10, **RECIPE})
    alone = trained(run, tmp_path / "alone.jsonl", name="alone")
    two = trained(run, tmp_path / "two.jsonl", name="two", **{"scale.workers": 2, "scale.ep": 2})
    assert_same(alone, two)


@pytest.mark.slow  # four workers
def test_four_workers_equal_one(run, tmp_path):
    run = override(run, {"train.steps": 10, **RECIPE})
    alone = trained(run, tmp_path / "alone.jsonl", name="alone")
    four = trained(run, tmp_path / "four.jsonl", name="four", **{"scale.workers": 4, "scale.ep": 2})
    assert_same(alone, four)


@pytest.mark.parametrize(("workers", "steps"), mostly_slow([(1, 60), (2, 400)], fast=[(1, 60)]))
def test_a_notice_saves_and_no_step_is_repeated(workers, steps, run, monkeypatch):
    """Between two reports, with no checkpoint near."""
    changes = {
        "train.steps": steps,
        "train.report_every": 20,
        "checkpoint.every": steps,
        "scale.workers": workers,
    }
    run = override(run, changes)
    monkeypatch.setattr(notice, "_given", False)
    assert not notice.give(), "nothing trains yet"

    def report(step: int, metrics: dict[str, float]) -> None:
        assert notice.give()

    with pytest.raises(notice.Stopped) as stopped:
        fit(run, report)
    (step,) = stopped.value.saved.values()
    assert 20 < step < steps
    assert manifests.steps(RunDir.of(run).checkpoints) == [step]
    monkeypatch.setattr(notice, "_given", False)
    assert fit(run).step == steps
    rows = [json.loads(line) for line in Path(RunDir.of(run).path, "metrics.jsonl").read_text().splitlines()]
    assert [row["resumed"] for row in rows if "resumed" in row] == [step]
    assert [row["step"] for row in rows if "metrics" in row] == [*range(20, steps + 1, 20)]


@pytest.mark.slow  # workers are started twice, as in `test_three_nodes`, which loses a worker with its node
def test_a_worker_is_killed(run, tmp_path):
    """FSDP and expert parallelism by Ray Train, fed by Ray Data, and half-way a kill: the losses of one
    undisturbed process.
    """
    run = override(run, {"train.steps": 50, "checkpoint.every": 10, **RECIPE})
    alone = trained(run, tmp_path / "alone.jsonl", name="alone")

    log = tmp_path / "two.jsonl"
    killer = kill_a_worker(lambda: log.exists() and len(log.read_text().splitlines()) > 25)
    two = trained(run, log, name="two", **{"scale.workers": 2, "scale.ep": 2})
    killer.join(timeout=1)
    assert not killer.is_alive()
    reported = [json.loads(line)[0] for line in log.read_text().splitlines()]
    assert len(reported) > 50, "nothing was replayed: the kill came too late"
    assert_same(alone, two)


@pytest.mark.slow  # workers of its own
def test_data_parallel_and_microbatches_equal_one(run, tmp_path):
    run = override(run, {"train.steps": 10})
    alone = trained(run, tmp_path / "alone.jsonl", name="alone")
    quarter = trained(run, tmp_path / "q.jsonl", name="quarter", **{"train.microbatch": 16})
    two = trained(run, tmp_path / "two.jsonl", name="two", **{"scale.workers": 2})
    assert_same(alone, quarter)
    assert_same(alone, two)


def test_a_run_keeps_the_lanes_that_it_began_with(run, tmp_path):
    """96 images are read in 12 lanes by three workers, and in 16 by one."""
    run = override(run, {"data.batch_size": 96, "train.steps": 3, "model.moe": None})
    written_down = trained(run, tmp_path / "twelve.jsonl", name="twelve", **{"data.lanes": 12})
    start(override(run, {"name": "three", "scale.workers": 3}))
    assert_same(written_down, trained(run, tmp_path / "three.jsonl", name="three"))

    alone = start(override(run, {"name": "alone"}))
    assert alone.lane_count() == 16
    with pytest.raises(UsageError, match=r"data.lanes=16 does not divide over workers=3: begin the run"):
        start(override(run, {"name": "alone", "scale.workers": 3}))
    with pytest.raises(UsageError, match=r"another config \(data.lanes: 16 -> 12\)"):
        start(override(run, {"name": "alone", "data.lanes": 12}), "resume")


def test_data_that_changed_in_place_is_refused(run, tmp_path, digits):
    copy = tmp_path / "copy"
    shutil.copytree(digits, copy)
    run = override(run, {"data.path": str(copy), "train.steps": 2})
    fit(run, lambda step, metrics: None)
    manifest = copy / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"0"', '"zero"'))
    with pytest.raises(UsageError, match="changed since"):
        fit(run, lambda step, metrics: None)


def test_a_validation_set_that_cannot_be_decoded_is_listed(run, tmp_path):
    """The evaluation has no image to average over, and the limit on bad images ends the run."""
    samples = [Sample(png(np.full((8, 8), n)), n % 10, f"grey-{n}") for n in range(44)]
    bad = [sample._replace(image=sample.image[:30]) for sample in samples[40:]]
    path = str(tmp_path / "data")
    write_shards(path, map(str, range(10)), {"train": samples[:40], "val": bad})
    run = override(run, {"data.path": path, "data.batch_size": 8, "train.steps": 2})
    with pytest.raises(UsageError, match=r"4 of 40 images cannot be decoded") as e:
        fit(run, lambda step, metrics: None)
    assert all(f"grey-{n}: " in str(e.value) for n in range(40, 44))


@pytest.mark.slow
def test_a_shard_that_changed_ends_the_run_at_once(run, tmp_path, digits):
    """The user must correct it: workers are not started again."""
    copy = tmp_path / "copy"
    shutil.copytree(digits, copy)
    for shard in (copy / "train").iterdir():
        content = bytearray(shard.read_bytes())
        content[200] ^= 1
        shard.write_bytes(content)
    run = override(run, {"data.path": str(copy), "train.steps": 5, "scale.workers": 2})
    with pytest.raises(UsageError, match=r"^shard .*parquet changed since it was packed"):
        fit(run, lambda step, metrics: None)


@pytest.mark.slow  # workers of its own
def test_a_report_that_cannot_be_recorded_ends_the_run(run):
    """At the first report, with its reason: another attempt would not record it either."""
    tried = []

    def full(step: int, metrics: dict[str, float]) -> None:
        tried.append(step)
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        fit(override(run, {"train.steps": 5, "scale.workers": 2}), full)
    assert tried == [1]


def test_a_batch_holds_at_most_all_images(run, digits):
    images = open_manifest(digits).rows("train")
    check_data(override(run, {"data.batch_size": images, "data.lanes": 1}))
    with pytest.raises(UsageError, match=f"more than the {images} training images .*: use at most {images}"):
        check_data(override(run, {"data.batch_size": images + 1, "data.lanes": 1}))


def test_the_cause_is_the_worker_that_failed_by_itself():
    broken = RuntimeError("[..gloo/transport/tcp/pair.cc:534] Connection closed by peer [10.0.0.2]:1024")
    full = OSError("no space left on device")
    assert (
        cause_of(WorkerGroupError("", {0: broken, 1: full, 2: broken})) == "rank 1: no space left on device"
    )
    assert "Connection closed" in cause_of(WorkerGroupError("", {0: broken}))
    assert cause_of(RuntimeError("lines\nand a reason")) == "and a reason"


@pytest.mark.parametrize("saves", [True, False])
def test_attempts_count_from_the_last_checkpoint(saves, run, monkeypatch):
    """Workers die in every attempt. The run goes on while attempts save checkpoints, else ATTEMPTS times."""
    tried = []

    def die(*_) -> None:
        tried.append(len(tried))
        raise RayError("a worker died")

    monkeypatch.setattr(elastic, "can_schedule", lambda *_, **__: True)
    monkeypatch.setattr(elastic, "_train_on", die)
    monkeypatch.setattr(elastic.RunDir, "result", lambda _: len(tried) == 2 * ATTEMPTS)
    monkeypatch.setattr(elastic.manifests, "steps", lambda _: tried if saves else [])
    with nullcontext() if saves else pytest.raises(RayError):
        fit_on_workers(run, MissingWorkers(), HeartbeatMonitor(run.name), None, [])
    assert len(tried) == (2 * ATTEMPTS if saves else ATTEMPTS)


def test_every_worker_stops_when_the_first_is_asked(run, monkeypatch):
    """One that went on alone would wait for the others. Here it is the second worker, which reads no file."""
    stops = []
    second = SimpleNamespace(get_world_rank=lambda: 1)
    monkeypatch.setattr(elastic.ray.train, "get_context", lambda: second)
    monkeypatch.setattr(elastic.ray.train, "get_preemption_info", lambda: None)
    monkeypatch.setattr(elastic, "sum_over_ranks", lambda asked: asked + 1)  # the first is asked
    monkeypatch.setattr(elastic, "train_worker", lambda *_, should_stop, **__: stops.append(should_stop()))
    start(run)
    elastic._train_worker_on_ray({"run": run, "until": None, "feeds": [], "heartbeats": None})
    assert stops == [True]


def eight_workers(**changes: object) -> RunConfig:
    """64 images in 16 lanes."""
    wide = {"model.moe.router.kind": "soft", "model.moe.num_experts": 8, "data.batch_size": 64}
    return override(RunConfig(), wide | {"scale.workers": 8} | changes)


@pytest.mark.parametrize(("workers", "passes"), [(8, 1), (4, 2), (1, 8), (3, None), (6, None)])
def test_fewer_workers_make_more_passes(workers, passes):
    """Each pass has 8 images; 3 and 6 do not divide the lanes."""
    small = resize(eight_workers(), workers)
    if passes is None:
        assert small is None
        return
    assert (small.data.batch_size, small.images_per_pass()) == (64, 8)
    assert small.data.batch_size // workers // small.images_per_pass() == passes


def test_a_pass_is_never_larger_and_holds_whole_groups():
    """96 images over 8 workers are 12 each; over 6 they are 16 each, which 12 does not divide."""
    wide = {"model.width": 48, "model.mlp_dim": 192}  # what six workers can share
    run = eight_workers(**{"data.batch_size": 96, "data.lanes": 48, "model.moe.images_per_group": 4}, **wide)
    assert [resize(run, workers).images_per_pass() for workers in (6, 4)] == [8, 12]


@pytest.mark.parametrize(("mixing", "images"), [("mixup", 6), ("cutmix", 6), ("randaugment", 9)])
def test_a_pass_holds_whole_pairs_of_mixed_images(mixing, images):
    """90 images over 9 workers are 10 each; over 5 they are 18 each, and 9 is their largest odd divisor."""
    changes = {"data.batch_size": 90, "data.lanes": 90, "scale.workers": 9, "train.microbatch": 10}
    run = override(RunConfig(), changes | {"model.moe": None, "data.augment": mixing})
    small = resize(run, 5)
    assert small
    assert small.images_per_pass() == images


def test_groups_of_experts_and_copies_of_the_model_shrink_when_they_must():
    run = eight_workers(**{"scale.ep": 4})
    assert [resize(run, n).scale.ep for n in (4, 2, 1)] == [4, 2, 1]
    run = eight_workers(**{"scale.ep": 2, "scale.dp_replicate": 4})
    assert [resize(run, n).scale.dp_replicate for n in (8, 4, 2)] == [4, 2, 1]


@pytest.mark.parametrize(("available", "chosen"), [(7, 4), (2, 2), (1, None)])
def test_as_many_workers_as_are_available_and_allowed(available, chosen, monkeypatch):
    """8, 4, 2 and 1 workers divide the batch; `min_workers=2` forbids the last."""
    monkeypatch.setattr(elastic, "can_schedule", lambda run, within_s: run.scale.workers <= available)
    found = largest_schedulable(eight_workers(**{"scale.min_workers": 2}))
    assert (found and found.scale.workers) == chosen


def test_fewer_workers_read_the_same_lanes():
    """Twelve workers have 12 lanes by default, where four would have 16."""
    wide = {"model.width": 48, "model.mlp_dim": 192, "model.moe.num_experts": 12}
    run = eight_workers(**wide, **{"data.batch_size": 96, "scale.workers": 12})
    small = resize(run, 4)
    assert small
    assert small.lane_count() == run.lane_count() == 12

"""Trains a run: on workers that Ray Train starts, or in this process if its only worker needs no GPU.

Workers write reports and log lines to the run's directory, and this process reads them there. When nodes are
lost a run continues with fewer workers, and with all of them once nodes are back.
"""

import logging
import re
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from math import gcd, lcm
from typing import Any

import ray
import ray.train
import torch
from ray.exceptions import RayError
from ray.train import TrainingFailedError
from ray.util.placement_group import PlacementGroup, placement_group, remove_placement_group

from moe.model import begins_so
from moe.parallel import sum_over_ranks
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.models import classes_at_start
from orchestrator.checkpoint.start import start_report
from orchestrator.codec import override, read_config, to_dict
from orchestrator.config import RunConfig
from orchestrator.data.augment.base import at
from orchestrator.data.fields import check_fields
from orchestrator.data.index import has_images
from orchestrator.data.manifest import check_shards, open_manifest
from orchestrator.data.ray_data import by_ray_data
from orchestrator.data.stream import in_process
from orchestrator.errors import UsageError, reason_of
from orchestrator.runs import notice
from orchestrator.runs.metrics_file import LOG, METRICS, POLL_S, LineReader, poll_s
from orchestrator.runs.run_directory import Result, RunDir, StartMode, acquire_run_dir
from orchestrator.training.gauges import Gauges
from orchestrator.training.heartbeat import HeartbeatMonitor, HeartbeatSender
from orchestrator.training.launch import on_workers
from orchestrator.training.profile import current_phase
from orchestrator.training.resources import (
    CPU_FOR_DATA,
    is_inline,
    placement,
    worker_resources,
)
from orchestrator.training.worker import Report, train_worker

log = logging.getLogger(__name__)

ATTEMPTS = 4  # without progress between them
PROBE_S = 2  # enough for the cluster to grant resources that are free
# What gloo and NCCL say when another worker is gone.
BROKEN_BY_ANOTHER = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe", re.IGNORECASE)
ASK_S = 1.0  # between steps after which workers agree whether to stop


def check_data(run: RunConfig, *, verify: bool = False) -> None:
    """Checks the sizes of all shards; with `verify` their SHA-256 too.

    Raises:
        UsageError: if a shard is damaged, the data have more classes than the model or lack a field of the
            task; if a batch is larger than the training set.
    """
    manifest = open_manifest(run.data.path)
    if run.data.batch_size > manifest.rows("train"):
        raise UsageError(
            f"data.batch_size={run.data.batch_size} is more than the {manifest.rows('train')} training images"
            f" of {run.data.path}: use at most {manifest.rows('train')}"
        )
    if run.task.classifies and len(manifest.classes) > run.model.num_outputs():
        raise UsageError(
            f"model.num_classes={run.model.num_outputs()}, but {run.data.path} has {len(manifest.classes)}"
            " classes"
        )
    if run.model.image_side() and not has_images(run.data.path, manifest.labels, manifest.fields):
        raise UsageError(
            f"{run.data.path} holds samples without images, of fields {', '.join(manifest.fields)}, and a"
            f" model of kind {run.model.kind!r} reads images: choose a model and a task that read them"
            " (model.kind, task.kind)"
        )
    check_fields(run.task.fields(run.model), manifest.fields, run.data.path)
    check_shards(run.data.path, manifest, verify=verify)


def decided_by_data(run: RunConfig) -> RunConfig:
    """Returns the run with the fields that its data set decides. Raises UsageError if it cannot."""
    return override(run, run.task.for_data(run.model, run.data.path))


def check_start(run: RunConfig) -> None:
    """Raises UsageError if a run that has not begun would start from weights that do not fit its model, or
    would freeze random ones.
    """
    if manifests.steps(RunDir.of(run).checkpoints):
        return
    frozen = f"{run.name}: train.freeze={list(run.train.freeze)} would keep"
    if run.train.init_from:
        without, classes = run.train.init_without, classes_at_start(run)
        started = start_report(run.model, run.train.init_from, without=without, classes=classes)
        head, new = f"{run.model.head}.", started.transfer.initial if started.classes else ()
        if heads := [n for n in new if n.startswith(head) and begins_so(n, run.train.freeze)]:
            raise UsageError(f"{frozen} {heads[0]} of {started.classes}")
    elif run.train.freeze and not run.train.trunk:
        raise UsageError(f"{frozen} random weights: begin from trained ones (train.init_from)")


def fit(run: RunConfig, report: Report = lambda step, metrics: None, *, until: int | None = None) -> Result:
    """Trains `run` to its end, or to step `until`, from its newest checkpoint if it has one.

    If the run is inline, this process is its only worker; otherwise Ray Train starts the workers. Either way
    `report` is called in this process, to show progress: the record is in the directory.

    Raises:
        UsageError: for missing data, or another config in the run's directory.
        ray.train.TrainingFailedError: when workers died more often than they are replaced.
        Stopped: if it was asked to save and stop, by a notice or in its directory.
    """
    return fit_started(start(run), report, until=until)


def fit_started(
    run: RunConfig, report: Report = lambda step, metrics: None, *, until: int | None = None
) -> Result:
    """Trains a run that `start` has returned, as `fit` does."""
    own = RunDir.of(run)
    if (result := own.result()) is not None:
        return result
    storage.delete(own.stop)
    until = until if until and until < run.train.steps else None
    if is_inline(run):
        with notice.saving():
            train_worker(run, report=report, read=in_process, until=until, should_stop=_asked(own))
    else:
        missing, monitor = MissingWorkers(), HeartbeatMonitor(run.name)
        with _following(run, report, missing, monitor, until) as failed:
            fit_on_workers(run, missing, monitor, until, failed)
    result = own.result() or (own.pause(until) if until else None)
    if result is None:
        raise notice.Stopped({run.name: max(manifests.steps(own.checkpoints), default=0)})
    if result.step == until and not is_inline(run):
        report(result.step, result.metrics)
    return result


def start(run: RunConfig, mode: StartMode = "auto", labels: Mapping[str, str] | None = None) -> RunConfig:
    """Acquires the run's directory and checks its data. Returns the run with what its data decide, and with
    the lanes that it began with, so that another number of workers reads the same batches.
    """
    run = decided_by_data(run)
    check_data(run)
    was = RunDir.of(run).record()
    digest = open_manifest(run.data.path).digest(was.data_digest if was else "")
    record = acquire_run_dir(run, digest, mode, labels)
    if record.config == to_dict(run):
        return run
    lanes = read_config(RunConfig, record.config).lane_count()
    return run if lanes == run.lane_count() else override(run, {"data.lanes": lanes})


def fit_on_workers(
    run: RunConfig,
    missing: "MissingWorkers",
    monitor: HeartbeatMonitor,
    until: int | None,
    failed: list[BaseException],
) -> None:
    """Trains on Ray Train workers: on all of `scale.workers`, or after `scale.wait_s` on as many as there are
    until the others are available. When one dies, all are started again from the last checkpoint; when it
    dies with its machine, without end.

    Raises:
        UsageError: for an error in a worker that another attempt would repeat.
        ray.train.TrainingFailedError: when workers died `ATTEMPTS` times without saving a checkpoint between.
    """
    own, died, saved = RunDir.of(run), 0, -1
    while True:
        # A report that fails sets `failed` and then makes this file, so none is missed in this order.
        ends = notice.given() or own.asked_for_good()
        storage.delete(own.stop)
        if ends or failed or own.result() or (until and own.pause(until)):
            return
        now = run if can_schedule(run, within_s=run.scale.wait_s) else largest_schedulable(run)
        if now is None:
            log.warning("%s waits for %d workers and a CPU for data", run.name, run.scale.workers)
            continue
        absent = run.scale.workers - now.scale.workers
        if absent:
            log.warning("%s continues without %d of %d workers", run.name, absent, run.scale.workers)
        missing.want(run, absent)
        try:
            with notice.saving():
                _train_on(now, until, monitor)
        except (TrainingFailedError, RayError) as error:
            newest, gone = max(manifests.steps(own.checkpoints), default=0), monitor.gone()
            died, saved = (0 if newest > saved else died) + (not gone), newest
            if died == ATTEMPTS or failed:
                raise
            why = f"lost {gone}" if gone else cause_of(error)
            again = max(monitor.step - newest, 0)
            text = "%s: %s; all workers restart from step %d and repeat %d steps"
            log.warning(text, run.name, why, newest, again)
        finally:
            monitor.end()
            missing.want(run, 0)


def cause_of(error: BaseException) -> str:
    """The reason of a failed attempt: that of the worker that failed first by itself, and not of those whose
    connection to it broke.
    """
    failures: Mapping[int, BaseException] = getattr(error, "worker_failures", {})
    reasons = {rank: reason_of(each).partition(". Some common causes")[0] for rank, each in failures.items()}
    own = {rank: why for rank, why in reasons.items() if not BROKEN_BY_ANOTHER.search(why)}
    rank, why = next(iter((own or reasons).items()), (None, reason_of(error)))
    return why if rank is None else f"rank {rank}: {why}"


def resize(run: RunConfig, workers: int) -> RunConfig | None:
    """Returns the run on `workers` with the same global batch: each accumulates more passes, which are no
    larger than before. None if the batch, its lanes or the model cannot be divided like that.

    Expert-parallel groups, and the copies of the model, shrink to the largest divisors that fit.
    """
    share = run.data.batch_size // workers
    # A pass holds whole routing groups, and whole pairs of mixed images.
    together = lcm(run.model.images_per_group, 2 if at(run.data.augment, "batch") else 1)
    images = [n for n in range(together, run.images_per_pass() + 1, together) if share % n == 0]
    ep = gcd(run.ep(), workers)
    copies = gcd(run.scale.dp_replicate, workers // ep)
    changes = {
        "scale.workers": workers,
        "scale.min_workers": min(workers, run.scale.min_workers),
        "scale.ep": ep,
        "scale.dp_replicate": copies,
        "data.lanes": run.lane_count(),
        "train.microbatch": max(images, default=share),
    }
    try:
        return override(run, changes)
    except ValueError:
        return None


def can_schedule(run: RunConfig, *, within_s: float) -> bool:
    """Returns whether the cluster has room for the run's workers and for the CPU that decodes for them,
    without which they would wait without end. The request makes an autoscaler add nodes.
    """
    group = _reserve(run, run.scale.workers)
    granted = group.wait(within_s)
    remove_placement_group(group)
    return granted


def largest_schedulable(run: RunConfig) -> RunConfig | None:
    """Returns the run on as many workers as the cluster holds, fewer than its own; None below the minimum."""
    sizes = (resize(run, workers) for workers in range(run.scale.workers - 1, run.scale.min_workers - 1, -1))
    return next((size for size in sizes if size and can_schedule(size, within_s=PROBE_S)), None)


class MissingWorkers:
    """Watches for the workers that a shrunken run lacks. Requests a placement group, so that an autoscaler
    adds nodes, and releases it as soon as it is granted, because the run still decodes on its CPUs.
    """

    def __init__(self) -> None:
        self._wanted: tuple[RunConfig, int] | None = None
        self._group: PlacementGroup | None = None
        self._available = False

    def want(self, run: RunConfig, workers: int) -> None:
        self._wanted = (run, workers) if workers else None
        self._group, self._available = None, False

    def available(self) -> bool:
        """To be called after the workers' first report: before it, their own resources would be counted."""
        if self._wanted and self._group is None:
            self._group = _reserve(*self._wanted)
            threading.Thread(target=self._watch, args=(self._group,), daemon=True).start()
        return self._available

    def _watch(self, group: PlacementGroup) -> None:
        while self._group is group and not group.wait(1):
            pass
        self._available = self._group is group
        remove_placement_group(group)


def _reserve(run: RunConfig, workers: int) -> PlacementGroup:
    each = worker_resources(run)
    # A task that decodes takes as much as a worker: the parts of the CPU for data may be on several nodes.
    data = [{"CPU": each["CPU"]}] * round(CPU_FOR_DATA / each["CPU"])
    bundles = [each] * workers + data
    return placement_group(bundles, strategy=placement(run))


@contextmanager
def _following(
    run: RunConfig, report: Report, missing: MissingWorkers, monitor: HeartbeatMonitor, until: int | None
) -> Iterator[list[BaseException]]:
    """Passes the workers' reports to `report` and their log lines to our log, from a thread, and says when
    they stand still. Asks them to stop on a notice, when missing workers are available, or when `report`
    raises. The report of step `until`, where they pause, is left to the caller: an evaluation belongs to it.

    Yields a list that receives what `report` raises; the error is raised again when the block ends.
    """
    own = RunDir.of(run)
    reports, lines = LineReader(own.path, METRICS), LineReader(own.path, LOG)
    for reader in (reports, lines):
        reader.new()  # skips the lines of earlier attempts
    ended, failed = threading.Event(), list[BaseException]()

    def read() -> None:
        for line in lines.new():
            log.info(line["line"])
        for row in reports.new():
            if "metrics" in row:
                if row["step"] != until:
                    report(row["step"], row["metrics"])
                monitor.step = row["step"]
                if missing.available():
                    own.ask_to_stop()

    def follow() -> None:
        last, due = False, time.monotonic()
        while not last:
            last = ended.wait(POLL_S)
            try:
                if last or time.monotonic() > due:
                    read()
                    due = time.monotonic() + poll_s(own.path)
                monitor.look()
                if notice.given():
                    own.ask_to_stop(for_good=True)
            except BaseException as error:
                failed.append(error)
                own.ask_to_stop()
                return

    # A daemon: a process whose main thread has ended must not wait for a run in another thread.
    thread = threading.Thread(target=follow, daemon=True, name="follow-workers")
    thread.start()
    try:
        yield failed
    finally:
        ended.set()
        thread.join()
        if failed:
            raise failed[0]


def _train_on(run: RunConfig, until: int | None, monitor: HeartbeatMonitor) -> None:
    """Makes one attempt. Ray's own retries know neither the CPU for data nor fewer workers."""
    on_workers(_train_worker_on_ray, run, {"until": until, "heartbeats": monitor.begin(run.scale.workers)})


def _train_worker_on_ray(config: Mapping[str, Any]) -> None:
    run: RunConfig = config["run"]
    own = RunDir.of(run)
    own.check_visible()
    rank = ray.train.get_context().get_world_rank()
    sender = HeartbeatSender(config["heartbeats"], rank, current_phase)
    train_worker(
        run,
        report=Gauges(run.name, rank).report,
        read=by_ray_data(config["feeds"]),
        until=config["until"],
        should_stop=sender.counting(_agreed(_asked(own) if rank == 0 else lambda: False, run.scale.workers)),
    )


def _asked(own: RunDir) -> Callable[[], bool]:
    """Returns a function to be called after each step: whether this process has got a notice, or the run's
    directory asks to stop. It looks there from time to time.
    """
    due, found = time.monotonic(), False

    def asked() -> bool:
        nonlocal due, found
        if not found and time.monotonic() > due:
            found = storage.size(own.stop) is not None
            due = time.monotonic() + poll_s(own.path)
        return found or notice.given()

    return asked


def _agreed(asked: Callable[[], bool], workers: int) -> Callable[[], bool]:
    """Returns a function that all workers call after each step, and that returns the same on all: whether one
    of them is asked to stop, or a node of theirs is to be removed. They exchange that about every `ASK_S`
    seconds, because all wait for the slowest.
    """
    steps, wait, since = 0, 1, time.monotonic()

    def should_stop() -> bool:
        nonlocal steps, wait, since
        steps += 1
        if steps < wait:
            return False
        mine = torch.tensor([float(asked()), time.monotonic() - since])
        asking, seconds = sum_over_ranks(mine).tolist()
        # The next time is the same on all; steps that were fast may become slow.
        wait = max(1, min(2 * steps, int(ASK_S * steps * workers / seconds)))
        steps, since = 0, time.monotonic()
        return bool(asking) or ray.train.get_preemption_info() is not None

    return should_stop

"""Trains a run on workers that Ray Train starts. They write reports and log lines to the run's directory, and
this process reads them there. When nodes are lost a run continues with fewer workers, and with all of them
once nodes are back.
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

from moe.parallel import sum_over_ranks
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.augment.base import at
from orchestrator.data.ray_data import by_ray_data
from orchestrator.errors import reason_of
from orchestrator.runs import notice
from orchestrator.runs.metrics_file import LOG, METRICS, POLL_S, LineReader, asked_by, poll_s
from orchestrator.runs.run_directory import RunDir
from orchestrator.training.gauges import Gauges
from orchestrator.training.heartbeat import HeartbeatMonitor, HeartbeatSender
from orchestrator.training.launch import on_workers
from orchestrator.training.profile import current_phase
from orchestrator.training.resources import CPU_FOR_DATA, placement, worker_resources
from orchestrator.training.worker import Report, train_worker

log = logging.getLogger(__name__)

ATTEMPTS = 4  # without progress between them
PROBE_S = 2  # enough for the cluster to grant resources that are free
# What gloo and NCCL say when another worker is gone.
BROKEN_BY_ANOTHER = re.compile(r"gloo|NCCL|Connection (closed|reset|refused)|Broken pipe", re.IGNORECASE)
ASK_S = 1.0  # between steps after which workers agree whether to stop


def train_on_workers(run: RunConfig, report: Report, until: int | None) -> None:
    """Trains a run that was started as `fit_on_workers` does, and passes on what its workers report."""
    missing, monitor = MissingWorkers(), HeartbeatMonitor(run.name)
    with _following(run, report, missing, monitor, until) as failed:
        fit_on_workers(run, missing, monitor, until, failed)


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
        should_stop=sender.counting(
            _agreed(asked_by(own) if rank == 0 else lambda: False, run.scale.workers)
        ),
    )


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

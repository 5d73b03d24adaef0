"""One worker of a run, alone or among others: from the newest checkpoint to the result."""

import ctypes
import logging
import math
import os
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor

from moe.cost import train_flops_6mac
from moe.model import Model
from moe.parallel import build_sharded, build_whole, make_mesh, set_weights
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.manager import Checkpoints
from orchestrator.checkpoint.manifest import on_first_rank
from orchestrator.checkpoint.models import classes_at_start, read_model
from orchestrator.checkpoint.start import StartReport, load_moments, start_from
from orchestrator.checkpoint.statistics import inputs_for_statistics
from orchestrator.checkpoint.weights import signature_of_run
from orchestrator.codec import changed_fields, flat, read_config, to_dict
from orchestrator.config import RunConfig
from orchestrator.costs import computed, counted
from orchestrator.data.batch import Batch, DecodeError
from orchestrator.data.stream import Reader, Stream, in_process, open_stream, prefetched
from orchestrator.errors import UsageError
from orchestrator.records import at_its_place
from orchestrator.runs.contents import moved, recorded_at
from orchestrator.runs.metrics_file import Metrics, MetricsWriter
from orchestrator.runs.run_directory import ROUTING, Result, RunDir, write_json
from orchestrator.threads import set_threads
from orchestrator.training.loop import Diverged, due, evaluate, good_enough, run_steps
from orchestrator.training.metrics import (
    CostCounters,
    Meter,
    SampleTracker,
    UtilizationMonitor,
    check_bad,
    fingerprint_metric,
    model_flops_utilization,
    write_csv,
)
from orchestrator.training.profile import profiled
from orchestrator.training.progress import Progress
from orchestrator.training.routing_table import parted, routing_table

log = logging.getLogger(__name__)
Report = Callable[[int, Metrics], None]
Ending = Literal["finished", "diverged", "paused"]
BRANCHES_DIFFER_IN = (
    "name",
    "train.trunk",
    "train.steps",
    "train.schedule.",
    "train.report_every",
    "train.eval_every",
)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


def train_worker(
    run: RunConfig,
    *,
    report: Report,
    read: Reader,
    until: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Trains to the end of the run, or to step `until`, where it pauses: the same call continues from there.

    The first worker reports, and writes the result. After each step all workers call `should_stop`, which
    returns the same for all; if true, they save and return without a result.
    """
    Worker(run, report, read).train(min(until or run.train.steps, run.train.steps), should_stop)


class Worker:
    """A worker's model, data and record of a run, from the newest checkpoint on.

    Attributes:
        done: steps taken before.
        progress: as of the last report, or of the checkpoint.
    """

    def __init__(self, run: RunConfig, report: Report, read: Reader) -> None:
        keep_freed_memory()
        set_threads(run.model, run.images_per_pass())
        if run.scale.deterministic:
            be_deterministic()
        self.run, self._report, self._read = run, report, read
        self.device = torch.device("cuda" if run.scale.use_gpu else "cpu")
        self.model = build_model(run, self.device, seed=None)
        self.optimizer = run.train.optimizer.build(self.model)
        self.average = self.fewshot = None
        if run.train.ema:
            import orchestrator.training.average as averages

            self.average = averages.Average(run.train.ema, self.optimizer, self._first_inputs)
        rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.first = rank == 0
        self.training, self.validation = (open_stream(run, s, rank, workers) for s in ("train", "val"))
        if run.train.fewshot:
            import orchestrator.training.fewshot as fewshot

            self.fewshot = fewshot.FewShot(run, run.train.fewshot, rank, workers)
        self.checkpoints = Checkpoints(RunDir.of(run).checkpoints, run.checkpoint)
        self.signature = to_dict(signature_of_run(run))
        self._pauses_at: int | None = None
        self.done, self.progress, self._resumed = self._begin()
        if self.average:
            self.average.updates = self.done
        if run.train.freeze:
            self._store_features()
        self.metrics_file = MetricsWriter(run) if self.first else None
        if self.metrics_file and self.done:
            self.metrics_file.resumed(self.done)
        self.counters = CostCounters(counted(run.train.costs), self.device, self.progress.counted)
        self.meter = Meter(workers=workers, device_s=self.progress.device_s, counters=self.counters)
        self.utilization = UtilizationMonitor()
        self.flops_per_image = train_flops_6mac(run.model, images=1)
        self.samples = SampleTracker(fingerprint=self.progress.fingerprint, bad=self.progress.bad)

    def _store_features(self) -> None:
        import orchestrator.training.features as features

        if features.can_be_stored(self.run):
            streams = (self.training, self.validation)
            self.training, self.validation = (
                features.with_features(each, self.model, self.device) for each in streams
            )
            self._read = in_process

    def _begin(self) -> tuple[int, Progress, Metrics]:
        """Sets the model's weights: from the run's newest checkpoint, else from the run that it branches
        from, else from the seed, and from other weights if there are any. Weights that a checkpoint
        overwrites are not drawn. Returns the step, the progress, and what the next report says about a
        resumption.
        """
        run, state = self.run, (self.model, self.optimizer)
        if (restored := self.checkpoints.restore(*state)) is not None:
            done, progress = restored.step, Progress.read(restored.progress)
            best = progress.best_so_far(run.task.quality)
            log.info("%s: resumes from step %d of %d, %s", run.name, done, run.train.steps, best)
            return done, progress, {"resumed/step": float(done)}
        if run.train.trunk:
            trunk = self.checkpoints.branch(run.train.trunk, *state)
            check_trunk(at_its_place(trunk.config, run.train.trunk), trunk.step, run)
            log.info("%s: branches at step %d from %s", run.name, trunk.step, run.train.trunk)
            progress = Progress.read(trunk.progress)
            return trunk.step, replace(progress, best_k=[], trunk=(trunk.step, progress.device_s)), {}
        set_weights(self.model, run.train.seed)
        if run.train.init_from:
            group = self.checkpoints.group
            started = start_from(
                self.model,
                run.train.init_from,
                without=run.train.init_without,
                noise=run.train.init_noise,
                classes=on_first_rank(lambda: classes_at_start(run), group),
                group=group,
            )
            if run.train.init_optimizer:
                load_moments(*state, started, group)
            log.info("%s %s", run.name, started)
            if started.classes and None in (started.classes.here, started.classes.there):
                log.warning("%s: %s", run.name, started.classes)
            return 0, Progress(), self._first_losses(started)
        return 0, Progress(), {}

    def _first_losses(self, started: StartReport) -> Metrics:
        """Returns the losses of the model and of the one whose weights it took over, on the first batch of
        evaluation; nothing unless that had the same classes, in this order, and images of this size.
        """
        run = self.run
        try:
            source = read_model(started.source, whole=False)
        except UsageError:
            return {}
        alike = source.run.model.image_side() == run.model.image_side() and source.run.task == run.task
        same = not run.task.classifies or (started.classes is not None and started.classes.are_same)
        if f"{run.model.head}.weight" not in started.transfer.copied or not (alike and same):
            return {}
        found = {}
        for name, model in (("init/loss", self.model), ("init/loss_source", source.load(self.device))):
            batches = prefetched(in_process(self.validation, self.validation.steps()[:1]), self.device)
            found[name] = evaluate(model, batches, run).get("val/loss", math.nan)
        log.info("%s: loss %.4f, of the weights' own model %.4f, on one batch", run.name, *found.values())
        return {name: loss for name, loss in found.items() if math.isfinite(loss)}

    def train(self, until: int, should_stop: Callable[[], bool]) -> None:
        """Takes the steps to `until`, and writes the result, or the pause, if it gets there."""
        run, until = self.run, max(until, self.done)
        if self._resumed and good_enough(run, self.progress.metrics):  # only the result is missing
            until = self.done
        # What is not finite at a pause is found where the undisturbed run looks.
        last = next(step for step in range(until, run.train.steps + 1) if any(due(run, step)))
        steps = self.samples.training(self._batches(self.training, range(self.done, last)))
        if run.scale.profile_steps and self.first:
            steps = profiled(
                steps,
                model=None if run.scale.compile else self.model,
                steps=run.scale.profile_steps,
                directory=RunDir.of(run).path,
            )
        status: Ending = "finished" if until == run.train.steps else "paused"
        self._pauses_at, reason = until if status == "paused" else None, ""
        try:
            reached = run_steps(
                self.model,
                self.optimizer,
                steps,
                run,
                self.meter,
                start=self.done,
                until=until,
                report=self.report,
                validate=self.validate,
                save=self.save,
                should_stop=should_stop,
                is_best=self.is_best,
            )
        except Diverged as error:
            status, reached, reason = "diverged", until, str(error)
        else:
            if good_enough(run, self.progress.metrics):
                status, until = "finished", reached
            elif run.train.stop_at is not None and reached == run.train.steps:
                best = self.progress.best_so_far(run.task.quality)
                log.warning("%s never reached stop_at=%g: %s", run.name, run.train.stop_at, best)
        step, metrics, until = self.progress.reported, self.progress.metrics, max(until, reached)
        if status == "paused" and reached == until:
            # The undisturbed run has no such evaluation, so it is not recorded as a report of the run.
            step, metrics = until, self._measured(until)
        if step == self._pauses_at and (status == "paused" or step > self.done):
            self._report(step, metrics)
        self.checkpoints.finish()
        if self.metrics_file:
            self.metrics_file.close()
            if reached == until:
                self._write_result(status, step, metrics, reason)

    def report(self, step: int, values: Metrics) -> None:
        """Completes the metrics of a step, and records and reports them."""
        run = self.run
        fingerprint, bad = self.samples.gather()
        values, of_table = parted(values)
        values |= self.utilization.read() | self._costs(step)
        flops_per_s = values["perf/images_per_s"] * self.flops_per_image
        values |= model_flops_utilization(flops_per_s, run.scale.workers)
        values |= {"data/fingerprint": fingerprint_metric(fingerprint), "data/bad_images": float(len(bad))}
        values |= self.samples.traffic()
        values["checkpoint/age_s"] = time.monotonic() - self.checkpoints.saved_s
        if self.checkpoints.failures:
            values["checkpoint/failed"] = float(self.checkpoints.failures)
        kept = max(1, run.checkpoint.keep_best)
        self.progress = self.progress.after(step, values | self._resumed, run.task.quality, kept)
        self._resumed = {}
        if self.metrics_file:
            if bad:
                write_csv(RunDir.of(run).bad_images, DecodeError._fields, bad)
            if of_table:
                write_json(RunDir.of(run).file(ROUTING), routing_table(of_table, run.model, step))
            self.metrics_file.report(step, self.progress.metrics)
        if step != self._pauses_at:  # else its evaluation follows
            self._report(step, self.progress.metrics)
        images = step * run.data.batch_size
        check_bad(bad, read=images, epoch=self.training.epoch(), max_frac=run.data.max_bad_frac)

    def _measured(self, step: int) -> Metrics:
        """Returns the report of `step`, where the run pauses, with the quality of the model there and what it
        has cost: it may not be a report of the run, or have no evaluation."""
        run, found = self.run, self.progress.metrics if self.progress.reported == step else {}
        if run.task.quality in found:
            return found
        return found | self.validate() | self._costs(step)

    def _costs(self, step: int) -> Metrics:
        """Returns what the run has cost. All workers call it together."""
        trunk, device_s = self.progress.trunk, self.meter.device_s
        found = computed(self.run, step, trunk=trunk[0] if trunk else 0) | self.counters.totals()
        own = {"cost/marginal_device_s": device_s - trunk[1]} if trunk else {}
        return found | {"cost/device_s": device_s} | own

    def is_best(self, step: int) -> bool:
        """Returns whether the evaluation of `step` is among the best so far, whose checkpoints are kept."""
        return self.run.checkpoint.keep_best > 0 and step in (each for _, each in self.progress.best_k)

    def save(self, step: int) -> None:
        """Saves a checkpoint, after the reports that it contains."""
        fingerprint, bad = self.samples.gather()
        own = {
            "device_s": self.meter.device_s,
            "counted": self.counters.totals(),
            "fingerprint": fingerprint,
            "bad": bad,
        }
        ends = self.progress.reported == step and good_enough(self.run, self.progress.metrics)
        scheduled = due(self.run, step).saves or self.is_best(step) or ends
        recorded = asdict(self.progress) | own | {"scheduled": scheduled}
        if self.metrics_file:
            self.metrics_file.flush()
        self.checkpoints.save(
            step,
            self.model,
            self.optimizer,
            images=step * self.run.data.batch_size,
            progress=recorded,
            config=to_dict(self.run),
            signature=self.signature,
        )

    def validate(self) -> Metrics:
        values = self._evaluated()
        values |= self.fewshot.measure(self.model, self.device).metrics() if self.fewshot else {}
        if self.average:
            with self.average.in_place_of_weights(self.model):
                found = self._evaluated()
            values |= {n.replace("val/", "val_ema/"): v for n, v in found.items() if n.startswith("val/")}
        return values

    def _first_inputs(self) -> Iterator[tuple[Any, Tensor]]:
        """Yields the inputs of the run's first batches, whichever step it has come to."""
        return inputs_for_statistics(self.training, self.device)

    def _evaluated(self) -> Metrics:
        batches = self._batches(self.validation, self.validation.steps())
        return evaluate(self.model, self.samples.validation(batches), self.run)

    def _batches(self, stream: Stream, steps: range) -> Iterator[Batch]:
        return prefetched(self._read(stream, steps), self.device)

    def _folder(self, step: int) -> str:
        """Returns the folder of a checkpoint, relative to the run's directory."""
        return manifests.folder_of(self.checkpoints.directory, step).removeprefix(
            f"{RunDir.of(self.run).path}/"
        )

    def _write_result(self, status: Ending, step: int, metrics: Metrics, reason: str) -> None:
        directory = self.checkpoints.directory
        kept, best = manifests.steps(directory), manifests.best_checkpoint(directory)
        if status == "diverged":
            log.warning("%s diverged: %s; %s", self.run.name, reason, _what_is_kept(self.run, kept))
        result = Result(
            status=status,
            step=step,
            metrics=metrics,
            reason=reason,
            time_s=time.time(),
            checkpoint=self._folder(kept[-1]) if kept else "",
            weights=manifests.read(manifests.folder_of(directory, kept[-1])).weights_digest() if kept else "",
            best_checkpoint=self._folder(best[0]) if best else "",
            best_quality=best[1] if best else None,
        )
        RunDir.of(self.run).write_result(result)


def _what_is_kept(run: RunConfig, steps: list[int]) -> str:
    if not steps:
        return "no checkpoint was saved: start again with a smaller train.lr"
    saved = f"step {steps[0]} is" if len(steps) == 1 else f"steps {', '.join(map(str, steps))} are"
    location = RunDir.of(run).checkpoints
    return f"{saved} kept: continue in another run, with train.init_from={location} and a smaller train.lr"


def build_model(run: RunConfig, device: torch.device, *, seed: int | None) -> Model:
    """Returns the model, sharded over all workers of the run; a single worker does not shard. Without a seed
    its weights are not set.
    """
    scale, compute_dtype = run.scale, torch.bfloat16 if run.compute_dtype() == "bfloat16" else None
    if scale.workers == 1:
        model = build_whole(run.model, device, seed=seed, options=scale, compute_dtype=compute_dtype)
    else:
        mesh = make_mesh(device.type, ep=run.ep(), dp_replicate=scale.dp_replicate)
        model = build_sharded(run.model, mesh, seed=seed, options=scale, compute_dtype=compute_dtype)
    if run.train.freeze:
        model.freeze(*run.train.freeze)
    return model


def check_trunk(config: Mapping[str, Any], step: int, run: RunConfig) -> None:
    """Checks that `run` itself would have reached the weights at `step` of a run with `config`.

    Source: Soft MoE, section 3.4: a long run at a slowly falling rate is cooled down from several of its
    steps, so that one training pays for a whole cost axis.

    Raises:
        UsageError: naming the fields that differ, or the first step at which the learning rates do.
    """
    trunk = read_config(RunConfig, config)
    if step >= run.train.steps:
        raise UsageError(f"{run.name}: train.steps={run.train.steps} end before its trunk, at step {step}")
    fields = (flat(each) | {"data.lanes": each.lane_count()} for each in (trunk, run))
    changes = {n: each for n, each in changed_fields(*fields).items() if not n.startswith(BRANCHES_DIFFER_IN)}
    same = moved(changes, recorded_at(run.train.trunk or ""))
    if changed := [f"{n}: {a!r} -> {b!r}" for n, (a, b) in changes.items() if n not in same]:
        raise UsageError(f"{run.name} cannot branch from {trunk.name}: {'; '.join(changed)}")
    for at in range(step):
        was, now = (
            each.train.schedule.rate(at, peak=each.train.lr, total=each.train.steps) for each in (trunk, run)
        )
        if was != now:
            raise UsageError(
                f"{run.name} cannot branch from {trunk.name} at step {step}: at step {at} its learning rate"
                f" would be {now:g}, the trunk's was {was:g}; give both the same"
                " train.schedule.warmup_steps, and cool down after the branch"
            )


def be_deterministic() -> None:
    """Lets torch use only algorithms that give the same bits in every run. Before the first use of a GPU,
    because its matmul library reads the environment then.
    """
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    # Filling memory before it is written helps debugging, and takes time.
    torch.utils.deterministic.fill_uninitialized_memory = False  # pyright: ignore[reportAttributeAccessIssue]


def keep_freed_memory() -> None:
    """Keeps freed memory in the process, so that a step's gradients reuse the pages of the step before.

    glibc maps every large tensor anew and unmaps it when freed, so each step pays a page fault for every
    4 KiB of its weight gradients; with many experts that costs more than computing them (`bench/results/`).
    Does nothing without glibc.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)

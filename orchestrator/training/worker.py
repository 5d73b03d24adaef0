"""What one worker of a run does, alone or among others, from its newest checkpoint to the result."""

import ctypes
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import HashStore  # pyright: ignore[reportPrivateImportUsage]

from moe.cost import forward_gflops_2mac, num_params, train_flops_6mac
from moe.parallel import build_sharded, make_mesh
from moe.vit import ViT
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.manager import BEST_BY, Checkpoints
from orchestrator.checkpoint.weights import start_from
from orchestrator.codec import MAY_CHANGE, flat, from_dict, to_dict
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch, DecodeError
from orchestrator.data.stream import Reader, Stream, open_stream, prefetched
from orchestrator.errors import UsageError
from orchestrator.training.fewshot import FewShot
from orchestrator.training.loop import Diverged, evaluate, good_enough, set_threads, train
from orchestrator.training.metrics import Meter, SampleTracker, UtilizationMonitor, check_bad, save_bad, shown
from orchestrator.training.metrics_file import Metrics, MetricsWriter
from orchestrator.training.optim import build_optimizer, learning_rate
from orchestrator.training.profile import profiled
from orchestrator.training.run_directory import Result, checkpoint_directory, run_directory, write_result

log = logging.getLogger(__name__)
Report = Callable[[int, Metrics], None]
BRANCHES_DIFFER_IN = (
    "name",
    "train.trunk",
    "train.steps",
    "train.schedule.",
    "train.report_every",
    "train.eval_every",
)
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # malloc.h


@dataclass(frozen=True, kw_only=True)
class Progress:
    """What a run counts beside its steps, as it lies in its checkpoints: device-seconds of training, the last
    report, the best value of `BEST_BY` with its step, steps and device-seconds of the trunk that it branched
    from, and what has been read (see `seen`).
    """

    device_s: float = 0.0
    reported: int = 0
    metrics: Metrics = field(default_factory=Metrics)
    best: tuple[float, int] | None = None
    trunk: tuple[int, float] | None = None
    fingerprint: int = 0
    bad: list[DecodeError] = field(default_factory=list)

    def after(self, step: int, metrics: Metrics) -> "Progress":
        """With the report of `step`."""
        best, quality = self.best, metrics.get(BEST_BY)
        if quality is not None and (best is None or quality > best[0]):
            best = quality, step
        return replace(self, reported=step, metrics=metrics, best=best)

    def best_so_far(self) -> str:
        return (
            f"best {BEST_BY} {self.best[0]:.4g} at step {self.best[1]}" if self.best else f"no {BEST_BY} yet"
        )


def train_worker(
    run: RunConfig,
    *,
    report: Report,
    read: Reader,
    until: int | None = None,
    should_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Trains to the end of the run, or to step `until`, where it pauses: the same call goes on from there.

    The first worker reports, and writes the result. After each report all workers ask `should_stop`, and
    get the same answer: true to save and return without a result.
    """
    until = min(until or run.train.steps, run.train.steps)
    keep_freed_memory()
    set_threads(run.model, run.images_per_pass())
    device = torch.device("cuda" if run.scale.use_gpu else "cpu")
    model = build_model(run, device)
    optimizer = build_optimizer(run.train.optimizer, model)
    rank, workers = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
    training, validation = (open_stream(run, split, rank, workers) for split in ("train", "val"))
    fewshot = FewShot(run, run.train.fewshot, rank, workers) if run.train.fewshot else None
    checkpoints = Checkpoints(checkpoint_directory(run), run.checkpoint)
    config = to_dict(run)

    done, progress = 0, Progress()
    if (restored := checkpoints.restore(model, optimizer)) is not None:
        done, progress = restored.step, Progress(**restored.progress)
        if rank == 0:
            log.info("%s: on from step %d of %d, %s", run.name, done, run.train.steps, progress.best_so_far())
        if good_enough(run.train, progress.metrics):  # only its result is missing
            until = done
    elif run.train.trunk:
        trunk = checkpoints.branch(run.train.trunk, model, optimizer)
        check_trunk(trunk.config, trunk.step, run)
        progress = replace(Progress(**trunk.progress), best=None)
        done, progress = trunk.step, replace(progress, trunk=(trunk.step, progress.device_s))
        if rank == 0:
            log.info("%s: branches at step %d from %s", run.name, done, run.train.trunk)
    elif run.train.init_from:
        without = run.train.init_without
        started = start_from(model, run.train.init_from, without=without, group=checkpoints.group)
        if rank == 0:
            log.info("%s %s", run.name, started)
    resumed = {"resumed/step": float(done)} if restored else {}
    metrics_file = MetricsWriter(run) if rank == 0 else None
    if metrics_file and done:
        metrics_file.resumed(done)
    meter = Meter(workers=workers, device_s=progress.device_s)
    busy = UtilizationMonitor()
    seen = SampleTracker(fingerprint=progress.fingerprint, bad=progress.bad)

    def on_report(step: int, values: Metrics) -> None:
        nonlocal progress, resumed
        failures = {"checkpoint/failed": float(checkpoints.failures)} if checkpoints.failures else {}
        fingerprint, bad = seen.gather()
        if rank == 0 and bad:
            save_bad(run_directory(run), bad)
        read = {"data/fingerprint": shown(fingerprint), "data/bad_images": float(len(bad))}
        values |= (
            busy.read()
            | costs(run, step)
            | marginal_costs(run, step, values["cost/device_s"], progress.trunk)
        )
        progress, resumed = progress.after(step, values | failures | read | resumed), {}
        if metrics_file:
            metrics_file.report(step, progress.metrics)
        report(step, progress.metrics)
        images = step * run.data.batch_size
        check_bad(bad, read=images, epoch=training.epoch(), most=run.data.max_bad_frac)

    def on_save(step: int) -> None:
        fingerprint, bad = seen.gather()
        counted = asdict(progress) | {"device_s": meter.device_s, "fingerprint": fingerprint, "bad": bad}
        images = step * run.data.batch_size
        if metrics_file:
            metrics_file.flush()
        checkpoints.save(step, model, optimizer, images=images, progress=counted, config=config)

    def batches(stream: Stream, steps: range) -> Iterator[Batch]:
        return prefetched(read(stream, steps), device)

    def validate() -> Metrics:
        values = evaluate(model, seen.validation(batches(validation, validation.steps())), run)
        return values | (fewshot.measure(model, device).metrics() if fewshot else {})

    steps = seen.training(batches(training, range(done, until)))
    if run.scale.profile_steps and rank == 0:
        steps = profiled(steps, steps=run.scale.profile_steps, directory=run_directory(run))

    status: Literal["finished", "diverged", "paused"] = "finished" if until == run.train.steps else "paused"
    try:
        reached = train(
            model,
            optimizer,
            steps,
            run,
            meter,
            start=done,
            until=until,
            report=on_report,
            validate=validate,
            save=on_save,
            should_stop=should_stop,
        )
    except Diverged:
        status, reached = "diverged", until
    else:
        if good_enough(run.train, progress.metrics):
            status, until = "finished", reached
        elif run.train.stop_at is not None and rank == 0 and reached == until == run.train.steps:
            log.warning(
                "%s never reached stop_at=%g: %s", run.name, run.train.stop_at, progress.best_so_far()
            )
    checkpoints.finish()
    if metrics_file:
        metrics_file.close()
        if reached == until:
            folder, weights = newest_checkpoint(run)
            result = Result(
                status=status,
                step=progress.reported,
                metrics=progress.metrics,
                time_s=time.time(),
                checkpoint=folder,
                weights=weights,
            )
            write_result(run_directory(run), result)


def newest_checkpoint(run: RunConfig) -> tuple[str, str]:
    """The newest checkpoint's folder, relative to the run's directory, and the digest of its weights."""
    directory = checkpoint_directory(run)
    if not (steps := manifests.steps(directory)):
        return "", ""
    folder = manifests.folder_of(directory, steps[-1])
    return folder.removeprefix(f"{run_directory(run)}/"), manifests.read(folder).weights_digest()


def build_model(run: RunConfig, device: torch.device) -> nn.Module:
    """Sharded over all workers of the run; whole where the only one trains it as it is."""
    scale, compute_dtype = run.scale, getattr(torch, run.train.compute_dtype)
    whole = compute_dtype == torch.float32
    if scale.workers == 1 and whole and not scale.activation_checkpointing and not scale.compile:
        return ViT(run.model, seed=run.train.seed).to(device)
    if not dist.is_initialized():  # one worker in the process that asked for the run
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, store=HashStore(), rank=0, world_size=1)
    mesh = make_mesh(device.type, ep=run.ep(), dp_replicate=scale.dp_replicate)
    return build_sharded(
        run.model,
        mesh,
        seed=run.train.seed,
        options=scale,
        compute_dtype=None if whole else compute_dtype,
    )


def costs(run: RunConfig, step: int) -> Metrics:
    """What `step` updates cost on paper; conventions are in the names."""
    return {
        "cost/train_flops_6mac": train_flops_6mac(run.model, images=step * run.data.batch_size),
        "cost/forward_gflops_2mac": forward_gflops_2mac(run.model),
        "cost/params": float(num_params(run.model)),
    }


def marginal_costs(run: RunConfig, step: int, device_s: float, trunk: tuple[int, float] | None) -> Metrics:
    """What a branch cost beyond its trunk's steps and seconds; nothing for a run without one."""
    if trunk is None:
        return {}
    own = (step - trunk[0]) * run.data.batch_size
    return {
        "cost/marginal_train_flops_6mac": train_flops_6mac(run.model, images=own),
        "cost/marginal_device_s": device_s - trunk[1],
    }


def check_trunk(config: Mapping[str, Any], step: int, run: RunConfig) -> None:
    """Checks that `run` would have come to the same weights at `step` by itself.

    Source: Soft MoE, section 3.4: a long run at a slowly falling rate is cooled down from several of its
    steps, so that one training pays for a whole cost axis.

    Args:
        config: the trunk's, from its checkpoint.

    Raises:
        UsageError: naming the fields that differ, or the first step at which the learning rates do.
    """
    trunk = from_dict(RunConfig, config)
    if step >= run.train.steps:
        raise UsageError(f"{run.name}: train.steps={run.train.steps} end before its trunk, at step {step}")
    old, new = flat(trunk), flat(run)
    names = [n for n in {**old, **new} if not n.startswith((*MAY_CHANGE, *BRANCHES_DIFFER_IN))]
    if changed := [f"{n}: {old.get(n)!r} -> {new.get(n)!r}" for n in names if old.get(n) != new.get(n)]:
        raise UsageError(f"{run.name} cannot branch from {trunk.name}: {'; '.join(changed)}")
    for at in range(step):
        rates = [
            learning_rate(each.train.schedule, at, peak=each.train.lr, total=each.train.steps)
            for each in (trunk, run)
        ]
        if rates[0] != rates[1]:
            raise UsageError(
                f"{run.name} cannot branch from {trunk.name} at step {step}: at step {at} its learning rate"
                f" would be {rates[1]:g}, the trunk's was {rates[0]:g}; give both the same"
                " train.schedule.warmup_steps, and cool down after the branch"
            )


def keep_freed_memory() -> None:
    """Keeps freed memory in the process, so that a step's gradients reuse the pages of the step before.

    glibc maps every large tensor anew and unmaps it when freed, so each step pays a page fault for every
    4 KiB of its weight gradients; with many experts that costs more than computing them (`bench/results/`).
    The same as MALLOC_MMAP_MAX_=0 without MALLOC_TRIM_THRESHOLD_ in the environment, but it also works in a
    process that already runs. Does nothing without glibc.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):
        libc.mallopt(M_MMAP_MAX, 0)
        libc.mallopt(M_TRIM_THRESHOLD, -1)

"""One training step, the loop around it, and evaluation. Runs on every worker; knows torch, not Ray.

Losses are sums over this worker's images divided by the global batch, so they add up over workers and
microbatches to the mean over the batch, however it is split.
"""

import math
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from statistics import median

import torch
from torch import Tensor, nn

from moe.init import mix
from moe.model import ModelConfig
from moe.parallel import accumulate, sum_over_ranks, update
from moe.routing import Router
from orchestrator.checkpoint.manager import NotFiniteError
from orchestrator.config import RunConfig, TrainConfig
from orchestrator.data import augment
from orchestrator.data.batch import Batch
from orchestrator.data.images import normalize
from orchestrator.training.losses import dominant_labels, hits, image_losses, mixed_losses
from orchestrator.training.metrics import Meter, device_sync
from orchestrator.training.metrics_file import Metrics
from orchestrator.training.profile import phase

CORES = torch.get_num_threads()  # $OMP_NUM_THREADS, which Ray sets to the CPUs of a process, else all cores
# About two milliseconds of a matmul; with less, threads wait longer than they compute.
FLOPS_PER_THREAD = 100e6
# Forward passes of an evaluation that are not timed, because they compile, capture and allocate, and of
# those after them that are.
WARM_UP, TIMED = 2, 5


class Diverged(Exception):
    """The loss, a weight or the optimiser's state is not finite; the message says what, and at which step."""


def run_steps(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterable[Batch],
    run: RunConfig,
    meter: Meter,
    *,
    start: int,
    until: int,
    report: Callable[[int, Metrics], None],
    validate: Callable[[], Metrics],
    save: Callable[[int], None],  # raises NotFiniteError
    should_stop: Callable[[], bool] = lambda: False,
) -> int:
    """Takes the steps `start` + 1 .. `until`, one per batch, and returns the last step that was taken.

    The last step always reports, validates and saves. After a report, training saves and ends early if
    `should_stop` or `good_enough` says so.

    Raises:
        Diverged: if the loss is not finite at a report or a save, or the state at a save, after reporting the
            step; nothing is saved.
    """
    config = run.train
    eval_every = config.eval_every or config.steps
    save_every = run.checkpoint.every or -(-config.steps // 10)
    for step, batch in enumerate(meter.timed(batches), start=start + 1):
        evaluates, saves = (step % every == 0 or step == until for every in (eval_every, save_every))
        reports = evaluates or step % config.report_every == 0
        metrics = train_step(model, optimizer, batch, run, step=step - 1, stats=reports or saves)
        if not (reports or saves):
            continue
        with meter.paused():
            values = _sum_over_workers(metrics)
            loss = values["train/loss"]
            if reports or not math.isfinite(loss):
                values |= meter.read()
                with phase("evaluate"):
                    values |= validate() if evaluates else {}
                with phase("report"):
                    report(step, values)
            if not math.isfinite(loss):
                raise Diverged(f"train/loss is {loss} at step {step}")
            stopping = reports and (should_stop() or good_enough(config, values))
            if saves or stopping:
                try:
                    with phase("checkpoint"):
                        save(step)
                except NotFiniteError as error:
                    if not reports:
                        report(step, values | meter.read())
                    raise Diverged(f"{error} at step {step}") from None
            if stopping:
                return step
    return until


def good_enough(config: TrainConfig, metrics: Metrics) -> bool:
    """Returns whether `metrics`, which are the same on every worker, end the run before its last step."""
    return config.stop_at is not None and metrics.get("val/acc1", -math.inf) >= config.stop_at


def train_step(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    batch: Batch,
    run: RunConfig,
    *,
    step: int,
    stats: bool = True,
) -> dict[str, Tensor]:
    """Takes `step`, which counts from 0. Returns this worker's share of the metrics, still on the device;
    statistics of the routers only with `stats`.
    """
    rate = run.train.schedule.rate(step, peak=run.train.lr, total=run.train.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate
    for module in model.modules():
        if isinstance(module, Router):
            module.anneal(step)
    optimizer.zero_grad(set_to_none=True)
    passes, microbatches = [], _microbatches(batch, run.images_per_pass())
    for i, microbatch in enumerate(microbatches, start=1):
        accumulate(model, last=i == len(microbatches))
        passes.append(_forward_backward(model, microbatch, run, stats))
    with phase("optimizer"):
        grad_norm = update(model, optimizer, run.train.clip_norm)
    metrics = {name: torch.stack([values[name] for values in passes]).sum() for name in passes[0]}
    # These are the same on every worker, and all metrics are summed over workers.
    shared = {"train/grad_norm": grad_norm, "train/lr": torch.full_like(grad_norm, rate, dtype=torch.float64)}
    return metrics | {name: value / run.scale.workers for name, value in shared.items()}


def _forward_backward(model: nn.Module, batch: Batch, run: RunConfig, stats: bool) -> dict[str, Tensor]:
    share = len(batch.label) / run.data.batch_size
    images, labels, loss = normalize(batch.image), batch.label_sets(), run.train.loss
    mixed = run.data.mixup > 0 or run.data.cutmix > 0
    if mixed:
        images = augment.mix_images(images, batch.mix)
    with phase("forward"):
        output = model(images, keys_B=mix(batch.key, run.train.seed), return_stats=stats)
        if mixed:
            loss_B = mixed_losses(loss, output.logits, labels, batch.mix)
            labels = dominant_labels(labels, batch.mix)
        else:
            loss_B = image_losses(loss, output.logits, labels)
        loss_class = loss_B.sum() / run.data.batch_size
        loss_router = output.aux * share
    with phase("backward"):
        (loss_class + loss_router).backward()
    correct = hits(output.logits.detach(), labels)
    return {
        "train/loss": (loss_class + loss_router).detach(),
        "train/loss_class": loss_class.detach(),
        "train/loss_router": loss_router.detach(),
        "train/acc1": correct.float().mean() * share,
    } | {f"moe/{name}": layers.mean() * share for name, layers in output.stats.items()}


def _microbatches(batch: Batch, images: int) -> list[Batch]:
    fields = zip(*(field.split(images) for field in batch.tensors()), strict=True)
    return [Batch(*part) for part in fields]


@torch.no_grad()
def evaluate(model: nn.Module, batches: Iterable[Batch], run: RunConfig) -> Metrics:
    """Returns accuracy and loss over the valid images of all workers, and this worker's forward time per
    image: the median over `TIMED` passes on one thread, after `WARM_UP` others. An evaluation of few passes
    repeats its last one until a pass is timed. Without any valid image, accuracy and loss are NaN.
    """
    model.eval()
    sums: list[Tensor] = []
    seconds: list[float] = []
    part = None
    for part in (part for batch in batches for part in _microbatches(batch, run.images_per_pass())):
        timed = WARM_UP <= len(sums) < WARM_UP + TIMED
        if timed:
            logits, time_per_image = _timed_pass(model, part)
            seconds.append(time_per_image)
        else:
            logits = _logits(model, part)
        labels = part.label_sets()
        loss, correct = image_losses(run.train.loss, logits, labels), hits(logits, labels).float()
        sums.append(torch.stack([correct, loss, torch.ones_like(loss)]) @ part.valid)
    assert part is not None
    for _ in range(len(sums), WARM_UP + 1):
        seconds = [_timed_pass(model, part)[1]]
    model.train()
    # As tensors, because 0 / 0 of numbers raises an error.
    correct, loss, count = sum_over_ranks(torch.stack(sums).sum(0)).double().cpu()
    return {
        "val/acc1": float(correct / count),
        "val/loss": float(loss / count),
        "perf/ms_per_image": 1000 * median(seconds),
    }


def _logits(model: nn.Module, batch: Batch) -> Tensor:
    return model(normalize(batch.image), batch.valid).logits


def _timed_pass(model: nn.Module, batch: Batch) -> tuple[Tensor, float]:
    """Returns the logits and the seconds per image on one thread."""
    with one_thread():
        device_sync()
        began = time.perf_counter()
        logits = _logits(model, batch)
        device_sync()
        return logits, (time.perf_counter() - began) / len(batch.label)


def _sum_over_workers(metrics: dict[str, Tensor]) -> Metrics:
    # Stacked on the device, so that the host waits for one copy.
    values = sum_over_ranks(torch.stack([value.float() for value in metrics.values()]).cpu())
    return dict(zip(metrics, values.tolist(), strict=True))


def threads_for(config: ModelConfig, images: int) -> int:
    """Returns the number of threads that the largest matmul of `images` keeps busy, at most `CORES`.

    Matmuls of small models end before a second thread has woken up.
    """
    return max(1, min(CORES, int(2 * images * config.largest_matmul() / FLOPS_PER_THREAD)))


def set_threads(config: ModelConfig, images: int) -> None:
    torch.set_num_threads(threads_for(config, images))


@contextmanager
def one_thread() -> Iterator[None]:
    """Computes with one thread, so that times of forward passes can be compared."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)

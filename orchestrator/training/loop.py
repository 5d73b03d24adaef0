"""One training step, the loop around it, and evaluation. Runs on every worker; knows torch, not Ray.

A task's loss is a worker's share, and shares add up over workers to the loss of the global batch, however it
is split. They add up over microbatches too if a sample's loss depends on that sample alone
(`TaskConfig.scope`). Else the loss is computed once per step, of the heads of all microbatches, and its
gradient is carried through them by a second forward pass (GradCache, Gao et al. 2021,
https://arxiv.org/abs/2101.06983), which gives the same heads, because noise is keyed by sample.
"""

import math
import time
from collections.abc import Callable, Iterable
from itertools import product
from statistics import median
from typing import NamedTuple

import torch
from torch import Tensor, nn

from moe.init import mix
from moe.model import Model, Output
from moe.parallel import accumulate, sum_over_ranks, update
from moe.router_state import after_batch, before_step
from orchestrator.checkpoint.manager import NotFiniteError
from orchestrator.config import RunConfig
from orchestrator.data.batch import Batch, concatenated
from orchestrator.runs.metrics_file import Metrics
from orchestrator.tasks.base import Heads, not_finite
from orchestrator.threads import one_thread
from orchestrator.training.metrics import Meter, device_sync
from orchestrator.training.profile import phase, phase_seconds
from orchestrator.training.routing_table import in_table

# Forward passes of an evaluation that are not timed, because they compile, capture and allocate, and of
# those after them that are.
WARM_UP, TIMED = 2, 5


class Diverged(Exception):
    """The loss, an output in validation, a weight or the optimiser's state is not finite; the message says
    what, and at which step.
    """


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
    is_best: Callable[[int], bool] = lambda step: False,
) -> int:
    """Takes the steps `start` + 1 .. `until`, one per batch, and returns the last step that was taken.

    What is reported, validated, saved and ended by `good_enough` depends on the run's config alone, and on
    `is_best`, which says of a step that was validated whether it is to be saved. Where a run is cut, at
    `until` or because `should_stop` says so, it is saved too. A state that is not finite there is no
    divergence yet, but at the next step that is due: a stop saves nothing, and a pause waits for that step if
    `batches` go on.

    Raises:
        Diverged: if the loss, a gradient norm or an output in validation is not finite at a step that is due,
            or the state at a save that is, after reporting the step; nothing is saved.
    """
    largest: Tensor | None = None  # gradient norm since the last step that was due
    for step, batch in enumerate(meter.timed(batches), start=start + 1):
        evaluates, reports, saves = scheduled = due(run, step)
        pauses = step >= until
        metrics = train_step(model, optimizer, batch, run, step=step - 1, stats=any(scheduled) or pauses)
        norm = metrics["train/grad_norm"]
        largest = norm if largest is None else torch.maximum(largest, norm)
        asked = should_stop()
        if not (any(scheduled) or pauses or asked):
            continue
        with meter.paused():
            values = _sum_over_workers(metrics | {"largest": largest})
            why = _not_finite(values["train/loss"], values.pop("largest"), step)
            if any(scheduled):
                largest = None
                if reports or why:
                    values |= meter.read() | phase_seconds()
                    with phase("evaluate"):
                        values |= validate() if evaluates else {}
                    if not why and (lost := values.get("val/not_finite")):
                        why = f"the outputs of {lost:.0f} validation images are not finite at step {step}"
                    with phase("report"):
                        report(step, values)
                if why:
                    raise Diverged(why)
            good = evaluates and good_enough(run, values)
            saves = saves or good or (evaluates and is_best(step))
            if saves or ((pauses or asked) and not why):
                try:
                    with phase("checkpoint"):
                        save(step)
                except NotFiniteError as error:
                    why = f"{error} at step {step}"
                    if saves:
                        if not reports:
                            report(step, values | meter.read())
                        raise Diverged(why) from None
            if asked or good or (pauses and not why):
                return step
    return until


def _not_finite(loss: float, norm: float, step: int) -> str:
    """Says what is not finite; empty: nothing. A norm that overflowed trained nothing, or far too much."""
    if not math.isfinite(loss):
        return f"train/loss is {loss} at step {step}"
    if not math.isfinite(norm):
        return f"train/grad_norm is {norm}, at step {step} or since the report before it"
    return ""


class Due(NamedTuple):
    """What is due after a step."""

    evaluates: bool
    reports: bool
    saves: bool


def due(run: RunConfig, step: int) -> Due:
    """Returns what is due after `step` updates, whether or not training is cut there: the last step of the
    run evaluates, reports and saves."""
    config, kept = run.train, run.checkpoint.keep_every
    last = step == config.steps
    evaluates = last or step % (config.eval_every or config.steps) == 0
    saves = last or step % run.save_every() == 0 or bool(kept and step % kept == 0)
    return Due(evaluates, evaluates or step % config.report_every == 0, saves)


def good_enough(run: RunConfig, metrics: Metrics) -> bool:
    """Returns whether `metrics`, which are the same on every worker, end the run before its last step."""
    stop_at = run.train.stop_at
    return stop_at is not None and metrics.get(run.task.quality, -math.inf) >= stop_at


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
    statistics of the routers only with `stats`, those of the table per layer and expert too.
    """
    rate = run.train.schedule.rate(step, peak=run.train.lr, total=run.train.steps)
    for group in optimizer.param_groups:
        group["lr"] = rate * group.get("lr_scale", 1.0)
    before_step(model, step)
    optimizer.zero_grad(set_to_none=True)
    parts = batch.split(run.images_per_pass())
    backward = _backward_of_batch if run.task.scope == "batch" and len(parts) > 1 else _backward_of_samples
    passes = backward(model, parts, run, stats)
    after_batch(model)
    with phase("optimizer"):
        grad_norm = update(model, optimizer, run.train.clip_norm)
    metrics = {n: torch.stack([each[n] for each in passes if n in each]).sum(0) for n in passes[0]}
    # These are the same on every worker, and all metrics are summed over workers.
    shared = {"train/grad_norm": grad_norm, "train/lr": torch.full_like(grad_norm, rate, dtype=torch.float64)}
    return metrics | {name: value / run.scale.workers for name, value in shared.items()}


def _forward(model: nn.Module, batch: Batch, run: RunConfig, stats: bool) -> Output:
    return model(run.task.inputs(batch), keys_B=mix(batch.key, run.train.seed), return_stats=stats)


def _backward_of_samples(
    model: nn.Module, parts: list[Batch], run: RunConfig, stats: bool
) -> list[dict[str, Tensor]]:
    """Returns the metrics of each microbatch, after its backward pass."""
    passes = []
    for i, part in enumerate(parts, start=1):
        accumulate(model, last=i == len(parts))
        with phase("forward"):
            output = _forward(model, part, run, stats)
            loss, metrics = run.task.loss_share(output.heads, part, run.data.batch_size)
            loss_router = output.aux * (len(part) / run.data.batch_size)
        with phase("backward"):
            (loss + loss_router).backward()
        passes.append(_metrics(run, loss, loss_router, output, len(part)) | metrics)
    return passes


def _backward_of_batch(
    model: nn.Module, parts: list[Batch], run: RunConfig, stats: bool
) -> list[dict[str, Tensor]]:
    """As `_backward_of_samples`, for a loss of the heads of all microbatches together."""
    with torch.no_grad(), phase("forward"):
        found = [_forward(model, part, run, False).heads for part in parts]
    heads = {name: torch.cat([each[name] for each in found]).requires_grad_() for name in run.task.needs}
    loss, metrics = run.task.loss_share(heads, concatenated(parts), run.data.batch_size)
    gradients = torch.autograd.grad(loss, list(heads.values()))
    rows = zip(*(gradient.split(len(parts[0])) for gradient in gradients), strict=True)
    passes = []
    for i, (part, gradient) in enumerate(zip(parts, rows, strict=True), start=1):
        accumulate(model, last=i == len(parts))
        with phase("forward"):
            output = _forward(model, part, run, stats)
            loss_router = output.aux * (len(part) / run.data.batch_size)
        with phase("backward"):
            # The gradient of this sum in each head is the loss's.
            carriers = [(output.heads[n] * g).sum() for n, g in zip(heads, gradient, strict=True)]
            (torch.stack(carriers).sum() + loss_router).backward()
        passes.append(_metrics(run, loss / len(parts), loss_router, output, len(part)))
    passes[0] |= metrics
    return passes


def _metrics(
    run: RunConfig, loss: Tensor, loss_router: Tensor, output: Output, images: int
) -> dict[str, Tensor]:
    share = images / run.data.batch_size
    return {
        "train/loss": (loss + loss_router).detach(),
        "train/loss_router": loss_router.detach(),
        **{f"moe/{name}": layers.mean() * share for name, layers in output.stats.items()},
        **{name: layers * share for name, layers in in_table(output.stats).items()},
    }


@torch.no_grad()
def evaluate(model: Model, batches: Iterable[Batch], run: RunConfig) -> Metrics:
    """Returns the task's metrics over the valid images of all workers, and this worker's forward time per
    image: the median over `TIMED` passes on one thread, after `WARM_UP` others. An evaluation of few passes
    repeats its last one until a pass is timed.

    Without any valid image, and if an output is not finite, the task's metrics are NaN. In the latter case
    ``val/not_finite`` is the number of images that have such outputs.
    """
    model.eval()
    beside = run.task.before_scores(model)
    sums: list[dict[str, Tensor]] = []
    seconds: list[float] = []
    passes, part = 0, None
    for batch in batches:
        found: list[tuple[Batch, Heads]] = []
        for part in batch.split(run.images_per_pass()):
            if WARM_UP <= passes < WARM_UP + TIMED:
                heads, time_per_image = _timed_pass(model, part, run)
                seconds.append(time_per_image)
            else:
                heads = _heads(model, part, run)
            passes += 1
            found.append((part, heads))
        if run.task.scope == "batch":
            joined = {name: torch.cat([heads[name] for _, heads in found]) for name in run.task.needs}
            found = [(batch, joined)]
        sums += [
            run.task.scores({**heads, **beside}, part) | {"not_finite": not_finite(heads, part, beside)}
            for part, heads in found
        ]
    assert part is not None
    for _ in range(passes, WARM_UP + 1):
        seconds = [_timed_pass(model, part, run)[1]]
    model.train()
    # One tensor, so that workers exchange one.
    total = torch.stack([torch.cat([value.flatten() for value in each.values()]) for each in sums]).sum(0)
    rows = sum_over_ranks(total).double().cpu().split([value.numel() for value in sums[0].values()])
    means = run.task.metrics({n: row.view_as(sums[0][n]) for n, row in zip(sums[0], rows, strict=True)})
    if lost := float(rows[-1]):
        means = dict.fromkeys(means, math.nan) | {"not_finite": lost}
    return {f"val/{name}": value for name, value in means.items()} | {
        "perf/ms_per_image": 1000 * median(seconds)
    }


def _heads(model: nn.Module, batch: Batch, run: RunConfig) -> Heads:
    return model(run.task.inputs(batch), batch.valid).heads


def _timed_pass(model: nn.Module, batch: Batch, run: RunConfig) -> tuple[Heads, float]:
    """Returns the heads and the seconds per image on one thread."""
    with one_thread():
        device_sync()
        began = time.perf_counter()
        heads = _heads(model, batch, run)
        device_sync()
        return heads, (time.perf_counter() - began) / len(batch)


def _sum_over_workers(metrics: dict[str, Tensor]) -> Metrics:
    """Returns sums; the parts of a tensor are named by their places in it."""
    # In one tensor on the device, so that the host waits for one copy.
    together = torch.cat([value.float().flatten() for value in metrics.values()])
    names = [
        "/".join((name, *map(str, place)))
        for name, value in metrics.items()
        for place in product(*map(range, value.shape))
    ]
    return dict(zip(names, sum_over_ranks(together.cpu()).tolist(), strict=True))

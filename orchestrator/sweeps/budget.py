"""Plan before you pay: what trials need, from their configs alone."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from moe.cost import forward_gflops_2mac, num_active_params, num_params, train_flops_6mac
from moe.plan import GIB, Cluster, Layout, checkpoint_bytes, layouts
from moe.sharding import FP32, Step
from orchestrator.checkpoint.manager import checkpoints_to_keep
from orchestrator.checkpoint.manifest import step_of as checkpoint_step
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.recipe import AdamWConfig
from orchestrator.sweeps.prices import Device

MEMORY_FRAC = 0.9  # of a device, for what docs/planning.md counts; the rest is the allocator's


@dataclass(frozen=True, kw_only=True)
class Estimate:
    """One trial. Attributes:
    active_params: those that a token meets (`moe.cost`).
    memory_gib: of a device at the peak of a step.
    device_s: predicted seconds of training times workers, as ``cost/device_s`` counts: no start, evaluation
        or checkpoints. None: nothing was measured and no mfu given.
    checkpoint_bytes: that stay on disk at most: were evaluations worst at the end.
    weights_bytes: of these, what a trial off the frontier keeps after the sweep.
    problems: why it cannot run.
    """

    trial: str
    family: str
    workers: int
    params: int
    active_params: float
    forward_gflops_2mac: float
    train_flops_6mac: float
    memory_gib: float
    device_s: float | None
    usd: float | None
    checkpoint_bytes: int
    weights_bytes: int
    problems: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Totals:
    """Sums over trials; device_s and usd are None if some trial has none."""

    trials: int
    train_flops_6mac: float
    device_s: float | None
    usd: float | None
    checkpoint_bytes: int
    weights_bytes: int


@dataclass(frozen=True, kw_only=True)
class Compared:
    """Of the trials of a family that were trained: predicted and actual device-seconds, and their ratio."""

    family: str
    trials: int
    predicted_s: float
    actual_s: float

    def ratio(self) -> float:
        return self.predicted_s / self.actual_s


@dataclass(frozen=True, kw_only=True)
class Plan:
    estimates: tuple[Estimate, ...]

    def total(self) -> Totals:
        return _totals(self.estimates)

    def by_family(self) -> dict[str, Totals]:
        """In the order of the trials."""
        members = _by_family(self.estimates)
        return {name: _totals(members[name]) for name in members}

    def problems(self) -> dict[str, tuple[str, ...]]:
        """Trials that cannot run, and why."""
        return {e.trial: e.problems for e in self.estimates if e.problems}


def plan(
    runs: Mapping[str, RunConfig],
    *,
    device: Device,
    seconds_per_step: Mapping[str, float] | None = None,
    mfu: float | None = None,
    unfit: Mapping[str, str] = MappingProxyType({}),
) -> Plan:
    """What every trial needs.

    Args:
        seconds_per_step: by trial, of all its workers side by side (`measure.measured_steps`); it precedes
        mfu: the part of the device's peak that training FLOPs (6mac) reach, 0 to 1.
        unfit: trial -> why the cluster can never hold it (`check.unfit`).

    Raises:
        UsageError: for an mfu outside of 0 .. 1.
    """
    if mfu is not None and not 0 < mfu <= 1:
        raise UsageError(
            f"mfu={mfu:g} must be above 0 and at most 1: the part of {device.peak_tflops:g} TFLOP/s"
        )
    measured = seconds_per_step or {}
    rate = None if mfu is None else mfu * device.peak_tflops * 1e12
    return Plan(
        estimates=tuple(
            _estimate(trial, run, device, measured.get(trial), rate, unfit.get(trial))
            for trial, run in runs.items()
        )
    )


def _estimate(
    trial: str,
    run: RunConfig,
    device: Device,
    step_s: float | None,
    flops_per_s: float | None,
    unfit: str | None,
) -> Estimate:
    steps, workers, batch = steps_to_train(run), run.scale.workers, run.data.batch_size
    seconds = None
    if step_s is not None:
        seconds = step_s * steps * workers
    elif flops_per_s is not None:
        seconds = train_flops_6mac(run.model, steps * batch) / flops_per_s
    memory = layout_of(run).peak() / GIB
    size = checkpoint_bytes(run.model, moments=step_of(run).moments)
    kept = checkpoints_kept(run)
    return Estimate(
        trial=trial,
        family=run.model.family(),
        workers=workers,
        params=num_params(run.model),
        active_params=num_active_params(run.model),
        forward_gflops_2mac=forward_gflops_2mac(run.model),
        train_flops_6mac=train_flops_6mac(run.model, run.train.steps * batch),
        memory_gib=memory,
        device_s=seconds,
        usd=None if seconds is None else seconds / 3600 * device.usd_per_hour,
        checkpoint_bytes=kept * size["total"],
        weights_bytes=kept * size["weights"],
        problems=tuple(_problems(memory, device, unfit)),
    )


def _problems(memory: float, device: Device, unfit: str | None) -> Iterable[str]:
    if device.memory_gib and memory > MEMORY_FRAC * device.memory_gib:
        yield (
            f"needs {memory:.1f} GiB per device, {MEMORY_FRAC:.0%} of {device.memory_gib:g} are"
            f" {MEMORY_FRAC * device.memory_gib:.1f}: more workers, a smaller train.microbatch,"
            " scale.activation_checkpointing=true or train.compute_dtype=bfloat16"
        )
    if unfit:
        yield unfit


def step_of(run: RunConfig) -> Step:
    """What a worker of `run` computes per update."""
    optimizer, images = run.train.optimizer, run.images_per_pass()
    return Step(
        images=images,
        passes=run.data.batch_size // run.scale.workers // images,
        compute_bytes=2 if run.train.compute_dtype == "bfloat16" else FP32,
        moments=2 if isinstance(optimizer, AdamWConfig) else int(optimizer.momentum > 0),
    )


def layout_of(run: RunConfig) -> Layout:
    """That the run will be split by."""
    cluster = Cluster(devices=run.scale.workers, devices_per_node=run.scale.workers_per_node)
    ep = run.ep()
    return next(one for one in layouts(run.model, step_of(run), cluster, run.scale) if one.ep == ep)


def steps_to_train(run: RunConfig) -> int:
    """Of a branch those after its trunk, of other runs all."""
    return run.train.steps - ((run.train.trunk and checkpoint_step(run.train.trunk)) or 0)


def checkpoints_kept(run: RunConfig) -> int:
    """That stay on disk at most, once `run` is complete: were its best the earliest it measured."""
    steps, every = run.train.steps, run.checkpoint.every or -(-run.train.steps // 10)
    evaluated = run.train.eval_every or steps
    saved = {*range(every, steps + 1, every), steps}
    found = {step: -float(step) if step % evaluated == 0 or step == steps else None for step in saved}
    return len(checkpoints_to_keep(found, run.checkpoint))


def predicted_against_actual(plan: Plan, actual: Mapping[str, float]) -> list[Compared]:
    """By family, and ``all`` at last where there are several.

    Args:
        actual: ``cost/device_s`` by trial, of those that were trained to their end. Others, and trials that
            nothing was predicted for, are left out.
    """
    known = [e for e in plan.estimates if e.device_s is not None and e.trial in actual]
    families = _by_family(known)
    groups = {**families, "all": known} if len(families) > 1 else families
    return [
        Compared(
            family=name,
            trials=len(members),
            predicted_s=sum(e.device_s or 0 for e in members),
            actual_s=sum(actual[e.trial] for e in members),
        )
        for name, members in groups.items()
    ]


def _by_family(estimates: Iterable[Estimate]) -> dict[str, list[Estimate]]:
    found: dict[str, list[Estimate]] = {}
    for estimate in estimates:
        found.setdefault(estimate.family, []).append(estimate)
    return found


def _totals(estimates: Sequence[Estimate]) -> Totals:
    def total(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return sum(known) if len(known) == len(estimates) else None

    return Totals(
        trials=len(estimates),
        train_flops_6mac=sum(e.train_flops_6mac for e in estimates),
        device_s=total(e.device_s for e in estimates),
        usd=total(e.usd for e in estimates),
        checkpoint_bytes=sum(e.checkpoint_bytes for e in estimates),
        weights_bytes=sum(e.weights_bytes for e in estimates),
    )

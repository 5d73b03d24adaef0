"""Directories of runs and sweeps as training leaves them, made without training."""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from orchestrator.codec import override, to_dict
from orchestrator.config import RunConfig
from orchestrator.runs.metrics_file import MetricsWriter
from orchestrator.runs.run_directory import Result, RunDir, acquire_run_dir, new_key
from orchestrator.runs.sweep_directory import SweepDir, SweepRecord
from orchestrator.sweeps.sweep import Sweep

DIGEST = "d" * 64
BATCH = 8


def run_at(folder: Path | str, name: str, **changes: object) -> RunConfig:
    named = {field.replace("__", "."): value for field, value in changes.items()}
    places = {"storage": str(folder), "name": name, "data.path": "/shards/digits", "data.batch_size": BATCH}
    return override(RunConfig(), {**places, **named})


def begin(run: RunConfig) -> str:
    """Returns its directory."""
    acquire_run_dir(run, DIGEST)
    return RunDir.of(run).path


def report(run: RunConfig, reports: Mapping[int, Mapping[str, float]]) -> None:
    """`reports`: step -> metrics."""
    writer = MetricsWriter(run)
    for step, metrics in reports.items():
        writer.report(step, dict(metrics))
    writer.close()


def named(metrics: Mapping[str, float]) -> dict[str, float]:
    return {name.replace("__", "/"): value for name, value in metrics.items()}


def pause(run: RunConfig, step: int, *, time_s: float = 0.0, **metrics: float) -> None:
    """Pauses the run as early stopping or the end of a budget does."""
    begin(run)
    RunDir.of(run).write_result(Result(status="paused", step=step, metrics=named(metrics), time_s=time_s))


def change_result(run: RunConfig, **fields: object) -> None:
    result = RunDir.of(run).result()
    assert result is not None
    RunDir.of(run).write_result(replace(result, **fields))


def end(
    run: RunConfig, step: int, *, status: str = "finished", weights: str = "w1", **metrics: float
) -> None:
    """Ends the run as training does: a last report, and its result. In names of metrics __ stands for /."""
    begin(run)
    values = named(metrics)
    report(run, {step: values})
    checkpoint = f"checkpoints/step-{step:08d}"
    result = Result(
        status=status,  # pyright: ignore[reportArgumentType]
        step=step,
        metrics=values,
        time_s=1_800_000_000.0 + step,
        checkpoint=checkpoint,
        weights=weights,
    )
    RunDir.of(run).write_result(result)


def begin_sweep(sweep: Sweep, **fields: object) -> str:
    """Writes `sweep.json`; returns the directory."""
    directory = RunDir.of(sweep.base).path
    seeded = bool(sweep.seeds)
    record = SweepRecord(
        key=new_key(),
        name=sweep.base.name,
        began_s=1_800_000_000.0,
        base=to_dict(sweep.base),
        data_digest=DIGEST,
        quality=sweep.quality,
        cost=sweep.cost,
        seeds=list(sweep.seeds),
        claims=list(sweep.claims),
        trials={trial.name: trial.labels(seeded) for trial in sweep.trials().values()},
    )
    SweepDir(directory).write(replace(record, **fields))
    return directory


def end_sweep(sweep: Sweep, ends: Mapping[str, float | str], *, cost: float = 1e9, **fields: object) -> str:
    """A whole sweep, with these fields in its record. `ends`: trial -> its accuracy, or how else it ended;
    others never began.
    """
    directory = begin_sweep(sweep, **{"status": "finished", **fields})
    for name, trial in sweep.trials().items():
        how = ends.get(name)
        if how is None:
            continue
        costs = {"cost__train_flops_6mac": cost, "cost__device_s": 2.0, "cost__forward_gflops_2mac": 1.0}
        costs["cost__marginal_train_flops_6mac"] = cost / 10
        if isinstance(how, float):
            end(trial.run, 3, weights=name, val__acc1=how, **costs)
        elif how == "diverged":
            end(trial.run, 1, status="diverged", train__loss=float("nan"), **costs)
        elif how == "stopped":
            pause(trial.run, 1, val__acc1=0.5)
        else:
            RunDir(begin(trial.run)).write_error(how)
    return directory


def sweep_record(directory: str) -> SweepRecord:
    record = SweepDir(directory).record()
    assert record is not None
    return record


def change_record(directory: str, **fields: object) -> None:
    SweepDir(directory).write(replace(sweep_record(directory), **fields))

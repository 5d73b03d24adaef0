"""Trains a run: in this process if its only worker needs no GPU, else on workers that Ray Train starts
(`elastic`).
"""

from collections.abc import Mapping

from moe.model import begins_so
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.models import classes_at_start
from orchestrator.checkpoint.start import start_report
from orchestrator.codec import override, read_config, to_dict
from orchestrator.config import RunConfig
from orchestrator.data.fields import check_fields
from orchestrator.data.index import has_images
from orchestrator.data.manifest import check_shards, open_manifest
from orchestrator.data.stream import in_process
from orchestrator.errors import UsageError
from orchestrator.runs import notice
from orchestrator.runs.metrics_file import asked_by
from orchestrator.runs.run_directory import Result, RunDir, StartMode, acquire_run_dir
from orchestrator.training.worker import Report, train_worker


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
    if run.inline:
        with notice.saving():
            train_worker(run, report=report, read=in_process, until=until, should_stop=asked_by(own))
    else:
        import orchestrator.training.elastic as elastic

        elastic.train_on_workers(run, report, until)
    result = own.result() or (own.pause(until) if until else None)
    if result is None:
        raise notice.Stopped({run.name: max(manifests.steps(own.checkpoints), default=0)})
    if result.step == until and not run.inline:
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

"""A run: `fit` where it is asked for, `train_worker` on every worker. One worker may be this very process."""

import logging
import os
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import ray
import ray.train
from ray.exceptions import RayError
from ray.train import TrainingFailedError
from ray.train.torch import TorchConfig, TorchTrainer

from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.start import start_report
from orchestrator.codec import flat, from_dict, to_dict
from orchestrator.config import RunConfig
from orchestrator.data.loader import in_process
from orchestrator.data.manifest import check_shards, open_manifest
from orchestrator.data.ray_data import BatchServer, by_ray_data
from orchestrator.errors import UsageError
from orchestrator.training.claim import check_claimed, claim
from orchestrator.training.cluster import here, placement, worker_resources
from orchestrator.training.elastic import Missing, are_there, as_placed, smaller
from orchestrator.training.reports import LogLines, Reports, Sender, hand_on
from orchestrator.training.worker import (
    Report,
    Result,
    checkpoint_directory,
    pause_of,
    result_of,
    run_directory,
    train_worker,
)

log = logging.getLogger(__name__)

ATTEMPTS = 4
RAY_TRAIN_ENV = {  # read by the controller and its workers, which inherit it
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # the end of a run waits for this poll, 2 s by default
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",  # it writes a line for every report and rank
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
}


def identity(run: RunConfig) -> dict[str, Any]:
    """What makes a run the same run when it is resumed: its fields, and what its data holds."""
    return flat(run) | {"data.digest": open_manifest(run.data.path).digest()}


def check_data(run: RunConfig, *, verify: bool = False) -> None:
    """Checks sizes and footers of all shards; with `verify` SHA-256 too, which else waits for the first read.

    Raises:
        UsageError: if one is not whole, or holds classes that the model has no output for; if a batch is
            larger than the training set.
    """
    manifest = open_manifest(run.data.path)
    if run.data.batch_size > manifest.rows("train"):
        raise UsageError(
            f"data.batch_size={run.data.batch_size} is more than the {manifest.rows('train')} training images"
            f" of {run.data.path}: use at most {manifest.rows('train')}"
        )
    if len(manifest.classes) > run.model.num_classes:
        raise UsageError(
            f"model.num_classes={run.model.num_classes}, but {run.data.path} has {len(manifest.classes)}"
            " classes"
        )
    check_shards(run.data.path, manifest, verify=verify)


def check_start(run: RunConfig) -> None:
    """Raises UsageError if a run that has not begun is to start from weights that do not fit its model."""
    if run.train.init_from and not manifests.steps(checkpoint_directory(run)):
        start_report(run.model, run.train.init_from, without=run.train.init_without)


def is_inline(run: RunConfig) -> bool:
    """Whether the process that asks for the run can be its only worker: one worker, without a GPU."""
    return run.scale.workers == 1 and not run.scale.use_gpu


def fit(run: RunConfig, report: Report, *, inline: bool, until: int | None = None) -> Result:
    """Trains `run` to its end, or to step `until`, from its newest checkpoint if it has one.

    `inline`: the only worker is this process and reads its own data. Else Ray Train starts the workers.
    `report` is called in this process either way.

    Raises:
        UsageError: for data that is not there, or another config in the run's directory.
        ray.train.TrainingFailedError: when workers died more often than they are replaced.
    """
    if (result := start(run)) is not None:
        return result
    if inline:
        train_worker(run, report=report, read=in_process, until=until)
    else:
        reports: Any = Reports.options(scheduling_strategy=here()).remote()
        missing = Missing()
        with ThreadPoolExecutor(1, thread_name_prefix="reports") as beside:
            recording = beside.submit(hand_on, reports, report, missing.are_there)
            try:
                fit_on_workers(run, reports, recording, missing, until)
            finally:
                reports.close.remote()
                recording.result()  # raises what `report` did
        ray.kill(reports)
    result = result_of(run) or (pause_of(run, until) if until else None)
    assert result is not None, "workers ended without a result"
    return result


def start(run: RunConfig) -> Result | None:
    """Claims the run's directory and checks its data; its result, if it is complete already."""
    check_data(run)
    claim(run_directory(run), identity(run), "auto")
    return result_of(run)


def fit_on_workers(
    run: RunConfig, reports: Any, recording: Future[None], missing: Missing, until: int | None
) -> None:
    """Trains on Ray Train workers, as many as there are: all that the run asks for; after `scale.wait_s` as
    many as are left, until the others are there. When one dies all begin anew, at the last checkpoint.

    Raises:
        UsageError: what a worker met that no other attempt would mend.
        ray.train.TrainingFailedError: when they died `ATTEMPTS` times without saving anything between.
    """
    died, saved = 0, -1
    while not (result_of(run) or (until and pause_of(run, until))):
        now = run if are_there(run, within_s=run.scale.wait_s) else smaller(run)
        if now is None:
            log.warning("%s waits for %d workers and a CPU for data", run.name, run.scale.workers)
            continue
        if now != run:
            few, most = now.scale.workers, run.scale.workers
            log.warning("%s goes on with %d of %d workers, same global batch", run.name, few, most)
        missing.want(run, run.scale.workers - now.scale.workers)
        try:
            _train_on(now, reports, until)
        except (TrainingFailedError, RayError) as error:
            newest = max(manifests.steps(checkpoint_directory(run)), default=0)
            died, saved = (died + 1 if newest <= saved else 1), newest
            if died == ATTEMPTS or recording.done():
                raise
            log.warning("%s: %s; all go on from step %d", run.name, _first_line(error), newest)
        finally:
            missing.want(run, 0)


def _first_line(error: Exception) -> str:
    return str(error).strip().partition("\n")[0]


def _train_on(run: RunConfig, reports: Any, until: int | None) -> None:
    """One attempt. Ray's own retries know neither the CPU for data nor fewer workers."""
    os.environ.update(RAY_TRAIN_ENV)
    gpu = run.scale.use_gpu
    refused = storage.join(run_directory(run), "refused.txt")
    storage.delete(refused)
    feed: Any = BatchServer.options(scheduling_strategy=here()).remote()
    config = {"run": to_dict(run), "until": until, "feed": feed, "reports": reports, "refused": refused}
    try:
        _Trainer(
            _train_worker_on_ray,
            train_loop_config=config,
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpu else "gloo"),
            scaling_config=ray.train.ScalingConfig(
                num_workers=run.scale.workers,
                use_gpu=gpu,
                resources_per_worker=worker_resources(run),
                placement_strategy=placement(run),
            ),
            run_config=ray.train.RunConfig(
                name=f"{run.name}/ray",
                storage_path=run.storage,
                failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=0),
            ),
        ).fit()
    except TrainingFailedError:
        if storage.size(refused) is not None:
            raise UsageError(storage.read_bytes(refused).decode()) from None
        raise
    finally:
        ray.kill(feed)


class _Trainer(TorchTrainer):
    """Ctrl-C is the job's, which tells MLflow; Ray would end the process as if the training had failed."""

    def _register_sigint_handler(self, controller: Any) -> None:
        pass


def _train_worker_on_ray(config: Mapping[str, Any]) -> None:
    """What the user has to mend is left in a file: of several workers' errors, Ray may show another's."""
    run, sender = from_dict(RunConfig, config["run"]), Sender(config["reports"])
    rank = ray.train.get_context().get_world_rank()
    ours = logging.getLogger("orchestrator")
    ours.setLevel(logging.INFO)
    ours.addHandler(LogLines(config["reports"], f"{run.name} rank {rank}"))
    try:
        check_claimed(run_directory(run))
        train_worker(
            as_placed(run),
            report=sender.report,
            read=by_ray_data(config["feed"]),
            until=config["until"],
            leave=sender.leave,
        )
    except UsageError as error:
        storage.write_bytes(config["refused"], str(error).encode())
        raise

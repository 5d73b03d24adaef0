"""A run: `fit` where it is asked for, `train_worker` on every worker. One worker may be this very process."""

import logging
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import ray
import ray.train
from ray.train.torch import TorchConfig, TorchTrainer

from orchestrator import storage
from orchestrator.codec import flat, from_dict, to_dict
from orchestrator.config import RunConfig, UsageError
from orchestrator.data.check import check_shards
from orchestrator.data.in_process import in_process
from orchestrator.data.manifest import open_manifest
from orchestrator.data.ray_data import Feed, by_ray_data
from orchestrator.training.claim import claim
from orchestrator.training.cluster import here, worker_resources
from orchestrator.training.reports import Reports, hand_on, send_to
from orchestrator.training.worker import Report, Result, pause_of, result_of, run_directory, train_worker

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
        UsageError: if one is not whole, or holds classes that the model has no output for.
    """
    manifest = open_manifest(run.data.path)
    if len(manifest.classes) > run.model.num_classes:
        raise UsageError(
            f"model.num_classes={run.model.num_classes}, but {run.data.path} has {len(manifest.classes)}"
            " classes"
        )
    check_shards(run.data.path, manifest, verify=verify)


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
        with ThreadPoolExecutor(1, thread_name_prefix="reports") as beside:
            recording = beside.submit(hand_on, reports, report)
            try:
                fit_on_workers(run, reports, until)
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


def fit_on_workers(run: RunConfig, reports: Any, until: int | None) -> None:
    """Trains on Ray Train workers. One that dies is replaced, and all go on from the last checkpoint.

    Raises:
        UsageError: what a worker met that no other attempt would mend.
    """
    for name, value in RAY_TRAIN_ENV.items():
        os.environ.setdefault(name, value)
    gpu = run.scale.use_gpu
    refused = storage.join(run_directory(run), "refused.txt")
    storage.delete(refused)
    feed: Any = Feed.options(scheduling_strategy=here()).remote()
    try:
        TorchTrainer(
            _train_worker_on_ray,
            train_loop_config={
                "run": to_dict(run),
                "until": until,
                "feed": feed,
                "reports": reports,
                "refused": refused,
            },
            torch_config=TorchConfig(backend="cpu:gloo,cuda:nccl" if gpu else "gloo"),
            scaling_config=ray.train.ScalingConfig(
                num_workers=run.scale.workers, use_gpu=gpu, resources_per_worker=worker_resources(run)
            ),
            run_config=ray.train.RunConfig(
                name=f"{run.name}/ray",
                storage_path=run.storage,
                failure_config=ray.train.FailureConfig(max_failures=3, controller_failure_limit=3),
            ),
        ).fit()
    finally:
        ray.kill(feed)
    if storage.size(refused) is not None:
        raise UsageError(storage.read_bytes(refused).decode())


def _train_worker_on_ray(config: Mapping[str, Any]) -> None:
    """A mistake of the user is left in a file before this worker fails: those that Ray starts in its place
    find it, and end at once.
    """
    if storage.size(config["refused"]) is not None:
        return
    logging.basicConfig(format="%(message)s")
    logging.getLogger("orchestrator").setLevel(logging.INFO)
    try:
        train_worker(
            from_dict(RunConfig, config["run"]),
            report=send_to(config["reports"]),
            read=by_ray_data(config["feed"]),
            until=config["until"],
        )
    except UsageError as error:
        storage.write_bytes(config["refused"], str(error).encode())
        raise

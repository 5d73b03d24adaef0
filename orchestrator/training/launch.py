"""Starts a function on all workers of a run, by Ray Train: training and evaluation run alike."""

import logging
import os
import tempfile
from collections.abc import Callable, Mapping
from typing import Any

import ray
import ray.train
from ray.train import TrainingFailedError

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.data.ray_data import start_feeds
from orchestrator.errors import UsageError
from orchestrator.runs.metrics_file import LogFile
from orchestrator.runs.run_directory import RunDir
from orchestrator.training.resources import pin_to_this_node, placement, worker_resources
from orchestrator.training.torch_trainer import ConnectConfig, Trainer

# Workers that wait for another worker for longer give up. torch's default is 30 minutes; Ray never times out.
COLLECTIVE_S = 600
RAY_TRAIN_ENV = {  # inherited by the controller and its workers
    "RAY_TRAIN_COLLECTIVE_TIMEOUT_S": str(COLLECTIVE_S),
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.2",  # a run ends with this poll, 2 s by default
    "RAY_TRAIN_ENABLE_WORKER_STRUCTURED_LOGGING": "0",  # a line for every report and rank
    "RAY_TRAIN_ENABLE_CONTROLLER_STRUCTURED_LOGGING": "0",
}


def on_workers(
    function: Callable[[dict[str, Any]], None],
    run: RunConfig,
    config: Mapping[str, Any],
    *,
    with_feeds: bool = True,
) -> None:
    """Calls `function` in all workers of the run, which torch.distributed connects, with `config`, the `run`
    and the `feeds` that decode its images (`by_ray_data`), if it uses them.

    Nothing is returned: the first worker writes what there is to know. Its log lines go to the run's
    directory.

    Raises:
        UsageError: if a worker raised it.
        ray.train.TrainingFailedError: if a worker raised something else, or died.
    """
    os.environ.update(RAY_TRAIN_ENV)
    gpu = run.scale.use_gpu
    refused = RunDir.of(run).refused
    storage.delete(refused)
    feeds = start_feeds(run, pin_to_this_node()) if with_feeds else []
    # Ray's controller reads its arguments too: of a reference, it imports nothing.
    call = {"function": function, "config": {**config, "run": run, "feeds": feeds}}
    # The controller, which runs on this node, keeps its state here; ours is in the run's directory.
    scratch = tempfile.TemporaryDirectory(prefix="ray-train-")
    try:
        Trainer(
            _work,
            train_loop_config={"call": ray.put(call)},
            torch_config=ConnectConfig(
                backend="cpu:gloo,cuda:nccl" if gpu else "gloo", timeout_s=COLLECTIVE_S
            ),
            scaling_config=ray.train.ScalingConfig(
                num_workers=run.scale.workers,
                use_gpu=gpu,
                resources_per_worker=worker_resources(run),
                placement_strategy=placement(run),
            ),
            run_config=ray.train.RunConfig(
                name=run.name,
                storage_path=scratch.name,
                failure_config=ray.train.FailureConfig(max_failures=0, controller_failure_limit=0),
            ),
        ).fit()
    except TrainingFailedError:
        if storage.size(refused) is not None:
            raise UsageError(storage.read_bytes(refused).decode()) from None
        raise
    finally:
        for feed in feeds:
            ray.kill(feed)
        scratch.cleanup()


def _work(work: Mapping[str, Any]) -> None:
    """Writes a UsageError to a file: of several workers' errors, Ray may show another one."""
    call: dict[str, Any] = ray.get(work["call"])
    own = RunDir.of(call["config"]["run"])
    first = ray.train.get_context().get_world_rank() == 0
    ours = logging.getLogger("orchestrator")  # without Ray's own lines
    log_file = LogFile(own.path) if first else logging.NullHandler()
    ours.setLevel(logging.INFO)
    ours.addHandler(log_file)
    try:
        call["function"](call["config"])
    except UsageError as error:
        storage.write_bytes(own.refused, str(error).encode())
        raise
    finally:
        ours.removeHandler(log_file)
        log_file.close()

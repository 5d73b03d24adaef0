"""What the cluster can hold: its declared maximum, against what runs need."""

import json
import os
from collections.abc import Mapping

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.config import RunConfig
from orchestrator.errors import UsageError

DECLARED = "MOE_FRONTIER_MAX_RESOURCES"  # JSON: {"CPU": 56, "GPU": 6}
CPU_PER_WORKER = 0.5  # of workers without a GPU
CPU_FOR_DATA = 1  # decodes for the workers of a run; one worker without a GPU reads its own data


def most_resources() -> dict[str, float]:
    """CPUs, GPUs and the like of the connected cluster: those that are up, or as many as it may bring up by
    what its nodes were started with.

    Ray's autoscaler knows, and tells nobody: no caller in Ray 2.60 fills its `get_max_resources..`.
    """
    have = dict(ray.cluster_resources())
    declared: dict[str, float] = json.loads(os.environ.get(DECLARED, "{}"))
    return have | {name: max(amount, have.get(name, 0.0)) for name, amount in declared.items()}


def here() -> NodeAffinitySchedulingStrategy:
    """For an actor that must not be lost with another node than the one that this process is on."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def worker_resources(run: RunConfig) -> dict[str, float]:
    """What a worker keeps for itself; its images are decoded on what is left of the cluster."""
    return {"GPU": 1, "CPU": 1} if run.scale.use_gpu else {"CPU": CPU_PER_WORKER}


def placement(run: RunConfig) -> str:
    """GPUs of one node speak to each other faster; workers without one would share a node's cores."""
    return "PACK" if run.scale.use_gpu else "SPREAD"


def run_resources(run: RunConfig) -> dict[str, float]:
    """What a run keeps busy while it trains."""
    workers = run.scale.workers
    if workers == 1 and not run.scale.use_gpu:
        return {"CPU": 1}
    need = {name: amount * workers for name, amount in worker_resources(run).items()}
    return need | {"CPU": need["CPU"] + CPU_FOR_DATA}


def fits(need: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(amount <= free.get(name, 0) for name, amount in need.items())


def check_resources(run: RunConfig, most: Mapping[str, float] | None = None) -> None:
    """Raises UsageError, with the arithmetic, if the cluster can never hold the run's workers and a CPU that
    decodes for them. `most`: what it can hold, if that is known already.
    """
    most = most_resources() if most is None else most
    workers, each, need = run.scale.workers, worker_resources(run), run_resources(run)
    if fits(need, most):
        return
    gpus = most.get("GPU", 0)
    if need.get("GPU", 0) > gpus:
        raise UsageError(f"{workers} workers need {workers} GPUs, the cluster has at most {gpus:g}")
    can = max(0, int((most.get("CPU", 0) - CPU_FOR_DATA) / each["CPU"]))
    raise UsageError(
        f"{workers} workers x {each['CPU']:g} CPU + {CPU_FOR_DATA} CPU for data = {need['CPU']:g} CPUs, the"
        f" cluster has at most {most.get('CPU', 0):g}: use at most {can} workers, or add nodes"
    )

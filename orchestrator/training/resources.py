"""Resources of the cluster: what runs need, what it can hold at most, and whether its nodes share files."""

import json
import os
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError

DECLARED = "MOE_FRONTIER_MAX_RESOURCES"  # JSON: {"CPU": 56, "GPU": 6}
CPU_PER_WORKER = 0.5  # of workers without a GPU
CPU_FOR_DATA = 1  # decodes for the workers of a run; one worker without a GPU reads its own data
# seconds; a node that starts its first worker process needs some
ANSWER_S = 60.0


def most_resources() -> dict[str, float]:
    """Returns CPUs, GPUs and so on of the connected cluster: those that are up, or the declared maximum of
    an autoscaling cluster, which its nodes were started with.

    Ray's autoscaler knows the maximum, but Ray 2.60 has no call that returns it.
    """
    have = dict(ray.cluster_resources())
    declared: dict[str, float] = json.loads(os.environ.get(DECLARED, "{}"))
    return have | {name: max(amount, have.get(name, 0.0)) for name, amount in declared.items()}


def here() -> NodeAffinitySchedulingStrategy:
    """Pins an actor to the node of this process, so that it is not lost with another."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def worker_resources(run: RunConfig) -> dict[str, float]:
    """Returns what one worker reserves; its images are decoded on the rest of the cluster."""
    return {"GPU": 1, "CPU": 1} if run.scale.use_gpu else {"CPU": CPU_PER_WORKER}


def placement(run: RunConfig) -> str:
    """Returns the placement strategy: GPUs of one node communicate faster; CPU workers would share cores."""
    return "PACK" if run.scale.use_gpu else "SPREAD"


def run_resources(run: RunConfig) -> dict[str, float]:
    """Returns what a run occupies while it trains."""
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


def on_every_node(work: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Runs ``work(*args)`` once on every node that is up: name -> what it returned, or what it raised.

    `work` is picklable, and so is what it returns. It takes no CPU, so busy nodes answer too.
    """
    ask = ray.remote(num_cpus=0, max_retries=0)(work)
    asked = {
        node_name(node): ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(*args)
        for node in ray.nodes()
        if node["Alive"]
    }
    return {name: _answer(answer) for name, answer in asked.items()}


def node_name(node: dict[str, Any]) -> str:
    """Of an entry of `ray.nodes`: its name and the start of its id, for several may share a machine."""
    return f"{node['NodeName']} ({node['NodeID'][:6]})"


def check_shared(root: str) -> None:
    """Raises UsageError if a node that is up does not see what this process writes below `root`."""
    if sum(node["Alive"] for node in ray.nodes()) == 1:
        return
    marker = storage.join(root, f".seen-{uuid4().hex}")
    storage.write_bytes(marker, b"")
    try:
        seen = on_every_node(storage.size, marker)
    finally:
        storage.delete(marker)
    blind = [f"{name}: {found}" if found is not None else name for name, found in seen.items() if found != 0]
    if blind:
        raise UsageError(
            f"{root} is not shared by all nodes: {', '.join(blind)} cannot see what is written there. Use"
            " --storage s3://bucket/prefix, or a directory that every node mounts"
        )


def _answer(answer: Any) -> Any:
    try:
        return ray.get(answer, timeout=ANSWER_S)
    except Exception as error:  # whatever it was belongs to that node's answer
        return error

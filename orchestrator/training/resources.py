"""Resources: what runs need, what the cluster can hold, and whether its nodes share files."""

import json
import os
import time
from collections.abc import Callable, Mapping
from typing import Any
from uuid import uuid4

import ray
from ray.exceptions import GetTimeoutError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator import storage
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError

DECLARED = "MOE_FRONTIER_MAX_RESOURCES"  # JSON: {"CPU": 56, "GPU": 6}
CPU_FOR_DATA = 1  # decodes for all workers of a run; an inline worker reads its own data
ANSWER_S = 180.0  # a busy node starts its first worker process, which loads libraries


def most_resources() -> dict[str, float]:
    """Returns the CPUs, GPUs and so on of the connected cluster, or the maximum that an autoscaling cluster
    declares in the environment of its nodes, because Ray 2.60 has no call that returns it.
    """
    have = dict(ray.cluster_resources())
    declared: dict[str, float] = json.loads(os.environ.get(DECLARED, "{}"))
    return have | {name: max(amount, have.get(name, 0.0)) for name, amount in declared.items()}


def pin_to_this_node() -> NodeAffinitySchedulingStrategy:
    """Returns a strategy that pins an actor to this node, so that it is not lost with another node."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


def worker_resources(run: RunConfig) -> dict[str, float]:
    """Returns what one worker reserves; its images are decoded on the rest of the cluster."""
    return ({"GPU": 1} if run.scale.use_gpu else {}) | {"CPU": run.scale.cpus_per_worker}


def placement(run: RunConfig) -> str:
    """GPUs of one node communicate faster; CPU workers would share its cores."""
    return "PACK" if run.scale.use_gpu else "SPREAD"


def run_resources(run: RunConfig) -> dict[str, float]:
    """Returns what a run keeps busy: its workers, and the CPU that decodes for them."""
    if run.inline:
        return {"CPU": 1}
    need = {name: amount * run.scale.workers for name, amount in worker_resources(run).items()}
    return need | {"CPU": need["CPU"] + CPU_FOR_DATA}


def fits(need: Mapping[str, float], free: Mapping[str, float]) -> bool:
    return all(amount <= free.get(name, 0) for name, amount in need.items())


def check_resources(run: RunConfig, most: Mapping[str, float] | None = None) -> None:
    """Raises UsageError, with the arithmetic, if the cluster can never hold the run's workers and a CPU that
    decodes for them. `most`: what the cluster can hold, if the caller knows it.
    """
    most = most_resources() if most is None else most
    workers, each, need = run.scale.workers, worker_resources(run), run_resources(run)
    if fits(need, most):
        return
    gpus, cpus = most.get("GPU", 0), most.get("CPU", 0)
    if need.get("GPU", 0) > gpus:
        raise UsageError(f"{workers} workers need {workers} GPUs, the cluster has at most {gpus:g}")
    fitting = max(0, int((cpus - CPU_FOR_DATA) / each["CPU"]))
    raise UsageError(
        f"{workers} workers x {each['CPU']:g} CPU + {CPU_FOR_DATA} CPU for data = {need['CPU']:g} CPUs, the"
        f" cluster has at most {cpus:g}: use at most {fitting} workers, or add nodes"
    )


def on_every_node(work: Callable[..., Any], *args: Any) -> dict[str, Any]:
    """Runs ``work(*args)``, which is picklable, once on every node that is up: name -> result or exception.

    It reserves no CPU, so busy nodes answer too. After `ANSWER_S` a missing answer is a TimeoutError.
    """
    ask = ray.remote(num_cpus=0, max_retries=0)(work)
    asked = {
        node_name(node): ask.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False)
        ).remote(*args)
        for node in ray.nodes()
        if node["Alive"]
    }
    deadline = time.monotonic() + ANSWER_S
    return {name: _answer(answer, max(0.0, deadline - time.monotonic())) for name, answer in asked.items()}


def node_name(node: dict[str, Any]) -> str:
    """Returns the name of an entry of `ray.nodes`, with the start of its id: nodes may share a machine."""
    return f"{node['NodeName']} ({node['NodeID'][:6]})"


def check_shared(root: str) -> None:
    """Raises UsageError if a node does not see what this process writes below `root`."""
    if sum(node["Alive"] for node in ray.nodes()) == 1:
        return
    marker = storage.join(root, f".seen-{uuid4().hex}")
    storage.write_bytes(marker, b"")
    try:
        seen = on_every_node(storage.size, marker)
    finally:
        storage.delete(marker)
    missing = [f"{name}: {size}" if size is not None else name for name, size in seen.items() if size != 0]
    if missing:
        raise UsageError(
            f"{root} is not shared by all nodes: {', '.join(missing)} cannot see what is written there. Use"
            " `storage` s3://bucket/prefix (gs://, az://), or a directory that every node mounts"
        )


def _answer(answer: Any, timeout_s: float) -> Any:
    try:
        return ray.get(answer, timeout=timeout_s)
    except GetTimeoutError:
        return TimeoutError(f"no answer within {ANSWER_S:.0f} s")
    except Exception as error:
        return error

"""The nodes of the cluster, one by one: what is asked of each, and whether all see the same files."""

from collections.abc import Callable
from typing import Any
from uuid import uuid4

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator import storage
from orchestrator.errors import UsageError

ANSWER_S = 60.0  # a node that starts its first worker process needs some


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

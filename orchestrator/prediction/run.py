"""Parts to a pool of actors, by Ray Data; what is done comes back.

An actor reads, decodes and writes its parts itself: images never pass through the object store, and what is
in memory is a few batches of each actor.
"""

import logging
import pickle
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import ray
import ray.data
from ray.exceptions import RayTaskError

from orchestrator.errors import UsageError
from orchestrator.prediction.inputs import Files, Rows
from orchestrator.prediction.predictor import Done, Predictor, Settings
from orchestrator.training.resources import most_resources


def pool_size(workers: int | None) -> tuple[int, dict[str, float]]:
    """Actors, and what each of them keeps for itself: a GPU and its share of CPUs, or where there is no GPU a
    CPU. `workers` None: as many as there is room for.

    Raises:
        UsageError: if the cluster can never hold them.
    """
    most = most_resources()
    cpus, gpus = int(most.get("CPU", 0)), int(most.get("GPU", 0))
    room, what = (gpus, "GPUs") if gpus else (cpus, "CPUs")
    if not room:
        raise UsageError("the cluster has neither a GPU nor a CPU")
    if workers is not None and workers > room:
        raise UsageError(f"--workers {workers}: each takes one of the {room} {what} of the cluster")
    each = {"num_gpus": 1.0, "num_cpus": float(_cpus_per_gpu())} if gpus else {"num_cpus": 1.0}
    return workers or room, each


def run(
    parts: Mapping[int, Files | Rows], settings: Settings, *, workers: int, each: Mapping[str, float]
) -> Iterator[Done]:
    """Does the parts, in any order, and says when each is done.

    Raises:
        UsageError: as `Predictor` does.
        OSError: if reading or writing fails.
    """
    logging.getLogger("ray.data").setLevel(logging.ERROR)  # it explains each execution at length
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = context.print_on_execution_start = False

    class Actor:  # in here, for Ray reproaches its own way to pass arguments to a constructor
        def __init__(self) -> None:
            self.predictor = Predictor(settings)

        def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
            done = [
                self.predictor.do(int(number), pickle.loads(part))
                for number, part in zip(batch["part"], batch["what"], strict=True)
            ]
            return {field: np.array([getattr(one, field) for one in done]) for field in Done._fields}

    rows = [{"part": number, "what": pickle.dumps(part)} for number, part in parts.items()]
    dataset = ray.data.from_items(rows, override_num_blocks=len(rows)).map_batches(
        Actor,
        batch_size=None,
        compute=ray.data.ActorPoolStrategy(size=min(workers, len(rows))),
        num_cpus=each["num_cpus"],
        num_gpus=each.get("num_gpus"),
    )
    dataset.context.raise_original_map_exception = True
    try:
        for row in dataset.iter_rows():
            yield Done(**{field: int(row[field]) for field in Done._fields})
    except RayTaskError as error:
        raise error.cause from None


def _cpus_per_gpu() -> int:
    """So many that every node with GPUs can use all of them."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"] and node["Resources"].get("GPU")]
    return max(1, min((int(node.get("CPU", 0) // node["GPU"]) for node in nodes), default=1))

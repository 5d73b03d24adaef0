"""A trained model that several workers hold together, as in training, and what they find of it.

Each worker reads its share of the weights and of every batch. All call the same function of the model, with
equally many forward passes of equal shapes, because experts and weights lie on other workers.
"""

from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any, Literal, TypeVar
from uuid import uuid4

import torch
from ray.util.queue import Empty, Queue

from moe.model import Model
from moe.parallel import make_mesh, this_rank
from orchestrator import storage
from orchestrator.checkpoint.models import ModelRef
from orchestrator.config import RunConfig
from orchestrator.runs.run_directory import RunDir
from orchestrator.training.launch import on_workers
from orchestrator.training.resources import check_resources, most_resources

T = TypeVar("T")
POLL_S = 0.2


@dataclass(frozen=True, kw_only=True)
class Sharding:
    """How workers hold a model together.

    Attributes:
        workers, ep: as in `ScaleConfig`.
        dtype: of matmuls and activations; routers compute in float32, and heads are float32.
        root: a folder or a URI that all nodes see.
    """

    workers: int
    ep: int = 1
    dtype: Literal["float32", "bfloat16"] = "float32"
    root: str

    def check(self, model: ModelRef, batch_size: int) -> RunConfig:
        """Returns the model's run on these workers. Raises UsageError if they cannot share it, or a batch."""
        path = model.run.data.path
        return model.run_on(path, batch_size=batch_size, workers=self.workers, ep=self.ep)

    def measure(self, model: ModelRef, function: Callable[[Model], T], *, batch_size: int) -> T:
        """Returns what the first worker's `function` returns; it and its result can be pickled. Raises as
        `answers` does.
        """

        def first(loaded: Model, put: Callable[[T], None]) -> None:
            found = function(loaded)
            if this_rank()[0] == 0:
                put(found)

        (answer,) = self.answers(model, first, batch_size=batch_size)
        return answer

    def answers(
        self, model: ModelRef, function: Callable[[Model, Callable[[Any], None]], None], *, batch_size: int
    ) -> Iterator[Any]:
        """Calls ``function(model, put)`` on all workers, and yields what they put while they run.

        Raises:
            UsageError: if the cluster is too small, or a worker raised it.
            ray.train.TrainingFailedError: if a worker raised something else, or died.
        """
        run = self.check(model, batch_size)
        scale = replace(run.scale, use_gpu=most_resources().get("GPU", 0) > 0)
        folder = storage.join(self.root, "evaluation")
        run = replace(run, scale=scale, storage=folder, name=f"workers-{uuid4().hex}")
        check_resources(run)
        queue = Queue(actor_options={"num_cpus": 0})
        config = {"model": model, "function": function, "dtype": self.dtype, "queue": queue}
        try:
            with ThreadPoolExecutor(1) as pool:
                working = pool.submit(on_workers, _work, run, config, with_feeds=False)
                while not (working.done() and queue.empty()):
                    with suppress(Empty):
                        yield queue.get(timeout=POLL_S)
                working.result()
        finally:
            queue.shutdown()
            storage.delete(RunDir.of(run).path)


def _work(config: Mapping[str, Any]) -> None:
    run: RunConfig = config["run"]
    mesh = make_mesh("cuda" if run.scale.use_gpu else "cpu", ep=run.ep())
    model = config["model"].load_sharded(mesh, torch.bfloat16 if config["dtype"] == "bfloat16" else None)
    config["function"](model, config["queue"].put)

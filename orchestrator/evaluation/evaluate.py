"""The quality and the speed of trained models, at one or many operating points.

Ray evaluates many models in parallel, with a task for each. A task stores its results before it returns them,
so that an interrupted command continues. Times are measured afterwards, one model at a time on one node,
because parallel models would disturb each other. Models take turns in several rounds, so that a change of the
node's speed affects all of them alike.
"""

import hashlib
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import numpy as np
import ray
import torch
from ray.exceptions import RayTaskError
from torch import Tensor, nn

from moe.cost import forward_gflops_2mac
from moe.model import Model
from moe.overrides import AS_TRAINED, RoutingOverrides
from orchestrator import storage
from orchestrator.checkpoint.models import ModelRef
from orchestrator.codec import to_dict
from orchestrator.data.batch import Batch, normalize
from orchestrator.data.fields import Field
from orchestrator.data.manifest import open_manifest
from orchestrator.data.stream import Split, in_order, in_process, prefetched
from orchestrator.errors import UsageError
from orchestrator.evaluation.points import point_name
from orchestrator.tasks import TaskConfig
from orchestrator.tasks.base import Heads
from orchestrator.threads import one_thread
from orchestrator.training.metrics import device_sync

WARM_UP = 3  # untimed passes of each operating point
ROUNDS = 3  # of timing

Row = dict[str, Any]


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def images_of(
    model: ModelRef,
    *,
    path: str,
    split: Split,
    batch_size: int,
    device: torch.device,
    fields: Mapping[str, Field] | None = None,
) -> Iterator[Batch]:
    """Yields every image of a split once, as the model sees it in evaluation, with `fields`, by default those
    of its task; the last batch is padded.
    """
    stream = in_order(model.run_on(path, batch_size=batch_size), split, fields=fields)
    return prefetched(in_process(stream, stream.steps()), device)


class Scores:
    """A task's scores in detail, summed while images come in, on the device.

    Attributes:
        sums: as `TaskConfig.details` returns them; empty before the first batch.
        unread: images that could not be decoded. They count nowhere else.
    """

    def __init__(self, task: TaskConfig) -> None:
        self.task = task
        self.sums: dict[str, Tensor] = {}
        self.unread = 0

    def add(self, heads: Heads, batch: Batch) -> None:
        for name, value in self.task.details(heads, batch).items():
            self.sums[name] = self.sums[name] + value if name in self.sums else value
        self.unread += len(batch.bad)

    def images(self) -> int:
        return int(self.sums["samples"])

    def metrics(self) -> dict[str, float]:
        return self.task.metrics(self.sums)

    def table(self, names: Sequence[str]) -> dict[str, list[Any]]:
        return self.task.table(self.sums, names)


def evaluate_at(
    model: Model,
    task: TaskConfig,
    batches: Iterable[Batch],
    points: Sequence[RoutingOverrides] = (AS_TRAINED,),
) -> list[Scores]:
    """The scores at each operating point, in one pass over the images that computes shared parts once.

    Raises:
        UsageError: if the task refuses the images, the model has no such routing, or none of the images can
            be decoded.
    """
    scores, beside = [Scores(task) for _ in points], task.before_scores(model)
    for batch in batches:
        try:
            at_points = model.at_points(task.inputs(batch), batch.valid, points)
        except ValueError as error:
            raise UsageError(str(error)) from None
        for point_scores, heads in zip(scores, at_points, strict=True):
            point_scores.add({**heads, **beside}, batch)
    if not all(point_scores.images() for point_scores in scores):
        raise UsageError("none of the images of the split can be decoded")
    return scores


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Milliseconds per image of each timed forward pass, over batches of `batch` images, on `device`."""

    ms: tuple[float, ...]
    batch: int
    device: str

    @property
    def quartiles(self) -> tuple[float, float, float]:
        """The lower quartile, the median and the upper quartile."""
        low, median, high = np.quantile(self.ms, (0.25, 0.5, 0.75)).tolist()
        return low, median, high

    @property
    def median(self) -> float:
        return self.quartiles[1]

    def summary(self) -> Row:
        """Median, quartiles and how they were measured, as JSON has them."""
        low, median, high = self.quartiles
        figures = {"median": median, "low": low, "high": high}
        return figures | {"batch": self.batch, "repeats": len(self.ms), "device": self.device}


def timed_inputs(task: TaskConfig, batch: Batch) -> Tensor:
    """Returns what `latencies` runs: images, or the input of a model that reads none."""
    return normalize(batch["image"]) if "image" in batch.fields else task.inputs(batch)


@torch.no_grad()
def latencies(
    model: Model, images: Tensor, points: Sequence[RoutingOverrides] = (AS_TRAINED,), *, repeats: int = 10
) -> list[Latency]:
    """The latency of each operating point on these images (B, 3, H, W), with one CPU thread.

    `WARM_UP` passes come first, and each timed pass waits for the device at its begin and end. The points
    take turns, so that a change of the machine's speed affects all of them alike.
    """
    ms: list[list[float]] = [[] for _ in points]
    with one_thread():
        for turn in range(WARM_UP + repeats):
            for point, taken in zip(points, ms, strict=True):
                device_sync()
                began = time.perf_counter()
                model(images, routing_overrides=point)
                device_sync()
                if turn >= WARM_UP:
                    taken.append(1000 * (time.perf_counter() - began) / len(images))
    device = device_name(images.device)
    return [Latency(ms=tuple(taken), batch=len(images), device=device) for taken in ms]


def device_name(device: torch.device) -> str:
    """The device that `latencies` measures on."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, 1 thread"


@dataclass(frozen=True, kw_only=True)
class EvalTask:
    """A model, and the operating points and images to evaluate it with. `results` is a folder or a URI that
    all nodes see, where results are stored.
    """

    model: ModelRef
    points: tuple[RoutingOverrides, ...]
    path: str
    split: Split
    batch_size: int
    results: str

    def key(self, weights: str) -> str:
        """A digest that equal tasks on equal weights and images have in common."""
        task = {
            "weights": weights,
            "model": to_dict(self.model.run.model),
            "points": [asdict(point) for point in self.points],
            "data": open_manifest(self.path).digest(),
            **self.model.run.data.eval_settings(),
            "split": self.split,
            "batch_size": self.batch_size,
        }
        return hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:32]

    def images(self) -> Iterator[Batch]:
        where: Any = {"path": self.path, "split": self.split, "batch_size": self.batch_size}
        return images_of(self.model, device=default_device(), **where)


def evaluate_all(tasks: Sequence[EvalTask]) -> Iterator[tuple[EvalTask, list[Row]]]:
    """Yields each task when it is done, with a row per operating point: ``point``, the metrics of what the
    model was trained for, ``cost/forward_gflops_2mac``, and ``weights``, the SHA-256 of the weights.

    Raises:
        UsageError: if data or weights are damaged or incomplete.
    """
    evaluate: Any = _evaluate
    running = {evaluate.options(num_gpus=_gpus()).remote(task): task for task in tasks}
    while running:
        (done,), _ = ray.wait(list(running))
        yield running.pop(done), _result(done)


def benchmark_all(tasks: Sequence[EvalTask], *, repeats: int) -> Iterator[tuple[EvalTask, list[Row]]]:
    """Times the operating points of each task, as `in_rounds`, in one process that holds one model."""
    clock: Any = _Clock.options(num_gpus=_gpus()).remote()
    yield from in_rounds(tasks, lambda task: _result(clock.time.remote(task, repeats)))


def in_rounds(
    tasks: Sequence[EvalTask], measure: Callable[[EvalTask], list[Latency]]
) -> Iterator[tuple[EvalTask, list[Row]]]:
    """Times every task once in each of `ROUNDS` rounds, and yields it each time, with a row per point.

    A row has ``perf/ms_per_image``, the median over all passes of all rounds so far, its quartiles
    (``.._q25``, ``.._q75``), ``batch``, ``device``, ``rounds`` and ``repeats``, the passes in a round.
    """
    measured: list[list[list[Latency]]] = [[] for _ in tasks]
    for _ in range(ROUNDS):
        for task, turns in zip(tasks, measured, strict=True):
            turns.append(measure(task))
            yield task, [_time_row(point_turns) for point_turns in zip(*turns, strict=True)]


def _time_row(turns: Sequence[Latency]) -> Row:
    merged = replace(turns[0], ms=tuple(ms for turn in turns for ms in turn.ms))
    low, median, high = merged.quartiles
    return {
        "perf/ms_per_image": median,
        "perf/ms_per_image_q25": low,
        "perf/ms_per_image_q75": high,
        "batch": merged.batch,
        "device": merged.device,
        "rounds": len(turns),
        "repeats": len(turns[0].ms),
    }


def weights_sha256(model: nn.Module) -> str:
    """SHA-256 over the names and bytes of all tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@ray.remote(num_cpus=1)
def _evaluate(task: EvalTask) -> list[Row]:
    model = task.model.load(default_device())
    weights = weights_sha256(model)
    file = storage.join(task.results, f"{task.key(weights)}.json")
    if storage.size(file) is not None:
        return json.loads(storage.read_bytes(file))
    all_scores = evaluate_at(model, task.model.run.task, task.images(), task.points)
    assert weights_sha256(model) == weights, "evaluation changed the weights"
    rows = [
        {
            "point": point_name(point),
            **{f"val/{name}": value for name, value in scores.metrics().items()},
            "cost/forward_gflops_2mac": forward_gflops_2mac(task.model.run.model, point),
            "weights": weights,
        }
        for point, scores in zip(task.points, all_scores, strict=True)
    ]
    storage.write_bytes(file, json.dumps(rows).encode())
    return rows


@ray.remote(num_cpus=1)
class _Clock:
    def time(self, task: EvalTask, repeats: int) -> list[Latency]:
        model = task.model.load(default_device())
        inputs = timed_inputs(task.model.run.task, next(task.images()))
        return latencies(model, inputs, task.points, repeats=repeats)


def _result(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.cause from None


def _gpus() -> int:
    return 1 if ray.cluster_resources().get("GPU") else 0

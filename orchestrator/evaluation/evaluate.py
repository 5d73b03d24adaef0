"""The quality and the speed of trained models, at one or many operating points.

Ray evaluates many models in parallel, with a task for each. A task stores its results before it returns them,
so that an interrupted command continues. Times are measured afterwards, one model at a time on one node,
because parallel models would disturb each other. Models take turns in several rounds, so that a change of the
node's speed affects all of them alike.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from moe.cost import forward_gflops_2mac
from moe.layout import local_part
from moe.model import Model
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.parallel import this_rank
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.files import SUFFIX
from orchestrator.checkpoint.models import ModelRef
from orchestrator.codec import to_dict
from orchestrator.data.batch import Batch, normalize
from orchestrator.data.fields import Field
from orchestrator.data.manifest import open_manifest
from orchestrator.data.stream import Split, in_order, in_process, prefetched
from orchestrator.evaluation.answers import AnswerFigures, KeptAnswers
from orchestrator.evaluation.points import point_name
from orchestrator.evaluation.scores import Scores, evaluate_at, on_this_rank
from orchestrator.evaluation.spellings import relabelled
from orchestrator.tasks import TaskConfig
from orchestrator.threads import one_thread
from orchestrator.training.metrics import device_sync

if TYPE_CHECKING:
    from orchestrator.evaluation.sharded import Sharding

WARM_UP = 3  # untimed passes of each operating point
ROUNDS = 3  # of timing

Row = dict[str, Any]
T = TypeVar("T")


def default_device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def on_model(
    model: ModelRef, function: Callable[[Model], T], sharding: Sharding | None, *, batch_size: int
) -> T:
    """Returns what `function` finds of the loaded model: in this process, or on all workers that hold it
    together, which share batches of `batch_size`.
    """
    if sharding is None:
        return function(model.load(default_device()))
    return sharding.measure(model, function, batch_size=batch_size)


def images_of(
    model: ModelRef,
    *,
    path: str,
    split: Split,
    batch_size: int,
    device: torch.device | None = None,
    fields: Mapping[str, Field] | None = None,
) -> Iterator[Batch]:
    """Yields every image of a split once, as the model sees it in evaluation, with `fields`, by default those
    of its task; the last batch is padded. Each rank reads its share of every batch.
    """
    stream = in_order(model.run_on(path, batch_size=batch_size), split, *this_rank(), fields=fields)
    return prefetched(in_process(stream, stream.steps()), device or default_device())


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
    take turns, so that a change of the machine's speed affects all of them alike. Ranks that hold a model
    together pass as many images each at a time, and all count.
    """
    count = len(images) * this_rank()[1]
    ms: list[list[float]] = [[] for _ in points]
    with one_thread():
        for turn in range(WARM_UP + repeats):
            for point, taken in zip(points, ms, strict=True):
                device_sync()
                began = time.perf_counter()
                model(images, routing_overrides=point)
                device_sync()
                if turn >= WARM_UP:
                    taken.append(1000 * (time.perf_counter() - began) / count)
    device = device_name(images.device)
    return [Latency(ms=tuple(taken), batch=count, device=device) for taken in ms]


def device_name(device: torch.device) -> str:
    """The device that `latencies` measures on."""
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU, 1 thread"
    ranks = this_rank()[1]
    return f"{name}, {ranks} workers" if ranks > 1 else name


@dataclass(frozen=True, kw_only=True)
class EvalTask:
    """A model, and the operating points and images to evaluate it with. `results` is a folder or a URI that
    all nodes see, for results. Without `sharding` one process holds the model. `outputs`: see `relabelled`.
    """

    model: ModelRef
    points: tuple[RoutingOverrides, ...]
    path: str
    split: Split
    batch_size: int
    results: str
    sharding: Sharding | None = None
    outputs: tuple[int, ...] | None = None

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
            "outputs": self.outputs,
        }
        if self.sharding and self.sharding.dtype != "float32":
            task["dtype"] = self.sharding.dtype
        return hashlib.sha256(json.dumps(task, sort_keys=True).encode()).hexdigest()[:32]

    def images(self) -> Iterator[Batch]:
        images = images_of(self.model, path=self.path, split=self.split, batch_size=self.batch_size)
        return relabelled(images, self.outputs)

    def on_model(self, function: Callable[..., T], **arguments: Any) -> T:
        """Returns ``function(model, task, ..)``, as `on_model`."""
        call = partial(function, task=self, **arguments)
        return on_model(self.model, call, self.sharding, batch_size=self.batch_size)


class Figures(NamedTuple):
    """The scores at each point; and at the first the time, the figures of all answers, none if the task does
    not classify, and the task's further figures.
    """

    scores: list[Scores]
    latency: Latency
    answers: AnswerFigures
    further: dict[str, float]


def figures(model: Model, task: EvalTask, repeats: int) -> Figures:
    """Returns the figures of a model. All ranks call it together."""
    kind, point = task.model.run.task, task.points[0]
    answers = KeptAnswers(kind, images=open_manifest(task.path).rows(task.split))
    scores = evaluate_at(model, kind, task.images(), task.points, also=answers.add)
    batch = next(task.images())
    (latency,) = latencies(model, timed_inputs(kind, batch), [point], repeats=repeats)
    further = kind.of_model(model, batch, on_this_rank(point, model, len(batch)))
    return Figures(scores, latency, answers.figures(), further)


def evaluate_all(tasks: Sequence[EvalTask]) -> Iterator[tuple[EvalTask, list[Row]]]:
    """Yields each task when it is done, with a row per operating point: ``point``, the metrics of what the
    model was trained for, ``cost/forward_gflops_2mac``, and ``weights``, the SHA-256 of the weights.

    Raises:
        UsageError: if data or weights are damaged or incomplete.
    """
    for task in tasks:
        if task.sharding:
            yield task, _rows(task)
    if all(task.sharding for task in tasks):
        return
    import ray

    evaluate: Any = ray.remote(num_cpus=1, num_gpus=_gpus())(_rows)
    running = {evaluate.remote(task): task for task in tasks if not task.sharding}
    while running:
        (done,), _ = ray.wait(list(running))
        yield running.pop(done), _result(done)


def benchmark_all(tasks: Sequence[EvalTask], *, repeats: int) -> Iterator[tuple[EvalTask, list[Row]]]:
    """Times the operating points of each task, as `in_rounds`, in one process that holds one model. Workers
    that hold a model together time all rounds as one, because they start for longer than they compute.
    """
    for task in tasks:
        if task.sharding:
            timed = task.on_model(_times, repeats=ROUNDS * repeats)
            yield task, [_time_row([latency]) for latency in timed]
    if alone := [task for task in tasks if not task.sharding]:
        import ray

        clock: Any = ray.remote(num_cpus=1, num_gpus=_gpus())(_Clock).remote()
        yield from in_rounds(alone, lambda task: _result(clock.time.remote(task, repeats)))


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


def weights_sha256(location: str) -> str:
    """Returns a SHA-256 of the weights of an exported file, or of a checkpoint, whose manifest has those of
    its files: they are compared when the weights are loaded.
    """
    if location.endswith(SUFFIX):
        return manifests.hashed(location).sha256
    return manifests.read(location).weights_digest()


def hash_of_bits(model: nn.Module) -> list[int]:
    """Returns a number for each tensor, or for this rank's part of it, that changes with every single bit."""
    parts = map(local_part, model.state_dict().values())
    return [int(torch.hash_tensor(part).view(torch.int64)) for part in parts if part.numel()]


def _rows(task: EvalTask) -> list[Row]:
    weights = weights_sha256(task.model.location)
    file = storage.join(task.results, f"{task.key(weights)}.json")
    if storage.size(file) is not None:
        return json.loads(storage.read_bytes(file))
    rows = [
        {
            "point": point_name(point),
            **{f"val/{name}": value for name, value in scores.metrics().items()},
            "cost/forward_gflops_2mac": forward_gflops_2mac(task.model.run.model, point),
            "weights": weights,
        }
        for point, scores in zip(task.points, task.on_model(_unchanged_scores), strict=True)
    ]
    storage.write_bytes(file, json.dumps(rows).encode())
    return rows


def _unchanged_scores(model: Model, task: EvalTask) -> list[Scores]:
    before = hash_of_bits(model)
    scores = evaluate_at(model, task.model.run.task, task.images(), task.points)
    assert hash_of_bits(model) == before, "evaluation changed the weights"
    return scores


def _times(model: Model, task: EvalTask, repeats: int) -> list[Latency]:
    inputs = timed_inputs(task.model.run.task, next(task.images()))
    return latencies(model, inputs, task.points, repeats=repeats)


class _Clock:
    def time(self, task: EvalTask, repeats: int) -> list[Latency]:
        return task.on_model(_times, repeats=repeats)


def _result(reference: Any) -> Any:
    import ray
    import ray.exceptions

    try:
        return ray.get(reference)
    except ray.exceptions.RayTaskError as error:
        raise error.cause from None


def _gpus() -> int:
    import ray

    return 1 if ray.cluster_resources().get("GPU") else 0

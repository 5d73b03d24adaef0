"""Operating points of many models, evaluated in parallel by Ray: a task for each model.

What a task finds is on disk before it counts: the same question again, after whatever ended it, is answered
from there. Times are taken afterwards, one model at a time on one node: they would disturb each other. The
models take turns in several rounds, so that a change of the node's speed affects all of them alike.
"""

import hashlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

import ray
import torch
from ray.exceptions import RayTaskError
from torch import nn

from moe.cost import forward_gflops_2mac
from moe.overrides import RoutingOverrides
from orchestrator import storage
from orchestrator.codec import to_dict
from orchestrator.data.images import normalize
from orchestrator.data.manifest import open_manifest
from orchestrator.data.stream import Split
from orchestrator.evaluation.classes import classes_of
from orchestrator.evaluation.images import device, images_of
from orchestrator.evaluation.latency import Latency, latencies
from orchestrator.evaluation.point import point_name
from orchestrator.evaluation.scores import evaluate_at
from orchestrator.evaluation.trained import Trained

Row = dict[str, Any]
ROUNDS = 3  # of timing


@dataclass(frozen=True, kw_only=True)
class Question:
    """Attributes:
    path, split: of the images.
    batch_size: images of a forward pass.
    answers: where answers are kept: a folder or URI that all nodes see.
    """

    model: Trained
    points: tuple[RoutingOverrides, ...]
    path: str
    split: Split
    batch_size: int
    answers: str

    def key(self, weights: str) -> str:
        """Of equal questions about equal weights and images."""
        asked = {
            "weights": weights,
            "model": to_dict(self.model.run.model),
            "points": [asdict(point) for point in self.points],
            "data": open_manifest(self.path).digest(),
            "labels": classes_of(self.model, self.path).labels,
            "eval_crop": self.model.run.data.eval_crop,
            "split": self.split,
            "batch_size": self.batch_size,
        }
        return hashlib.sha256(json.dumps(asked, sort_keys=True).encode()).hexdigest()[:32]


def qualities(questions: list[Question]) -> Iterator[tuple[Question, list[Row]]]:
    """Rows of each question, a point each, as they are answered: ``point``, ``val/acc1``, ``val/acc5``,
    ``val/loss``, ``cost/forward_gflops_2mac``, and ``weights``, the SHA-256 of the model's.

    Raises what a task did: UsageError for data or weights that are not whole.
    """
    ask: Any = _quality
    waiting = {ask.options(num_gpus=_gpus()).remote(question): question for question in questions}
    while waiting:
        (done,), _ = ray.wait(list(waiting))
        yield waiting.pop(done), _answer(done)


def times(questions: list[Question], *, repeats: int) -> Iterator[tuple[Question, list[Row]]]:
    """Times of each question's points, as `in_rounds` yields them, by one process that holds one model."""
    clock: Any = _Clock.options(num_gpus=_gpus()).remote()
    yield from in_rounds(questions, lambda question: _answer(clock.time.remote(question, repeats)))


def in_rounds(
    questions: Sequence[Question], measure: Callable[[Question], list[Latency]]
) -> Iterator[tuple[Question, list[Row]]]:
    """Times every question once in each of `ROUNDS` rounds; yields it each time, with a row per point.

    A row has ``perf/ms_per_image``, the median over all passes of all rounds so far, its quartiles
    (``.._q25``, ``.._q75``), ``batch``, ``device``, ``rounds`` and ``repeats``, the passes in a round.
    """
    taken: list[list[list[Latency]]] = [[] for _ in questions]
    for rounds in range(1, ROUNDS + 1):
        for question, found in zip(questions, taken, strict=True):
            found.append(measure(question))
            merged = [
                replace(turns[0], ms=tuple(ms for turn in turns for ms in turn.ms))
                for turns in zip(*found, strict=True)
            ]
            yield question, [_time_row(latency, rounds) for latency in merged]


def _time_row(latency: Latency, rounds: int) -> Row:
    return {
        "perf/ms_per_image": latency.median,
        "perf/ms_per_image_q25": latency.low,
        "perf/ms_per_image_q75": latency.high,
        "batch": latency.batch,
        "device": latency.device,
        "rounds": rounds,
        "repeats": len(latency.ms) // rounds,
    }


def weights_sha256(model: nn.Module) -> str:
    """Over the names and bytes of all tensors."""
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode())
        digest.update(tensor.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()


@ray.remote(num_cpus=1)
def _quality(question: Question) -> list[Row]:
    model = question.model.load(device())
    weights = weights_sha256(model)
    file = storage.join(question.answers, f"{question.key(weights)}.json")
    if storage.size(file) is not None:
        return json.loads(storage.read_bytes(file))
    scores = evaluate_at(model, _images(question), question.points)
    assert weights_sha256(model) == weights, "evaluation changed the weights"
    rows = [
        {
            "point": point_name(point),
            **{f"val/{name}": value for name, value in one.metrics().items() if name != "prec1"},
            "cost/forward_gflops_2mac": forward_gflops_2mac(question.model.run.model, point),
            "weights": weights,
        }
        for point, one in zip(question.points, scores, strict=True)
    ]
    storage.write_bytes(file, json.dumps(rows).encode())
    return rows


@ray.remote(num_cpus=1)
class _Clock:
    def time(self, question: Question, repeats: int) -> list[Latency]:
        model = question.model.load(device())
        images = normalize(next(iter(_images(question))).image)
        return latencies(model, images, question.points, repeats=repeats)


def _images(question: Question) -> Any:
    return images_of(
        question.model,
        path=question.path,
        split=question.split,
        batch_size=question.batch_size,
        device=device(),
    )


def _answer(reference: Any) -> Any:
    try:
        return ray.get(reference)
    except RayTaskError as error:
        raise error.cause from None


def _gpus() -> int:
    return 1 if ray.cluster_resources().get("GPU") else 0

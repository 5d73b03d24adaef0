"""A soup: the average of models that were trained alike, one model at the cost of one.

Source: Wortsman et al. 2022, "Model soups", https://arxiv.org/abs/2203.05482, section 2: the uniform soup, as
in Soft MoE, section 4, table 3, and the greedy soup, to which the released code adds a model only if it gets
better.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from moe.signature import SIGNATURE
from orchestrator import storage
from orchestrator.checkpoint.files import SUFFIX, fill
from orchestrator.checkpoint.models import ModelRef
from orchestrator.checkpoint.statistics import with_own_statistics
from orchestrator.checkpoint.weights import VERSION, open_weights, write_file
from orchestrator.codec import flat, to_dict
from orchestrator.data.batch import Batch
from orchestrator.errors import UsageError
from orchestrator.evaluation.evaluate import default_device
from orchestrator.evaluation.scores import evaluate_at

T = TypeVar("T")


def write_soup(
    models: Sequence[ModelRef], out: str, *, fresh: bool = False, chosen_on: str | None = None
) -> None:
    """Writes the average as an exported model into the local file `out`, whose name becomes the model's.

    Memory holds the average, and one tensor of one model at a time. `chosen_on`: the images that chose the
    models, for the file's metadata.

    Raises:
        UsageError: if models are damaged or differ in config, classes or tensors, or if `out` is not such a
            file or exists and is not to be replaced (`fresh`).
        OSError: if reading or writing fails.
    """
    if not (storage.is_local(out) and out.endswith(SUFFIX)):
        raise UsageError(f"`out` {out}: a soup is a local file that ends in {SUFFIX}")
    if storage.size(out) is not None and not fresh:
        raise UsageError(f"{out} exists already; `fresh` replaces it")
    check_alike(models)
    names = next((model.classes for model in models if model.classes), None)
    metadata = {
        "format": "pt",
        "version": VERSION,
        "config": json.dumps(to_dict(replace(models[0].run, name=Path(out).stem))),
        SIGNATURE: replace(models[0].signature, classes=names).to_json(),
        "soup": json.dumps(
            [{"location": m.location, "step": m.step, "directory": m.directory} for m in models]
        ),
    }
    if chosen_on:
        metadata["chosen_on"] = chosen_on
    write_file(out, average_of(models), metadata)


def greedy(models: Sequence[T], quality_of: Callable[[Sequence[T]], float], *, ties: bool = False) -> list[T]:
    """Returns the models of the greedy soup, in the order in which they joined: from the best to the worst,
    each joins if the average of all members is better with it; with `ties`, if it is not worse.

    quality_of: the quality of the average of some models, on images that nothing else is measured on.
    """
    alone = [quality_of([model]) for model in models]
    best, *others = sorted(range(len(models)), key=lambda i: -alone[i])
    members, reached = [models[best]], alone[best]
    for i in others:
        found = quality_of([*members, models[i]])
        if found > reached or (ties and found == reached):
            members, reached = [*members, models[i]], found
    return members


def quality_of_average(models: Sequence[ModelRef], images: Iterable[Batch]) -> float:
    """Returns the task's quality of the average of models that are alike."""
    model, task = models[0].load(default_device()), models[0].run.task
    model.load_state_dict(average_of(models))
    (scores,) = evaluate_at(model, task, images)
    return scores.metrics()[task.quality.removeprefix("val/")]


def average_of(models: Sequence[ModelRef]) -> dict[str, Tensor]:
    """Returns the tensors of the average of models that are alike. Raises UsageError as `average` does, and
    if it cannot have running statistics of its own."""
    tensors = average([model.location for model in models])
    return tensors if len(models) == 1 else with_own_statistics(tensors, models[0].run)


def average(locations: Sequence[str]) -> dict[str, Tensor]:
    """Returns the mean of every tensor, summed in float64 and rounded once.

    The average of one model is that model bit for bit, and the average of two models is their mean rounded to
    the nearest float32. The average of more is within half a unit in the last place and 2^-52 of the largest.

    Raises:
        UsageError: if the models hold different tensors, or are damaged.
    """
    with ExitStack() as stack:
        sources = [stack.enter_context(open_weights(location)) for location in locations]
        first = sources[0].reader.tensors()
        for source in sources[1:]:
            if different := _difference(_shapes(first), _shapes(source.reader.tensors())):
                name, here, there = different
                raise UsageError(
                    f"{source.location} holds {name} as {there}, {locations[0]} as {here}: such models cannot"
                    " be averaged"
                )

        def mean(name: str) -> Tensor:
            # -0.0 + x is x, also for the sign of a zero.
            total = torch.tensor(-0.0, dtype=torch.float64)
            tensor = torch.empty_like(first[name], device="cpu")
            for source in sources:
                fill({name: tensor}, source.reader)
                total = total + tensor.double()
            return (total / len(sources)).to(tensor.dtype)

        return {name: mean(name) for name in first}


def check_alike(models: Sequence[ModelRef]) -> None:
    """Raises UsageError, naming the first field, if their architectures, their classes, what they see of an
    image or the weights that they began with differ: the experts and channels of other initial weights are in
    another order. Unknown classes are taken for the same.
    """
    known = [model for model in models if model.classes]
    for alike, described in ((models, _described), (known, _classes), (models, _began)):
        for model in alike[1:]:
            if different := _difference(described(alike[0]), described(model)):
                field, was, now = different
                raise UsageError(
                    f"cannot average different models: {field} is {was} in {alike[0].location}, {now} in"
                    f" {model.location}"
                )


def _described(model: ModelRef) -> dict[str, Any]:
    seen = replace(model.signature, classes=None, source="", licence="")
    return {
        **{f"model.{name}": value for name, value in flat(model.run.model).items()},
        **{f"signature.{name}": value for name, value in flat(seen).items()},
    }


def _classes(model: ModelRef) -> dict[str, str]:
    return {f"class {label}": name for label, name in enumerate(model.classes or ())}


def _began(model: ModelRef) -> dict[str, Any]:
    train = model.run.train
    return {"the start": train.init_from or f"the weights of seed {train.seed}"}


def _difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first name whose values differ, and the values."""
    names = (name for name in {**here, **there} if here.get(name) != there.get(name))
    return next(((name, here.get(name), there.get(name)) for name in names), None)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {[*tensor.shape]}" for name, tensor in sorted(tensors.items())}

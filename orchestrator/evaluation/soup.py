"""A soup: the uniform average of models that were trained alike, one model at the cost of one.

Source: Wortsman et al. 2022, "Model soups", section 2 (uniform soup), as in Soft MoE, section 4, table 3.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchestrator import storage
from orchestrator.checkpoint.files import SUFFIX, fill
from orchestrator.checkpoint.models import ModelRef
from orchestrator.checkpoint.weights import VERSION, open_weights, write_file
from orchestrator.codec import flat, to_dict
from orchestrator.errors import UsageError


def write_soup(models: Sequence[ModelRef], out: str, *, fresh: bool = False) -> None:
    """Writes the average as an exported model into the local file `out`, whose name becomes the model's.

    Memory holds the average, and one tensor of one model at a time.

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
    metadata = {
        "format": "pt",
        "version": VERSION,
        "config": json.dumps(to_dict(replace(models[0].run, name=Path(out).stem))),
        "classes": json.dumps(next((m.classes for m in models if m.classes), None)),
        "soup": json.dumps([{"location": m.location, "step": m.step, "run_id": m.run_id} for m in models]),
    }
    write_file(out, average([model.location for model in models]), metadata)


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
    """Raises UsageError, naming the first field, if their architectures, their classes or what they see of an
    image differ. Unknown classes are taken for the same.
    """
    known = [model for model in models if model.classes]
    for alike, described in ((models, _described), (known, _classes)):
        for model in alike[1:]:
            if different := _difference(described(alike[0]), described(model)):
                field, was, now = different
                raise UsageError(
                    f"cannot average different models: {field} is {was} in {alike[0].location}, {now} in"
                    f" {model.location}"
                )


def _described(model: ModelRef) -> dict[str, Any]:
    return {
        **{f"model.{name}": value for name, value in flat(model.run.model).items()},
        **{f"data.{name}": value for name, value in model.run.data.eval_settings().items()},
    }


def _classes(model: ModelRef) -> dict[str, str]:
    return {f"class {label}": name for label, name in enumerate(model.classes or ())}


def _difference(here: Mapping[str, Any], there: Mapping[str, Any]) -> tuple[str, Any, Any] | None:
    """The first name whose values differ, and the values."""
    names = (name for name in {**here, **there} if here.get(name) != there.get(name))
    return next(((name, here.get(name), there.get(name)) for name in names), None)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {[*tensor.shape]}" for name, tensor in sorted(tensors.items())}

"""A soup: the uniform average of models that were trained alike, one model at the cost of one.

Source: Wortsman et al. 2022, "Model soups", section 2 (uniform soup), as in Soft MoE, section 4, table 3.
"""

import json
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from orchestrator import storage
from orchestrator.checkpoint.files import SUFFIX, fill
from orchestrator.checkpoint.weights import VERSION, open_weights, write_file
from orchestrator.codec import flat, to_dict
from orchestrator.errors import UsageError
from orchestrator.evaluation.models import ModelRef


def write_soup(models: Sequence[ModelRef], out: str, *, force: bool = False) -> None:
    """Writes the average into the local file `out`, as `weights.export` writes one model, under the name of
    the file. Memory holds the average, and one tensor of one model at a time.

    Raises:
        UsageError: for models of different configs or tensors, naming the difference, damaged ones, and an
            `out` that is not such a file or is there already (`force`).
        OSError: if reading or writing fails.
    """
    if not (storage.is_local(out) and out.endswith(SUFFIX)):
        raise UsageError(f"--out {out}: a soup is a local file that ends in {SUFFIX}")
    if storage.size(out) is not None and not force:
        raise UsageError(f"{out} exists already; --force replaces it")
    check_alike(models)
    metadata = {
        "format": "pt",
        "version": VERSION,
        "config": json.dumps(to_dict(replace(models[0].run, name=Path(out).stem))),
        "classes": json.dumps(models[0].classes),
        "soup": json.dumps([{"location": m.location, "step": m.step, "run_id": m.run_id} for m in models]),
    }
    write_file(out, average([model.location for model in models]), metadata)


def average(locations: Sequence[str]) -> dict[str, Tensor]:
    """Returns the mean of every tensor, summed in float64 and rounded once: the average of one model is that
    model bit for bit, the average of two is their mean rounded to the nearest float32; of more it is within
    half a unit in the last place and 2^-52 of the largest number.

    Raises:
        UsageError: if the models hold different tensors, or are damaged.
    """
    with ExitStack() as stack:
        sources = [stack.enter_context(open_weights(location)) for location in locations]
        first = sources[0].reader.tensors()
        for source in sources[1:]:
            here, there = _shapes(first), _shapes(source.reader.tensors())
            if different := sorted(name for name in {**here, **there} if here.get(name) != there.get(name)):
                name = different[0]
                raise UsageError(
                    f"{source.location} holds {name} as {there.get(name)}, {locations[0]} as"
                    f" {here.get(name)}: there is no soup of such models"
                )

        def mean(name: str) -> Tensor:
            # -0.0 + x is x, also for the sign of a zero
            total, tensor = (
                torch.tensor(-0.0, dtype=torch.float64),
                torch.empty_like(first[name], device="cpu"),
            )
            for source in sources:
                fill({name: tensor}, source.reader)
                total = total + tensor.double()
            return (total / len(sources)).to(tensor.dtype)

        return {name: mean(name) for name in first}


def check_alike(models: Sequence[ModelRef]) -> None:
    """Raises UsageError, naming the first field, if their architectures differ."""
    first = models[0]
    here = flat(first.run.model)
    for model in models[1:]:
        there = flat(model.run.model)
        for field in {**here, **there}:
            if here.get(field) != there.get(field):
                raise UsageError(
                    f"there is no soup of different models: model.{field} is {here.get(field)} in"
                    f" {first.location}, {there.get(field)} in {model.location}"
                )


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {[*tensor.shape]}" for name, tensor in tensors.items()}

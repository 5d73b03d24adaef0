"""A soup: the uniform average of models that were trained alike, one model at the cost of one.

Source: Wortsman et al. 2022, "Model soups", section 2 (uniform soup), as in Soft MoE, section 4, table 3.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor

from orchestrator import storage
from orchestrator.checkpoint.single_file import SUFFIX, write_each
from orchestrator.checkpoint.source import open_source, read, tensors_in
from orchestrator.checkpoint.weights import VERSION
from orchestrator.codec import flat, to_dict
from orchestrator.errors import UsageError
from orchestrator.evaluation.models import ModelRef


def write_soup(models: Sequence[ModelRef], out: str, *, force: bool = False) -> None:
    """Writes the average into the local file `out`, as `weights.export` writes one model, under the name of
    the file. In memory is one tensor at a time.

    Numbers are summed in float64 and rounded once: of one model they are its own bit for bit, of two their
    mean rounded to the nearest float32; of more within half a unit in the last place and 2^-52 of the largest
    of them.

    Raises:
        UsageError: for models of different configs or tensors, naming the difference, damaged ones, and an
            `out` that is no name for it or is there already (`force`).
        OSError: if reading or writing fails.
    """
    if not (storage.is_local(out) and out.endswith(SUFFIX)):
        raise UsageError(f"--out {out}: a soup is a local file that ends in {SUFFIX}")
    if storage.size(out) is not None and not force:
        raise UsageError(f"{out} exists already; --force replaces it")
    check_alike(models)
    readers = [open_source(model.location).reader for model in models]
    first, *others = [tensors_in(reader) for reader in readers]
    for model, tensors in zip(models[1:], others, strict=True):
        here, there = _shapes(first), _shapes(tensors)
        if different := sorted(name for name in {**here, **there} if here.get(name) != there.get(name)):
            name = different[0]
            raise UsageError(
                f"{model.location} holds {name} as {there.get(name)}, {models[0].location} as"
                f" {here.get(name)}: no soup of such models"
            )

    def average(name: str) -> Tensor:
        total, tensor = torch.tensor(-0.0, dtype=torch.float64), torch.empty_like(first[name], device="cpu")
        for reader in readers:
            read(reader, {name: tensor})
            total = total + tensor.double()  # -0.0 + x is x, the sign of its zero too
        return (total / len(readers)).to(first[name].dtype)

    run = replace(models[0].run, name=Path(out).stem)
    metadata = {
        "format": "pt",
        "version": VERSION,
        "config": json.dumps(to_dict(run)),
        "classes": json.dumps(models[0].classes),
        "soup": json.dumps([{"location": m.location, "step": m.step, "run_id": m.run_id} for m in models]),
    }
    write_each(out, first, metadata, average)


def check_alike(models: Sequence[ModelRef]) -> None:
    """Raises UsageError, naming the first field, if their architectures differ."""
    first = models[0]
    here = flat(first.run.model)
    for model in models[1:]:
        there = flat(model.run.model)
        for field in {**here, **there}:
            if here.get(field) != there.get(field):
                raise UsageError(
                    f"no soup of different models: model.{field} is {here.get(field)} in {first.location},"
                    f" {there.get(field)} in {model.location}"
                )


def _shapes(tensors: dict[str, Tensor]) -> dict[str, str]:
    return {name: f"{tensor.dtype} {[*tensor.shape]}" for name, tensor in tensors.items()}

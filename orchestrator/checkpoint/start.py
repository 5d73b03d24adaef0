"""A model that starts from another's weights, for fine-tuning and upcycling."""

from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict
from torch.distributed.tensor import DTensor

from moe.adapt import plan_transfer, shapes_of
from moe.vit import ViT, ViTConfig
from orchestrator.checkpoint.find import agreed
from orchestrator.checkpoint.single_file import SUFFIX
from orchestrator.checkpoint.source import Source, open_source, read, tensors_in
from orchestrator.checkpoint.start_report import StartReport, by_reason
from orchestrator.errors import UsageError


def start_from(
    model: nn.Module,
    location: str,
    *,
    without: str | None = None,
    group: dist.ProcessGroup | None = None,
) -> StartReport:
    """Fills a model in place with what `location` has for it, as `moe.adapt.plan_transfer` says; the rest of
    it stays as initialised.

    All workers of `group` call it together, each with its share of one model; without a group the caller
    is alone. Shares are read as such; only what is converted is read whole.

    Args:
        location: a directory of checkpoints (the newest whole one is taken), the folder of one, or one
            `SUFFIX` file.
        without: tensors whose names begin so stay as initialised though they fit.

    Raises:
        UsageError: if nothing fits, tensors that fit have another dtype, or the folder or file is damaged.
        FileNotFoundError: if there is nothing at `location`.
    """
    source = open_source(location, group)
    there = agreed(lambda: tensors_in(source.reader), group)
    here: dict[str, Tensor] = get_model_state_dict(model)  # pyright: ignore[reportAssignmentType]
    report = _compare(source, there, here, without)
    transfer = report.transfer
    whole = {
        conversion.source: torch.empty_like(there[conversion.source], device="cpu")
        for conversion in transfer.converted.values()
    }
    read(source.reader, {name: here[name] for name in transfer.copied} | whole, group)
    for name, conversion in transfer.converted.items():
        _fill(here[name], conversion.of(whole[conversion.source]))
    return report


def start_report(config: ViTConfig, location: str, *, without: str | None = None) -> StartReport:
    """What `start_from` would do for such a model; no tensor is read. Raises as it does."""
    with torch.device("meta"):
        model = ViT(config)
    source = open_source(location)
    return _compare(source, tensors_in(source.reader), model.state_dict(), without)


def _compare(
    source: Source, there: Mapping[str, Tensor], here: Mapping[str, Tensor], without: str | None
) -> StartReport:
    """Raises UsageError if nothing fits, or tensors that fit have another dtype."""
    drawn = [name for name in here if without is not None and name.startswith(without)]
    transfer = plan_transfer(
        shapes_of({name: tensor for name, tensor in there.items() if name not in drawn}),
        shapes_of({name: tensor for name, tensor in here.items() if name not in drawn}),
    )
    initial = {**transfer.initial, **dict.fromkeys(drawn, "new, as asked")}
    transfer = replace(transfer, initial=initial)
    origins = {name: name for name in transfer.copied}
    origins |= {name: conversion.source for name, conversion in transfer.converted.items()}
    if not any(here[name].ndim > 1 for name in origins):  # vectors fit many a model
        raise UsageError(
            f"nothing in {source.location} fits the model: {'; '.join(by_reason(transfer.initial))};"
            " it must be of the same width"
        )
    dtypes = {name: (there[origin].dtype, here[name].dtype) for name, origin in origins.items()}
    if wrong := {name: f"{old} there, {new} here" for name, (old, new) in dtypes.items() if old != new}:
        raise UsageError(
            f"{source.location} holds other dtypes: {'; '.join(by_reason(wrong))}; cast them first, into a"
            f" file *{SUFFIX}"
        )
    numbers = sum(here[name].numel() for name in origins)
    return StartReport(source=source.location, step=source.step, transfer=transfer, numbers=numbers)


def _fill(target: Tensor, whole: Tensor) -> None:
    """The part of `whole` that this rank holds."""
    if isinstance(target, DTensor):
        (part,) = target.__create_chunk_list__()
        for dim, (offset, length) in enumerate(zip(part.offsets, part.sizes, strict=True)):
            whole = whole.narrow(dim, offset, length)
        target = target.to_local()
    with torch.no_grad():
        target.copy_(whole)

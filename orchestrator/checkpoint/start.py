"""Models that start from the weights, and the optimiser's state, of another model."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from moe.adapt import Rows, Transfer, plan_transfer, shapes_of
from moe.experts import is_expert
from moe.model import Model, ModelConfig
from orchestrator.checkpoint.files import (
    OPTIMIZER,
    SUFFIX,
    fill,
    fill_part,
    open_tensors,
    set_moments,
    state_of,
)
from orchestrator.checkpoint.manifest import find_checkpoint
from orchestrator.checkpoint.weights import WeightsSource, open_weights
from orchestrator.errors import UsageError

SHOWN = 5  # names that a message lists; the others are counted


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The names of classes by output: of a classifier that starts (`here`), and of the weights that it starts
    from (`there`). None: unknown.
    """

    here: tuple[str, ...] | None
    there: tuple[str, ...] | None

    @property
    def are_same(self) -> bool:
        return self.here is not None and self.here == self.there

    def rows(self, outputs: int) -> Rows | None:
        """Returns the output there of each of `outputs` here, by name; None if names are unknown. A name that
        is not unique, in lists that differ, means no output.
        """
        if self.here is None or self.there is None:
            return None
        if self.are_same:
            return range(outputs)
        once = [name for name, count in Counter(self.there).items() if count == 1]
        place = {name: self.there.index(name) for name in once}
        counts = Counter(self.here)
        rows = [place.get(name) if counts[name] == 1 else None for name in self.here]
        return [*rows, *[None] * (outputs - len(rows))]

    def __str__(self) -> str:
        """Says what becomes of the head, in a line."""
        if self.here is None or self.there is None:
            where = "of these weights" if self.there is None else "of the data"
            return f"the names of the classes {where} are unknown: outputs are taken over by number"
        if self.are_same:
            return f"the same {len(self.here)} classes"
        found = self.rows(len(self.here)) or ()
        kept = [name for name, row in zip(self.here, found, strict=True) if row is not None]
        new = [name for name, row in zip(self.here, found, strict=True) if row is None]
        if not kept:
            return (
                f"a new head: its classes are {_listed(new)}, and those of the weights {_listed(self.there)}"
            )
        rest = f"; new: {_listed(new)}" if new else ", which have another order there"
        return f"outputs are taken over by the names of classes: {_listed(kept)}{rest}"


@dataclass(frozen=True, kw_only=True)
class StartReport:
    """The tensors that a model took over from another model's weights.

    source: the checkpoint's folder, or the file.
    step: step of the source's run; None if the file does not say.
    numbers: how many numbers were copied or converted.
    classes: what outputs were compared by; None: by nothing, or no output was taken over.
    """

    source: str
    step: int | None
    transfer: Transfer
    numbers: int
    classes: Classes | None = None

    def __str__(self) -> str:
        taken = self.transfer
        converted = {name: conversion.how for name, conversion in taken.converted.items()}
        tensors = f"{len(taken.copied)} tensors as they are, {len(converted)} converted"
        step = "" if self.step is None else f", step {self.step}"
        lines = [f"started from {self.source}{step}: {tensors}, {self.numbers:,} numbers"]
        lines += [f"  converted {line}" for line in _by_reason(converted)]
        lines += [f"  as initialised {line}" for line in _by_reason(taken.initial)]
        lines += [f"  not used {_abridged(taken.unused)}"] if taken.unused else []
        lines += [f"  {self.classes}"] if self.classes else []
        return "\n".join(lines)


def start_from(
    model: Model,
    location: str,
    *,
    without: str | None = None,
    noise: float = 0.0,
    classes: Classes | None = None,
    group: dist.ProcessGroup | None = None,
) -> StartReport:
    """Fills a model in place with the weights at `location` that fit, as `moe.adapt.plan_transfer` decides;
    the other tensors stay as initialised.

    All workers of `group` call it together, each with its share of one model; without a group the caller
    is alone. Each worker reads its share; tensors that are converted are read whole.

    location: a directory of checkpoints, of which the newest whole one is taken, the folder of a checkpoint,
        or a `SUFFIX` file.
    without: tensors whose names begin with this stay as initialised though they fit.
    noise: a copy of an MLP is added to this times what the expert was initialised with.
    classes: of a classifier; outputs are taken over by name. None: by number, and all or none.

    Raises:
        UsageError: if nothing fits, tensors that fit have another dtype, or the folder or file is damaged.
        FileNotFoundError: if there is nothing at `location`.
    """
    with open_weights(location, group) as source:
        here = model.state_dict()
        report = _compare(source, here, without, model.config, classes)
        transfer, there = report.transfer, source.reader.tensors()
        whole = {
            conversion.source: torch.empty_like(there[conversion.source], device="cpu")
            for conversion in transfer.converted.values()
        }
        fill({name: here[name] for name in transfer.copied} | whole, source.reader, group)
    for name, conversion in transfer.converted.items():
        kept = noise if is_expert(name) and not is_expert(conversion.source) else 0.0
        made = conversion.of(whole[conversion.source])
        fill_part(here[name], _keeping(made, conversion.new, here[name]), kept)
    return report


def load_moments(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    started: StartReport,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fills the optimiser's state of the tensors that `start_from` took over; each copy of an MLP gets a copy
    of its state. The state of other tensors is that before the first update.

    Raises:
        UsageError: if there is no state of such an optimiser beside the weights, or it is damaged.
    """
    prefix, wanted, transfer = f"{OPTIMIZER}state.", state_of(model, optimizer), started.transfer
    location, same, whole, made = started.source, dict[str, Tensor](), dict[str, Tensor](), []
    manifest = None if location.endswith(SUFFIX) else find_checkpoint(location, group, whole=False)[1]
    if manifest is not None and manifest.has_optimizer():
        with open_tensors(location, list(manifest.files), group, manifest) as reader:
            there = reader.tensors()
            for name, tensor in wanted.items():
                param, _, kind = name.removeprefix(prefix).rpartition(".")
                source = conversion.source if (conversion := transfer.converted.get(param)) else param
                key = f"{prefix}{source}.{kind}"
                shape = there[key].shape if name.startswith(prefix) and key in there else None
                if conversion and shape in ((), there[source].shape):  # a factored state has another
                    whole[key] = torch.empty_like(there[key], device="cpu")
                    made.append((tensor, key, conversion if shape else None))
                elif param in transfer.copied and shape == tensor.shape:
                    same[key] = tensor
            fill(same | whole, reader, group)
    if not same:
        raise UsageError(f"{location} holds no state of the optimiser that this run has")
    for tensor, key, conversion in made:
        state = whole[key]
        fill_part(tensor, _keeping(conversion.of(state), conversion.new, tensor) if conversion else state)
    set_moments(model, optimizer, wanted)


def start_report(
    config: ModelConfig, location: str, *, without: str | None = None, classes: Classes | None = None
) -> StartReport:
    """Returns the report of `start_from` for such a model, without reading tensors. Raises as it does."""
    with torch.device("meta"):
        model = config.build(seed=None)
    with open_weights(location) as source:
        return _compare(source, model.state_dict(), without, config, classes)


def _keeping(made: Tensor, rows: Sequence[int], target: Tensor) -> Tensor:
    """Returns a whole tensor with these rows of the target, which may be sharded."""
    if not rows:
        return made
    whole = target.full_tensor() if isinstance(target, DTensor) else target
    return made.index_copy(0, torch.tensor(rows), whole.detach()[list(rows)].to(made))


def _compare(
    source: WeightsSource,
    model: Mapping[str, Tensor],
    without: str | None,
    config: ModelConfig,
    classes: Classes | None,
) -> StartReport:
    """Raises UsageError if nothing fits, or tensors that fit have another dtype."""
    saved = source.reader.tensors()
    excluded = [name for name in model if without is not None and name.startswith(without)]
    transfer = plan_transfer(
        shapes_of({name: tensor for name, tensor in saved.items() if name not in excluded}),
        shapes_of({name: tensor for name, tensor in model.items() if name not in excluded}),
        config.starts_from,
        config.head,
        classes.rows(config.num_outputs()) if classes else None,
    )
    initial = {**transfer.initial, **dict.fromkeys(excluded, "new, as asked")}
    transfer = replace(transfer, initial=initial)
    origins = {name: name for name in transfer.copied}
    origins |= {name: conversion.source for name, conversion in transfer.converted.items()}
    if not any(model[name].ndim > 1 for name in origins):  # vectors fit many models
        raise UsageError(
            f"nothing in {source.location} fits the model: {'; '.join(_by_reason(transfer.initial))};"
            " it must be of the same width"
        )
    dtypes = {name: (saved[origin].dtype, model[name].dtype) for name, origin in origins.items()}
    if wrong := {
        name: f"{old} in the file, {new} in the model" for name, (old, new) in dtypes.items() if old != new
    }:
        raise UsageError(
            f"{source.location} holds other dtypes: {'; '.join(_by_reason(wrong))}; cast them first, into a"
            f" file *{SUFFIX}"
        )
    numbers = sum(model[name].numel() for name in origins)
    of_head = [name for name in (*origins, *transfer.initial) if name.startswith(f"{config.head}.")]
    compared = any(name in saved and name not in excluded for name in of_head)
    return StartReport(
        source=source.location,
        step=source.step,
        transfer=transfer,
        numbers=numbers,
        classes=classes if compared else None,
    )


def _listed(names: Sequence[str]) -> str:
    """Returns the first names and the number of all: ``3 (cat, dog, owl)``."""
    return f"{len(names)} ({', '.join(names[:3])}{', ..' if len(names) > 3 else ''})"


def _abridged(names: Iterable[str]) -> str:
    """Returns names as one short text: ``blocks.1,3.mlp.experts.w_in_EDF, head.weight``."""
    blocks_of: dict[str, list[str]] = {}
    for name in names:
        match = re.fullmatch(r"blocks\.(\d+)\.(.+)", name)
        blocks_of.setdefault(match[2] if match else name, []).append(match[1] if match else "")
    words = [f"blocks.{','.join(found)}.{name}" if found[0] else name for name, found in blocks_of.items()]
    return ", ".join(_shortened(words))


def _by_reason(reasons: Mapping[str, str]) -> list[str]:
    """Returns a line for each reason: the names that it applies to, and the reason."""
    names: dict[str, list[str]] = {}
    for name, reason in reasons.items():
        names.setdefault(reason, []).append(name)
    return _shortened([f"{_abridged(alike)}: {reason}" for reason, alike in names.items()])


def _shortened(words: list[str]) -> list[str]:
    return words if len(words) <= SHOWN else [*words[:SHOWN], f"and {len(words) - SHOWN} more"]

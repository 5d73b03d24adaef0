"""Weights apart from their run: models that start from them, exports to a file or folder, and readers."""

import hashlib
import json
import os
import re
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_model_state_dict

from moe.adapt import Transfer, plan_transfer, shapes_of
from moe.load import CONFIG, WEIGHTS
from moe.model import Model, ModelConfig
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.card import CARD, PREPROCESSOR, model_card, preprocessor
from orchestrator.checkpoint.files import (
    OPTIMIZER,
    SUFFIX,
    WeightsReader,
    fill,
    fill_part,
    open_tensors,
    set_moments,
    state_of,
)
from orchestrator.checkpoint.manifest import (
    CheckpointManifest,
    DamagedError,
    damaged_error,
    find_checkpoint,
    on_first_rank,
)
from orchestrator.codec import read_config, to_dict
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.plugins import save_plugins

VERSION = "1"  # version of the metadata in an exported file
SHOWN = 5  # names that a message lists; the others are counted


class WeightsSource(NamedTuple):
    """Weights to read.

    location: the checkpoint's folder, or the file.
    step: the run's step; None if the file does not say.
    manifest: None if `location` is a file.
    """

    location: str
    step: int | None
    reader: WeightsReader
    manifest: CheckpointManifest | None = None


@contextmanager
def open_weights(location: str, group: dist.ProcessGroup | None = None) -> Iterator[WeightsSource]:
    """Opens the weights of a checkpoint, as `find_checkpoint` finds it, or of a `SUFFIX` file, on all workers
    of `group` alike. Each file of a checkpoint is hashed as it is read.

    Raises:
        UsageError: if it is damaged, or not a safetensors file.
        FileNotFoundError: if there is nothing.
    """
    location, manifest = storage.absolute(location), None
    if location.endswith(SUFFIX):
        folder, _, name = location.rpartition("/")
        written = on_first_rank(lambda: read_metadata(location), group).get("step", "")
        # Other programs may write anything there.
        names, step = [name], int(written) if written.isdecimal() else None
    else:
        whole = not on_first_rank(lambda: manifests.is_there(location), group)  # to find the newest whole one
        location, manifest = find_checkpoint(location, group, whole=whole)
        folder, names, step = location, manifest.weights(), manifest.step
    try:
        with open_tensors(folder, names, group, manifest) as reader:
            yield WeightsSource(location, step, reader, manifest)
    except DamagedError as error:
        raise damaged_error(location, error) from None
    except Exception:
        # A damaged header may look like another model, or be unreadable in any way.
        if manifest:
            find_checkpoint(location, group)
        raise


def read_metadata(location: str) -> dict[str, str]:
    """Returns the metadata of a safetensors file, local or on S3, without reading its tensors.

    Raises:
        UsageError: if it is not a safetensors file.
        FileNotFoundError: if there is none.
    """
    try:
        with storage.open_to_read(location) as file:
            length = int.from_bytes(file.read_at(8, 0), "little")
            header = file.read_at(length, 8) if length < file.size() else b""
        metadata = json.loads(header).get("__metadata__", {})
        if not all(isinstance(value, str) for value in metadata.values()):
            raise ValueError
    except (ValueError, AttributeError, RecursionError):
        raise UsageError(f"{location} is not a safetensors file") from None
    return metadata


def write_file(path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Writes a local safetensors file, whole or not at all. Raises OSError."""
    temporary = Path(f"{path}.{uuid.uuid4().hex}.tmp")
    storage.make_folder(os.path.dirname(path))
    try:
        temporary.touch()
        mode = temporary.stat().st_mode
        contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
        try:
            save_file(contiguous, temporary, dict(metadata))
        except SafetensorError as error:
            raise OSError(f"writing {path} failed: {error}") from error
        temporary.chmod(mode)  # the library makes it readable for its owner only
        storage.flush(str(temporary))
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def export(location: str, out: str, *, fresh: bool = False) -> None:
    """Writes the weights of a checkpoint, as `find_checkpoint` finds it, bit for bit: see `write_export`.

    Raises:
        UsageError: if `out` is not local, or exists and is not to be replaced (`fresh`).
        OSError: if reading or writing fails.
    """
    check_export(out, fresh=fresh)
    with open_weights(location) as source:
        tensors = source.reader.tensors("cpu")
        fill(tensors, source.reader)
    assert source.manifest
    run = read_config(RunConfig, source.manifest.config)
    digest = hashlib.sha256(manifests.encode(source.manifest)).hexdigest()
    more = {"step": str(source.step), "manifest_sha256": digest}
    if origin := _origin(run.train.init_from):
        more["initial_source"] = origin
    progress = source.manifest.progress
    metrics = progress.get("metrics", {}) if progress.get("reported") == source.step else {}
    metrics = {name: value for name, value in metrics.items() if name.startswith("val/")}
    write_export(out, tensors, run, classes=classes_of_run(run), more=more, metrics=metrics, fresh=fresh)


def _origin(location: str | None) -> str:
    """The `source` that the weights a run started from were imported with; empty if there is none."""
    try:
        metadata = read_metadata(location) if location and location.endswith(SUFFIX) else {}
    except (UsageError, OSError):
        return ""
    return metadata.get("source") or metadata.get("initial_source", "")


def check_export(out: str, *, fresh: bool) -> None:
    """Raises UsageError if `out` is not local, or exists and is not to be replaced (`fresh`)."""
    if not storage.is_local(out):
        raise UsageError(f"{out}: weights are exported to a local file or folder")
    is_file = out.endswith(SUFFIX)
    if storage.size(out if is_file else f"{out}/{CONFIG}") is not None and not fresh:
        raise UsageError(f"{out} {'exists' if is_file else 'holds an export'} already; `fresh` replaces it")


def write_export(
    out: str,
    tensors: Mapping[str, Tensor],
    run: RunConfig,
    *,
    classes: Sequence[str] | None,
    more: Mapping[str, str],
    metrics: Mapping[str, float] | None = None,
    fresh: bool = False,
) -> None:
    """Writes weights into a local `SUFFIX` file, or into a local folder as `WEIGHTS`, with `CONFIG`, plugins,
    `PREPROCESSOR` and a model card that states the `metrics` beside it.

    The file's metadata holds `config` (of the run, JSON), `classes` (JSON, null if they are unknown),
    `version` and what is in `more`: the run's `step`, `manifest_sha256` of its checkpoint and the
    `initial_source` of the weights that it started from, or the `source` of an import.

    Raises:
        UsageError: if `out` is not local, or exists and is not to be replaced (`fresh`).
        OSError: if writing fails.
    """
    check_export(out, fresh=fresh)
    file, config = (out, None) if out.endswith(SUFFIX) else (f"{out}/{WEIGHTS}", f"{out}/{CONFIG}")
    metadata = {
        "format": "pt",  # the library's convention for torch's tensors
        "version": VERSION,
        "config": json.dumps(to_dict(run)),
        "classes": json.dumps(classes),
        **more,
    }
    if config:
        for name in (CONFIG, CARD):
            storage.delete(f"{out}/{name}")  # they must never describe other weights
    write_file(file, tensors, metadata)
    if config:
        content = {
            "version": VERSION,
            "name": run.name,
            **more,
            **run.data.eval_settings(),
            "classes": classes,
            "plugins": run.plugins,
            "model": to_dict(run.model),
        }
        if "step" in more:
            content["step"] = int(more["step"])
        save_plugins(out, run.plugins)
        source = json.loads(more.get("source") or more.get("initial_source", "null"))
        card = model_card(run, classes=classes, metrics=metrics or {}, metadata=more, source=source)
        storage.write_bytes(f"{out}/{CARD}", card.encode())
        beside = json.dumps(preprocessor(run.model.image_size, run.data), indent=1)
        storage.write_bytes(f"{out}/{PREPROCESSOR}", beside.encode())
        storage.write_bytes(config, json.dumps(content, indent=1).encode())


def classes_of_run(run: RunConfig) -> tuple[str, ...] | None:
    """Returns the classes of the data set that a model was trained on; None if the data set is gone, or
    another one has taken its place.
    """
    try:
        names = open_manifest(run.data.path).classes
    except (UsageError, OSError):
        return None
    return names if len(names) == run.model.num_classes else None


@dataclass(frozen=True, kw_only=True)
class StartReport:
    """The tensors that a model took over from another model's weights.

    source: the checkpoint's folder, or the file.
    step: step of the source's run; None if the file does not say.
    numbers: how many numbers were copied or converted.
    """

    source: str
    step: int | None
    transfer: Transfer
    numbers: int

    def __str__(self) -> str:
        taken = self.transfer
        converted = {name: conversion.how for name, conversion in taken.converted.items()}
        tensors = f"{len(taken.copied)} tensors as they are, {len(converted)} converted"
        step = "" if self.step is None else f", step {self.step}"
        lines = [f"started from {self.source}{step}: {tensors}, {self.numbers:,} numbers"]
        lines += [f"  converted {line}" for line in _by_reason(converted)]
        lines += [f"  as initialised {line}" for line in _by_reason(taken.initial)]
        lines += [f"  not used {_abridged(taken.unused)}"] if taken.unused else []
        return "\n".join(lines)


def start_from(
    model: Model,
    location: str,
    *,
    without: str | None = None,
    noise: float = 0.0,
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

    Raises:
        UsageError: if nothing fits, tensors that fit have another dtype, or the folder or file is damaged.
        FileNotFoundError: if there is nothing at `location`.
    """
    with open_weights(location, group) as source:
        here: dict[str, Tensor] = get_model_state_dict(model)  # pyright: ignore[reportAssignmentType]
        report = _compare(source, here, without, model.config.starts_from)
        transfer, there = report.transfer, source.reader.tensors()
        whole = {
            conversion.source: torch.empty_like(there[conversion.source], device="cpu")
            for conversion in transfer.converted.values()
        }
        fill({name: here[name] for name in transfer.copied} | whole, source.reader, group)
    for name, conversion in transfer.converted.items():
        kept = noise if conversion.source != name else 0.0
        fill_part(here[name], conversion.of(whole[conversion.source]), kept)
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
                    made.append((tensor, key, conversion.of if shape else torch.clone))
                elif param in transfer.copied and shape == tensor.shape:
                    same[key] = tensor
            fill(same | whole, reader, group)
    if not same:
        raise UsageError(f"{location} holds no state of the optimiser that this run has")
    for tensor, key, of in made:
        fill_part(tensor, of(whole[key]))
    set_moments(model, optimizer, wanted)


def start_report(config: ModelConfig, location: str, *, without: str | None = None) -> StartReport:
    """Returns the report of `start_from` for such a model, without reading tensors. Raises as it does."""
    with torch.device("meta"):
        model = config.build(seed=None)
    with open_weights(location) as source:
        return _compare(source, model.state_dict(), without, config.starts_from)


def _compare(
    source: WeightsSource, model: Mapping[str, Tensor], without: str | None, below: str
) -> StartReport:
    """Raises UsageError if nothing fits, or tensors that fit have another dtype."""
    saved = source.reader.tensors()
    excluded = [name for name in model if without is not None and name.startswith(without)]
    transfer = plan_transfer(
        shapes_of({name: tensor for name, tensor in saved.items() if name not in excluded}),
        shapes_of({name: tensor for name, tensor in model.items() if name not in excluded}),
        below,
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
    return StartReport(source=source.location, step=source.step, transfer=transfer, numbers=numbers)


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

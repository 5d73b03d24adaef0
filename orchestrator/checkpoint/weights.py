"""Weights apart from their run: readers, and exports to a file or folder."""

import hashlib
import json
import os
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from moe.exported import CONFIG, WEIGHTS
from moe.overrides import RoutingOverrides
from moe.signature import SIGNATURE, Signature, read_signature
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.card import CARD, PREPROCESSOR, TRAINED_GROUP, model_card, preprocessor
from orchestrator.checkpoint.files import (
    EMA,
    OPTIMIZER,
    SUFFIX,
    WeightsReader,
    fill,
    open_tensors,
    read_header,
)
from orchestrator.checkpoint.manifest import (
    CheckpointManifest,
    DamagedError,
    damaged_error,
    find_checkpoint,
    on_first_rank,
)
from orchestrator.checkpoint.statistics import with_own_statistics
from orchestrator.codec import to_dict
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.data.preparation import AS_IT_IS, Preparation
from orchestrator.errors import UsageError
from orchestrator.plugins import save_plugins
from orchestrator.records import at_its_place, read_run

VERSION = "1"  # version of the metadata in an exported file


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
    """Returns the metadata of a safetensors file, wherever it is, without reading its tensors.

    Raises:
        UsageError: if it is not a safetensors file.
        FileNotFoundError: if there is none.
    """
    try:
        metadata = json.loads(read_header(location)[0][8:]).get("__metadata__", {})
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


def export(
    location: str,
    out: str,
    *,
    ema: bool = False,
    images_per_group: int | None = None,
    fresh: bool = False,
) -> None:
    """Writes the weights of a checkpoint, as `find_checkpoint` finds it, bit for bit: see `write_export`.

    ema: writes the average of the weights in their place; weights that were not trained are its own.
    images_per_group: see `in_groups`; metrics were measured in the model's own groups, and are left out.

    Raises:
        UsageError: if `out` is not local, or exists and is not to be replaced (`fresh`); if there is no
            average; as `in_groups`.
        OSError: if reading or writing fails.
    """
    check_export(out, fresh=fresh)
    with open_weights(location) as source:
        tensors = source.reader.tensors("cpu")
        fill(tensors, source.reader)
    assert source.manifest
    run = read_run(at_its_place(source.manifest.config, source.location))
    digest = hashlib.sha256(manifests.encode(source.manifest)).hexdigest()
    more = {"step": str(source.step), "manifest_sha256": digest}
    if ema:
        _fill_average(tensors, source)
        tensors = with_own_statistics(tensors, run)
        more["ema"] = json.dumps(to_dict(run.train.ema))
    if origin := _imported_from(run.train.init_from):
        more["initial_source"] = origin
    progress = source.manifest.progress
    metrics = progress.get("metrics", {}) if progress.get("reported") == source.step else {}
    measured = "val_ema/" if ema else "val/"
    metrics = {n.replace(measured, "val/"): value for n, value in metrics.items() if n.startswith(measured)}
    known = source.manifest.signature
    signature = read_signature(known) if known else signature_of_run(run)
    trained = run.model.images_per_group
    run, signature = in_groups(run, signature, images_per_group)
    if run.model.images_per_group != trained:
        more[TRAINED_GROUP], metrics = str(trained), {}
    write_export(out, tensors, run, signature=signature, more=more, metrics=metrics, fresh=fresh)


def in_groups(run: RunConfig, signature: Signature, images: int | None) -> tuple[RunConfig, Signature]:
    """Returns the config and the signature of a trained model with so many images routed together, which
    divide its own number; None: as they are. Routers have no weights that depend on it.

    Raises:
        UsageError: if they do not, or the model is dense.
    """
    if images is None:
        return run, signature
    point = RoutingOverrides(images_per_group=images)
    try:
        run.model.check_overrides(point)
        run = replace(run, model=run.model.at_point(point))
    except ValueError as error:
        raise UsageError(f"{run.name}: {error}") from None
    return run, replace(signature, images_per_group=images)


def _fill_average(tensors: Mapping[str, Tensor], source: WeightsSource) -> None:
    """Fills the tensors that were trained with their averages. Raises UsageError if there are none."""
    assert source.manifest
    names = list(source.manifest.files)
    with open_tensors(source.location, names, manifest=source.manifest) as reader:
        there = reader.tensors()
        key_of = {name: f"{OPTIMIZER}state.{name}.{EMA}" for name in tensors}
        found = {key: tensors[name] for name, key in key_of.items() if key in there}
        if not found:
            raise UsageError(
                f"{source.location} holds no average of the weights: train with train.ema, and keep the"
                " optimiser's state"
            )
        fill(found, reader)


def _imported_from(location: str | None) -> str:
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
    classes: Sequence[str] | None = None,
    signature: Signature | None = None,
    more: Mapping[str, str],
    metrics: Mapping[str, float] | None = None,
    fresh: bool = False,
) -> None:
    """Writes weights into a local `SUFFIX` file, or into a local folder as `WEIGHTS`, with `CONFIG`, plugins,
    `PREPROCESSOR` and a model card that states the `metrics` beside it.

    The file's metadata holds `config` (of the run, JSON), `signature` (JSON), `version` and what is in
    `more`: the run's `step`, `manifest_sha256` of its checkpoint, `ema` if the average was written, and the
    `initial_source` of the weights that the run started from, or the `source` of an import.

    signature: of the model; by default that of the run with these `classes`, which may be unknown.

    Raises:
        UsageError: if `out` is not local, or exists and is not to be replaced (`fresh`).
        OSError: if writing fails.
    """
    check_export(out, fresh=fresh)
    signature = signature or signature_of(run, classes=classes)
    file, config = (out, None) if out.endswith(SUFFIX) else (f"{out}/{WEIGHTS}", f"{out}/{CONFIG}")
    metadata = {
        "format": "pt",  # the library's convention for torch's tensors
        "version": VERSION,
        "config": json.dumps(to_dict(run)),
        SIGNATURE: signature.to_json(),
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
            SIGNATURE: to_dict(signature),
            "plugins": run.plugins,
            "model": to_dict(run.model),
        }
        if "step" in more:
            content["step"] = int(more["step"])
        save_plugins(out, run.plugins)
        source = json.loads(more.get("source") or more.get("initial_source", "null"))
        card = model_card(run, signature, metrics=metrics or {}, metadata=more, source=source)
        storage.write_bytes(f"{out}/{CARD}", card.encode())
        if signature.image_size:
            beside = json.dumps(preprocessor(signature.image_size, run.data), indent=1)
            storage.write_bytes(f"{out}/{PREPROCESSOR}", beside.encode())
        storage.write_bytes(config, json.dumps(content, indent=1).encode())


def signature_of(
    run: RunConfig,
    *,
    classes: Sequence[str] | None = None,
    preparation: Preparation = AS_IT_IS,
    origin: tuple[str, str] = ("", ""),
) -> Signature:
    """Returns the signature of a run's model.

    preparation: of the images that it learned from.
    origin: source and licence of weights that were made elsewhere.
    """
    return Signature(
        image_size=run.model.image_side(),
        **{name.removeprefix("eval_"): value for name, value in run.data.eval_settings().items()},
        background=preparation.background,
        white=preparation.white,
        output=run.task.output,
        classes=tuple(classes) if classes else None,
        images_per_group=run.model.images_per_group,
        source=origin[0],
        licence=origin[1],
    )


def signature_of_run(run: RunConfig) -> Signature:
    """Returns the signature of the model of a run, as its data set says: without names of classes if the data
    set is gone, or another has taken its place.
    """
    origin = _origin(run.train.init_from)
    try:
        manifest = open_manifest(run.data.path)
    except (UsageError, OSError):
        return signature_of(run, origin=origin)
    names = manifest.classes
    return signature_of(
        run,
        classes=names if run.model.num_outputs() in (0, len(names)) else None,
        preparation=Preparation.of(manifest),
        origin=origin,
    )


def _origin(start: str | None) -> tuple[str, str]:
    """Returns source and licence of the weights that a run began with, as their own signature says."""
    if not start:
        return "", ""
    try:
        is_file = start.endswith(SUFFIX)
        tree = (
            read_metadata(start)[SIGNATURE] if is_file else find_checkpoint(start, whole=False)[1].signature
        )
        found = read_signature(tree)
    except (UsageError, OSError, ValueError, KeyError):  # gone, or of an earlier version
        return "", ""
    return found.source, found.licence

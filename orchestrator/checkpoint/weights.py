"""Weights apart from their run: readers, a file of them, and the signature of their model."""

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

from moe.overrides import RoutingOverrides
from moe.signature import SIGNATURE, Signature, read_signature
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.files import SUFFIX, WeightsReader, open_tensors, read_header
from orchestrator.checkpoint.manifest import (
    CheckpointManifest,
    DamagedError,
    damaged_error,
    find_checkpoint,
    on_first_rank,
)
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.data.preparation import AS_IT_IS, Preparation
from orchestrator.errors import UsageError

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


def is_import(location: str) -> bool:
    """Returns whether a file was made from weights of another project."""
    return location.endswith(SUFFIX) and "source" in read_metadata(location)


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

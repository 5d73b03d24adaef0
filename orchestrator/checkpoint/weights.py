"""Weights handed on, in one process: a checkpoint's as a model, as one safetensors file, or as a folder that
`moe.load` reads with torch alone.
"""

import hashlib
import json

import torch
from torch import nn

from moe.load import CONFIG, WEIGHTS
from moe.vit import ViT, ViTConfig
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.find import located
from orchestrator.checkpoint.manifest import Manifest
from orchestrator.checkpoint.single_file import SUFFIX, read_header, write
from orchestrator.checkpoint.source import read, tensors_in, weights_reader
from orchestrator.checkpoint.start import start_from
from orchestrator.checkpoint.state import load
from orchestrator.codec import from_dict, to_dict
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError

VERSION = "1"  # of the metadata in an exported file


def load_newest(location: str, model: nn.Module) -> Manifest:
    """Fills `model` with the weights of a checkpoint, or the newest that are whole in a directory of them.

    Raises as `located` and `load` do.
    """
    folder, manifest = located(location)
    load(folder, manifest, model)
    return manifest


def export(location: str, out: str, *, force: bool = False) -> None:
    """Writes the weights of a checkpoint, as `located` finds it, into the local file `out`, bit for bit.
    Meanwhile it holds one copy of them.

    Beside them lie `config` (of the run, JSON), `step`, `classes` (JSON, null if they are unknown),
    `manifest_sha256` (of the checkpoint's manifest) and `version`.

    Raises:
        UsageError: if `out` is no name for it, or is there already and not to be replaced (`force`).
        OSError: if reading or writing fails.
    """
    if not (storage.is_local(out) and out.endswith(SUFFIX)):
        raise UsageError(
            f"{out}: weights are exported to a local file that ends in {SUFFIX}, or to a local folder (--out"
            " FOLDER)"
        )
    if storage.size(out) is not None and not force:
        raise UsageError(f"{out} exists already; --force replaces it")
    folder, manifest = located(location)
    reader = weights_reader(folder, manifest)
    tensors = {name: torch.empty_like(held, device="cpu") for name, held in tensors_in(reader).items()}
    read(reader, tensors)
    metadata = {
        "format": "pt",  # torch's tensors, by convention of the library
        "version": VERSION,
        "config": json.dumps(manifest.config),
        "step": str(manifest.step),
        "classes": json.dumps(class_names(from_dict(RunConfig, manifest.config))),
        "manifest_sha256": hashlib.sha256(manifests.encode(manifest)).hexdigest(),
    }
    write(out, tensors, metadata)


def export_folder(location: str, out: str, *, force: bool = False) -> None:
    """Writes the weights of a checkpoint as `WEIGHTS` into the local folder `out`, as `export` does, and then
    `CONFIG`: what is needed to use them (`model`, `classes` if they are known, `eval_crop`) and where they
    are from.

    Raises as `export`.
    """
    if not storage.is_local(out):
        raise UsageError(f"{out}: weights are exported to a local folder")
    config = storage.join(out, CONFIG)
    if storage.size(config) is not None and not force:
        raise UsageError(f"{out} holds an export already; --force replaces it")
    storage.delete(config)  # it must never describe other weights
    export(location, storage.join(out, WEIGHTS), force=True)
    metadata = read_header(storage.join(out, WEIGHTS)).metadata
    run = from_dict(RunConfig, json.loads(metadata["config"]))
    content = {
        "version": VERSION,
        "name": run.name,
        "step": int(metadata["step"]),
        "manifest_sha256": metadata["manifest_sha256"],
        "eval_crop": run.data.eval_crop,
        "classes": json.loads(metadata["classes"]),
        "model": to_dict(run.model),
    }
    storage.write_bytes(config, json.dumps(content, indent=1).encode())


def class_names(run: RunConfig) -> tuple[str, ...] | None:
    """Of the data set that a model was trained on; None if it is gone, or another is in its place."""
    try:
        names = open_manifest(run.data.path).classes
    except (UsageError, OSError):
        return None
    return names if len(names) == run.model.num_classes else None


def load_exported(location: str) -> ViT:
    """The model of a file that `export` wrote, in evaluation mode; `location` may be on S3.

    Raises:
        UsageError: if the file is not whole, or not one of `export`.
        FileNotFoundError: if there is none.
    """
    metadata = read_header(storage.absolute(location)).metadata
    if metadata.get("version") != VERSION:
        raise UsageError(
            f"{location} is no export of version {VERSION}: its metadata is {metadata or 'empty'}"
        )
    with torch.device("meta"):
        model = ViT(from_dict(ViTConfig, json.loads(metadata["config"])["model"]))
    model.to_empty(device="cpu")
    report = start_from(model, location)
    if len(report.transfer.copied) < len(model.state_dict()) or report.transfer.unused:
        raise UsageError(f"{location} does not hold the model that its config describes; {report}")
    return model.eval()

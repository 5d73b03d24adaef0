"""Exports: the weights of a checkpoint as a file, or as a folder with a card, that need no run."""

import hashlib
import json
from collections.abc import Mapping, Sequence

from torch import Tensor

from moe.exported import CONFIG, WEIGHTS
from moe.signature import SIGNATURE, Signature, read_signature
from orchestrator import storage
from orchestrator.checkpoint import manifest as manifests
from orchestrator.checkpoint.card import CARD, PREPROCESSOR, TRAINED_GROUP, model_card, preprocessor
from orchestrator.checkpoint.files import EMA, OPTIMIZER, SUFFIX, fill, open_tensors
from orchestrator.checkpoint.statistics import with_own_statistics
from orchestrator.checkpoint.weights import (
    VERSION,
    WeightsSource,
    in_groups,
    open_weights,
    read_metadata,
    signature_of,
    signature_of_run,
    write_file,
)
from orchestrator.codec import to_dict
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.plugins import save_plugins
from orchestrator.records import at_its_place, read_run


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

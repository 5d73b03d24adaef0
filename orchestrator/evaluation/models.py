"""Finds trained models by every name that a user may have for them, and loads them."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from moe.load import WEIGHTS
from moe.model import Model
from orchestrator import storage
from orchestrator.checkpoint.files import SUFFIX
from orchestrator.checkpoint.manifest import MANIFEST, find_checkpoint, steps
from orchestrator.checkpoint.weights import classes_of_run, read_metadata, start_from
from orchestrator.codec import read_config
from orchestrator.config import DataConfig, RunConfig, ScaleConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.tracking.find import RunInfo, children, find_run, find_sweep, newest_of
from orchestrator.tracking.registry import checkpoint_of
from orchestrator.tracking.store import Tracking, open_reader, store_uri
from orchestrator.training.loop import set_threads
from orchestrator.training.run_directory import (
    CONFIG,
    SWEEP,
    read_result,
    read_sweep,
    run_directory,
)

IMAGES_PER_PASS = 64  # the default of --batch-size in all commands that use trained models
MODEL_REF_HELP = (
    "a run below the storage, a folder of checkpoints, an exported file, models:/NAME@ALIAS, runs:/ID or"
    " sweep:NAME"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """A trained model: the place of its weights, and the facts about it."""

    name: str  # the name of its run, with the step if a step was named or stands in a file
    location: str  # the folder of its checkpoint, or an exported file
    run: RunConfig  # as it was trained
    step: int  # of training; -1 if unknown
    classes: tuple[str, ...] | None = None  # that it learned, by label; None if unknown
    run_id: str | None = None  # of MLflow; None if MLflow does not know the run

    def load(self, device: torch.device | None = None) -> Model:
        """Returns the model in evaluation mode, and sets torch's number of threads for it.

        Raises:
            UsageError: if the weights are damaged or incomplete.
        """
        set_threads(self.run.model, IMAGES_PER_PASS)
        try:
            with torch.device("meta"):
                model = self.run.model.build(seed=None)
        # A size beyond 64 bits is a TypeError.
        except (RuntimeError, TypeError) as error:
            raise UsageError(f"{self.location} describes a model that cannot be built: {error}") from None
        model.to_empty(device=device or torch.device("cpu"))
        report = start_from(model, self.location)
        if len(report.transfer.copied) < len(model.state_dict()) or report.transfer.unused:
            raise UsageError(f"{self.location} does not hold the model that its config describes; {report}")
        return model.eval()

    def run_on(self, path: str, *, batch_size: int) -> RunConfig:
        """The config of this model's run with other images, in one process and without augmentation.

        Raises:
            UsageError: if the batch does not hold whole routing groups.
        """
        was = self.run.data
        try:
            data = DataConfig(
                path=path,
                batch_size=batch_size,
                eval_resize=was.eval_resize,
                eval_crop=was.eval_crop,
                cache_gb=was.cache_gb,
            )
            train = replace(self.run.train, microbatch=None)
            return replace(self.run, data=data, scale=ScaleConfig(), train=train)
        except ValueError as error:
            raise UsageError(f"`batch_size` {batch_size}: {error}") from None

    def check_classes(self, path: str) -> None:
        """Checks that the labels of a data set mean the classes that this model learned.

        Unknown classes are compared by their number alone, with a warning.

        Raises:
            UsageError: if the data set has other classes, or has them in another order.
        """
        classes = open_manifest(path).classes
        if not self.run.task.classifies:
            return
        if self.classes is None:
            outputs = self.run.model.num_classes
            fits, known = len(classes) <= outputs, f"unknown classes ({outputs} outputs)"
            log.warning(
                f"The classes of {self.name} are unknown, because {self.run.data.path} is missing or has"
                f" changed: the labels of {path} are compared by number."
            )
        else:
            fits, known = classes == self.classes[: len(classes)], f"the classes {_first(self.classes)}"
        if not fits:
            raise UsageError(
                f"{path} has the classes {_first(classes)}, but {self.name} learned {known}: its predictions"
                " do not compare with these labels. Pack the images with the model's classes in its order,"
                " or fine-tune the model on this data: jobs/finetune.py"
            )


def load_model(reference: str, *, root: str | None = None, tracking_uri: str | None = None) -> Model:
    """Returns the model that `reference` names, in evaluation mode: ``model(images in -1 .. 1).logits``.

    All commands find models by the same rule.

    Args:
        reference: a run below `root`, a folder of checkpoints, an exported file, or
            ``models:/NAME@ALIAS``, ``models:/NAME/VERSION`` or ``runs:/ID`` of MLflow.
        root: the storage, as `--storage` of the commands; by default ``$MOE_FRONTIER_HOME``, else
            ``~/moe-frontier``.
        tracking_uri: the MLflow store; by default MLFLOW_TRACKING_URI, else ``mlflow.db`` below `root`.

    Raises:
        UsageError: if there is no such model, or its weights are damaged.
    """
    location = model_location(reference, root=root, tracking_uri=tracking_uri)
    try:
        return read_model(location, whole=False).load()
    except UsageError:
        # Weights that are damaged: the checkpoint before may be whole.
        return read_model(location).load()


def find_models(reference: str, *, root: str, tracking: Tracking) -> list[ModelRef]:
    """The models that `reference` means: a single model, or the finished trials of a sweep.

    Raises:
        UsageError: if there is no such model, or its weights are damaged.
    """
    name = reference.removeprefix("sweep:")
    if name != reference:
        models = _models_below(storage.join(root, name), tracking)
        if models is None:
            runs = children(tracking, find_sweep(tracking, name).run_id)
            trials = [run for run in runs if run.tags.get("role") == "trial"]
            models = [_model_of(run) for run in trials if run.status == "FINISHED"]
        if not models:
            raise UsageError(f"{reference} has no finished trial")
        return models
    if reference.startswith("runs:/"):
        return [_model_of(find_run(tracking, reference.removeprefix("runs:/")))]
    model = read_model(model_location(reference, root=root, tracking_uri=tracking.uri))
    run = newest_of(tracking, run_directory(model.run)) if _has_one_run(model.location) else None
    return [replace(model, run_id=run.run_id if run else None)]


def model_location(reference: str, *, root: str | None = None, tracking_uri: str | None = None) -> str:
    """The directory of checkpoints, the folder of a single checkpoint, or the file of the model.

    Args:
        root, tracking_uri: see `load_model`.

    Raises:
        UsageError: if there is no such model, or `reference` may name several.
    """
    if reference.startswith("sweep:"):
        raise UsageError(f"{reference} names several models: name a single trial of it")
    root = storage.home(root)
    if reference.startswith("models:/"):
        location, _, digest = checkpoint_of(reference, store_uri(root, tracking_uri))
        try:
            folder, manifest = find_checkpoint(location, whole=False)
        except FileNotFoundError as error:
            raise UsageError(
                f"{reference} was registered from {location}, and that is gone: {error}; if the storage was"
                " moved, `jobs/report.py` registers its models again"
            ) from None
        if manifest.weights_digest() != digest:
            raise UsageError(
                f"{reference}: {folder} holds other weights than were registered under that name"
            )
        return location
    if reference.startswith("runs:/"):
        store = open_reader(store_uri(root, tracking_uri))
        return _checkpoints_of(find_run(store, reference.removeprefix("runs:/")))
    path = storage.absolute(reference)
    exported = storage.join(path, WEIGHTS)
    if storage.size(exported) is not None:
        return exported
    if reference.endswith(SUFFIX) or storage.size(storage.join(path, MANIFEST)) is not None or steps(path):
        return path
    for checkpoints in (storage.join(path, "checkpoints"), storage.join(root, reference, "checkpoints")):
        if steps(checkpoints):
            return checkpoints
    place = path if reference.startswith(("/", "~")) or "://" in reference else storage.join(root, reference)
    if read_sweep(place) is not None:
        trials = ", ".join(f"{reference}/trials/{name}" for name in _runs_in(f"{place}/trials")[:2])
        raise UsageError(f"{reference} is a sweep, not one model: name a trial of it, such as {trials}")
    folder = place.rpartition("/")[0]
    there = ", ".join(_runs_in(folder))
    raise UsageError(
        f"no trained model {reference!r}: {path} has no checkpoint"
        + (f", and neither has {place}" if place != path else "")
        + (f"; {folder} holds {there}" if there else "")
        + f"; name {MODEL_REF_HELP}"
    )


def _runs_in(folder: str) -> list[str]:
    """The names of runs and sweeps in a folder."""
    return [
        name
        for name in storage.names(folder)
        if any(storage.size(storage.join(folder, name, file)) is not None for file in (CONFIG, SWEEP))
    ]


def read_model(location: str, *, whole: bool = True) -> ModelRef:
    """Reads about the model in a checkpoint's folder, a directory of checkpoints or an exported file.

    Args:
        whole: hash the weights of a checkpoint; without, they are hashed when they are loaded.

    Raises:
        UsageError: if there is no such model, or its checkpoint is damaged.
    """
    classes = ()
    if location.endswith(SUFFIX):
        if storage.size(location) is None:
            raise UsageError(f"no file {location}")
        metadata = read_metadata(location)
        if "config" not in metadata:
            raise UsageError(f"{location} was not exported by jobs/export.py: its metadata has no config")
        try:
            folder, run = location, read_config(RunConfig, json.loads(metadata["config"]))
            step = int(metadata.get("step", -1))
            classes = tuple(json.loads(metadata.get("classes", "null")) or ())
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"the metadata of {location} cannot be read: {error}") from None
    else:
        try:
            folder, manifest = find_checkpoint(location, whole=whole)
        except FileNotFoundError as error:
            raise UsageError(str(error)) from None
        run, step = read_config(RunConfig, manifest.config), manifest.step
    name = f"{run.name}@{step}" if location == folder and step >= 0 else run.name
    return ModelRef(name=name, location=folder, run=run, step=step, classes=classes or classes_of_run(run))


def _has_one_run(location: str) -> bool:
    """Whether a single run trained these weights. A soup comes from several, and may have the name of any."""
    return not location.endswith(SUFFIX) or "manifest_sha256" in read_metadata(location)


def _models_below(directory: str, tracking: Tracking) -> list[ModelRef] | None:
    """The finished trials of the sweep in a directory; None if there is no sweep."""
    if (sweep := read_sweep(directory)) is None:
        return None
    models = []
    for name, labels in sweep.trials.items():
        folder = storage.join(directory, labels["directory"])
        result = read_result(folder)
        if labels["role"] == "trial" and result is not None and result.status == "finished":
            run, model = newest_of(tracking, folder), read_model(storage.join(folder, "checkpoints"))
            models.append(replace(model, name=name, run_id=run.run_id if run else None))
    return models


def _model_of(run: RunInfo) -> ModelRef:
    model = read_model(_checkpoints_of(run))
    return replace(model, name=run.tags.get("trial", run.name), run_id=run.run_id)


def _checkpoints_of(run: RunInfo) -> str:
    """The run's checkpoints: `--fresh` moves them, and its tag follows."""
    return storage.join(run.tags.get("directory", run_directory(run.config())), "checkpoints")


def _first(names: Sequence[str]) -> str:
    """The first names and the number of names, in parentheses."""
    return f"({', '.join(names[:3])}{f', .. {len(names)}' if len(names) > 3 else ''})"

"""Trained models at the places where they lie: facts about them, and the models themselves."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from moe.model import Model
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.parallel import build_sharded
from moe.signature import SIGNATURE, Signature, read_signature
from orchestrator import storage
from orchestrator.checkpoint.files import SUFFIX
from orchestrator.checkpoint.manifest import find_checkpoint
from orchestrator.checkpoint.start import Classes, start_from
from orchestrator.checkpoint.weights import in_groups, read_metadata, signature_of_run
from orchestrator.config import DataConfig, RunConfig, ScaleConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.data.preparation import Preparation
from orchestrator.errors import UsageError
from orchestrator.records import at_its_place, read_run
from orchestrator.threads import set_threads

IMAGES_PER_PASS = 64  # the default of --batch-size in all commands that use trained models

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class ModelRef:
    """A trained model: the place of its weights, and the facts about it."""

    name: str  # the name of its run, with the step if a step was named or stands in a file
    location: str  # the folder of its checkpoint, or an exported file
    run: RunConfig  # as it was trained
    step: int  # of training; -1 if unknown
    signature: Signature  # what it takes and what it gives
    directory: str | None = None  # of its run; None if it is not there

    @property
    def classes(self) -> tuple[str, ...] | None:
        """The names of the classes that it learned, by label; None if they are unknown."""
        return self.signature.classes

    @property
    def preparation(self) -> Preparation:
        """The preparation of the images that it learned from, and so of any that it is given."""
        return Preparation.of(self.signature)

    def in_groups(self, images: int | None) -> "ModelRef":
        """Returns the model with so many images routed together, which divide its own number; None: as it is.

        Raises:
            UsageError: if they do not, or the model is dense.
        """
        run, signature = in_groups(self.run, self.signature, images)
        return replace(self, run=run, signature=signature)

    def at_point(self, point: RoutingOverrides) -> "ModelRef":
        """Returns the model with other k, capacity, priority or images per group in its config. Its weights
        are the same.

        Raises:
            UsageError: for a setting that its router does not have or that a config does not hold, or a
                value that is refused.
        """
        kept = RoutingOverrides(k=point.k, capacity_factor=point.capacity_factor, priority=point.priority)
        if replace(point, images_per_group=None) != kept:
            raise UsageError(f"{self.name}: a file holds k, capacity, priority and images per group: {point}")
        model = self.in_groups(point.images_per_group)
        if kept == AS_TRAINED:
            return model
        config = model.run.model
        try:
            config.check_overrides(kept)
            assert config.moe
            evaluated = config.with_moe(replace(config.moe, router=config.moe.router.eval_config()))
            return replace(model, run=replace(model.run, model=evaluated.at_point(kept)))
        except ValueError as error:
            raise UsageError(f"{self.name}: {error}") from None

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
        return self._filled(model)

    def load_sharded(self, mesh: DeviceMesh, compute_dtype: torch.dtype | None = None) -> Model:
        """Returns the model in evaluation mode, of which each rank of a mesh reads and holds its share. All
        ranks call it together. Raises as `load` does.
        """
        set_threads(self.run.model, IMAGES_PER_PASS)
        model = build_sharded(self.run.model, mesh, seed=None, compute_dtype=compute_dtype)
        return self._filled(model, dist.new_group(backend="gloo"))  # pyright: ignore[reportArgumentType]

    def _filled(self, model: Model, group: dist.ProcessGroup | None = None) -> Model:
        report = start_from(model, self.location, group=group)
        if len(report.transfer.copied) < len(model.state_dict()) or report.transfer.unused:
            raise UsageError(f"{self.location} does not hold the model that its config describes; {report}")
        return model.eval()

    def run_on(self, path: str, *, batch_size: int, **scale: Any) -> RunConfig:
        """The config of this model's run with other images and without augmentation, in one process or with
        the fields `scale` of a `ScaleConfig`.

        Raises:
            UsageError: if the batch does not hold whole routing groups for each worker, or the workers cannot
                share the model.
        """
        was, together = self.run.data, self.run.model.images_per_group
        if together > 1 and batch_size % (together * scale.get("workers", 1)):
            raise UsageError(
                f"{self.name} routes {together} images together: `batch_size` {batch_size} must hold a"
                f" multiple of {together} for each worker"
            )
        try:
            data = DataConfig(
                path=path,
                batch_size=batch_size,
                cache_gb=was.cache_gb,
                **was.eval_settings(),
            )
            train = replace(self.run.train, microbatch=None)
            return replace(self.run, data=data, scale=ScaleConfig(**scale), train=train)
        except ValueError as error:
            settings = ", ".join(
                f"`{name}` {value}" for name, value in [*scale.items(), ("batch_size", batch_size)]
            )
            raise UsageError(f"{settings}: {error}") from None

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
            outputs = self.run.model.num_outputs()
            fits, known = len(classes) <= outputs, f"unknown classes ({outputs} outputs)"
            was = self.run.data.path
            why = f"{was} is missing or has changed" if was else "its weights came without their names"
            log.warning(
                f"The classes of {self.name} are unknown, because {why}: the labels of {path} are compared by"
                " number."
            )
        else:
            fits, known = classes == self.classes[: len(classes)], f"the classes {_first(self.classes)}"
        if not fits:
            raise UsageError(
                f"{path} has the classes {_first(classes)}, but {self.name} learned {known}: its predictions"
                " do not compare with these labels. Pack the images with the model's classes in its order,"
                " or fine-tune the model on this data: wings/jobs/finetune.py"
            )


def read_model(location: str, *, whole: bool = True, root: str = "") -> ModelRef:
    """Reads about the model in a checkpoint's folder, a directory of checkpoints or an exported file.

    Args:
        whole: hash the weights of a checkpoint; without, they are hashed when they are loaded.
        root: a storage in which data may lie that are gone from where they were.

    Raises:
        UsageError: if there is no such model, or its checkpoint is damaged.
    """
    if location.endswith(SUFFIX):
        if storage.size(location) is None:
            raise UsageError(f"no file {location}")
        metadata = read_metadata(location)
        if "config" not in metadata:
            raise UsageError(f"{location} was not exported by jobs/export.py: its metadata has no config")
        try:
            folder, run = location, read_run(at_its_place(json.loads(metadata["config"]), location, root))
            step = int(metadata.get("step", -1))
            signature = _signature_of_file(run, metadata)
        except (ValueError, TypeError, AttributeError, RecursionError) as error:
            raise UsageError(f"the metadata of {location} cannot be read: {error}") from None
    else:
        try:
            folder, manifest = find_checkpoint(location, whole=whole)
        except FileNotFoundError as error:
            raise UsageError(str(error)) from None
        run, step = read_run(at_its_place(manifest.config, folder, root)), manifest.step
        known = manifest.signature
        signature = read_signature(known) if known else signature_of_run(run)
    names, outputs = signature.classes, run.model.num_outputs()
    if names and run.task.classifies and len(names) != outputs:
        log.warning("%s names %d classes for %d outputs: the names are left out", folder, len(names), outputs)
        signature = replace(signature, classes=None)
    name = f"{run.name}@{step}" if location == folder and step >= 0 else run.name
    return ModelRef(name=name, location=folder, run=run, step=step, signature=signature)


def _signature_of_file(run: RunConfig, metadata: Mapping[str, str]) -> Signature:
    """Returns the signature in a file's metadata; files of earlier versions have names of classes alone."""
    if SIGNATURE in metadata:
        return read_signature(metadata[SIGNATURE])
    names, known = json.loads(metadata.get("classes", "null")), signature_of_run(run)
    return replace(known, classes=tuple(names)) if names else known


def classes_at_start(run: RunConfig) -> Classes | None:
    """Returns the names of classes of a run's data and of the weights that it starts from; None if there are
    no such weights, or outputs are no classes.
    """
    if not (run.train.init_from and run.task.classifies):
        return None
    here = open_manifest(run.data.path).classes
    try:
        source = read_model(run.train.init_from, whole=False)
    except UsageError:  # weights without a config
        return Classes(here=here or None, there=None)
    known = source.classes if source.run.task.classifies else None
    return Classes(here=here or None, there=known)


def load_checkpoint(location: str) -> Model:
    """Returns the model of the checkpoint in a folder, in evaluation mode.

    Raises:
        UsageError: if there is no checkpoint, or its weights are damaged.
    """
    return read_model(location, whole=False).load()


def _first(names: Sequence[str]) -> str:
    """The first names and the number of names, in parentheses."""
    return f"({', '.join(names[:3])}{f', .. {len(names)}' if len(names) > 3 else ''})"

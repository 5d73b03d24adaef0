"""Trained models, by whatever name a user has for them."""

import json
from dataclasses import dataclass

import torch

from moe.load import WEIGHTS
from moe.vit import ViT
from orchestrator import storage
from orchestrator.codec import from_dict
from orchestrator.config import RunConfig, UsageError
from orchestrator.tracking import Found, Tracking, checkpoint_of, children, find_sweep
from orchestrator.tracking.find import found_run, newest_of
from orchestrator.training.checkpoint.find import located
from orchestrator.training.checkpoint.manifest import MANIFEST, steps
from orchestrator.training.checkpoint.single_file import SUFFIX, read_header
from orchestrator.training.checkpoint.start import start_from
from orchestrator.training.checkpoint.weights import class_names
from orchestrator.training.worker import checkpoint_directory, run_directory

NAMES = (
    "a run below the storage (soft, quickstart/trials/soft1), a directory of checkpoints, the folder of one,"
    " an exported file or folder, models:/NAME@ALIAS or models:/NAME/VERSION, runs:/ID of MLflow, or"
    " sweep:NAME: its finished trials"
)


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Attributes:
    name: what tables and charts call it: its run, with the step where that was named or lies in a file.
    location: the folder of its checkpoint, or an exported file.
    run: as it was trained.
    step: of the run; -1 if the file does not say.
    classes: what it learned, by label; None if nobody knows any more.
    run_id: of the MLflow run that trained it; None if MLflow does not know it.
    """

    name: str
    location: str
    run: RunConfig
    step: int
    classes: tuple[str, ...] | None = None
    run_id: str | None = None

    def load(self, device: torch.device | None = None) -> ViT:
        """The model in evaluation mode. Raises UsageError if the weights are damaged or not all there."""
        with torch.device("meta"):
            model = ViT(self.run.model)
        model.to_empty(device=device or torch.device("cpu"))
        report = start_from(model, self.location)
        if len(report.transfer.copied) < len(model.state_dict()) or report.transfer.unused:
            raise UsageError(f"{self.location} does not hold the model that its config describes; {report}")
        return model.eval()


def find_trained(reference: str, *, root: str, tracking: Tracking) -> list[Trained]:
    """The models that `reference` means: one, or the finished trials of a sweep; see `NAMES`.

    Raises:
        UsageError: if there is none, or none that is whole.
    """
    if reference.startswith("sweep:"):
        sweep = find_sweep(tracking, reference.removeprefix("sweep:"))
        trials = [run for run in children(tracking, sweep.run_id) if run.tags.get("role") == "trial"]
        found = [_of_run(run) for run in trials if run.status == "FINISHED"]
        if not found:
            raise UsageError(f"{reference} has no finished trial")
        return found
    if reference.startswith("runs:/"):
        return [_of_run(found_run(tracking, reference.removeprefix("runs:/")))]
    if reference.startswith("models:/"):
        location, _ = checkpoint_of(reference, tracking.uri)
    else:
        location = _location(reference, root)
    found = read_trained(location)
    run = newest_of(tracking, run_directory(found.run)) if _of_one_run(location) else None
    return [Trained(**{**vars(found), "run_id": run.run_id if run else None})]


def read_trained(location: str) -> Trained:
    """Of a checkpoint's folder, a directory of checkpoints or an exported file; MLflow is not asked.

    Raises:
        UsageError: if there is nothing whole.
    """
    classes = None
    if location.endswith(SUFFIX):
        if storage.size(location) is None:
            raise UsageError(f"no file {location}")
        metadata = read_header(location).metadata
        if "config" not in metadata:
            raise UsageError(f"{location} is no export of ours: its metadata has no config")
        folder, config, step = location, json.loads(metadata["config"]), int(metadata.get("step", -1))
        classes = json.loads(metadata.get("classes", "null"))
    else:
        try:
            folder, manifest = located(location)
        except FileNotFoundError as error:
            raise UsageError(str(error)) from None
        config, step = manifest.config, manifest.step
    run = from_dict(RunConfig, config)
    name = f"{run.name}@{step}" if location == folder and step >= 0 else run.name
    classes = tuple(classes) if classes else class_names(run)
    return Trained(name=name, location=folder, run=run, step=step, classes=classes)


def _of_one_run(location: str) -> bool:
    """Not a soup, whose name may be that of any run."""
    return not location.endswith(SUFFIX) or "manifest_sha256" in read_header(location).metadata


def _of_run(run: Found) -> Trained:
    found = read_trained(checkpoint_directory(run.config()))
    return Trained(**{**vars(found), "name": run.tags.get("trial", run.name), "run_id": run.run_id})


def _location(reference: str, root: str) -> str:
    """A path if something of ours lies there, else that of a run's checkpoints."""
    path = storage.absolute(reference)
    exported = storage.join(path, WEIGHTS)
    if storage.size(exported) is not None:
        return exported
    if reference.endswith(SUFFIX) or storage.size(storage.join(path, MANIFEST)) is not None or steps(path):
        return path
    named = storage.join(root, reference, "checkpoints")
    if steps(named):
        return named
    raise UsageError(
        f"no trained model {reference!r}: neither {path} nor {named} holds a checkpoint; name {NAMES}"
    )

"""Trained models, by whatever name a user has for them."""

import json
from dataclasses import dataclass

import torch

from moe.load import WEIGHTS
from moe.vit import ViT
from orchestrator import storage
from orchestrator.checkpoint.find import located
from orchestrator.checkpoint.manifest import MANIFEST, steps
from orchestrator.checkpoint.single_file import SUFFIX, read_header
from orchestrator.checkpoint.start import start_from
from orchestrator.checkpoint.weights import class_names
from orchestrator.codec import from_dict
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.tracking import Found, Tracking, checkpoint_of, children, find_sweep, open_reader
from orchestrator.tracking.find import found_run, newest_of
from orchestrator.training.loop import set_threads
from orchestrator.training.worker import checkpoint_directory, run_directory

IMAGES_PER_PASS = 64  # of the commands that look at trained models, unless --batch-size says otherwise
NAMES = "a run, a folder of checkpoints, an exported file, models:/NAME@ALIAS, runs:/ID or sweep:NAME"


@dataclass(frozen=True, kw_only=True)
class Trained:
    """Attributes:
    name: what tables and charts call it: its run, with the step where that was named or lies in a file.
    location: the folder of its checkpoint, or an exported file.
    run: as it was trained.
    step: of the run; -1 if the file does not say.
    classes: names of the classes it learned, by label; None if they are unknown.
    run_id: of the MLflow run that trained it; None if MLflow does not know it.
    """

    name: str
    location: str
    run: RunConfig
    step: int
    classes: tuple[str, ...] | None = None
    run_id: str | None = None

    def load(self, device: torch.device | None = None) -> ViT:
        """The model in evaluation mode, and torch's threads set for it.

        Raises:
            UsageError: if the weights are damaged or not all there.
        """
        set_threads(self.run.model, IMAGES_PER_PASS)
        with torch.device("meta"):
            model = ViT(self.run.model)
        model.to_empty(device=device or torch.device("cpu"))
        report = start_from(model, self.location)
        if len(report.transfer.copied) < len(model.state_dict()) or report.transfer.unused:
            raise UsageError(f"{self.location} does not hold the model that its config describes; {report}")
        return model.eval()


def find_trained(reference: str, *, root: str, tracking: Tracking) -> list[Trained]:
    """The models that `reference` means: one, or the finished trials of a sweep; as the help of
    `jobs/evaluate.py` lists them.

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
    location = model_location(reference, root=root, tracking_uri=tracking.uri)
    found = read_trained(location)
    run = newest_of(tracking, run_directory(found.run)) if _of_one_run(location) else None
    return [Trained(**{**vars(found), "run_id": run.run_id if run else None})]


def model_location(reference: str, *, root: str, tracking_uri: str) -> str:
    """The directory of checkpoints, the folder of one, or the file of the one model that `reference` names.

    Raises:
        UsageError: if there is none, or there may be several.
    """
    if reference.startswith("sweep:"):
        raise UsageError(f"{reference} names several models: name one of its trials")
    if reference.startswith("runs:/"):
        run = found_run(open_reader(tracking_uri), reference.removeprefix("runs:/"))
        return checkpoint_directory(run.config())
    if reference.startswith("models:/"):
        return checkpoint_of(reference, tracking_uri)[0]
    return _location(reference, root)


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
    runs = (storage.join(path, "checkpoints"), storage.join(root, reference, "checkpoints"))
    if found := next((checkpoints for checkpoints in runs if steps(checkpoints)), None):
        return found
    raise UsageError(
        f"no trained model {reference!r}: neither {path} nor {root}/{reference} has a checkpoint;"
        f" name {NAMES}"
    )

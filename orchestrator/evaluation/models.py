"""Finds trained models by every name that a user may have for them."""

from dataclasses import replace
from importlib import import_module

from moe.config import did_you_mean
from moe.exported import WEIGHTS
from moe.guests import offered
from moe.model import Model
from orchestrator import storage, tracking
from orchestrator.checkpoint.files import SUFFIX
from orchestrator.checkpoint.manifest import MANIFEST, find_checkpoint, steps
from orchestrator.checkpoint.models import ModelRef, read_model
from orchestrator.checkpoint.weights import read_metadata
from orchestrator.errors import UsageError
from orchestrator.runs.run_directory import RunDir, kind_of
from orchestrator.runs.sweep_directory import SweepDir, SweepRecord

MODEL_REF_HELP = (
    "a run below the storage, SWEEP@knee (or @fast, @best), a folder of checkpoints, an exported file,"
    " models:/NAME@ALIAS, runs:/ID or sweep:NAME"
)


def load_model(reference: str, *, root: str | None = None, tracking_uri: str | None = None) -> Model:
    """Returns the model that `reference` names, in evaluation mode: ``model(images in -1 .. 1).logits``.

    All commands find models by the same rule.

    Args:
        reference: a run below `root`, a folder of checkpoints, an exported file; ``SWEEP@knee``,
            ``SWEEP@fast`` or ``SWEEP@best`` of a sweep below `root`; or ``models:/NAME@ALIAS``,
            ``models:/NAME/VERSION`` or ``runs:/ID`` of MLflow.
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


def find_models(
    reference: str, *, root: str | None = None, tracking_uri: str | None = None
) -> list[ModelRef]:
    """The models that `reference` means: a single model, or the finished trials of a sweep. Each knows the
    directory of its run.

    Args:
        root, tracking_uri: see `load_model`.

    Raises:
        UsageError: if there is no such model, or its weights are damaged.
    """
    name, home = reference.removeprefix("sweep:"), storage.home(root)
    if name == reference:
        model = read_model(model_location(reference, root=root, tracking_uri=tracking_uri), root=home)
        return [replace(model, directory=_directory_of(model))]
    directory = SweepDir(storage.join(home, name))
    if (sweep := directory.record()) is None:
        raise UsageError(f"no sweep {name!r}: {directory.path} holds none")
    models = []
    for trial, labels in sweep.trials.items():
        run = directory.trial(labels)
        if labels["role"] == "trial" and run.state(live=False, quality=sweep.quality).status == "finished":
            models.append(replace(read_model(run.checkpoints), name=trial, directory=run.path))
    if not models:
        raise UsageError(f"{reference} has no finished trial")
    return models


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
        location, digest = tracking.checkpoint_of(reference, tracking.store_uri(root, tracking_uri))
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
        reference = tracking.directory_of(
            reference.removeprefix("runs:/"), tracking.store_uri(root, tracking_uri)
        )
    path = storage.absolute(reference)
    for guest in map(import_module, offered("WEIGHTS").values()) if storage.is_local(path) else ():
        if guest.is_foreign(path):
            return guest.import_once(path, root)
    exported = storage.join(path, WEIGHTS)
    if storage.size(exported) is not None:
        return exported
    if reference.endswith(SUFFIX) or storage.size(storage.join(path, MANIFEST)) is not None or steps(path):
        return path
    for run in (RunDir(path), RunDir(storage.join(root, reference))):
        if steps(run.checkpoints):
            return run.checkpoints
    name, _, alias = reference.rpartition("@")
    for directory in (storage.absolute(name), storage.join(root, name)) if name else ():
        if (sweep := SweepDir(directory).record()) is not None:
            return _on_frontier(SweepDir(directory), sweep, alias)
    place = path if reference.startswith(("/", "~")) or "://" in reference else storage.join(root, reference)
    if SweepDir(place).record() is not None:
        trials = ", ".join(f"{reference}/trials/{name}" for name in _runs_in(f"{place}/trials")[:2])
        raise UsageError(
            f"{reference} is a sweep, not one model: name its {reference}@knee, or a trial, such as {trials}"
        )
    folder = place.rpartition("/")[0]
    runs = _runs_in(folder)
    there, near = ", ".join(runs), did_you_mean(place.rpartition("/")[2], runs)
    raise UsageError(
        f"no trained model {reference!r}: {path} has no checkpoint"
        + (f", and neither has {place}" if place != path else "")
        + (f"; {folder} holds {there}{near}" if there else "")
        + f"; name {MODEL_REF_HELP}"
    )


def _runs_in(folder: str) -> list[str]:
    """The names of runs and sweeps in a folder."""
    return [name for name in storage.names(folder) if kind_of(storage.join(folder, name))]


def _on_frontier(directory: SweepDir, sweep: SweepRecord, alias: str) -> str:
    """The checkpoint that an alias names in the summary of a sweep: ``knee`` stands for ``pareto-knee``."""
    aliases = directory.summary().get("aliases", {})
    model = aliases.get(alias) or aliases.get(f"pareto-{alias}")
    if model is None:
        known = ", ".join(f"{sweep.name}@{name.removeprefix('pareto-')}" for name in aliases)
        raise UsageError(
            f"the sweep {sweep.name} has no model @{alias}: "
            + (f"there is {known}" if known else "none of its arms is finished")
        )
    location = directory.trial(sweep.trials[model["run"]]).file(model["checkpoint"])
    if storage.size(storage.join(location, MANIFEST)) is None:
        raise UsageError(f"{sweep.name}@{alias} is {location}, and that is gone")
    return location


def _directory_of(model: ModelRef) -> str | None:
    """The directory of the run that trained these weights; None if it is not there, or if they come from
    several runs, as a soup does.
    """
    if model.location.endswith(SUFFIX) and "manifest_sha256" not in read_metadata(model.location):
        return None
    around = model.location.rpartition("/checkpoints")[0]
    there = (RunDir(around) for around in (around, RunDir.of(model.run).path) if around)
    return next((run.path for run in there if run.record() is not None), None)

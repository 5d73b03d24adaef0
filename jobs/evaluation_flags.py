"""The models and the images that the flags of `usage.evaluation_parser` name."""

import argparse

from jobs.command import root
from orchestrator import storage
from orchestrator.data.external import index_external_shards
from orchestrator.data.manifest import has_manifest, open_manifest
from orchestrator.errors import UsageError
from orchestrator.evaluation.classes import Classes, classes_of, few
from orchestrator.evaluation.trained import Trained, find_trained
from orchestrator.tracking import TrackedRun, Tracking, writer
from orchestrator.tracking.find import found_run
from orchestrator.tracking.search import key_part


def models_of(args: argparse.Namespace, store: Tracking) -> list[Trained]:
    """Finds every model that was named, once. Raises UsageError for a model that is not there."""
    references = args.model if isinstance(args.model, list) else [args.model]
    found = [model for name in references for model in find_trained(name, root=root(args), tracking=store)]
    if not isinstance(args.model, list) and len(found) > 1:
        raise UsageError(f"{args.model} names {len(found)} models, but this command takes one")
    return list({model.location: model for model in found}.values())


def images_path(args: argparse.Namespace, model: Trained) -> str:
    """The shards of --data, else those that the model was trained on."""
    if not args.data:
        return model.run.data.path
    path = storage.absolute(args.data)
    return path if has_manifest(path) else index_external_shards(path, root(args))


def tell_other_classes(model: Trained, path: str) -> Classes:
    """The classes of the images. Prints a note if the model learned other classes, or they are unknown.

    Raises:
        UsageError: if labels fit neither by name nor by number.
    """
    found, here = classes_of(model, path), open_manifest(path).classes
    if not model.classes:
        print(
            f"note: the classes of {model.name} are unknown: {model.run.data.path} is missing or has changed."
            f" Labels of {path} ({few(here)}) are compared by number",
            flush=True,
        )
    elif here != model.classes[: len(here)]:
        classes = f"other classes ({few(here)}) than {model.name} learned ({few(model.classes)})"
        how = "name" if found.labels else "number"
        print(f"note: {path} has {classes}: labels are compared by {how}", flush=True)
    return found


def results_of(store: Tracking, run_id: str, *paths: str) -> tuple[TrackedRun, list[str]]:
    """The run, and a name for its figures of each data set: the last part of the path, or as many parts as
    tell it from other data that the run was evaluated on. Tags ``eval.data.<name>`` store the names.
    """
    found = found_run(store, run_id)
    tags, names = dict(found.tags), []
    for path in paths:
        parts = [key_part(part) for part in path.split("/") if part]
        tails = ["-".join(parts[-length:]) for length in range(1, len(parts) + 1)]
        names.append(next((t for t in tails if tags.get(f"eval.data.{t}", path) == path), tails[-1]))
        tags[f"eval.data.{names[-1]}"] = path
    run = writer(store, found)
    run.tag(**{f"eval.data.{name}": path for name, path in zip(names, paths, strict=True)})
    return run, names

"""The models, the images and the MLflow runs that the flags of the evaluation commands name."""

import argparse

from jobs.command import root
from orchestrator import storage
from orchestrator.data.formats import index_external_shards
from orchestrator.data.manifest import has_manifest
from orchestrator.errors import UsageError
from orchestrator.evaluation.models import ModelRef, find_models
from orchestrator.tracking.find import RunWriter, find_run, metric_name
from orchestrator.tracking.store import Tracking


def models_of(args: argparse.Namespace, store: Tracking) -> list[ModelRef]:
    """Every model of the command line, once. Raises UsageError for a model that does not exist."""
    references = args.model if isinstance(args.model, list) else [args.model]
    models = [model for name in references for model in find_models(name, root=root(args), tracking=store)]
    if not isinstance(args.model, list) and len(models) > 1:
        raise UsageError(f"{args.model} names {len(models)} models, but this command takes one")
    return list({model.location: model for model in models}.values())


def images_path(args: argparse.Namespace, model: ModelRef, data: str | None = None) -> str:
    """The shards at `data`, by default at --data, else the shards that the model was trained on."""
    if not (data := data or args.data):
        return model.run.data.path
    path = storage.absolute(data)
    return path if has_manifest(path) else index_external_shards(path, root(args))


def results_of(store: Tracking, run_id: str, *paths: str) -> tuple[RunWriter, list[str]]:
    """The MLflow run, and a name for its figures on each data set: the last part of the path, or as many
    parts as distinguish it from other data that the run was evaluated on. Tags ``eval.data.<name>`` hold
    the paths.
    """
    found = find_run(store, run_id)
    tags, names = dict(found.tags), []
    for path in paths:
        parts = [metric_name(part) for part in path.split("/") if part]
        tails = ["-".join(parts[-length:]) for length in range(1, len(parts) + 1)]
        names.append(next((t for t in tails if tags.get(f"eval.data.{t}", path) == path), tails[-1]))
        tags[f"eval.data.{names[-1]}"] = path
    run = RunWriter(store, run_id)
    run.tag(**{f"eval.data.{name}": path for name, path in zip(names, paths, strict=True)})
    return run, names

"""Removes from MLflow what it has of a run or a sweep: registered model, models, runs and their files."""

from collections.abc import Collection, Iterator

from mlflow.entities import LoggedModel, Run
from mlflow.entities.model_registry import RegisteredModel
from mlflow.store.artifact.artifact_repository_registry import get_artifact_repository

from orchestrator.errors import UsageError, reason_of
from orchestrator.output import redact_uri
from orchestrator.tracking.find import KEY, SWEEP_KEY, find_by_tag, mlflow_errors
from orchestrator.tracking.registry import CHECKPOINT, WEIGHTS
from orchestrator.tracking.store import Tracking


def shown_of(tracking: Tracking, key: str) -> tuple[list[str], list[Run]]:
    """Returns the names of the registered models, and the runs, of the run or the sweep with that key. Its
    own run is the last: it says in MLflow whose the others are.
    """
    with mlflow_errors(tracking):
        models = [model.name for model in registered(tracking) if model.tags[SWEEP_KEY] == key]
        return models, [*find_by_tag(tracking, SWEEP_KEY, key), *find_by_tag(tracking, KEY, key)]


def remove_shown(tracking: Tracking, key: str) -> None:
    """Removes all that MLflow shows of the run or the sweep with that key. Repeated after a failure, it
    removes what is left.

    Raises:
        UsageError: if MLflow, or the place of its files, refuses or does not answer.
    """
    models, runs = shown_of(tracking, key)
    with mlflow_errors(tracking):
        for name in models:
            tracking.client.delete_registered_model(name)
        for run in runs:
            remove_run(tracking, run)


def remove_run(tracking: Tracking, run: Run) -> None:
    """Removes a run with its models and files. MLflow keeps the row of a run, marked as deleted, until
    ``mlflow gc``.
    """
    with mlflow_errors(tracking):
        for model in _models_of(tracking, run):
            _remove_model(tracking, model)
        _remove_files(tracking, run.info.artifact_uri)
        tracking.client.delete_run(run.info.run_id)


def remove_weights(tracking: Tracking, key: str, weights: Collection[str]) -> None:
    """Removes the models of a sweep whose weights have these digests, registered versions first."""
    names, runs = shown_of(tracking, key)
    with mlflow_errors(tracking):
        for name in names:
            for version in tracking.client.search_model_versions(f"name = '{name}'"):
                if version.tags.get(WEIGHTS) in weights:
                    tracking.client.delete_model_version(name, str(version.version))
        for run in runs:
            for model in _models_of(tracking, run):
                if model.tags.get(WEIGHTS) in weights:
                    _remove_model(tracking, model)


def named_weights(tracking: Tracking, key: str) -> set[str]:
    """Returns the digests of the weights of a sweep to which any alias points, also one of the user's own."""
    client, found = tracking.client, set[str]()
    names, _ = shown_of(tracking, key)
    with mlflow_errors(tracking):
        for name in names:
            for version in client.get_registered_model(name).aliases.values():
                found.add(client.get_model_version(name, str(version)).tags.get(WEIGHTS, ""))
    return found


def registered(tracking: Tracking) -> Iterator[RegisteredModel]:
    """Yields the registered models of all sweeps, of all storages that this store shows."""
    token = None
    with mlflow_errors(tracking):
        while True:
            page = tracking.client.search_registered_models(page_token=token)
            yield from (model for model in page if SWEEP_KEY in model.tags)
            if not (token := page.token):
                return


def checkpoints_of(tracking: Tracking, name: str) -> list[str]:
    """Returns where the checkpoints of a registered model's versions lie."""
    with mlflow_errors(tracking):
        versions = tracking.client.search_model_versions(f"name = '{name}'")
    return [version.tags.get(CHECKPOINT, "") for version in versions]


def _models_of(tracking: Tracking, run: Run) -> list[LoggedModel]:
    if not tracking.has_models:
        return []
    query = f"source_run_id = '{run.info.run_id}'"
    return list(tracking.client.search_logged_models([run.info.experiment_id], query))


def _remove_model(tracking: Tracking, model: LoggedModel) -> None:
    _remove_files(tracking, model.artifact_location)
    tracking.client.delete_logged_model(model.model_id)


def _remove_files(tracking: Tracking, location: str | None) -> None:
    """Before what names them is removed, so that none is forgotten."""
    if not location:
        return
    try:
        get_artifact_repository(location, tracking.uri).delete_artifacts()
    except Exception as error:  # of any type: each storage has its own
        raise UsageError(f"{redact_uri(location)} cannot be deleted: {reason_of(error)}") from None

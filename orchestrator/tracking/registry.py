"""Checkpoints as models in MLflow: a LoggedModel per trained run, and registered versions of a sweep's best.

The weights stay where training wrote them; a version has their digest, so that it never loads other weights.
Small models that are registered are copied too, so that MLflow itself loads and serves them.
"""

import logging
import re
import tempfile
from collections.abc import Mapping

from mlflow.entities import LoggedModel, LoggedModelStatus, Metric
from mlflow.entities.model_registry import RegisteredModel
from mlflow.exceptions import MlflowException
from mlflow.models import Model as MLmodel
from mlflow.models.utils import get_external_mlflow_model_spec
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

from moe.config import did_you_mean
from orchestrator.checkpoint.models import read_model
from orchestrator.errors import UsageError
from orchestrator.output import redact_uri
from orchestrator.tracking.find import KEY, SWEEP_KEY, find_by_tag, mlflow_errors
from orchestrator.tracking.pyfunc import is_servable, is_small, write_pyfunc
from orchestrator.tracking.store import Tracking, open_reader

CHECKPOINT = "checkpoint"  # tag of a LoggedModel and of a version: the folder of the checkpoint
WEIGHTS = "weights"  # tag: digest of its weights
FAST, KNEE, BEST, CONFIRMED = ALIASES = ("pareto-fast", "pareto-knee", "pareto-best", "confirmed")

log = logging.getLogger(__name__)


def log_checkpoint(
    tracking: Tracking,
    run_id: str,
    *,
    name: str,
    uri: str,
    digest: str,
    step: int,
    time_s: float,
    metrics: Mapping[str, float],
) -> None:
    """Makes the checkpoint at `uri` a LoggedModel of the run, ranked by `metrics`; completes what an earlier
    attempt began. Characters that MLflow refuses in a model's name become dashes.
    """
    client = tracking.client
    model = _find_checkpoint(tracking, run_id, digest)
    if model is not None and model.tags[CHECKPOINT] != uri:  # the directory was moved
        client.set_logged_model_tags(model.model_id, {CHECKPOINT: uri})
    if model is None:
        model = client.create_logged_model(
            tracking.experiment_id,
            name=re.sub(r"[/:.%\"'\\]", "-", name),
            source_run_id=run_id,
            tags={CHECKPOINT: uri, WEIGHTS: digest, MLFLOW_MODEL_IS_EXTERNAL: "true"},
            params={"step": str(step)},
        )
    if model.status != LoggedModelStatus.READY:
        with tempfile.TemporaryDirectory() as folder:  # the registry needs the description, not the weights
            get_external_mlflow_model_spec(model).save(f"{folder}/MLmodel")
            client.log_model_artifacts(model.model_id, folder)
        client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    written = {metric.key for metric in model.metrics or []}
    rows = _rows(tracking, run_id, {k: v for k, v in metrics.items() if k not in written}, step, time_s)
    linked = [Metric(r.key, r.value, r.timestamp, r.step, model_id=model.model_id) for r in rows]
    if linked:
        client.log_batch(run_id, metrics=linked)


def _rows(
    tracking: Tracking, run_id: str, metrics: Mapping[str, float], step: int, time_s: float
) -> list[Metric]:
    """Returns the run's own rows of that step where it has them: MLflow writes a model's metrics to the run
    too, and stores equal rows only once.
    """
    newest = {row.key: row for row in tracking.client.get_run(run_id).data.to_proto().metrics}
    rows = []
    for name, value in metrics.items():
        row = newest.get(name)
        if row is not None and row.step > step:
            history = tracking.client.get_metric_history(run_id, name)
            row = next((each for each in history if each.step == step), None)
        if row is not None and row.step == step:
            rows.append(Metric(row.key, row.value, row.timestamp, row.step))
        elif row is not None:  # metrics that the run itself does not chart are left out
            rows.append(Metric(name, value, int(1000 * time_s), step))
    return rows


def _find_checkpoint(tracking: Tracking, run_id: str, digest: str) -> LoggedModel | None:
    query = f"tags.{WEIGHTS} = '{digest}'"
    found = tracking.client.search_logged_models([tracking.experiment_id], query)
    return next((model for model in found if model.source_run_id == run_id), None)


def model_name(sweep: str) -> str:
    """Returns the name of a sweep's registered model; characters that MLflow refuses become dashes."""
    return re.sub(r"[/:%'\"\\]", "-", sweep)


def registered_name(tracking: Tracking, key: str) -> str | None:
    """Returns the name of the registered model of the sweep with that key; None if it has none.

    Raises:
        UsageError: if MLflow does not answer.
    """
    with mlflow_errors(tracking):
        found = tracking.client.search_registered_models(f"tags.`{SWEEP_KEY}` = '{key}'")
    return found[0].name if found else None


def register(
    tracking: Tracking,
    sweep: str,
    models: Mapping[str, tuple[str, Mapping[str, str]]],
    *,
    key: str,
    directory: str,
) -> dict[str, str]:
    """Points the aliases of a sweep's registered model at checkpoints that `log_checkpoint` has logged.

    An alias of `ALIASES` that is not in `models` is removed, because its model no longer is what the alias
    says. Other aliases and the models of other sweeps stay as they are.

    Args:
        models: alias -> run id, and ``uri``, ``weights`` and ``description`` of the checkpoint.
        key, directory: of the sweep.

    Returns:
        alias -> version.
    """
    client, name = tracking.client, registered_name(tracking, key)
    if name is None:
        if not models:
            return {}
        name = _acquire_model(tracking, sweep, key, directory, {run_id for run_id, _ in models.values()})
    versions = list(client.search_model_versions(f"name = '{name}'"))
    found = {}
    for alias, (run_id, model) in models.items():
        same = (v for v in versions if v.run_id == run_id and v.tags.get(WEIGHTS) == model["weights"])
        version = next(same, None)
        logged = _find_checkpoint(tracking, run_id, model["weights"])
        if logged is not None and logged.tags.get(MLFLOW_MODEL_IS_EXTERNAL) == "true":
            _pack_small(tracking, logged, model["uri"])
        if version is None:
            if logged is None:
                continue
            # not models:/<id>, which MLflow would look up in its default store
            version = client.create_model_version(
                name,
                logged.artifact_location,
                run_id,
                {CHECKPOINT: model["uri"], WEIGHTS: model["weights"]},
                description=model["description"],
                model_id=logged.model_id,
            )
            versions.append(version)
        elif version.description != model["description"]:
            client.update_model_version(name, version.version, model["description"])
        if version.tags[CHECKPOINT] != model["uri"]:  # the directory was moved
            client.set_model_version_tag(name, version.version, CHECKPOINT, model["uri"])
        found[alias] = str(version.version)
    known = client.get_registered_model(name).aliases
    for alias, version in found.items():
        if str(known.get(alias)) != version:
            client.set_registered_model_alias(name, alias, version)
    ours = {str(version.version) for version in versions if WEIGHTS in version.tags}
    for alias in known.keys() & {*ALIASES} - found.keys():
        if str(known[alias]) in ours:
            client.delete_registered_model_alias(name, alias)
    return found


def _pack_small(tracking: Tracking, logged: LoggedModel, uri: str) -> None:
    """Copies a small classifier to MLflow, which then loads and serves it; others stay where they are."""
    client = tracking.client
    # As its `artifact_path` MLflow itself writes the place, which is one of this machine.
    known = MLmodel(artifact_path=logged.name, run_id=logged.source_run_id, model_id=logged.model_id)
    try:
        source = read_model(uri, whole=False)
        if not is_small(source) or not is_servable(source):
            return
        with tempfile.TemporaryDirectory() as folder:
            write_pyfunc(source, f"{folder}/model", known)
            client.log_model_artifacts(logged.model_id, f"{folder}/model")
    except (UsageError, OSError) as error:
        log.warning("%s is not copied to MLflow, which cannot serve it: %s", uri, error)
        return
    client.delete_logged_model_tag(logged.model_id, MLFLOW_MODEL_IS_EXTERNAL)


def _acquire_model(tracking: Tracking, sweep: str, key: str, directory: str, run_ids: set[str]) -> str:
    """Makes a registered model that of the sweep with that key, and returns its name: the sweep's, or, where
    another source has that, the name with a part of the key.
    """
    client, name = tracking.client, model_name(sweep)
    found = client.search_registered_models(f"name = '{name}'")
    others = [_source(tracking, model, sweep, directory, run_ids) for model in found]
    if found and not any(others):
        client.set_registered_model_tag(name, SWEEP_KEY, key)
        return name
    if found:
        taken, name = name, f"{name}-{key[:6]}"
        log.warning(
            "the models of %s are registered as %s: %s belongs to %s", directory, name, taken, *others
        )
    description = f"Models of the sweep {sweep} worth their cost."
    client.create_registered_model(name, {SWEEP_KEY: key}, description=description)
    return name


def _source(
    tracking: Tracking, model: RegisteredModel, sweep: str, directory: str, run_ids: set[str]
) -> str | None:
    """Returns what a registered model belongs to; None if the sweep in `directory` may have it.

    A sweep loses its model when it was deleted, or when another sweep takes its directory, as with --fresh.
    """
    if owner := model.tags.get(SWEEP_KEY):
        places = [
            run.data.tags.get("directory")
            for run in find_by_tag(tracking, KEY, owner)
            if run.info.run_name == sweep
        ]
        return next((f"the sweep in {place}" for place in places if place != directory), None)
    # Older versions of this project have registered models without this tag.
    versions = tracking.client.search_model_versions(f"name = '{model.name}'")
    ours = not versions or {version.run_id for version in versions} & run_ids
    return None if ours else "somebody else"


def checkpoint_of(uri: str, tracking_uri: str) -> tuple[str, str]:
    """Returns the checkpoint of ``models:/<name>@<alias>`` or ``models:/<name>/<version>``: its location, and
    the digest that its weights had when they were registered.

    Raises UsageError if there is no such model.
    """
    tracking = open_reader(tracking_uri)
    client, name = tracking.client, uri.removeprefix("models:/")
    try:
        if "@" in name:
            version = client.get_model_version_by_alias(*name.split("@", 1))
        elif "/" in name:
            version = client.get_model_version(*name.split("/", 1))
        else:
            raise UsageError(f"{uri} names no version: write models:/{name}@ALIAS or models:/{name}/VERSION")
        return version.tags[CHECKPOINT], version.tags[WEIGHTS]
    except (MlflowException, KeyError) as error:
        models = client.search_registered_models(max_results=20)
        known = [f"models:/{model.name}@{alias}" for model in models for alias in model.aliases]
        there = f"no model {uri} at {redact_uri(tracking.uri)}, which has {', '.join(known) or 'none'}"
        raise UsageError(f"{there}: {error}{did_you_mean(uri, known, str)}") from None


def directory_of(run_id: str, tracking_uri: str) -> str:
    """Returns the directory of a run in MLflow. Raises UsageError if there is no such run of ours."""
    tracking = open_reader(tracking_uri)
    with mlflow_errors(tracking):
        run = tracking.client.get_run(run_id)
    if KEY not in run.data.tags:
        raise UsageError(f"run {run_id} at {redact_uri(tracking.uri)} is not one of this project")
    return run.data.tags["directory"]

"""Checkpoints in MLflow's list of models, and the few that get a name."""

import re
from collections.abc import Mapping

import mlflow
from mlflow.exceptions import MlflowException

from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.tracking.checkpoints import CHECKPOINT, find_checkpoint
from orchestrator.tracking.find import found_run, reading
from orchestrator.tracking.runs import TrackedRun
from orchestrator.tracking.search import alike
from orchestrator.tracking.store import Tracking, open_reader, shown

MODEL = "moe-frontier"


def log_checkpoint(tracked: TrackedRun, name: str, uri: str, step: int, metrics: Mapping[str, float]) -> None:
    """A model of the run, ranked by `metrics`, whose bytes stay at `uri`; once, however often it is said.

    What MLflow allows in no model's name becomes a dash.
    """
    tracked.put(
        "checkpoint",
        name=re.sub(r"[/:.%\"'\\]", "-", name),
        uri=uri,
        step=step * tracked.batch_size,
        metrics=dict(metrics),
    )


def register(tracking: Tracking, run_id: str, uri: str, alias: str) -> str:
    """Points `alias` at the version of the checkpoint, which `log_checkpoint` named; a new one if need be.

    Returns:
        The version's number.

    Raises:
        UsageError: if MLflow does not know the checkpoint, or does not answer.
    """
    tracking.flush(timeout_s=60)
    client = tracking.client
    with reading(tracking):
        model = find_checkpoint(client, tracking.experiment_id, run_id, uri)
        if model is None:
            raise UsageError(f"MLflow at {shown(tracking.uri)} knows no checkpoint {uri} of run {run_id}")
        if not client.search_registered_models(f"name = '{MODEL}'"):
            client.create_registered_model(MODEL)
        query = f"name = '{MODEL}' and {alike(f'tags.{CHECKPOINT}', uri)}"
        known = (v for v in client.search_model_versions(query) if v.tags[CHECKPOINT] == uri)
        version = next((v for v in known if v.run_id == run_id), None)
        if version is None:
            # not models:/<id>, which MLflow looks up in a store of its own choice
            source, tags = model.artifact_location, {CHECKPOINT: uri}
            version = client.create_model_version(MODEL, source, run_id, tags, model_id=model.model_id)
        client.set_registered_model_alias(MODEL, alias, str(version.version))
    return str(version.version)


def checkpoint_of(uri: str, tracking_uri: str | None = None) -> tuple[str, RunConfig]:
    """Of ``models:/<name>@<alias>`` or ``models:/<name>/<version>``: where its weights are, and their config.

    Without `tracking_uri`, MLflow's own holds (MLFLOW_TRACKING_URI). Raises UsageError if there is none.
    """
    tracking = open_reader(tracking_uri or mlflow.get_tracking_uri())
    client, name = tracking.client, uri.removeprefix("models:/")
    try:
        if "@" in name:
            version = client.get_model_version_by_alias(*name.split("@", 1))
        elif "/" in name:
            version = client.get_model_version(*name.split("/", 1))
        else:
            raise UsageError(f"{uri} names no version: write models:/{name}@ALIAS or models:/{name}/VERSION")
        return version.tags[CHECKPOINT], found_run(tracking, str(version.run_id)).config()
    except (MlflowException, KeyError) as error:
        raise UsageError(f"no model {uri} of ours at {shown(tracking.uri)}: {error}") from None

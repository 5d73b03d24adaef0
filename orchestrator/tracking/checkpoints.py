"""A checkpoint as MLflow has it: a LoggedModel without bytes, which stay where training wrote them."""

import tempfile
from collections.abc import Sequence

from mlflow import MlflowClient
from mlflow.entities import LoggedModel, LoggedModelStatus, Metric
from mlflow.models.utils import get_external_mlflow_model_spec
from mlflow.utils.mlflow_tags import MLFLOW_MODEL_IS_EXTERNAL

from orchestrator.tracking.journal import Entry
from orchestrator.tracking.search import alike

CHECKPOINT = "checkpoint"  # tag of a LoggedModel: where its bytes are


def find_checkpoint(client: MlflowClient, experiment_id: str, run_id: str, uri: str) -> LoggedModel | None:
    found = client.search_logged_models([experiment_id], alike(f"tags.{CHECKPOINT}", uri))
    ours = (m for m in found if m.tags[CHECKPOINT] == uri and m.source_run_id == run_id)
    return next(ours, None)


def write_checkpoint(client: MlflowClient, experiment_id: str, run_id: str, entry: Entry) -> None:
    """Goes on where an earlier attempt ended."""
    model = find_checkpoint(client, experiment_id, run_id, entry["uri"])
    if model is None:
        model = client.create_logged_model(
            experiment_id,
            name=entry["name"],
            source_run_id=run_id,
            tags={CHECKPOINT: entry["uri"], MLFLOW_MODEL_IS_EXTERNAL: "true"},
            params={"step": str(entry["step"])},
        )
    if model.status != LoggedModelStatus.READY:
        with tempfile.TemporaryDirectory() as folder:  # the registry wants the description, not the weights
            get_external_mlflow_model_spec(model).save(f"{folder}/MLmodel")
            client.log_model_artifacts(model.model_id, folder)
        client.finalize_logged_model(model.model_id, LoggedModelStatus.READY)
    written = {metric.key for metric in model.metrics or []}
    metrics = [
        Metric(name, value, entry["ms"], entry["step"])
        for name, value in entry["metrics"].items()
        if name not in written
    ]
    if metrics:
        client.log_batch(run_id, metrics=_rows(client, run_id, metrics, model.model_id))


def _rows(client: MlflowClient, run_id: str, metrics: Sequence[Metric], model_id: str) -> list[Metric]:
    """The run's own rows of those steps again, where it has them: MLflow writes a model's metrics to it too.

    The newest row of each metric costs one request for all, its history one for each, and of those a server
    with users answers few in a second.
    """
    newest = {row.key: row for row in client.get_run(run_id).data.to_proto().metrics}
    rows = []
    for metric in metrics:
        row = newest.get(metric.key, metric)
        if row.step > metric.step:
            history = client.get_metric_history(run_id, metric.key)
            row = next((one for one in history if one.step == metric.step), metric)
        elif row.step < metric.step:
            row = metric
        rows.append(Metric(row.key, row.value, row.timestamp, row.step, model_id=model_id))
    return rows

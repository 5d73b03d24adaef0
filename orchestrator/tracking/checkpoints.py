"""A checkpoint as MLflow has it: a LoggedModel without bytes, which stay where training wrote them."""

import tempfile

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
    rows = [
        _row(client, run_id, Metric(name, value, entry["ms"], entry["step"]), model.model_id)
        for name, value in entry["metrics"].items()
        if name not in written
    ]
    if rows:
        client.log_batch(run_id, metrics=rows)


def _row(client: MlflowClient, run_id: str, metric: Metric, model_id: str) -> Metric:
    """The run's own row of that step again, if it has one: MLflow writes a model's metrics to its run too."""
    rows = (row for row in client.get_metric_history(run_id, metric.key) if row.step == metric.step)
    row = next(rows, metric)
    return Metric(row.key, row.value, row.timestamp, row.step, model_id=model_id)

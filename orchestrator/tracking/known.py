"""What is known of a run's state in the store, so that nothing is written twice or without need."""

from collections.abc import Iterable

from mlflow import MlflowClient
from mlflow.entities import Metric, Param, Run, RunTag

from orchestrator.tracking.search import all_runs

KEY = "moe_frontier.key"  # tag; ours, because MLflow draws run ids itself: a retry finds what it made before
BY_ID = "id:"  # prefix of the key of a run that somebody else made
LONG = 200  # characters of a tag that need not be remembered


class Gone(Exception):
    """The run is not there, or deleted."""


class Known:
    """Attributes:
    last: metric -> step of its newest row.
    """

    def __init__(self, run: Run) -> None:
        self.run_id = run.info.run_id
        self.status = run.info.status
        self.tags = {key: value for key, value in run.data.tags.items() if len(value) < LONG}
        self.params = set(run.data.params)
        self.last = {metric.key: metric.step for metric in run.data.to_proto().metrics}
        inputs = run.inputs.dataset_inputs if run.inputs else []
        self.datasets = {(one.dataset.name, one.dataset.digest) for one in inputs}

    def learn(self, items: Iterable[Metric | Param | RunTag]) -> None:
        for item in items:
            if isinstance(item, Metric):
                self.last[item.key] = item.step
            elif isinstance(item, Param):
                self.params.add(item.key)
            elif len(item.value) < LONG:
                self.tags[item.key] = item.value
            else:
                self.tags.pop(item.key, None)


def find_known(client: MlflowClient, experiment_id: str, key: str) -> Known | None:
    """The active run of that key.

    A request that seemed lost may have made a second one meanwhile: it is empty, and is deleted.
    """
    if key.startswith(BY_ID):
        run = client.get_run(key.removeprefix(BY_ID))
        return Known(run) if run.info.lifecycle_stage == "active" else None
    query = f"tags.`{KEY}` = '{key}'"
    runs = list(all_runs(client, experiment_id, query, "attributes.start_time DESC"))
    runs.sort(key=_is_empty)
    for run in runs[1:]:
        if _is_empty(run):
            client.delete_run(run.info.run_id)
    return Known(runs[0]) if runs else None


def _is_empty(run: Run) -> bool:
    return not run.data.metrics and not run.data.params

"""What MLflow takes: search, whose filters know neither escapes nor the end of a page, and names."""

import re
from collections.abc import Iterator

from mlflow import MlflowClient
from mlflow.entities import Run

PAGE = 1000


def alike(field: str, text: str) -> str:
    """A condition that holds where `field` is `text`; elsewhere too if that has quotes: compare again."""
    if "'" in text or "\\" in text:
        any_of_them = text.replace("'", "_").replace("\\", "_")
        return f"{field} LIKE '{any_of_them}'"
    return f"{field} = '{text}'"


def key_part(text: str) -> str:
    """As a part of a metric's name, which MLflow allows few characters: others become dashes."""
    return re.sub(r"[^A-Za-z0-9_.-]+", "-", text)


def all_runs(client: MlflowClient, experiment_id: str, query: str, order: str) -> Iterator[Run]:
    """Active runs, page by page; none where there is no experiment (its id is empty)."""
    token = None
    while experiment_id:
        page = client.search_runs(
            [experiment_id], query, max_results=PAGE, order_by=[order], page_token=token
        )
        yield from page
        if not (token := page.token):
            return

"""The dashboard asks for nothing that this Ray does not export."""

import json
import re
import time
import urllib.request
from pathlib import Path

import pytest
import ray
import yaml

from tests.parts import start_ray

CLUSTER = Path(__file__).parents[2] / "cluster"
SOURCE = Path(ray.__file__).parent

# Exported only where there is a GPU, a training of several workers, or a Ray Data plan: the names under which
# the installed Ray defines them, and where.
DEFINED = {
    "dashboard/modules/reporter/reporter_agent.py": {
        "node_gpus_utilization",
        "node_gram_used",
        "node_gram_available",
        "node_gpu_power_milliwatts",
        "node_gpu_temperature_celsius",
    },
    "train/v2/_internal/metrics/controller.py": {
        "train_controller_state",
        "train_worker_group_start_total_time_s",
        "train_worker_group_shutdown_total_time_s",
    },
    "train/v2/_internal/metrics/worker.py": {"train_report_total_blocked_time_s"},
    "data/_internal/stats.py": {"data_output_rows", "data_iter_total_blocked_seconds"},
}


def expressions() -> list[str]:
    dashboard = json.loads((CLUSTER / "grafana.json").read_text())
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def names(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:ray|autoscaler)_[a-z0-9_]+", re.sub(r"by \([^)]*\)", "", expression)))


@pytest.fixture
def scraped(no_cluster: None) -> set[str]:
    """What the nodes of a live Ray export while a task and an actor run."""
    start_ray(dashboard=True)

    @ray.remote(num_cpus=0)
    class UtilizationMonitor:
        def port(self) -> list[int]:
            return [node["MetricsExportPort"] for node in ray.nodes()]

    busy = UtilizationMonitor.remote()
    ray.get(busy.port.remote())  # pyright: ignore[reportAttributeAccessIssue]
    directory = Path(ray._private.worker.global_worker.node.get_session_dir_path()).parent
    found, wanted = set[str](), set().union(*map(names, expressions())) - defined()
    for _ in range(60):  # nodes report every few seconds
        targets = json.loads((directory / "prom_metrics_service_discovery.json").read_text())[0]["targets"]
        for target in targets:
            with urllib.request.urlopen(f"http://{target}/metrics", timeout=10) as answer:
                found |= set(re.findall(r"^([a-z_0-9]+)[{ ]", answer.read().decode(), re.MULTILINE))
        if wanted <= found:
            break
        time.sleep(1)
    return found


def defined() -> set[str]:
    return {f"ray_{name}" for found in DEFINED.values() for name in found}


@pytest.mark.slow  # nodes report every few seconds
def test_every_expression_names_metrics_that_ray_exports(scraped):
    for expression in expressions():
        assert names(expression), expression
        assert names(expression) <= scraped | defined(), expression


@pytest.mark.parametrize("file", DEFINED)
def test_names_that_need_gpus_or_trainings_stand_in_rays_source(file):
    text = (SOURCE / file).read_text()
    assert [name for name in DEFINED[file] if f'"{name}"' not in text] == []


def test_the_dashboard_can_be_imported():
    """Ids are unique, every panel is in the grid of 24 columns, and none lies on another."""
    dashboard = json.loads((CLUSTER / "grafana.json").read_text())
    panels = dashboard["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken = set[tuple[int, int]]()
    for panel in panels:
        place = panel["gridPos"]
        cells = {(place["x"] + x, place["y"] + y) for x in range(place["w"]) for y in range(place["h"])}
        assert place["x"] + place["w"] <= 24
        assert not cells & taken
        taken |= cells
    assert {variable["name"] for variable in dashboard["templating"]["list"]} == {"source", "instance"}


def test_prometheus_finds_the_nodes_where_ray_writes_them_down():
    config = yaml.safe_load((CLUSTER / "prometheus.yaml").read_text())
    files = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert files == ["/tmp/ray/prom_metrics_service_discovery.json"]

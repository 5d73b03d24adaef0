"""The Grafana dashboard and the Prometheus configuration."""

import json
import re

import yaml

from orchestrator.training.gauges import GAUGES
from tests.cluster.commented import CLUSTER

FILES = ("grafana.json", "alerts.yaml")


def test_the_dashboard_can_be_imported():
    """Ids are unique, and panels lie in the grid of 24 columns without overlap."""
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


def test_dashboard_and_alerts_know_the_gauges_of_workers():
    """All of them are drawn, and no other name is asked for."""
    exported = {f"ray_moe_{name}" for name in GAUGES}
    drawn, alarmed = (set(re.findall(r"ray_moe_\w+", (CLUSTER / name).read_text())) for name in FILES)
    assert drawn == exported
    assert alarmed < exported


def test_prometheus_reads_the_nodes_from_rays_file():
    config = yaml.safe_load((CLUSTER / "prometheus.yaml").read_text())
    files = config["scrape_configs"][0]["file_sd_configs"][0]["files"]
    assert files == ["/tmp/ray/prom_metrics_service_discovery.json"]
    assert [CLUSTER / name for name in config["rule_files"]] == [CLUSTER / "alerts.yaml"]

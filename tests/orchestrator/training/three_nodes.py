"""Runs on nodes that are lost, replaced and drained.

``python -m tests.orchestrator.training.three_nodes DIGITS HOME SCENARIO..``: three raylets on this machine, a
head without CPUs and two nodes of two CPUs. Nodes can only be added from the main thread, so runs train in
other threads. The reports of a run are written to ``HOME/<run>.json``.
"""

import json
import logging
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ray
from ray.cluster_utils import Cluster
from ray.util import placement_group_table

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.training.fit import fit
from orchestrator.training.resources import check_shared

SOFT = {"model.moe.router.kind": "soft", "model.moe.num_experts": 4, "train.report_every": 1}
STEPS = 120
SLOW = {"train.microbatch": 2}  # steps that leave time for nodes to come and go
STALLED_S = 300  # without a report; how long a run takes is the machine's affair


class Training(threading.Thread):
    """A run on workers, with what it reported and where its workers were."""

    def __init__(self, run: RunConfig) -> None:
        super().__init__(daemon=True)
        self.run_config = run
        self.reports: list[tuple[int, float, float]] = []
        self.nodes: list[list[str]] = []
        self.error: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            fit(self.run_config, self._report)
        except BaseException as error:
            self.error = error

    def _report(self, step: int, metrics: dict[str, float]) -> None:
        if "resumed/step" in metrics or not self.reports:
            self.nodes.append(worker_nodes())
        self.reports.append((step, metrics["train/loss"], metrics["cost/device_s"]))

    def wait_for(self, happened: Callable[[], bool]) -> None:
        seen, since = 0, time.monotonic()
        while self.is_alive() and time.monotonic() < since + STALLED_S and not happened():
            if len(self.reports) != seen:
                seen, since = len(self.reports), time.monotonic()
            time.sleep(0.1)
        if not happened():
            raise TimeoutError(f"it never happened: {self.error!r}, {seen} reports")

    def reach(self, step: int) -> None:
        self.wait_for(lambda: bool(self.reports) and self.reports[-1][0] >= step)

    def finish(self) -> dict[str, Any]:
        self.wait_for(lambda: not self.is_alive())
        return {"error": repr(self.error or ""), "reports": self.reports, "nodes": self.nodes}


def worker_nodes() -> list[str]:
    """The node of each bundle of the placement group of the run's workers, in the order of the bundles."""
    groups = [group for group in placement_group_table().values() if group["state"] == "CREATED"]
    return [node for group in groups for _, node in sorted(group["bundles_to_node_id"].items())]


def undisturbed(run: RunConfig) -> dict[str, Any]:
    reports: list[tuple[int, float]] = []
    fit(run, lambda step, metrics: reports.append((step, metrics["train/loss"])))
    return {"reports": reports}


def lost_and_replaced(run: RunConfig, cluster: Cluster) -> dict[str, Any]:
    """An expert-parallel group across two nodes loses one of them for a while."""
    training = Training(override(run, {"scale.workers": 2, "scale.ep": 2}))
    training.reach(40)
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    cluster.add_node(num_cpus=2)
    return training.finish()


def lost_for_good(run: RunConfig, cluster: Cluster) -> dict[str, Any]:
    """Four workers, then two, and four again when a node comes, long after."""
    training = Training(override(run, {**SLOW, "scale.workers": 4, "scale.ep": 4, "scale.wait_s": 5}))
    training.reach(40)
    cluster.remove_node(cluster.list_all_nodes()[-1], allow_graceful=False)
    training.wait_for(lambda: len(training.nodes) == 2)
    training.reach(training.reports[-1][0] + 20)
    cluster.add_node(num_cpus=2)
    return training.finish()


def drained(run: RunConfig, cluster: Cluster) -> dict[str, Any]:
    """The cloud takes a spot node and says so first."""
    training = Training(override(run, {**SLOW, "scale.workers": 4, "scale.wait_s": 5}))
    training.reach(40)
    going = cluster.list_all_nodes()[-1]
    command = [
        Path(sys.executable).with_name("ray"),
        "drain-node",
        "--address",
        cluster.address,
        "--node-id",
        going.node_id,
    ]
    why = ["--reason", "DRAIN_NODE_REASON_PREEMPTION", "--reason-message", "spot"]
    subprocess.run([*command, *why, "--deadline-remaining-seconds", "90"], check=True)
    training.wait_for(lambda: len(training.nodes) == 2)
    cluster.remove_node(going, allow_graceful=False)
    return training.finish()


SCENARIOS = {function.__name__: function for function in (lost_and_replaced, lost_for_good, drained)}


def main() -> None:
    data, home, *scenarios = sys.argv[1:]
    logging.basicConfig(format="%(asctime)s %(message)s")
    run = override(
        RunConfig(),
        {**SOFT, "data.path": data, "storage": home, "train.steps": STEPS, "checkpoint.every": 25},
    )
    Path(home, "alone.json").write_text(json.dumps(undisturbed(override(run, {"name": "alone"}))))
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 0})
    for _ in range(2):
        cluster.add_node(num_cpus=2)
    ray.init(address=cluster.address, logging_level=logging.ERROR, log_to_driver=False)
    check_shared(home)
    for name in scenarios:
        scenario, began = SCENARIOS[name], time.monotonic()
        found = scenario(override(run, {"name": name}), cluster)
        Path(home, f"{name}.json").write_text(json.dumps(found))
        print(name, f"{time.monotonic() - began:.0f} s", flush=True)
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()

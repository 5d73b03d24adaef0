"""Checks before a sweep, with real faults where they are cheap; facts of several nodes by hand."""

import os
import shutil
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import ray
from ray.cluster_utils import Cluster

from orchestrator import storage
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.planning import preflight as preflight_file
from orchestrator.planning.findings import Finding, require
from orchestrator.planning.preflight import (
    NodeFacts,
    check_gpus,
    check_shared_files,
    check_trials,
    check_versions,
    examine,
    preflight,
)
from orchestrator.sweeps.sweep import Sweep
from tests.orchestrator.buckets import Bucket

CHECKS = ["sweep", "storage", "tracking", "versions", "shared files", "GPUs", "trials"]


def sweep_of(digits: str, root: Path, **changes: Any) -> Sweep:
    fields = {"name": "tiny", "data.path": digits, "storage": str(root), "model.moe": None}
    return Sweep(base=override(RunConfig(), fields), arms={"a": {}, "b": changes})


def checked(sweep: Sweep, **options: Any) -> dict[str, Finding]:
    found = preflight(sweep, **{"connect": lambda: None, "open_store": lambda: None} | options)
    return {finding.check: finding for finding in found}


@pytest.mark.usefixtures("cluster")
def test_a_sweep_that_can_start(digits: str, tmp_path: Path) -> None:
    found = checked(sweep_of(digits, tmp_path / "runs"), verify=True)
    assert list(found) == CHECKS
    require(found.values())
    assert "2 trials" in found["sweep"].message
    assert os.listdir(tmp_path / "runs") == []


def test_faults_here_are_all_found_before_the_cluster_is_joined(digits: str, tmp_path: Path) -> None:
    shards = tmp_path / "shards"
    shutil.copytree(digits, shards)
    damaged = max(shards.rglob("*.parquet"), key=lambda path: path.stat().st_size)
    damaged.write_bytes(damaged.read_bytes()[:-100])
    (tmp_path / "file").touch()

    def connect() -> None:
        raise AssertionError

    def open_store() -> AbstractContextManager[None]:
        raise UsageError("no MLflow server answers")

    sweep = sweep_of(str(shards), tmp_path / "file" / "runs")
    found = checked(sweep, connect=connect, open_store=open_store)
    assert [(check, one.ok) for check, one in found.items()] == [(check, False) for check in CHECKS[:3]]
    assert "copy it again" in found["sweep"].message
    assert "Name another place with `storage`" in found["storage"].message
    with pytest.raises(
        UsageError, match=r"(?s)cannot start:.*sweep: .*parquet .*storage: .*tracking: no MLflow"
    ):
        require(found.values())


def test_a_node_that_does_not_answer(digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its versions may be right: it is not told to install others."""
    silent = {"a": NODE, "b": TimeoutError("no answer within 180 s")}
    monkeypatch.setattr(preflight_file.ray, "nodes", lambda: 2 * [{"Alive": True}])
    monkeypatch.setattr(preflight_file, "on_every_node", lambda *_: silent)
    found = checked(sweep_of(digits, tmp_path))["nodes"]
    assert found.message.startswith("1 of 2 nodes: b: no answer within 180 s. These nodes hang or are too")


@pytest.mark.usefixtures("cluster")
def test_a_trial_that_never_fits(digits: str, tmp_path: Path) -> None:
    found = checked(sweep_of(digits, tmp_path, **{"scale.workers": 8}))
    assert [check for check, one in found.items() if not one.ok] == ["trials"]
    message = "trials: 1 of 2 trials do not fit; b: 8 workers x 0.5 CPU .* at most 2: use at most 2 workers"
    with pytest.raises(UsageError, match=message):
        require(found.values())


@pytest.mark.usefixtures("cluster")
def test_a_trial_that_does_not_fit_the_memory(digits: str, tmp_path: Path) -> None:
    sweep, nodes = sweep_of(digits, tmp_path), {"a": NODE}
    with pytest.raises(UsageError, match=r"2 of 2 trials do not fit; a: needs .* GiB per device, and 90%"):
        check_trials(sweep, nodes, {"a": {"CPU": 2, "memory": 2.0**20}}, retrain=False)
    larger = {"a": {"CPU": 1, "memory": 2.0**20}}  # another node is to come
    assert check_trials(sweep, nodes, larger, retrain=False) == "2 trials fit 1 node"
    on_gpus = replace(sweep, base=override(sweep.base, {"scale.use_gpu": True}))
    with pytest.raises(UsageError, match="1 workers need 1 GPUs, the cluster has at most 0"):
        check_trials(on_gpus, nodes, {"a": {"CPU": 2, "memory": 2.0**40}}, retrain=False)


def test_a_bucket(bucket: Bucket, digits: str) -> None:
    stop = UsageError("stop")

    def connect() -> None:
        raise stop

    sweep = sweep_of(digits, Path("unused"))
    there = replace(sweep, base=override(sweep.base, {"storage": bucket.uri("runs")}))
    with pytest.raises(UsageError, match="stop"):
        checked(there, connect=connect)
    assert bucket.all_keys() == []
    missing = replace(sweep, base=override(sweep.base, {"storage": "s3://nobody-made-this/runs"}))
    assert "there is no such bucket. Name another place" in checked(missing)["storage"].message


def test_what_a_node_sees(digits: str, tmp_path: Path) -> None:
    """A node with a disk of its own sees neither the driver's file nor the data."""
    marker = tmp_path / "marker"
    marker.touch()
    here = examine(str(tmp_path), str(marker), digits)
    assert here.storage_problem == ""
    assert os.listdir(tmp_path) == ["marker"]
    marker.unlink()
    elsewhere = examine(str(tmp_path), str(marker), "/nowhere")
    assert elsewhere.storage_problem == "does not see what the driver wrote"
    assert "no data set at /nowhere" in elsewhere.data
    nodes = {"a": here, "b": elsewhere}
    with pytest.raises(UsageError, match=r"1 of 2 nodes: b: does not see .* is not shared .*`storage` s3://"):
        check_shared_files(nodes, str(tmp_path), digits)
    nodes["b"] = replace(here, data="other")
    with pytest.raises(UsageError, match=r"1 of 2 nodes: b: found other, here .* differs: name data"):
        check_shared_files(nodes, str(tmp_path), digits)
    assert "2 nodes read and write" in check_shared_files({"a": here, "b": here}, str(tmp_path), digits)


NODE = NodeFacts(versions={}, gpus=2, gpu_gib=80, cuda=True, storage_problem="", data="")


def test_versions_and_code_of_nodes(digits: str, tmp_path: Path) -> None:
    storage.write_bytes(str(tmp_path / "marker"), b"")
    here = examine(str(tmp_path), str(tmp_path / "marker"), digits)
    assert {"python", "torch", "ray", "our code"} == here.versions.keys()
    older = replace(here, versions={**here.versions, "torch": "2.0.0", "our code": "0123"})
    with pytest.raises(
        UsageError, match=r"1 of 2 nodes: b: torch 2.0.0, here 2.*, our code 0123, here .*pip"
    ):
        check_versions({"a": here, "b": older})
    assert "on 1 node" in check_versions({"a": here})


def test_gpus_that_are_not_there() -> None:
    declared = {"a": {"GPU": 2.0}, "b": {"GPU": 2.0}}
    for wrong, says in (
        ({"gpus": 1}, "b: Ray has 2 GPUs, NVIDIA's driver 1"),
        ({"cuda": False}, "b: torch was built without CUDA"),
    ):
        nodes = {"a": NODE, "b": replace(NODE, **wrong)}
        with pytest.raises(UsageError, match=f"1 of 2 nodes: {says}"):
            check_gpus(nodes, declared, wanted=True)
        assert check_gpus(nodes, declared, wanted=False) == "the sweep trains on CPUs"
    assert check_gpus({"a": NODE, "b": NODE}, declared, wanted=True) == "4 GPUs on 2 nodes"


@pytest.mark.slow
@pytest.mark.usefixtures("no_cluster")
def test_two_nodes(digits: str, tmp_path: Path) -> None:
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    cluster.add_node(num_cpus=2)
    try:
        connect = lambda: ray.init(address=cluster.address, logging_level="error", log_to_driver=False)  # noqa: E731
        found = checked(sweep_of(digits, tmp_path, **{"scale.workers": 4}), connect=connect)
        require(found.values())
        assert "2 nodes read and write" in found["shared files"].message
    finally:
        ray.shutdown()
        cluster.shutdown()

"""The Kubernetes files: by KubeRay's own schemas, where they are, and by what must hold of them anyway."""

import json
import os
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml

from tests.cluster.commented import CLUSTER, check_filled_in, check_no_secrets, check_prices

FOLDER = CLUSTER / "kuberay"
FILES = pytest.mark.parametrize("name", ["raycluster", "rayjob"])
WHERE = (
    "set KUBERAY_CRDS to a folder with ray.io_rayclusters.yaml and ray.io_rayjobs.yaml: they are"
    " ray-operator/config/crd/bases/ of https://github.com/ray-project/kuberay, tag v1.7.0"
)


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def cluster_of(name: str) -> dict[str, Any]:
    spec = manifest(name)["spec"]
    return spec["rayClusterSpec"] if name == "rayjob" else spec


def shared() -> dict[tuple[str, str], dict[str, Any]]:
    documents = yaml.safe_load_all((FOLDER / "shared.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def pods(name: str) -> dict[str, dict[str, Any]]:
    spec = cluster_of(name)
    workers = {group["groupName"]: group["template"]["spec"] for group in spec["workerGroupSpecs"]}
    return {"head": spec["headGroupSpec"]["template"]["spec"]} | workers


@cache
def schema(name: str) -> dict[str, Any]:
    if not (folder := os.environ.get("KUBERAY_CRDS")):
        pytest.skip(WHERE)
    definition = yaml.load((Path(folder) / f"ray.io_{name}s.yaml").read_text(), yaml.CSafeLoader)
    (version,) = [one for one in definition["spec"]["versions"] if one["name"] == "v1"]
    return version["schema"]["openAPIV3Schema"]


def unknown(value: Any, schema: dict[str, Any], at: str = "") -> list[str]:
    """Paths that the schema does not have: the server would drop them without a word."""
    if isinstance(value, list):
        return [
            path
            for n, one in enumerate(value)
            for path in unknown(one, schema.get("items", {}), f"{at}[{n}]")
        ]
    known, others = schema.get("properties", {}), schema.get("additionalProperties")
    free = schema.get("x-kubernetes-preserve-unknown-fields") or (not known and others is None)
    if not isinstance(value, dict) or free:
        return []
    return [
        path
        for name, one in value.items()
        for path in (
            unknown(one, known.get(name, others), f"{at}.{name}")
            if name in known or others
            else [f"{at}.{name}"]
        )
    ]


@FILES
def test_kuberays_schema_accepts_it(name):
    jsonschema.Draft202012Validator(schema(name)).validate(manifest(name))
    assert unknown(manifest(name), schema(name)) == []


@FILES
def test_mistakes_would_be_found(name):
    wrong = manifest(name)
    group = (wrong["spec"].get("rayClusterSpec") or wrong["spec"])["workerGroupSpecs"][0]
    group["maxReplica"] = group.pop("maxReplicas")
    group["template"]["spec"]["containers"][0]["resources"]["limits"]["cpu"] = "four"
    (where,) = unknown(wrong, schema(name))
    assert where.endswith(".workerGroupSpecs[0].maxReplica")
    found = {error.json_path for error in jsonschema.Draft202012Validator(schema(name)).iter_errors(wrong)}
    assert len(found) == 2  # what is missing now, and a quantity that is none


@FILES
def test_prices_and_lines_to_fill_in(name):
    check_prices(FOLDER / f"{name}.yaml", {"head": 1, "GPU": 6, "data": 2})
    check_filled_in(FOLDER / f"{name}.yaml")
    check_filled_in(FOLDER / "shared.yaml")


def test_the_job_brings_up_the_same_cluster():
    assert cluster_of("rayjob") == cluster_of("raycluster")


def test_ray_is_the_pinned_one():
    assert cluster_of("raycluster")["rayVersion"] == ray.__version__


def test_the_clusters_maximum_is_declared():
    """Trials of a cluster with no worker up yet are checked against this."""
    most = {"CPU": 0, "GPU": 0}
    for group in cluster_of("raycluster")["workerGroupSpecs"]:
        limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
        most["CPU"] += group["maxReplicas"] * int(limits["cpu"])
        most["GPU"] += group["maxReplicas"] * int(limits.get("nvidia.com/gpu", 0))
    declared = shared()["ConfigMap", "moe-frontier"]["data"]["MOE_FRONTIER_MAX_RESOURCES"]
    assert json.loads(declared) == most


@FILES
def test_closed_by_default(name):
    spec = cluster_of(name)
    assert spec["authOptions"] == {"mode": "token", "secretName": "moe-frontier-token"}
    assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
    assert spec["headGroupSpec"]["enableIngress"] is False
    assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for pod in pods(name).values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        assert container["resources"]["requests"] == container["resources"]["limits"]
        (volume,) = [one for one in pod["volumes"] if one["name"] == "shm"]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    check_no_secrets(manifest(name))
    for one in shared().values():
        check_no_secrets(one)


def test_only_the_head_has_the_password_and_the_right_to_start_pods():
    for name, pod in pods("raycluster").items():
        from_secrets = [
            one["name"] for one in pod["containers"][0].get("env", []) if "secretKeyRef" in str(one)
        ]
        assert bool(from_secrets) == (name == "head")
        assert pod["serviceAccountName"] == f"moe-frontier-{'head' if name == 'head' else 'worker'}"
        assert ("ServiceAccount", pod["serviceAccountName"]) in shared()


def test_a_pod_that_must_go_is_drained_first():
    for name, pod in pods("raycluster").items():
        if name != "head":
            (_, _, script) = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            assert script.startswith("timeout 10 ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION")
            assert pod["terminationGracePeriodSeconds"] > 100


def test_the_job_tries_again_and_always_cleans_up():
    spec = manifest("rayjob")["spec"]
    assert spec["backoffLimit"] > 0
    assert spec["submissionMode"] == "K8sJobMode"
    rules = spec["deletionStrategy"]["deletionRules"]
    assert {next(iter(rule["condition"].values())) for rule in rules} == {"SUCCEEDED", "FAILED", "Failed"}
    assert {rule["policy"] for rule in rules} == {
        "DeleteCluster"
    }  # DeleteWorkers is refused beside autoscaling
    assert spec["shutdownAfterJobFinishes"] is False
    assert spec["entrypoint"].startswith("python jobs/pareto_sweep.py ")
    assert spec["activeDeadlineSeconds"] > 0

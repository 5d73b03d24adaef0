"""The Kubernetes files: KubeRay's schemas, declared resources, security, clean-up."""

import gzip
import json
from functools import cache
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import ray
import yaml
from ray._private.services import determine_plasma_store_config
from ray._private.utils import resolve_object_store_memory
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr

from orchestrator.config import DataConfig
from tests.cluster.commented import CLUSTER, check_filled_in, check_no_secrets

FOLDER = CLUSTER / "kuberay"
SCHEMAS = Path(__file__).parents[1] / "fixtures" / "kuberay-1.7.0.json.gz"


def manifest(name: str) -> dict[str, Any]:
    return yaml.safe_load((FOLDER / f"{name}.yaml").read_text())


def cluster_of(name: str) -> dict[str, Any]:
    spec = manifest(name)["spec"]
    return spec.get("rayClusterSpec", spec)


def shared() -> dict[tuple[str, str], dict[str, Any]]:
    documents = yaml.safe_load_all((FOLDER / "shared.yaml").read_text())
    return {(one["kind"], one["metadata"]["name"]): one for one in documents}


def pods() -> dict[str, dict[str, Any]]:
    small, large = cluster_of("raycluster"), cluster_of("rayjob_h100")
    groups = [*small["workerGroupSpecs"], *large["workerGroupSpecs"]]
    workers = {group["groupName"]: group["template"]["spec"] for group in groups}
    heads = {"head": small["headGroupSpec"], "h100-head": large["headGroupSpec"]}
    return workers | {name: group["template"]["spec"] for name, group in heads.items()}


@cache
def schemas() -> dict[str, Any]:
    return json.loads(gzip.decompress(SCHEMAS.read_bytes()))


def unknown(value: Any, schema: dict[str, Any], at: str = "") -> list[str]:
    """Paths that the schema does not have, which the server would drop silently."""
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


@pytest.mark.parametrize("name", ["raycluster", "rayjob", "rayjob_h100"])
def test_kuberays_schema_accepts_it(name):
    """And a misspelt field is noticed, which Kubernetes drops in silence."""
    mine = manifest(name)
    whole = schemas()[mine["kind"]]
    jsonschema.Draft202012Validator(whole).validate(mine)
    assert unknown(mine, whole) == []
    cluster = mine["spec"].get("rayClusterSpec", mine["spec"])
    cluster["workerGroupSpecs"][0]["maxReplica"] = 3
    assert [path.rpartition(".")[2] for path in unknown(mine, whole)] == ["maxReplica"]


def test_the_job_brings_up_the_same_cluster_with_the_pinned_ray():
    assert cluster_of("rayjob") == cluster_of("raycluster")
    assert cluster_of("raycluster")["rayVersion"] == ray.__version__
    assert cluster_of("rayjob_h100")["rayVersion"] == ray.__version__
    for name in ("raycluster", "rayjob", "rayjob_h100", "shared"):
        check_filled_in(FOLDER / f"{name}.yaml")


def test_the_clusters_maximum_is_declared():
    """Trials of a cluster without workers yet are checked against it; Ray's autoscaler reads the groups."""
    types = _derive_autoscaling_config_from_ray_cr(manifest("raycluster"))["available_node_types"].values()
    most = {
        name: sum(one["max_workers"] * one["resources"].get(name, 0) for one in types)
        for name in ("CPU", "GPU")
    }
    declared = shared()["ConfigMap", "moe-frontier"]["data"]["MOE_FRONTIER_MAX_RESOURCES"]
    assert json.loads(declared) == most


@pytest.mark.parametrize(
    ("name", "cpus", "gib"),
    [("head", 4, 16), ("gpu", 4, 16), ("data", 16, 64), ("h100-head", 4, 16), ("h100", 192, 2048)],
)
def test_a_pod_leaves_room_for_the_system_of_its_node(name, cpus, gib):
    """Else no node of the price that the file quotes ever fits it."""
    spec = cluster_of("raycluster")
    requests = [container["resources"]["requests"] for container in pods()[name]["containers"]]
    if name == "head":  # KubeRay puts the autoscaler's container into the head's pod
        requests.append(spec["autoscalerOptions"]["resources"]["requests"])
    assert 0.85 * cpus < sum(cores(one["cpu"]) for one in requests) <= cpus - 0.5
    assert 0.8 * gib < sum(size(one["memory"]) for one in requests) / 2**30 <= 0.875 * gib
    for group in (*spec["workerGroupSpecs"], *cluster_of("rayjob_h100")["workerGroupSpecs"]):
        if group["groupName"] == name:  # KubeRay would round the CPUs up
            assert int(group["rayStartParams"]["num-cpus"]) == int(cores(requests[0]["cpu"]))


def test_closed_by_default():
    for spec in (cluster_of("raycluster"), cluster_of("rayjob_h100")):
        assert spec["authOptions"] == {"mode": "token", "secretName": "moe-frontier-token"}
        assert spec["headGroupSpec"]["serviceType"] == "ClusterIP"
        assert spec["headGroupSpec"]["enableIngress"] is False
        assert spec["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"
    for pod in pods().values():
        assert pod["securityContext"]["runAsNonRoot"] is True
        (container,) = pod["containers"]
        assert container["securityContext"]["allowPrivilegeEscalation"] is False
        requests, limits = container["resources"]["requests"], container["resources"]["limits"]
        assert requests == limits | {"ephemeral-storage": requests["ephemeral-storage"]}
        (volume,) = [one for one in pod["volumes"] if one["name"] == "shm"]
        assert volume["emptyDir"]["medium"] == "Memory"
        assert {"name": "shm", "mountPath": "/dev/shm"} in container["volumeMounts"]
    for document in (*map(manifest, ("raycluster", "rayjob", "rayjob_h100")), *shared().values()):
        check_no_secrets(document)


def cores(quantity: str) -> float:
    """Returns the CPUs of a Kubernetes quantity."""
    return float(quantity.removesuffix("m")) / (1000 if quantity.endswith("m") else 1)


def size(quantity: str) -> float:
    """Returns the bytes of a Kubernetes quantity in Gi."""
    return float(quantity.removesuffix("Gi")) * 2**30


@pytest.mark.parametrize("name", ["head", "gpu", "data", "h100-head", "h100"])
def test_shared_memory_holds_rays_object_store(name, monkeypatch):
    """Ray would put a larger store on the disk. It sizes the store by the memory of the pod."""
    pod = pods()[name]
    (volume,) = [one for one in pod["volumes"] if one["name"] == "shm"]
    shm, memory = (
        size(volume["emptyDir"]["sizeLimit"]),
        size(pod["containers"][0]["resources"]["limits"]["memory"]),
    )
    monkeypatch.setattr(ray._private.utils, "get_shared_memory_bytes", lambda: int(shm))
    monkeypatch.setattr(ray._common.utils, "get_system_memory", lambda: int(memory))
    store = resolve_object_store_memory(int(memory))
    most = ray._private.ray_constants.DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES
    assert store == pytest.approx(min(0.3 * memory, most)), "capped by the shared memory"
    assert determine_plasma_store_config(store, "/tmp")[0] == "/dev/shm"


@pytest.mark.parametrize("name", ["head", "gpu", "data", "h100-head", "h100"])
def test_the_disk_of_a_pod_holds_the_cache(name):
    requests = pods()[name]["containers"][0]["resources"]["requests"]
    assert size(requests["ephemeral-storage"]) > DataConfig().cache_gb * 1e9 + size("4Gi")  # logs


def test_only_the_head_has_the_password_and_the_right_to_start_pods():
    for name, pod in pods().items():
        from_secrets = [
            one["name"] for one in pod["containers"][0].get("env", []) if "secretKeyRef" in str(one)
        ]
        assert bool(from_secrets) == name.endswith("head")
        assert pod["serviceAccountName"] == f"moe-frontier-{'head' if name.endswith('head') else 'worker'}"
        assert ("ServiceAccount", pod["serviceAccountName"]) in shared()
        if not name.endswith("head"):  # drained before it stops
            (_, _, script) = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            assert script.startswith("timeout 10 ray drain-node --reason DRAIN_NODE_REASON_PREEMPTION")
            assert pod["terminationGracePeriodSeconds"] > 100


def test_the_job_tries_again_and_always_cleans_up():
    spec = manifest("rayjob")["spec"]
    assert spec["backoffLimit"] > 0
    assert spec["submissionMode"] == "K8sJobMode"
    rules = spec["deletionStrategy"]["deletionRules"]
    assert {next(iter(rule["condition"].values())) for rule in rules} == {"SUCCEEDED", "FAILED", "Failed"}
    # DeleteWorkers is refused together with autoscaling.
    assert {rule["policy"] for rule in rules} == {"DeleteCluster"}
    assert spec["shutdownAfterJobFinishes"] is False
    assert spec["entrypoint"].startswith("python jobs/pareto_sweep.py ")
    assert spec["activeDeadlineSeconds"] > 0


def test_kueue_takes_the_job():
    """What its webhook checks, and one pod set for each group: the head, all workers, the submitter."""
    job, spec = manifest("rayjob_h100"), cluster_of("rayjob_h100")
    assert job["metadata"]["labels"].keys() == {"kueue.x-k8s.io/queue-name"}
    assert job["spec"]["shutdownAfterJobFinishes"] is True
    assert not {"suspend", "clusterSelector", "deletionStrategy"} & job["spec"].keys()
    assert not spec.get("enableInTreeAutoscaling")
    (group,) = spec["workerGroupSpecs"]
    assert group["replicas"] == group["minReplicas"] == group["maxReplicas"]
    assert group["groupName"] != "head"
    (topology,) = group["template"]["metadata"]["annotations"]
    assert topology == "kueue.x-k8s.io/podset-preferred-topology"


def test_the_workers_of_the_queued_job_have_whole_nodes():
    """All GPUs with all their network cards, and as many workers as there are GPUs."""
    (group,) = cluster_of("rayjob_h100")["workerGroupSpecs"]
    limits = group["template"]["spec"]["containers"][0]["resources"]["limits"]
    assert (limits["nvidia.com/gpu"], limits["vpc.amazonaws.com/efa"]) == ("8", "32")
    assert "hugepages-2Mi" in limits
    most = {"CPU": int(group["rayStartParams"]["num-cpus"]), "GPU": int(limits["nvidia.com/gpu"])}
    most = {name: amount * group["replicas"] for name, amount in most.items()}
    assert f"--workers {most['GPU']} " in manifest("rayjob_h100")["spec"]["entrypoint"]
    env = {one["name"]: one.get("value") for one in pods()["h100-head"]["containers"][0]["env"]}
    assert json.loads(env["MOE_FRONTIER_MAX_RESOURCES"]) == most
    env = {one["name"]: one["value"] for one in pods()["h100"]["containers"][0]["env"]}
    assert env == {"FI_PROVIDER": "efa", "NCCL_DEBUG": "WARN"}

"""`ray up` files: Ray's own checks, the clouds' API descriptions, resources and security."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import botocore.session
import googleapiclient
import pytest
import yaml
from botocore.validate import ParamValidator
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.cluster.commented import CLUSTER, check_filled_in, check_no_secrets

BOTH = pytest.mark.parametrize("cloud", ["aws", "gcp"])


def config(cloud: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / f"{cloud}.yaml").read_text())


def commands(cloud: str) -> list[str]:
    return [line for name, lines in config(cloud).items() if name.endswith("commands") for line in lines]


def cluster_env(cloud: str, home: Path) -> dict[str, str]:
    """Environment after the first setup command, which runs as the launcher runs it."""
    for command in (config(cloud)["setup_commands"][0], ". ~/cluster.env; env -0"):
        done = subprocess.run(
            ["bash", "-c", f"({command})"],
            env={"HOME": str(home), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
    return dict(pair.split("=", 1) for pair in done.stdout.split("\0") if pair)


@BOTH
def test_ray_accepts_it(cloud):
    """Ray finds a typo; nothing in the file is secret or public; the shell can parse every command."""
    validate_config(prepare_config(config(cloud)))
    with pytest.raises(Exception, match="idle_timeout"):
        validate_config(prepare_config(config(cloud) | {"idle_timeout": 3}))
    check_filled_in(CLUSTER / f"{cloud}.yaml")
    check_no_secrets(config(cloud))
    assert "security_group" not in config(cloud)["provider"]  # Ray's would open port 22 to all
    for line in commands(cloud):
        subprocess.run(["bash", "-n"], input=f"true && ({line})", text=True, check=True)


@BOTH
def test_the_sum_of_resources_is_declared(cloud, tmp_path):
    types = config(cloud)["available_node_types"]
    most = {"CPU": 0, "GPU": 0}
    for one in types.values():
        for resource, amount in one["resources"].items():
            most[resource] += amount * one.get("max_workers", 0)
    assert types["head"]["resources"] == {"CPU": 0}
    assert json.loads(cluster_env(cloud, tmp_path)["MOE_FRONTIER_MAX_RESOURCES"]) == most
    assert config(cloud)["max_workers"] == sum(one.get("max_workers", 0) for one in types.values())


@BOTH
def test_every_ray_starts_with_a_token_and_the_dashboard_on_loopback(cloud, tmp_path):
    env = cluster_env(cloud, tmp_path)
    assert env["RAY_AUTH_MODE"] == "token"
    assert env["RAY_AUTH_TOKEN_PATH"] == f"{tmp_path}/.ray/auth_token"
    assert config(cloud)["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert {"MOE_FRONTIER_HOME", "MLFLOW_TRACKING_URI"} <= env.keys()
    assert "OMP_NUM_THREADS" not in env
    starts = [line for line in commands(cloud) if "ray start" in line]
    assert len(starts) == 2
    assert all(line.startswith(". ~/cluster.env;") for line in starts)
    (head,) = [line for line in starts if "--head" in line]
    assert {"--dashboard-host=127.0.0.1", "--num-cpus=0"} <= set(head.split())
    (watch,) = [line for line in config(cloud)["worker_start_ray_commands"] if "drain_on_notice.sh" in line]
    assert f"drain_on_notice.sh {cloud} " in watch
    assert config(cloud)["file_mounts"]["~/setup/drain_on_notice.sh"] == "cluster/drain_on_notice.sh"


@BOTH
def test_triton_can_compile(cloud):
    """Its launcher includes Python.h. Packages are installed before anything is built with them."""
    setup = config(cloud)["setup_commands"]
    (installs,) = [line for line in setup if "apt-get" in line and " install " in line]
    assert {"gcc", "python3-dev", "python3-venv"} <= set(installs.split())
    assert setup.index(installs) < setup.index("python3 -m venv ~/venv")


def test_ec2_knows_every_parameter():
    """Each node type as Ray passes it to `create_instances`, checked by botocore's model of the call."""
    shape = (
        botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    )
    for one in config("aws")["available_node_types"].values():
        asked = one["node_config"] | {"MinCount": 1, "MaxCount": 1, "SubnetId": "subnet-0", "KeyName": "key"}
        report = ParamValidator().validate(asked, shape)
        assert not report.has_errors(), report.generate_report()
    misspelt = asked | {"InstanceTyp": "g5.xlarge"}
    assert "InstanceTyp" in ParamValidator().validate(misspelt, shape).generate_report()


def test_nodes_are_closed_by_default():
    """Without a security group or a subnetwork of its own, a node would be reachable from outside."""
    aws, gcp = (config(cloud)["available_node_types"] for cloud in ("aws", "gcp"))
    for one in aws.values():
        assert one["node_config"]["SecurityGroupIds"]
        assert one["node_config"]["MetadataOptions"]["HttpTokens"] == "required"
    profiles = {name: one["node_config"]["IamInstanceProfile"]["Name"] for name, one in aws.items()}
    # Only the head may start nodes.
    assert set(profiles.values()) - {profiles["head"]} == {"moe-frontier-worker"}
    assert [name for name, one in aws.items() if "InstanceMarketOptions" in one["node_config"]] == [
        "gpu_spot"
    ]
    assert aws["gpu_spot"]["priority"] > aws["gpu_on_demand"].get("priority", 0)
    for one in gcp.values():
        (interface,) = one["node_config"]["networkInterfaces"]
        assert re.fullmatch(r"projects/.+/regions/.+/subnetworks/moe-frontier", interface["subnetwork"])
        assert "serviceAccounts" not in one["node_config"]
    assert [name for name, one in gcp.items() if "SPOT" in str(one["node_config"])] == ["gpu_spot"]


def test_compute_engine_knows_every_field():
    """Each node type, checked by Google's published description of an instance."""
    document = Path(googleapiclient.__file__).parent / "discovery_cache/documents/compute.v1.json"
    schemas = json.loads(document.read_text())["schemas"]
    for one in config("gcp")["available_node_types"].values():
        assert unknown(one["node_config"], {"$ref": "Instance"}, schemas) == []
    assert unknown({"machineTyp": "x", "disks": [{"boot": "yes"}]}, {"$ref": "Instance"}, schemas) == [
        ".machineTyp",
        ".disks[0].boot",
    ]


def unknown(value: Any, schema: dict[str, Any], schemas: dict[str, Any], at: str = "") -> list[str]:
    """Paths that a discovery document does not have, or whose type or value it does not allow."""
    schema = schemas[schema["$ref"]] if "$ref" in schema else schema
    if isinstance(value, dict) and "properties" in schema:
        known = schema["properties"]
        return [
            path
            for name, inner in value.items()
            for path in (
                unknown(inner, known[name], schemas, f"{at}.{name}") if name in known else [f"{at}.{name}"]
            )
        ]
    if isinstance(value, list) and schema.get("type") == "array":
        return [
            path
            for number, inner in enumerate(value)
            for path in unknown(inner, schema["items"], schemas, f"{at}[{number}]")
        ]
    types = {"string": str, "boolean": bool, "integer": int, "object": dict}
    wide = schema.get("format") == "int64"  # JSON carries those as strings, and takes numbers
    right = isinstance(value, int if wide else types.get(schema.get("type", ""), type(None)))
    return [] if right and value in schema.get("enum", [value]) else [at]

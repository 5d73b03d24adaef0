"""`ray up` files: by Ray's own checks, by the clouds' models of what they accept, by what they promise."""

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import botocore.session
import googleapiclient
import pytest
import yaml
from botocore.model import ListShape, Shape, StringShape, StructureShape
from botocore.validate import ParamValidator
from ray.autoscaler._private.util import prepare_config, validate_config

from tests.cluster.commented import CLUSTER, check_filled_in, check_no_secrets, check_prices

MACHINES = {  # vCPUs and GPUs, from the clouds' lists of machine types
    "m7i.xlarge": {"CPU": 4},
    "m7i.4xlarge": {"CPU": 16},
    "g5.xlarge": {"CPU": 4, "GPU": 1},
    "n2-standard-4": {"CPU": 4},
    "n2-standard-16": {"CPU": 16},
    "a2-highgpu-1g": {"CPU": 12, "GPU": 1},
}
COUNTS = {"head": 1, "GPU": 6, "data": 2}
BOTH = pytest.mark.parametrize("cloud", ["aws", "gcp"])


def config(cloud: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / f"{cloud}.yaml").read_text())


def commands(cloud: str) -> list[str]:
    return [line for name, lines in config(cloud).items() if name.endswith("commands") for line in lines]


def cluster_env(cloud: str, home: Path) -> dict[str, str]:
    """What the first setup command leaves in the environment, when it is run as the launcher runs it."""
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
    validate_config(prepare_config(config(cloud)))


@BOTH
def test_a_typo_would_be_found(cloud):
    wrong = config(cloud) | {"idle_timeout": 3}
    with pytest.raises(Exception, match="idle_timeout"):
        validate_config(prepare_config(wrong))


@BOTH
def test_prices_and_lines_to_fill_in(cloud):
    check_prices(CLUSTER / f"{cloud}.yaml", COUNTS)
    check_filled_in(CLUSTER / f"{cloud}.yaml")


@BOTH
def test_resources_are_those_of_the_machines_and_their_sum_is_declared(cloud, tmp_path):
    types = config(cloud)["available_node_types"]
    most = {"CPU": 0, "GPU": 0}
    for name, one in types.items():
        machine = one["node_config"].get("InstanceType") or one["node_config"]["machineType"]
        has = {"CPU": 0} if name == "head" else MACHINES[machine]
        assert one["resources"] == has
        for resource, amount in has.items():
            most[resource] += amount * one.get("max_workers", 0)
    assert json.loads(cluster_env(cloud, tmp_path)["MOE_FRONTIER_MAX_RESOURCES"]) == most
    assert config(cloud)["max_workers"] == sum(one.get("max_workers", 0) for one in types.values())
    assert all(one.get("min_workers", 0) == 0 for one in types.values())


@BOTH
def test_every_ray_starts_with_token_authentication_and_the_dashboard_on_loopback(cloud, tmp_path):
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


@BOTH
def test_nothing_secret_and_nothing_public(cloud):
    check_no_secrets(config(cloud))
    assert not (CLUSTER / f"{cloud}.yaml").read_text().count("aws_credentials")
    assert "security_group" not in config(cloud)["provider"]  # Ray's would open port 22 to everybody


@BOTH
def test_the_shell_can_read_every_command(cloud):
    for line in commands(cloud):
        subprocess.run(["bash", "-n"], input=f"true && ({line})", text=True, check=True)


@BOTH
def test_workers_watch_for_the_notice(cloud):
    (watch,) = [line for line in config(cloud)["worker_start_ray_commands"] if "drain_on_notice.sh" in line]
    assert f"drain_on_notice.sh {cloud} " in watch
    assert config(cloud)["file_mounts"]["~/setup/drain_on_notice.sh"] == "cluster/drain_on_notice.sh"


def test_ec2_knows_every_parameter():
    """Each node type as Ray hands it to `create_instances`, by botocore's model of that call."""
    shape = (
        botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    )
    for one in config("aws")["available_node_types"].values():
        asked = one["node_config"] | {"MinCount": 1, "MaxCount": 1, "SubnetId": "subnet-0", "KeyName": "key"}
        report = ParamValidator().validate(asked, shape)
        assert not report.has_errors(), report.generate_report()
        check_choices(asked, shape)
    misspelt = asked | {"InstanceTyp": "g5.xlarge"}
    assert "InstanceTyp" in ParamValidator().validate(misspelt, shape).generate_report()


def check_choices(value: Any, shape: Shape) -> None:
    """botocore itself does not look whether a string is one of the known ones."""
    if isinstance(shape, StructureShape):
        for name, inner in value.items():
            check_choices(inner, shape.members[name])
    elif isinstance(shape, ListShape):
        for inner in value:
            check_choices(inner, shape.member)
    elif isinstance(shape, StringShape) and shape.enum:
        assert value in shape.enum


def test_aws_nodes_are_closed_by_default():
    types = config("aws")["available_node_types"]
    for one in types.values():
        node = one["node_config"]
        assert node["SecurityGroupIds"], "Ray would make one with port 22 open to everybody"
        assert node["MetadataOptions"]["HttpTokens"] == "required"
        assert "Name" in node["IamInstanceProfile"]
    profiles = {name: one["node_config"]["IamInstanceProfile"]["Name"] for name, one in types.items()}
    assert set(profiles.values()) - {profiles["head"]} == {
        "moe-frontier-worker"
    }  # only the head starts nodes
    spot = {name for name, one in types.items() if "InstanceMarketOptions" in one["node_config"]}
    assert spot == {"gpu_spot"}
    assert types["gpu_spot"]["priority"] > types["gpu_on_demand"].get("priority", 0)


def test_compute_engine_knows_every_field():
    """Each node type by Google's published description of an instance."""
    document = Path(googleapiclient.__file__).parent / "discovery_cache/documents/compute.v1.json"
    schemas = json.loads(document.read_text())["schemas"]
    for one in config("gcp")["available_node_types"].values():
        assert unknown(one["node_config"], {"$ref": "Instance"}, schemas) == []
    assert unknown({"machineTyp": "x", "disks": [{"boot": "yes"}]}, {"$ref": "Instance"}, schemas) == [
        ".machineTyp",
        ".disks[0].boot",
    ]


def unknown(value: Any, schema: dict[str, Any], schemas: dict[str, Any], at: str = "") -> list[str]:
    """Paths of what is not in a discovery document, or has another type or none of the choices there."""
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


def test_gcp_nodes_are_in_a_network_of_their_own():
    types = config("gcp")["available_node_types"]
    for one in types.values():
        (interface,) = one["node_config"]["networkInterfaces"]
        assert re.fullmatch(r"projects/.+/regions/.+/subnetworks/moe-frontier", interface["subnetwork"])
        assert "serviceAccounts" not in one["node_config"]
    spot = {
        name
        for name, one in types.items()
        if one["node_config"].get("scheduling", {}).get("provisioningModel") == "SPOT"
    }
    assert spot == {"gpu_spot"}

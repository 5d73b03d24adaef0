"""`ray up` files: Ray's own checks, the clouds' API descriptions, resources and security."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import boto3
import botocore.session
import googleapiclient
import moto
import pytest
import yaml
from botocore.validate import ParamValidator
from ray.autoscaler._private.aws.node_provider import AWSNodeProvider
from ray.autoscaler._private.aws.utils import resource_cache
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.autoscaler.tags import TAG_RAY_NODE_NAME

from tests.cluster.commented import CLUSTER, check_filled_in, check_no_secrets

FILES = ["aws", "gcp", "aws_h100", "gcp_h100"]
ALL = pytest.mark.parametrize("name", FILES)


def config(name: str) -> dict[str, Any]:
    return yaml.safe_load((CLUSTER / f"{name}.yaml").read_text())


def node_configs(*names: str) -> list[dict[str, Any]]:
    return [one["node_config"] for name in names for one in config(name)["available_node_types"].values()]


def commands(name: str) -> list[str]:
    return [line for key, lines in config(name).items() if key.endswith("commands") for line in lines]


def cluster_env(name: str, home: Path) -> dict[str, str]:
    """Environment after the first setup command, which runs as the launcher runs it."""
    for command in (config(name)["setup_commands"][0], ". ~/cluster.env; env -0"):
        done = subprocess.run(
            ["bash", "-c", f"({command})"],
            env={"HOME": str(home), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            check=True,
        )
    return dict(pair.split("=", 1) for pair in done.stdout.split("\0") if pair)


@ALL
def test_ray_accepts_it(name):
    """Ray finds a typo; nothing in the file is secret or public; the shell can parse every command."""
    validate_config(prepare_config(config(name)))
    with pytest.raises(Exception, match="idle_timeout"):
        validate_config(prepare_config(config(name) | {"idle_timeout": 3}))
    check_filled_in(CLUSTER / f"{name}.yaml")
    check_no_secrets(config(name))
    assert "security_group" not in config(name)["provider"]  # Ray's would open port 22 to all
    for line in commands(name):
        subprocess.run(["bash", "-n"], input=f"true && ({line})", text=True, check=True)


@ALL
def test_the_sum_of_resources_is_declared(name, tmp_path):
    types = config(name)["available_node_types"]
    most = {"CPU": 0, "GPU": 0}
    for one in types.values():
        for resource, amount in one["resources"].items():
            most[resource] += amount * one.get("max_workers", 0)
    assert types["head"]["resources"] == {"CPU": 0}
    assert json.loads(cluster_env(name, tmp_path)["MOE_FRONTIER_MAX_RESOURCES"]) == most
    assert config(name)["max_workers"] == sum(one.get("max_workers", 0) for one in types.values())


@ALL
def test_every_ray_starts_with_a_token_and_the_dashboard_on_loopback(name, tmp_path):
    env = cluster_env(name, tmp_path)
    assert env["RAY_AUTH_MODE"] == "token"
    assert env["RAY_AUTH_TOKEN_PATH"] == f"{tmp_path}/.ray/auth_token"
    assert config(name)["file_mounts"]["~/.ray/auth_token"] == "~/.ray/auth_token"
    assert {"MOE_FRONTIER_HOME", "MLFLOW_TRACKING_URI"} <= env.keys()
    assert "OMP_NUM_THREADS" not in env
    starts = [line for line in commands(name) if "ray start" in line]
    assert len(starts) == 2
    assert all(line.startswith(". ~/cluster.env;") for line in starts)
    (head,) = [line for line in starts if "--head" in line]
    assert {"--dashboard-host=127.0.0.1", "--num-cpus=0"} <= set(head.split())
    (watch,) = [line for line in config(name)["worker_start_ray_commands"] if "drain_on_notice.sh" in line]
    assert f"drain_on_notice.sh {name[:3]} " in watch
    assert config(name)["file_mounts"]["~/setup/drain_on_notice.sh"] == "cluster/drain_on_notice.sh"


def test_ray_gives_up_broken_connections_on_every_cluster():
    """A task on a machine that lost power failed after 148 s with these settings, after 418 s by default."""
    files = [f"{name}.yaml" for name in FILES] + ["slurm/frontier.sbatch", "kuberay/shared.yaml"]
    found = [dict(re.findall(r'(RAY_grpc\w+)[=:] ?"?(\d+)', (CLUSTER / name).read_text())) for name in files]
    assert all(each == found[0] for each in found)
    ask = "from ray._raylet import Config as c\n"
    ask += "print(c.grpc_client_keepalive_time_ms(), c.grpc_client_keepalive_timeout_ms())"
    env = os.environ | found[0]
    said = subprocess.run([sys.executable, "-c", ask], env=env, capture_output=True, text=True, check=True)
    assert said.stdout.split() == ["90000", "60000"]  # and the servers' minimum is a minute


@ALL
def test_triton_can_compile(name):
    """Its launcher includes Python.h. Packages are installed before anything is built with them."""
    setup = config(name)["setup_commands"]
    (installs,) = [line for line in setup if "apt-get" in line and " install " in line]
    assert {"gcc", "python3.12-dev", "python3.12-venv"} <= set(installs.split())
    assert setup.index(installs) < setup.index("python3.12 -m venv ~/venv")


def test_ec2_knows_every_parameter():
    """Each node type as Ray passes it to `create_instances`, checked by botocore's model of the call."""
    shape = (
        botocore.session.get_session().get_service_model("ec2").operation_model("RunInstances").input_shape
    )
    for one in node_configs("aws", "aws_h100"):
        asked = one | {"MinCount": 1, "MaxCount": 1, "SubnetId": "subnet-0", "KeyName": "key"}
        asked.pop("SubnetIds", None)  # Ray takes one of them
        report = ParamValidator().validate(asked, shape)
        assert not report.has_errors(), report.generate_report()
    misspelt = asked | {"InstanceTyp": "g5.xlarge"}
    assert "InstanceTyp" in ParamValidator().validate(misspelt, shape).generate_report()


@pytest.mark.parametrize("name", ["aws", "aws_h100"])
def test_rays_launcher_starts_every_node_type(name, tmp_path, monkeypatch):
    """Ray refuses subnets that give no public addresses, and interfaces beside subnets; AWS is moto's."""
    for variable in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "testing")
    monkeypatch.setenv("HOME", str(tmp_path))  # Ray makes a key in ~/.ssh
    resource_cache.cache_clear()
    asked = []
    with moto.mock_aws():
        ec2, iam = boto3.client("ec2", "us-east-1"), boto3.client("iam")
        for profile in ("moe-frontier-head", "moe-frontier-worker"):
            iam.create_instance_profile(InstanceProfileName=profile)
        vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
        subnet = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/20")["Subnet"]["SubnetId"]
        ec2.modify_subnet_attribute(SubnetId=subnet, MapPublicIpOnLaunch={"Value": True})
        group = ec2.create_security_group(GroupName="g", Description="d", VpcId=vpc)["GroupId"]
        text = (CLUSTER / f"{name}.yaml").read_text()
        text = re.sub("subnet-0{17}", subnet, text).replace("sg-00000000000000000", group)
        filled = AWSNodeProvider.bootstrap_config(prepare_config(yaml.safe_load(text)))
        provider = AWSNodeProvider(filled["provider"], "name")
        provider.ec2_fail_fast.meta.client.meta.events.register(
            "before-parameter-build.ec2.RunInstances", lambda params, **_: asked.append(params)
        )
        for kind, one in filled["available_node_types"].items():
            assert provider.create_node(one["node_config"], {TAG_RAY_NODE_NAME: kind}, 1)
    resource_cache.cache_clear()
    interfaces = [len(one.get("NetworkInterfaces", ())) for one in node_configs(name)]
    assert [len(one.get("NetworkInterfaces", ())) for one in asked] == interfaces


def test_nodes_are_closed_by_default():
    """Without a security group or a subnetwork of its own, a node would be reachable from outside."""
    for one in node_configs("aws", "aws_h100"):
        groups = [card["Groups"] for card in one.get("NetworkInterfaces", ())] or [one["SecurityGroupIds"]]
        assert all(groups)
        assert one["MetadataOptions"]["HttpTokens"] == "required"
    for name in ("aws", "aws_h100"):  # only the head may start nodes
        head, *workers = [one["IamInstanceProfile"]["Name"] for one in node_configs(name)]
        assert head not in workers
        assert set(workers) == {"moe-frontier-worker"}
    for one in node_configs("gcp", "gcp_h100"):
        interface, *others = one["networkInterfaces"]
        assert re.fullmatch(r"projects/.+/regions/.+/subnetworks/moe-frontier", interface["subnetwork"])
        assert not any("accessConfigs" in other for other in others)
        assert "serviceAccounts" not in one
    assert "accessConfigs" not in node_configs("gcp_h100")[1]["networkInterfaces"][0]


def test_spot_nodes_come_first():
    aws, gcp = (config(name)["available_node_types"] for name in ("aws", "gcp"))
    spot = [name for name, one in aws.items() if "InstanceMarketOptions" in one["node_config"]]
    assert spot == [name for name, one in gcp.items() if "SPOT" in str(one["node_config"])] == ["gpu_spot"]
    for types in (aws, gcp):
        assert types["gpu_spot"]["priority"] > types["gpu_on_demand"].get("priority", 0)


@pytest.mark.parametrize("cloud", ["aws", "gcp"])
def test_nodes_of_8_gpus_are_set_up_as_the_small_ones(cloud):
    """Else a change of one file would be forgotten in the other."""
    small, large = config(cloud), config(f"{cloud}_h100")
    for key in ("auth", "provider", "file_mounts", "head_setup_commands", "head_start_ray_commands"):
        assert small[key] == large[key], key
    assert small["setup_commands"][1:] == large["setup_commands"][1:]
    (only_small,) = set(small["setup_commands"][0].splitlines()) - set(
        large["setup_commands"][0].splitlines()
    )
    assert "MOE_FRONTIER_MAX_RESOURCES" in only_small
    assert "--set scale.wait_s=1200" in (CLUSTER / f"{cloud}_h100.yaml").read_text()


def test_a_p5_has_an_efa_on_each_of_its_32_cards():
    """The first interface has the address; two nodes reach each other only over interfaces of one group."""
    types = config("aws_h100")["available_node_types"]
    assert {"CapacityReservationSpecification", "InstanceMarketOptions"} <= types["h100_block"][
        "node_config"
    ].keys()
    assert types["h100"]["node_config"]["Placement"]["GroupName"]
    for one in (types["h100_block"]["node_config"], types["h100"]["node_config"]):
        first, *cards = one["NetworkInterfaces"]
        assert (first["NetworkCardIndex"], first["DeviceIndex"], first["InterfaceType"]) == (
            0,
            0,
            "interface",
        )
        assert [card["NetworkCardIndex"] for card in cards] == list(range(32))
        assert [card["DeviceIndex"] for card in cards] == [1] + 31 * [0]
        assert {card["InterfaceType"] for card in cards} == {"efa-only"}
        assert {card["SubnetId"] for card in cards} == {first["SubnetId"]}
        assert not {"SubnetId", "SubnetIds", "SecurityGroupIds"} & one.keys()  # Ray forbids them beside
    (start,) = [line for line in config("aws_h100")["worker_start_ray_commands"] if "ray start" in line]
    assert '--pid "$BASHPID" --memlock=unlimited:unlimited && ray start' in start


def test_a_p5_without_its_network_does_not_come_up(tmp_path):
    """NCCL would take plain TCP and say nothing."""
    for folder in ("infiniband", "amazon/ofi-nccl/lib"):
        (tmp_path / folder).mkdir(parents=True)
    check = config("aws_h100")["worker_setup_commands"][0]
    check = check.replace("/sys/class/infiniband", f"{tmp_path}/infiniband").replace(
        "/opt/amazon", f"{tmp_path}/amazon"
    )

    def run() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["bash", "-c", f"({check})"],
            env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"},
            capture_output=True,
            text=True,
            check=False,
        )

    for card in range(31):
        (tmp_path / f"infiniband/rdmap{card}s0").touch()
    assert "31 EFA devices, 32 expected" in run().stderr
    (tmp_path / "infiniband/rdmap31s0").touch()
    assert "no aws-ofi-nccl" in run().stderr
    (tmp_path / "amazon/ofi-nccl/lib/libnccl-net.so").touch()
    assert run().returncode == 0
    env = cluster_env("aws_h100", tmp_path)
    assert env["NCCL_NET_PLUGIN"] == f"{tmp_path}/amazon/ofi-nccl/lib/libnccl-net.so"
    assert (env["FI_PROVIDER"], env["NCCL_DEBUG"]) == ("efa", "WARN")
    assert env["MOE_FRONTIER_CACHE"] in config("aws_h100")["worker_setup_commands"][1]


def test_an_a3_mega_has_an_interface_for_each_gpu(tmp_path):
    """Each is in a network of its own; the environment has one name for each, from Google's profile on."""
    interfaces = config("gcp_h100")["available_node_types"]["h100"]["node_config"]["networkInterfaces"]
    assert len({one["subnetwork"] for one in interfaces}) == 9
    assert {one["nicType"] for one in interfaces} == {"GVNIC"}
    profile = tmp_path / "nccl-env-profile.sh"
    profile.write_text('[ "$NCCL_LIB_DIR" ] && export NCCL_CROSS_NIC=0 NCCL_SOCKET_IFNAME=eth0')
    *_, write = config("gcp_h100")["worker_setup_commands"]
    write = write.replace(". /var/lib/tcpxo/lib64/", f". {tmp_path}/")
    subprocess.run(
        ["bash", "-c", f"({write})"], env={"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}, check=True
    )
    env = cluster_env("gcp_h100", tmp_path)
    names = {*env["NCCL_FASTRAK_IFNAME"].split(","), env["NCCL_SOCKET_IFNAME"]}
    assert len(names) == 9
    assert (env["NCCL_CROSS_NIC"], env["NCCL_DEBUG"]) == ("0", "WARN")


def test_compute_engine_knows_every_field():
    """Each node type, checked by Google's published description of an instance."""
    document = Path(googleapiclient.__file__).parent / "discovery_cache/documents/compute.v1.json"
    schemas = json.loads(document.read_text())["schemas"]
    for one in node_configs("gcp", "gcp_h100"):
        assert unknown(one, {"$ref": "Instance"}, schemas) == []
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

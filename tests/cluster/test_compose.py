"""The tracking server's compose file and image, by linters, and by what they promise of security."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml

CLUSTER = Path(__file__).parents[2] / "cluster"
BIN = Path(sys.executable).parent
TEXT = (CLUSTER / "compose.yaml").read_text()
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?P<how>:-|:\?)(?P<rest>[^}]*)\}")
SECRETS = (
    "POSTGRES_PASSWORD",
    "S3_SECRET_KEY",
    "MLFLOW_AUTH_ADMIN_PASSWORD",
    "MLFLOW_FLASK_SERVER_SECRET_KEY",
)


def filled() -> dict[str, Any]:
    """As compose reads it: anchors merged, every secret `s3cret`, the rest at its default."""
    text = VARIABLE.sub(lambda found: found["rest"] if found["how"] == ":-" else "s3cret", TEXT)
    assert "${" not in text
    return yaml.safe_load(text)


SERVICES: dict[str, dict[str, Any]] = filled()["services"]


def test_compose_takes_it() -> None:
    """Unknown keys, words and types are refused."""
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(filled())).validate()
    for wrong in ({"prots": []}, {"restart": "alway"}, {"healthcheck": {"intrval": "5s"}}):
        services = {**SERVICES, "s3": {**SERVICES["s3"], **wrong}}
        with pytest.raises(ValueError, match=r"prots|alway|intrval"):
            compose_spec.PyCompose.from_yaml(yaml.safe_dump({**filled(), "services": services}))


def test_the_image_and_the_script_have_no_lint() -> None:
    subprocess.run([BIN / "hadolint", CLUSTER / "mlflow.Dockerfile"], check=True)
    subprocess.run([BIN / "shellcheck", CLUSTER / "mlflow/serve.sh"], check=True)


def test_only_this_machine_reaches_it() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert not SERVICES["postgres"].get("ports")
    assert not any(service.get("network_mode") == "host" for service in SERVICES.values())


def test_no_secret_is_written_down() -> None:
    """What looks like one is a variable that must be set; the head tells how to draw each."""
    assert {found["name"] for found in VARIABLE.finditer(TEXT) if found["how"] == ":?"} == set(SECRETS)
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|URI$", name):
                assert "s3cret" in str(value), name
    head = TEXT[: TEXT.index("\nname:")]
    assert all(name in head for name in SECRETS)
    ignored = subprocess.run(["git", "check-ignore", "-q", "cluster/.env"], cwd=CLUSTER.parent, check=False)
    assert ignored.returncode == 0, "git does not ignore cluster/.env"


def test_images_are_pinned() -> None:
    base = re.findall(r"^FROM (\S+)", (CLUSTER / "mlflow.Dockerfile").read_text(), re.MULTILINE)
    images = [service["image"] for service in SERVICES.values() if "image" in service] + base
    assert len(images) == 4
    assert all(re.search(r":v?\d+\.\d+(\.\d+)?(-[a-z-]+)?$", image) for image in images), images


def test_the_image_has_what_its_build_copies() -> None:
    """`.dockerignore` of this image lets through what is copied, and the context is the root."""
    build = SERVICES["mlflow"]["build"]
    root = (CLUSTER / build["context"]).resolve()
    dockerfile = (root / build["dockerfile"]).read_text()
    copied = re.findall(r"^COPY (?:--\S+ )*(\S+) \S+$", dockerfile, re.MULTILINE)
    allowed = (root / f"{build['dockerfile']}.dockerignore").read_text().split()
    assert allowed[0] == "*"
    assert [f"!{path}" for path in copied] == allowed[1:]
    assert all((root / path).is_file() for path in copied)


def test_services_survive_and_are_watched() -> None:
    for name, service in SERVICES.items():
        assert "no-new-privileges:true" in service["security_opt"], name
        if name != "s3-folders":  # which ends
            assert service["restart"] == "unless-stopped", name
            assert service["healthcheck"]["test"][0] == "CMD", name
        assert set(service.get("depends_on", ())) <= set(SERVICES), name
    volumes = {mount.split(":")[0] for one in SERVICES.values() for mount in one.get("volumes", ())}
    assert volumes == set(filled()["volumes"])

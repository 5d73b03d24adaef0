"""Images and the tracking server's compose file: linters, schema, closed ports, secrets, pinned versions."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import compose_spec
import pytest
import yaml

from tests.cluster.commented import CLUSTER
from tests.lanes import absent_guests

ROOT = CLUSTER.parent
BIN = Path(sys.executable).parent
TEXT = (CLUSTER / "compose.yaml").read_text()
VARIABLE = re.compile(r"\$\{(?P<name>\w+)(?P<how>:-|:\?)(?P<rest>[^}]*)\}")
SECRETS = {
    "POSTGRES_PASSWORD",
    "S3_SECRET_KEY",
    "MLFLOW_AUTH_ADMIN_PASSWORD",
    "MLFLOW_FLASK_SERVER_SECRET_KEY",
}
IMAGES = {
    "Dockerfile": ROOT / ".dockerignore",
    "mlflow.Dockerfile": CLUSTER / "mlflow.Dockerfile.dockerignore",
}


def instructions(name: str) -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (CLUSTER / name).read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def filled() -> dict[str, Any]:
    """The file as compose reads it, with every secret set to `s3cret`."""
    text = VARIABLE.sub(lambda found: found["rest"] if found["how"] == ":-" else "s3cret", TEXT)
    return yaml.safe_load(text)


SERVICES: dict[str, dict[str, Any]] = filled()["services"]


def test_linters_find_nothing() -> None:
    for name in IMAGES:
        subprocess.run([BIN / "hadolint", CLUSTER / name], check=True)
    scripts = [*CLUSTER.glob("*.sh"), CLUSTER / "mlflow/serve.sh"]
    subprocess.run([BIN / "shellcheck", *scripts], check=True)


@pytest.mark.parametrize("name", IMAGES)
def test_only_copied_files_enter_the_build(name: str) -> None:
    """All other files are ignored, so neither tokens nor data can be copied by mistake."""
    ignored, *lines = [line for line in IMAGES[name].read_text().splitlines() if not line.startswith("#")]
    assert ignored == "*"
    copies = [
        [w for w in rest.split() if not w.startswith("--")]
        for what, rest in instructions(name)
        if what == "COPY"
    ]
    copied = {source for words in copies for source in words[:-1]}
    assert copied == {line.removeprefix("!") for line in lines if line.startswith("!")}
    assert {path for path in copied if not (ROOT / path).exists()} <= absent_guests()


def test_the_image_runs_without_privileges_secrets_or_unpinned_packages() -> None:
    """Packages are installed before the code is copied, so a change of code rebuilds only the last layers."""
    steps = instructions("Dockerfile")
    assert steps[-1] == ("USER", "1000:1000")
    order = [f"{name} {rest}" for name, rest in steps]
    (install,) = [number for number, line in enumerate(order) if "pip install" in line]
    assert "--constraint /tmp/setup/constraints.txt" in order[install]
    assert all(number > install for number, line in enumerate(order) if line.startswith("COPY moe "))
    assert not any(name == "ARG" for name, _ in steps)
    assert not re.search(r"(?i)password|secret|token", " ".join(order))


def test_compose_accepts_the_file() -> None:
    """Its schema would refuse an unknown key."""
    compose_spec.PyCompose.from_yaml(yaml.safe_dump(filled())).validate()
    services = {**SERVICES, "s3": {**SERVICES["s3"], "healthcheck": {"intrval": "5s"}}}
    with pytest.raises(ValueError, match="intrval"):
        compose_spec.PyCompose.from_yaml(yaml.safe_dump({**filled(), "services": services}))


def test_only_this_machine_reaches_the_services() -> None:
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert ports
    assert all(port.startswith("127.0.0.1:") for port in ports)
    assert not SERVICES["postgres"].get("ports")
    assert not any(service.get("network_mode") == "host" for service in SERVICES.values())


def test_no_secret_is_written_down() -> None:
    """Every secret is a variable that must be set, and the header explains each."""
    assert {found["name"] for found in VARIABLE.finditer(TEXT) if found["how"] == ":?"} == SECRETS
    for service in SERVICES.values():
        for name, value in service.get("environment", {}).items():
            if re.search("PASSWORD|SECRET|URI$", name):
                assert "s3cret" in str(value), name
    assert all(name in TEXT[: TEXT.index("\nname:")] for name in SECRETS)
    assert ".env" in (ROOT / "cluster/.gitignore").read_text().split()


def test_images_are_pinned() -> None:
    base = [rest for name, rest in instructions("mlflow.Dockerfile") if name == "FROM"]
    images = [service["image"] for service in SERVICES.values() if "image" in service] + base
    assert len(images) == 4
    assert all(re.search(r":v?\d+\.\d+(\.\d+)?(-[a-z-]+)?$", image) for image in images), images


def test_services_restart_and_have_health_checks() -> None:
    for name, service in SERVICES.items():
        assert "no-new-privileges:true" in service["security_opt"], name
        if name != "s3-folders":  # a task that ends
            assert service["restart"] == "unless-stopped", name
            assert service["healthcheck"]["test"][0] == "CMD", name
        assert set(service.get("depends_on", ())) <= set(SERVICES), name
    volumes = {mount.split(":")[0] for one in SERVICES.values() for mount in one.get("volumes", ())}
    assert volumes == set(filled()["volumes"])

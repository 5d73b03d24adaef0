"""The image: by a linter, and by what must hold of it without building it."""

import re
import subprocess
import sys
from pathlib import Path

from tests.cluster.commented import CLUSTER

ROOT = CLUSTER.parent
BIN = Path(sys.executable).parent


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", (CLUSTER / "Dockerfile").read_text())
    lines = [line for line in text.splitlines() if line.strip() and not line.startswith("#")]
    return [(line.split()[0], line.split(maxsplit=1)[1]) for line in lines]


def test_the_linter_finds_nothing_and_can_find_something():
    hadolint = str(BIN / "hadolint")
    done = subprocess.run(
        [hadolint, str(CLUSTER / "Dockerfile")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (0, "")
    wrong = subprocess.run(
        [hadolint, "-"], input="FROM python\n", capture_output=True, text=True, check=False
    )
    assert "DL3006" in wrong.stdout


def test_it_runs_as_nobody_in_the_projects_folder():
    *_, (last, user) = instructions()
    assert (last, user) == ("USER", "1000:1000")
    assert ("WORKDIR", "/moe-frontier") in instructions()


def test_packages_are_pinned_and_come_before_the_code():
    """A change of code rebuilds only the last layers."""
    order = [f"{name} {rest}" for name, rest in instructions()]
    (install,) = [number for number, line in enumerate(order) if "pip install" in line]
    assert "--constraint /tmp/setup/constraints.txt" in order[install]
    assert all(number > install for number, line in enumerate(order) if line.startswith("COPY moe "))


def test_only_what_is_copied_enters_the_build():
    """Everything is ignored but these, so neither tokens nor data can be copied by mistake."""
    lines = [line for line in (ROOT / ".dockerignore").read_text().splitlines() if not line.startswith("#")]
    assert lines[0] == "*"
    let_in = {line.removeprefix("!") for line in lines if line.startswith("!")}
    copied = {source for name, rest in instructions() if name == "COPY" for source in rest.split()[:-1]}
    assert copied == let_in
    assert [path for path in copied if not (ROOT / path).exists()] == []


def test_no_secret_is_given_to_the_build():
    assert not any(name == "ARG" for name, _ in instructions())
    assert not re.search(r"(?i)password|secret|token", " ".join(rest for _, rest in instructions()))

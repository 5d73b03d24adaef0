"""The core alone: a copy without the guests passes the fast lane, and its commands show what is there."""

import os
import re
import subprocess
import sys
from pathlib import Path
from shutil import copy2

import pytest

from moe.guests import PACKAGES, offered

pytestmark = [pytest.mark.guests, pytest.mark.slow]

ROOT = Path(__file__).parents[1]
OF_GUESTS = tuple(f"{folder}{name}/" for folder in ("", "tests/") for name in PACKAGES)
SWEEPS = ("quickstart", "study", "modern", "upcycle")


@pytest.fixture(scope="module")
def core(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tracked tree without the guests and their tests, in a repository of its own."""
    core = tmp_path_factory.mktemp("core")
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True, check=True)
    for name in filter(None, tracked.stdout.split("\0")):
        if not name.startswith(OF_GUESTS) and (ROOT / name).is_file():
            (core / name).parent.mkdir(parents=True, exist_ok=True)
            copy2(ROOT / name, core / name)
    (core / ".venv").symlink_to(sys.prefix)  # for `cluster/local.sh`
    subprocess.run(["git", "init", "--quiet"], cwd=core, check=True)
    return core


@pytest.fixture(scope="module")
def env(core: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Homes of its own. Guests that are installed, as a working tree may be, cannot be imported."""
    hidden = tmp_path_factory.mktemp("hidden")
    for name in PACKAGES:
        (hidden / f"{name}.py").write_text(f"raise ModuleNotFoundError({name!r})\n")
    homes = {name: str(tmp_path_factory.mktemp("home")) for name in ("HOME", "MOE_FRONTIER_HOME")}
    return {"PATH": os.environ["PATH"], "PYTHONPATH": f"{core}{os.pathsep}{hidden}", **homes}


def run(core: Path, env: dict[str, str], *words: str) -> str:
    done = subprocess.run(
        [sys.executable, *words],
        cwd=core,
        env=env,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-10_000:]
    return done.stdout


@pytest.mark.timeout(3 * 3600)
def test_the_fast_lane_passes(core: Path, env: dict[str, str]) -> None:
    print(run(core, env, "-m", "pytest", "--numprocesses", "2", "-q"))


def test_help_shows_what_is_there(core: Path, env: dict[str, str]) -> None:
    assert "usage: train.py " in run(core, env, "jobs/train.py", "--help")
    said = " ".join(run(core, env, "jobs/pareto_sweep.py", "--help").split())
    assert f"--sweep SWEEP {', '.join(SWEEPS)}, or a function" in said
    assert {*re.findall(r"--sweep ([a-z]\w*)", said)} <= {*SWEEPS}
    assert {*re.findall(r"--scale ([a-z]\w*)", said)} <= {"tiny", "cifar"}
    said = run(core, env, "-c", "from jobs._main import main; main()")
    assert "  sweep " in said
    assert not {*offered("COMMANDS")} & {line.split()[0] for line in said.splitlines() if line}


@pytest.mark.parametrize("command", ["train", "pareto_sweep"])
def test_lists_show_what_is_there(command: str, core: Path, env: dict[str, str]) -> None:
    said = run(core, env, f"jobs/{command}.py", "--list")
    names = {line.split()[1] for line in said.splitlines() if line.startswith("│")}
    assert {"debug", "soft-S/14-256e"} < names
    assert not {*offered("SWEEPS"), *offered("SCALES")} & names
    assert not [name for name in names if name.startswith(("lit-", "astroformer-"))]

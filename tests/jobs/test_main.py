"""The command `moe-frontier`, from the working tree and from an installed wheel."""

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest
import yaml

from jobs._main import main
from moe.guests import guests, offered
from tests.jobs.bare import run_bare
from tests.jobs.test_light import COMMANDS

ROOT = Path(__file__).parents[2]
MAIN = "import sys; from jobs._main import main; main(); print('torch' in sys.modules, file=sys.stderr)"


def test_all_commands_are_listed_and_none_is_loaded() -> None:
    done = run_bare("-c", MAIN)
    listed = [line.split() for line in done.stdout.splitlines() if line.startswith("  ")]
    names = [words[0] for words in listed]
    assert {"evaluate", "pack", "sweep", "train", *offered("COMMANDS")} < {*names}
    assert len(names) == len(COMMANDS)
    assert all(len(words) > 3 for words in listed)
    assert done.stderr == "False\n"


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (["sweep", "--help"], 0, "usage: moe-frontier sweep [flags]"),
        (["evaluate", "--nonsense"], 2, "error: the following arguments are required: model"),
        (["swep"], 2, "error: unknown command 'swep'; did you mean sweep?"),
        (["x"], 2, "error: unknown command 'x'; moe-frontier --help lists all"),
    ],
)
def test_its_words_and_exit_codes(
    words: list[str],
    code: int,
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(sys, "argv", ["moe-frontier", *words])
    with pytest.raises(SystemExit) as end:
        main()
    assert end.value.code == code
    out, err = capsys.readouterr()
    assert (out + err).startswith(said)
    assert ".py" not in out.replace("my_sweep.py", "")


def test_all_files_name_one_version() -> None:
    version = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    assert yaml.safe_load((ROOT / "CITATION.cff").read_text())["version"] == version
    assert re.findall(r"^## (.+)", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)[0] == version


@pytest.mark.smoke  # builds and installs the project
def test_a_wheel_has_all_that_commands_need(tmp_path: Path) -> None:
    """Without network: dependencies are those of this environment."""
    leave = ignore_patterns(".*", "__pycache__", "site", "build")
    copytree(
        ROOT,
        tmp_path / "source",
        ignore=lambda at, names: leave(at, names) | ({"runs"} if Path(at) == ROOT else set()),
    )
    pip = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
    alone = ["--no-deps", "--no-build-isolation", "--no-index"]
    subprocess.run([*pip, "wheel", *alone, "--wheel-dir", tmp_path, tmp_path / "source"], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    packages = {name.split("/")[0] for name in names if ".dist-info" not in name}
    assert packages == {"jobs", "moe", "orchestrator", *(guest.__name__ for guest in guests())}
    for package in packages:
        for path in (ROOT / package).rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                assert str(path.relative_to(ROOT)) in names
    assert any(name.endswith("licenses/LICENSE") for name in names)

    subprocess.run([*pip, "install", *alone, "--target", tmp_path / "env", wheel], check=True)
    done = subprocess.run(
        [
            sys.executable,
            tmp_path / "env/bin/moe-frontier",
            "sweep",
            "--sweep",
            "quickstart",
            "--plan",
            "--mfu",
            "0.3",
        ],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "env"), "MOE_FRONTIER_HOME": str(tmp_path / "home")},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "w32-soft" in done.stdout

"""The product without its guests, and beside packages that have their names."""

import pickle
from pathlib import Path
from shutil import copytree, ignore_patterns

import pytest

from orchestrator.packing import source_of
from tests.jobs.bare import run_bare
from tests.lanes import absent_guests

ROOT = Path(__file__).parents[2]
LIST = """
import runpy, sys
from moe.presets import PRESETS
for name in [*PRESETS][1:]:
    del PRESETS[name]  # their costs take half a minute
sys.argv = ["pareto_sweep.py", "--list"]
runpy.run_path("jobs/pareto_sweep.py", run_name="__main__")
from orchestrator.frontier.published import DRAWABLE, published
from orchestrator.sweeps.catalog import SCALES, SWEEPS
print(*SWEEPS, *SCALES, DRAWABLE, published("imagenet/acc1", "cost/params"))
"""

OWN = """
from dataclasses import dataclass
from typing import Literal

from moe import ViTConfig


@dataclass(frozen=True, kw_only=True)
class Own(ViTConfig):
    kind: Literal["decoder"] = "decoder"
"""


@pytest.mark.smoke
def test_without_guests_the_product_has_its_own_sweeps_and_scales(tmp_path: Path) -> None:
    for package in ("moe", "orchestrator", "jobs"):
        copytree(ROOT / package, tmp_path / package, ignore=ignore_patterns("__pycache__"))
    done = run_bare("-c", LIST, root=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "quickstart study modern upcycle tiny cifar {} ()"
    commands = run_bare("-c", "from jobs._main import COMMANDS; print(*COMMANDS)", root=tmp_path).stdout
    assert {"sweep", "train"} < {*commands.split()}
    assert not {"study", "inspect-routing"} & {*commands.split()}


@pytest.mark.guests
def test_members_of_guests_are_known_in_another_process_and_not_to_be_hidden(tmp_path: Path) -> None:
    """A source goes to workers by pickle; a plugin may not take the kind of a guest, loaded or not."""
    sent = pickle.dumps(source_of(f"text:{tmp_path}"))
    plugin = tmp_path / "own.py"
    plugin.write_text(OWN)
    code = f"""
import pickle
from orchestrator import UsageError, load_plugins
print(pickle.loads({sent!r}).kind)
try:
    load_plugins([{str(plugin)!r}])
except UsageError as error:
    print(error)
"""
    done = run_bare("-c", code)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("text\nown.py, line 9: TypeError: Own and DecoderConfig both are 'decoder'")


def test_another_package_of_the_name_of_a_guest_is_none(tmp_path: Path) -> None:
    (tmp_path / "papers").mkdir()
    (tmp_path / "papers" / "__init__.py").write_text("raise RuntimeError('loaded')")
    done = run_bare(
        "-c",
        f"import sys; sys.path.insert(0, {str(tmp_path)!r})\n"
        "from moe.guests import guests; print(*(guest.__name__ for guest in guests()))",
    )
    assert (done.returncode, done.stdout) == (0, " ".join({"wings"} - absent_guests()) + "\n"), done.stderr

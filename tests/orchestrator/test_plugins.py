"""Plugins: loading, refusing, and configs that travel to other processes with the text of theirs."""

import importlib
import inspect
import json
import pickle
import subprocess
import sys
from copy import deepcopy
from hashlib import sha256
from pathlib import Path

import pytest
from ray import cloudpickle

from moe.codec import to_dict
from orchestrator import RunConfig, load_plugins, override
from orchestrator.codec import read_config
from orchestrator.errors import UsageError
from orchestrator.plugins import error_in, function_of, modules_by_value
from orchestrator.runs.run_directory import RunDir, acquire_run_dir
from orchestrator.sweeps.driver import acquire_sweep_dir
from orchestrator.sweeps.sweep import Sweep

ROOT = Path(__file__).parents[2]
OWN = ROOT / "tests" / "own"
PEAKED = """
from dataclasses import dataclass
from typing import Literal

from orchestrator.schedules import ScheduleConfig


@dataclass(frozen=True, kw_only=True)
class PeakConfig(ScheduleConfig):
    kind: Literal["peak"] = "peak"

    def after_warmup(self, step, *, peak, total):
        return peak
"""


@pytest.fixture
def peak(tmp_path: Path) -> Path:
    file = tmp_path / "peak.py"
    file.write_text(PEAKED)
    return file


pytestmark = pytest.mark.usefixtures("new_process")


def digest(file: Path) -> str:
    return sha256(file.read_bytes()).hexdigest()


def test_a_config_names_the_plugins_of_its_parts(peak):
    files = [OWN / "cosine.py", OWN / "convnet.py", OWN / "lion.py", peak]
    loaded = load_plugins(files)
    assert loaded == tuple(f"{file.name}@{digest(file)}" for file in files)
    assert load_plugins(files[:1]) == loaded[:1], "again is nothing new"
    assert RunConfig().plugins == ()
    run = override(RunConfig(), {"model.moe.router.kind": "cosine", "train.optimizer.kind": "lion"})
    assert run.plugins == (loaded[0], loaded[2])
    run = override(run, {"model.kind": "convnet", "train.schedule.kind": "peak"})
    assert run.plugins == loaded[1:]
    assert override(run, {"model.moe.router.kind": "cosine"}).plugins == loaded
    assert override(run, {"plugins": ()}).plugins == run.plugins
    assert run == deepcopy(run) == read_config(RunConfig, json.loads(json.dumps(to_dict(run))))
    source = inspect.getsource(type(run.model).build)
    assert source in (OWN / "convnet.py").read_text(), "tracebacks and torch.compile show the lines"


def test_a_config_takes_its_plugins_to_another_process(peak, new_process):
    load_plugins([OWN / "cosine.py", peak])
    run = override(RunConfig(), {"model.moe.router.kind": "cosine", "train.schedule.kind": "peak"})
    pickled, written, plugins = pickle.dumps([run, run.model.moe]), to_dict(run), run.plugins
    new_process()
    what = rf"made with the plugin cosine.py \(SHA-256 {digest(OWN / 'cosine.py')[:12]}\.\.\)"
    with pytest.raises(ValueError, match=f"{what}.* and it is not loaded: load that file"):
        read_config(RunConfig, written)
    again, moe = pickle.loads(pickled)
    assert moe is again.model.moe
    assert (again.train.schedule.rate(3, peak=0.5, total=9), again.plugins) == (0.5, plugins)
    assert type(again.model.moe.router) is not type(run.model.moe.router), "made anew from its text"


def test_a_changed_plugin_is_another(peak, tmp_path, new_process):
    load_plugins([peak])
    changes = {"train.schedule.kind": "peak", "storage": str(tmp_path), "data.path": "/shards"}
    run = override(RunConfig(), changes)
    acquire_run_dir(run, "digest")
    assert Path(RunDir.of(run).path, "plugins", "peak.py").read_text() == PEAKED
    before = digest(peak)[:12]
    peak.write_text(PEAKED.replace("return peak", "return 2 * peak"))
    now = digest(peak)[:12]
    with pytest.raises(
        UsageError, match=rf"{now}.* cannot be loaded, because .*{before}.*: start a new process"
    ):
        load_plugins([peak])
    new_process()
    load_plugins([peak])
    with pytest.raises(
        UsageError, match=rf"made with the plugin .*{before}.*{now}.* is loaded: load that file"
    ):
        acquire_run_dir(override(RunConfig(), changes), "digest")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, "no file .*mine.py: a plugin is a Python file of your own"),
        ("def f():\n  return 1 +\n", "mine.py, line 2: SyntaxError: "),
        ("a = 1\ndef f():\n    raise ValueError('no')\n\nf()\n", "mine.py, line 3: ValueError: no"),
        ("import json\n\njson.loads('[')\n", "mine.py, line 3: JSONDecodeError: "),
        (
            "a = 1\n",
            "mine.py defines no config with a kind, derived from one of .*RouterConfig, ScheduleConfig",
        ),
        (
            PEAKED.replace('"peak"', '"cosine"'),
            "mine.py, line 9: TypeError: PeakConfig and CosineConfig both are",
        ),
        (PEAKED.replace("after_warmup", "rates"), "mine.py: PeakConfig has no after_warmup"),
        (PEAKED.replace("@dataclass", "#"), "mine.py: PeakConfig is no dataclass: @dataclass.frozen=True"),
        (PEAKED + "1 / 0\n", "mine.py, line 14: ZeroDivisionError: division by zero"),
    ],
)
def test_a_file_that_is_no_plugin(text, message, tmp_path):
    """The file and the line are named, and the mended file can be loaded."""
    file = tmp_path / "mine.py"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UsageError, match=message):
        load_plugins([file])
    file.write_text(PEAKED)
    load_plugins([file])
    assert override(RunConfig(), {"train.schedule.kind": "peak"}).plugins


def test_a_sweep_records_the_plugins_of_its_arms(peak, digits, tmp_path, new_process):
    (plugin,) = load_plugins([peak])
    base = override(RunConfig(), {"storage": str(tmp_path), "name": "s", "data.path": digits})
    sweep = Sweep(base=base, arms={"a": {"train.schedule.kind": "peak"}, "b": {}}, quality="val/loss")
    assert acquire_sweep_dir(sweep, resume=False, labels={}).plugins == [plugin]
    assert (tmp_path / "s" / "plugins" / "peak.py").read_text() == PEAKED
    more = Sweep(base=base, arms={**sweep.arms, "c": {}}, quality="val/loss")
    assert acquire_sweep_dir(more, resume=True, labels={}).plugins == [plugin]
    peak.write_text(PEAKED + "# changed\n")
    new_process()
    load_plugins([peak])
    with pytest.raises(UsageError, match=r"made with the plugin peak.py .*, and peak.py .* is loaded"):
        acquire_sweep_dir(more, resume=True, labels={})


MADE = """from __future__ import annotations

from dataclasses import dataclass

from moe.config import Config
from widths import WIDTHS


@dataclass
class Grid:
    n: Later = 2


@dataclass(frozen=True, kw_only=True)
class Checked(Config):
    n: Later = 2


Later = int


class Widths:
    of = WIDTHS


def make(fails=False):
    Checked(n=2)
    return Widths() if not fails else 1 / 0
"""


def test_a_function_is_of_a_proper_module(tmp_path: Path) -> None:
    """With dataclasses of annotations from the future, and files beside it; moe.py hides nothing of ours."""
    file = tmp_path / "moe.py"
    file.write_text(MADE)
    (tmp_path / "widths.py").write_text("WIDTHS = (16, 32)\n")
    make = function_of(f"{file}:make")
    assert make().of == (16, 32)
    assert importlib.import_module("moe").__file__ == str(ROOT / "moe" / "__init__.py")
    assert function_of(f"{file}:make") is make  # is not executed again
    named = {module.__name__ for module in modules_by_value()}
    assert {make.__module__, "widths"} <= named
    assert "moe" not in named
    with pytest.raises(ZeroDivisionError) as raised:
        make(True)
    error = error_in(f"{file}:make", raised.value)
    assert str(error) == f"{file}:make, line 28: ZeroDivisionError: division by zero"
    file.write_text(MADE.replace("WIDTHS\n\n\ndef", "(8,)\n\n\ndef"))
    assert function_of(f"{file}:make")().of == (8,)


def test_other_processes_get_what_a_file_defines_by_value(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(MADE)
    (tmp_path / "widths.py").write_text("WIDTHS = (16, 32)\n")
    made = function_of(f"{file}:make")()
    for module in modules_by_value():
        cloudpickle.register_pickle_by_value(module)
    (tmp_path / "made.pickle").write_bytes(cloudpickle.dumps(made))
    file.unlink()
    code = "import pickle, sys; print(pickle.load(open(sys.argv[1], 'rb')).of)"
    command = [sys.executable, "-c", code, tmp_path / "made.pickle"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "(16, 32)\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("\n\ndef make(:\n", r"own.py, line 3: SyntaxError"),
        ("\nimport no_such_thing\n", r"own.py, line 2: ModuleNotFoundError: No module named 'no_such_thing'"),
        ("a = 1\n", r"own.py has no function 'make'"),
    ],
)
def test_an_error_of_a_file_has_its_line(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(text)
    for _ in range(2):
        with pytest.raises(UsageError, match=message):
            function_of(f"{tmp_path}/own.py:make")

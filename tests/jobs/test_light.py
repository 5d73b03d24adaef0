"""Commands answer before they load large libraries: help, usage errors, the line that says what begins."""

import json
from pathlib import Path
from typing import Any

import pytest
from mlflow.exceptions import MlflowException

from jobs import _main
from jobs._cli import OUT_OF_BUDGET, command, with_flags
from moe.guests import PACKAGES
from orchestrator.errors import BudgetExhausted, UsageError
from orchestrator.sweeps.search import SearchOptions
from tests.jobs.bare import run_bare

ROOT = Path(__file__).parents[2]
COMMANDS = sorted(
    str(path.relative_to(ROOT))
    for folder in (".", *PACKAGES)
    for path in ROOT.glob(f"{folder}/jobs/*.py")
    if 'if __name__ == "__main__"' in path.read_text()
)
HEAVY = ("torch", "ray", "mlflow")
ANSWER = f"""
import contextlib, io, json, runpy, sys
answers = []
for name in {COMMANDS!r}:
    for flag in ("--help", "--no-such-flag"):
        sys.argv, code, said = [name, flag], None, io.StringIO()
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
            try:
                runpy.run_path(name, run_name="__main__")
            except SystemExit as stop:
                code = stop.code
        loaded = [library for library in {HEAVY!r} if library in sys.modules]
        answers.append((name, flag, code, loaded, said.getvalue()))
print(json.dumps(answers))
"""
FIRST_LINE = """
import runpy, sys
class Stop:
    def find_spec(self, name, *_):
        if name == "torch":
            raise SystemExit("torch is loaded")
sys.meta_path.insert(0, Stop())
sys.argv = ["plan.py", "S/16"]
runpy.run_path("jobs/plan.py", run_name="__main__")
"""


NO_STORAGE = """
import json, runpy, sys
sys.argv = [*sys.argv[1:], "--storage", "/proc/x"]
try:
    runpy.run_path(sys.argv[0], run_name="__main__")
except SystemExit as stop:
    print(json.dumps([stop.code, "torch" in sys.modules]))
"""


@pytest.fixture(scope="module")
def answers() -> list[tuple[str, str, int, list[str], str]]:
    done = run_bare("-c", ANSWER)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_help_and_usage_errors_load_no_large_library(answers: list[Any]):
    assert len(COMMANDS) == len(_main.COMMANDS)
    assert len(answers) == 2 * len(COMMANDS)
    for name, flag, code, loaded, said in answers:
        assert code == (0 if flag == "--help" else 2), (name, said)
        assert loaded == [], name
        assert said.startswith("usage: " if flag == "--help" else "error: ")


def test_the_first_line_comes_before_torch():
    done = run_bare("-c", FIRST_LINE)
    assert done.stdout.startswith("planning S/16 on 8 devices: loading libraries ..\n")
    assert done.stderr == "torch is loaded\n"


@pytest.mark.parametrize(
    "words",
    [
        ["jobs/train.py"],
        ["jobs/pareto_sweep.py"],
        ["jobs/evaluate.py", "soft"],
        pytest.param(["wings/jobs/finetune.py", "soft", "--data", "x"], marks=pytest.mark.guests),
    ],
    ids=lambda words: words[0],
)
def test_a_storage_that_cannot_be_written_to_is_refused_before_torch_is_loaded(words: list[str]):
    done = run_bare("-c", NO_STORAGE, *words)
    assert done.returncode == 0, done.stderr
    refused = "error: --storage /proc/x cannot be written to: No such file or directory"
    assert json.loads(done.stdout.splitlines()[-1]) == [refused, False]


def test_messages_of_the_library_name_flags_on_the_command_line() -> None:
    said = "use another `name`, or `mode=fresh` to start over; give more `hours`; `ray job submit`"
    assert with_flags(said) == (
        "use another --name, or --fresh to start over; give more --budget-hours; `ray job submit`"
    )


def test_a_budget_that_is_exhausted_has_a_code_of_its_own(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended, command("training"):
        raise BudgetExhausted("Run again with a larger `hours`")
    assert ended.value.code == OUT_OF_BUDGET
    assert capsys.readouterr().err == "error: Run again with a larger --budget-hours\n"


def test_what_a_user_can_correct_is_a_line() -> None:
    """MLflow's errors too, and values that a config refuses; a fault of the program keeps its traceback."""
    for error in (MlflowException("no right to it"), OSError("disk full"), UsageError("give `hours`")):
        with pytest.raises(SystemExit, match=r"^error: "), command("training"):
            raise error
    with pytest.raises(SystemExit, match=r"^error: trials must be an integer, got 'x'"), command("training"):
        SearchOptions(trials="x")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="a fault"), command("training"):
        raise ValueError("a fault")

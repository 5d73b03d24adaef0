"""The command that lists, stops and removes the sweeps of a storage."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import sweeps
from orchestrator.runs.measurements import USER
from orchestrator.sweeps.sweep import Sweep
from tests.made_directories import begin, end_sweep, run_at

Call = Callable[..., tuple[str, str]]


def test_a_day_of_a_team(empty_home: Path, call: Call) -> None:
    sweep = Sweep(base=run_at(empty_home, "mine"), arms={"a": {}, "b": {}})
    directory = end_sweep(sweep, {"a": 0.5, "b": 0.75}, labels={USER: "ada"})
    begin(run_at(empty_home, "one"))
    stopped, said = call(sweeps.main)
    assert stopped == ""
    row = next(line for line in said.splitlines() if "mine" in line)
    cells = [cell.strip() for cell in row.strip("│ ").split("│")]
    assert cells[:3] + cells[4:7] == ["mine", "finished", "ada", "2/2", "val/acc1 0.75", "0"]
    assert "2 runs and sweeps" in said
    listed = {entry["name"]: entry for entry in json.loads(call(sweeps.main, "list", "--json")[1])}
    assert (listed["mine"]["user"], listed["mine"]["arms_done"], listed["one"]["kind"]) == ("ada", 2, "run")
    assert "nothing runs in" in call(sweeps.main, "stop", "mine")[1]
    said = call(sweeps.main, "rm", "mine", "--dry-run")[1]
    assert "would remove" in said
    assert "nothing was removed" in said
    assert Path(directory, "sweep.json").exists()
    assert " freed" in call(sweeps.main, "rm", "mine")[1]
    assert not Path(directory).exists()
    assert "0 things" in call(sweeps.main, "rm", "--orphans", "--dry-run")[1]
    assert call(sweeps.main, "rm", "mine")[0].startswith("error: no run or sweep in ")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["rm"], "rm needs the name of a sweep or a run"),
        (["list", "x"], "list takes no name, got x"),
        (["rm", "x", "--orphans"], "rm --orphans takes no name, got x"),
        (["stop", "x", "--dry-run"], "stop takes no --dry-run, which is a flag of rm"),
        (["rm", "--orphans", "--keep", "frontier"], "rm --orphans takes no --keep, which is for one sweep"),
        (["rm", "../x"], "begin with a letter or digit"),
    ],
)
def test_wrong_flags_are_one_line(
    words: list[str], said: str, call: Call, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call(sweeps.main, *words)[0] == "2" or said in capsys.readouterr().err

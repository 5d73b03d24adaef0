"""Commands under the names that they had before: each says what it is now, and reads its old flags."""

import importlib
import runpy
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jobs._main import OLD, main

ROOT = Path(__file__).parents[2]
CALLS = {  # old name -> flags of an old call, and what the new command reads
    "cost": ("S/16 --json", {"cost": True, "model": ("S/16",), "json": True}),
    "doctor": ("--seeds 2 --json", {"seeds": 2, "json": True}),
    "fewshot": ("soft --shots 1,5", {"model": ("soft",), "shots": (1, 5), "seeds": None}),
    "operating_points": ("sweep:a --split train", {"model": ("sweep:a",), "grid": (), "repeats": 5}),
    "soup": ("a b --out s.safetensors --fresh", {"model": ("a", "b"), "fresh": True}),
}


class Parsed(Exception):
    """Ends a command once its flags are read."""


def run_file(name: str) -> None:
    runpy.run_path(f"{ROOT}/jobs/{name}.py", run_name="__main__")


def run_word(name: str) -> None:
    sys.argv[1:1] = [name.replace("_", "-")]
    main()


@pytest.mark.parametrize("name", OLD)
@pytest.mark.parametrize("run", [run_file, run_word])
def test_an_old_call_is_a_call_of_the_new_command(
    run: Callable[[str], None],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    now = importlib.import_module(f"jobs.{OLD[name][0]}")
    parse, found, (words, expected) = now.parse, [], CALLS[name]

    def record(*args: Any, **options: Any) -> None:
        found.append(parse(*args, **options))
        raise Parsed

    monkeypatch.setattr(now, "parse", record)
    monkeypatch.setattr(sys, "argv", [f"jobs/{name}.py", *words.split()])
    with pytest.raises(Parsed):
        run(name)
    assert {field: getattr(found[0], field) for field in expected} == expected
    said = capsys.readouterr()
    assert said.out == ""
    assert " is now: " in said.err
    assert OLD[name][0] in said.err.partition(" is now: ")[2]

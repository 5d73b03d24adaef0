"""The flags of a sweep are checked before anything large is loaded."""

import sys
from pathlib import Path

import pytest

from jobs import sweep_flags
from orchestrator.sweeps.catalog import SWEEPS
from orchestrator.sweeps.scales import SCALES


def refused(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *flags: str) -> str:
    monkeypatch.setattr(sys, "argv", ["pareto_sweep.py", *flags])
    with pytest.raises(SystemExit) as stopped:
        sweep_flags.parse("")
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_the_names_are_those_of_the_catalog():
    assert set(sweep_flags.SWEEPS) == set(SWEEPS)
    assert set(sweep_flags.SCALES) == set(SCALES)


def test_a_sweep_that_is_not_there(monkeypatch, capsys, tmp_path: Path):
    assert "unknown sweep 'nosuch'; known: quickstart" in refused(monkeypatch, capsys, "--sweep", "nosuch")
    mine = tmp_path / "mine.py"
    assert f"no file {mine}" in refused(monkeypatch, capsys, "--sweep", f"{mine}:make")
    mine.write_text("import torch\n\ndef helper(): ...\n\ndef make(): ...\n")
    said = refused(monkeypatch, capsys, "--sweep", str(mine))
    assert f"names no function: write {mine}:FUNCTION; it has helper, make" in said


def test_a_sweep_is_named_after_its_scale_and_by_the_flag(monkeypatch):
    for flags, name in (
        (["--sweep", "routers"], "routers"),
        (["--sweep", "routers", "--scale", "cifar"], "routers-cifar"),
    ):
        monkeypatch.setattr(sys, "argv", ["pareto_sweep.py", *flags])
        assert sweep_flags.named_sweep(sweep_flags.parse("")).base.name == name

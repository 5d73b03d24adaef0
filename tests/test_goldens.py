"""Every golden file passes; a wrong array, a wrong decision and an unknown family are each found out."""

import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from tests.golden import FAMILIES, check, family_of, main
from tests.lanes import mostly_slow
from tests.moe.parts import GOLDENS

ALL = sorted(GOLDENS.glob("*.npz"))
FILES = [path for path in ALL if family_of(path) in FAMILIES]  # the others are those of absent guests


@pytest.mark.guests
def test_all_files_and_families_are_there():
    assert len(ALL) == 160
    assert {family_of(path) for path in ALL} == set(FAMILIES)


# Sparse plans are solved with 20,000 iterations.
LONG = {path for path in FILES if "sparsity" in path.stem and "tiny_t6_e2" not in path.stem}


@pytest.mark.parametrize("path", mostly_slow(FILES, fast={*FILES} - LONG), ids=lambda path: path.stem)
def test_golden(path):
    report = check(path)
    assert not report.failed(), str(report)


def run(folder: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "tests.golden", str(folder)],
        cwd=Path(__file__).parents[1],
        capture_output=True,
        text=True,
        check=False,
    )


def altered(source: str, target: Path, **changes) -> None:
    """A copy of a golden with some arrays (or `meta`) changed by functions."""
    with np.load(GOLDENS / f"{source}.npz") as file:
        arrays = dict(file)
    np.savez(target, **arrays | {name: change(arrays[name]) for name, change in changes.items()})


@pytest.mark.smoke
def test_runner_prints_a_line_per_case_and_finds_what_is_wrong(tmp_path, capsys):
    assert main([str(tmp_path)]) == 1
    assert "no .npz" in capsys.readouterr().err
    case = "softmax_token_choice__k1_cf1"
    shutil.copy(GOLDENS / f"{case}.npz", tmp_path)
    shutil.copy(GOLDENS / "fewshot__ridge.npz", tmp_path)
    assert main([str(tmp_path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:-1]] == ["ok", "ok"]
    assert lines[-1] == "2 ok, 0 FAIL, 0 none"

    of = "softmax_token_choice__"
    altered(case, tmp_path / f"{of}forward.npz", y=lambda y: y + 1e-3)
    altered(case, tmp_path / f"{of}gradient.npz", grad_W=lambda g: g * 1.01)
    altered(case, tmp_path / f"{of}decision.npz", dispatch=lambda d: d[:, ::-1])
    altered(case, tmp_path / "other__family.npz")
    bad = run(tmp_path)  # its exit code too
    assert bad.returncode == 1
    failed = {line.split()[1]: line for line in bad.stdout.splitlines() if line.startswith("FAIL")}
    assert failed.keys() == {f"{of}forward", f"{of}gradient", f"{of}decision"}
    assert "<-- FAIL" in failed[f"{of}forward"]
    assert "dispatch differs" in failed[f"{of}decision"]
    assert "unknown family other: 1 not checked" in bad.stdout
    for known in tmp_path.glob("[fs]*.npz"):
        known.unlink()
    assert main([str(tmp_path)]) == 1, "nothing was checked"

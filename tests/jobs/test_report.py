"""`jobs/report.py` as a user runs it, on a sweep that is trained."""

from collections.abc import Callable
from pathlib import Path

from jobs import report
from orchestrator.sweeps.report import FILES
from orchestrator.tracking import EXPERIMENT

Call = Callable[..., tuple[str, str]]
OTHERS = ("--experiment", EXPERIMENT, "--quality", "val/acc1", "--cost", "cost/train_flops_6mac")


def test_pages_lie_below_the_storage(home: Path, call: Call, tmp_path: Path, monkeypatch) -> None:
    """A sweep's page lies beside its trials, that of another tool's runs in its own folder."""
    monkeypatch.chdir(tmp_path)
    for flags, folder in ((("--name", "tiny"), home / "tiny"), (OTHERS, home / "reports" / EXPERIMENT)):
        for name in FILES:
            (folder / name).unlink(missing_ok=True)
        stopped, printed = call(report.main, *flags)
        assert stopped == ""
        assert f"{folder}/{{{','.join(FILES)}}}: " in printed
        assert all((folder / name).exists() for name in FILES)
    assert list(tmp_path.iterdir()) == []
    assert call(report.main, "--name", "tiny", "--out", "page")[0] == ""
    assert sorted(path.name for path in (tmp_path / "page").iterdir()) == sorted(FILES)


def test_mistakes_are_one_line(home: Path, call: Call) -> None:
    stopped, _ = call(report.main, "--name", "tiny", "--out", "/proc/nope")
    assert stopped == "error: --out /proc/nope cannot be written to: No such file or directory"
    stopped, _ = call(report.main, *OTHERS, "--claim", "size wins")
    assert stopped.startswith("error: --claim 'size wins': ")
    assert call(report.main, "--experiment", EXPERIMENT)[0] == "2"

"""`jobs/report.py --published`: tables and figures of what papers print."""

from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest

from jobs import report
from jobs._cli import Places
from jobs.report import PaperFlags, ReportFlags
from orchestrator.costs import TIMES
from orchestrator.errors import UsageError
from orchestrator.sweeps.publish import FILES

Call = Callable[..., tuple[str, str]]


def test_a_table_and_a_figure_for_a_paper(empty_home: Path, call: Call, tmp_path: Path) -> None:
    asked = ("--published", "softmoe-figure3", "--out", f"{tmp_path}/paper", "--format", "tex", "svg", "csv")
    options = ("--width", "3", "--font", "7", "--title", "Theirs", "--families", "dense,soft")
    cost = "cost/train_flops_3mac"
    assert call(report.main, *asked, *options, "--cost", cost, "--columns", "cost/tpuv3_days")[0] == ""
    svg, table = ((tmp_path / f"paper/frontier.{each}").read_text() for each in ("svg", "tex"))
    assert 'width="216pt"' in svg
    for text in ("<!-- Theirs -->", "<!-- Soft -->", f"<!-- Training (EFLOP, 3 {TIMES} MAC) -->"):
        assert text in svg
    assert "Expert choice" not in svg
    assert "TPUv3" in table
    assert {*pd.read_csv(tmp_path / "paper/frontier.csv")["family"]} == {"dense", "soft"}
    for wrong, known in (
        ("--cost", "known: cost/tpuv3_days, "),
        ("--families", "known: dense, expert_choice"),
    ):
        stopped, _ = call(report.main, *asked, wrong, "x")
        assert stopped.startswith("error: softmoe-figure3 has no ")
        assert known in stopped
    assert call(report.main, *asked[:4], "--width", "3")[0] == "2"
    for option, flags in (("width", PaperFlags(width=3.0)), ("no-baselines", PaperFlags(no_baselines=True))):
        with pytest.raises(UsageError, match=f"^without --format, --{option} does nothing"):
            ReportFlags(paper=flags, places=Places())


@pytest.mark.usefixtures("no_pictures")
def test_a_figure_of_a_paper(empty_home: Path, call: Call, tmp_path: Path) -> None:
    stopped, printed = call(report.main, "--published", "softmoe-table1")
    assert stopped == ""
    assert "8 points of softmoe-table1" in printed
    folder = empty_home / "reports/softmoe-table1"
    assert sorted(path.name for path in folder.iterdir()) == sorted(FILES)
    call(report.main, "--published", "vmoe-table2", "--out", f"{tmp_path}/page")
    assert "V-MoE (2021), table 2" in (tmp_path / "page/frontier.html").read_text()
    assert "routers-figure1" in call(report.main, "--published", "help")[1]
    stopped, _ = call(report.main, "--published", "figure3")
    assert stopped.startswith("error: no published figure 'figure3'; known: softmoe-figure3, ")

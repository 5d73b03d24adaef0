"""Plans beside what the papers print: `jobs/plan.py --cost`, and `--plan` of a sweep."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobs import pareto_sweep, plan
from papers import costs
from tests.jobs.bare import run_bare

Call = Callable[..., tuple[str, str]]


@pytest.mark.smoke
def test_costs_beside_every_row_of_the_papers() -> None:
    job = run_bare("jobs/plan.py", "--cost")
    assert job.returncode == 0, job.stderr
    assert job.stderr == "computing costs: loading libraries ..\n"
    lines = job.stdout.splitlines()
    assert max(map(len, lines)) <= 110
    rows = [line.split() for line in lines[2:]]
    assert [row[0] for row in rows] == [row.model for row in costs.PRINTED]
    assert rows[0][:10] == ["S/16", "33.06M", "33.06M", "33M", "+0.2", "9.2", "9.2", "-0.3", "3", "225.4"]
    assert " NO" not in job.stdout


def test_costs_as_json(call: Call) -> None:
    code, out = call(plan.main, "--cost", "--json", "soft-B/16-128e", "vmoe-B/32")
    assert code == ""
    printed, plain = json.loads(out)
    assert printed["params"] == 3_707_638_687
    assert printed["paper"] == {"params": 3.7e9, "gflop": 32.0, "exaflop": 1769.5}
    assert printed["train_exaflops"] == pytest.approx(1760.1, abs=0.1)
    assert printed["train_images"] == 9_000_000 * 4096
    assert printed["train_flops_per_mac"] == 3
    assert printed["within"] is True
    assert plain["num_classes"] == 1000
    assert plain["active_params"] < plain["params"]
    assert plain["within"] is plain["train_exaflops"] is None
    assert plain["difference_percent"] == {"params": None, "gflop": None, "exaflop": None}


def test_a_row_that_is_out_fails(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = [replace(row, exaflop=250.0) if row.model == "S/16" else row for row in costs.PRINTED]
    monkeypatch.setattr(costs, "PRINTED", wrong)
    code, out = call(plan.main, "--cost", "S/16", "B/16")
    assert code == "1"
    lines = out.splitlines()
    assert " NO " in lines[2]
    assert " yes " in lines[3]


def test_an_unknown_model_is_refused(call: Call) -> None:
    error, out = call(plan.main, "--cost", "S/17")
    assert error.startswith("error: unknown model 'S/17'; known: debug, S/32, ")
    assert not out


def test_a_plan_needs_no_data(empty_home: Path, call: Call) -> None:
    """The papers' costs stand beside ours: 814.2 exaFLOP at 3 per MAC are 1.63e21 at 6, for 494.7 days."""
    words = ["--sweep", "long_runs", "--scale", "jft", "--plan", "--mfu", "0.35", "--device", "H100-80"]
    stopped, said = call(pareto_sweep.main, *words)
    assert stopped == ""
    assert "no --data: assuming the 29,593 classes of scale jft" in said
    printed = said.partition("as printed by the paper")[2]
    row = next(line for line in printed.splitlines() if "S14-soft-256e-10M-cooldown50k" in line)
    assert row.split()[3::2] == ["1.61e+21", "1.63e+21", "-1.0", "494.7"]
    assert "models this small" not in said
    stopped, _ = call(pareto_sweep.main, "--sweep", "long_runs", "--scale", "jft")
    assert stopped == "error: --sweep long_runs --scale jft has no data of its own: give --data"

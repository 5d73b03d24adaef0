"""`jobs/cost.py` as a user runs it."""

import json
from dataclasses import replace

import pytest

from jobs import cost
from papers import costs
from tests.jobs.bare import run_bare


def test_every_row_of_the_papers():
    job = run_bare("jobs/cost.py")
    assert job.returncode == 0, job.stderr
    assert job.stderr == "computing costs: loading libraries ..\n"
    lines = job.stdout.splitlines()
    assert max(map(len, lines)) <= 110
    rows = [line.split() for line in lines[2:]]
    assert [row[0] for row in rows] == [row.model for row in costs.PRINTED]
    assert rows[0][:10] == ["S/16", "33.06M", "33.06M", "33M", "+0.2", "9.2", "9.2", "-0.3", "3", "225.4"]
    assert " NO" not in job.stdout


def test_json(call):
    code, out = call(cost.main, "--json", "soft-B/16-128e", "vmoe-B/32")
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


def test_a_row_that_is_out_fails(call, monkeypatch):
    wrong = [replace(row, exaflop=250.0) if row.model == "S/16" else row for row in costs.PRINTED]
    monkeypatch.setattr(costs, "PRINTED", wrong)
    code, out = call(cost.main, "S/16", "B/16")
    assert code == "1"
    lines = out.splitlines()
    assert " NO " in lines[2]
    assert " yes " in lines[3]

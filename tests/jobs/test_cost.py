"""`jobs/cost.py` as a user runs it, and its table against the papers."""

import json
from dataclasses import replace

import pytest

from jobs import cost
from moe.presets import PRESETS
from orchestrator.errors import UsageError
from tests.jobs.bare import run_bare


def test_every_row_of_the_papers():
    job = run_bare("jobs/cost.py")
    assert job.returncode == 0, job.stderr
    assert job.stderr == "computing costs: loading libraries ..\n"
    lines = job.stdout.splitlines()
    assert max(map(len, lines)) <= 110
    rows = [line.split() for line in lines[2:]]
    assert [row[0] for row in rows] == [row.model for row in cost.PRINTED]
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
    wrong = [replace(row, exaflop=250.0) if row.model == "S/16" else row for row in cost.PRINTED]
    monkeypatch.setattr(cost, "PRINTED", wrong)
    code, out = call(cost.main, "S/16", "B/16")
    assert code == "1"
    lines = out.splitlines()
    assert " NO " in lines[2]
    assert " yes " in lines[3]


@pytest.mark.parametrize(
    ("printed", "params", "within"),
    [
        ("1.8e9", 1_849_000_000, True),  # rounds to it
        ("1.8e9", 1_851_000_000, False),
        ("656e6", 662_000_000, True),  # 0.9 %
        ("656e6", 663_000_000, False),
    ],
)
def test_parameters_may_round(monkeypatch, printed, params, within):
    monkeypatch.setattr("moe.cost.num_params", lambda config: params)
    assert cost.costs(cost.Row(model="S/16", params=printed))["within"] is within


def test_over_forty_times_as_many():
    """Soft MoE's abstract: 128 experts in 16 layers have over 40x more parameters than ViT-H/14."""
    soft, vit = (
        next(cost.costs(row)["params"] for row in cost.PRINTED if row.model == name)
        for name in ("soft-H/14-128e", "H/14")
    )
    assert 40 < soft / vit < 41


def test_unknown_model():
    with pytest.raises(UsageError, match="unknown model 'S/17'; known: debug, S/32, "):
        cost.rows(["S/16", "S/17"])


def test_every_preset_has_costs():
    for row in cost.rows(list(PRESETS)):
        assert cost.costs(row)["within"] is not False

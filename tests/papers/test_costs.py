"""The papers' rows of costs against ours."""

import pytest

from moe.presets import PRESETS
from orchestrator.errors import UsageError
from papers import costs


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
    assert costs.costs(costs.Row(model="S/16", params=printed))["within"] is within


def test_over_forty_times_as_many():
    """Soft MoE's abstract: 128 experts in 16 layers have over 40x more parameters than ViT-H/14."""
    soft, vit = (
        next(costs.costs(row)["params"] for row in costs.PRINTED if row.model == name)
        for name in ("soft-H/14-128e", "H/14")
    )
    assert 40 < soft / vit < 41


def test_unknown_model():
    with pytest.raises(UsageError, match="unknown model 'S/17'; known: debug, S/32, "):
        costs.rows(["S/16", "S/17"])


@pytest.mark.smoke
def test_every_preset_has_costs():
    for row in costs.rows(list(PRESETS)):
        assert costs.costs(row)["within"] is not False

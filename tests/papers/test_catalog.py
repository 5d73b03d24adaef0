"""The named sweeps hold what their papers list."""

import math

import pytest

from moe.cost import num_expert_params, slots_per_token, train_flops_6mac
from moe.presets import PRESETS
from orchestrator.codec import to_dict
from orchestrator.planning.preflight import check_claims
from orchestrator.sweeps.catalog import SCALES, SWEEPS, make_sweep


@pytest.mark.parametrize(
    "scale", [name for name, scale in SCALES.items() if SWEEPS["routers"].runs_at(scale)]
)
def test_claims_at_equal_size_and_capacity_have_a_cell_for_each(scale: str) -> None:
    """However slots are rounded, c of 1 and 2 of every router meet."""
    sizes = len(SCALES[scale].of("routers", {}).sizes)
    counts = [*check_claims(make_sweep("routers", scale)).values()]
    assert counts == [sizes * 2 * 2, sizes * 2, sizes * 2]


@pytest.mark.parametrize("scale", ["tiny", "cifar"])
def test_pareto_compares_three_capacities_of_every_size(scale: str) -> None:
    sizes = len(SCALES[scale].sizes)
    assert [*check_claims(make_sweep("pareto", scale)).values()] == [sizes * 3, sizes, sizes]


def test_routers_are_the_twelve_of_the_paper_for_every_size() -> None:
    """Figure 1: {softmax, Sinkhorn} token choice k 1, 2; three expert choices and Soft MoE with c 1, 2."""
    runs = make_sweep("routers", "tiny").runs()
    assert len(runs) == 5 * (12 + 1)
    for name, run in runs.items():
        if run.model.moe:
            assert slots_per_token(run.model) == int(name[-1]), name
    of_one_size = {name: run for name, run in runs.items() if name.startswith("w32d2") and run.model.moe}
    equal = {  # sparse routers of equal capacity cost the same
        train_flops_6mac(run.model, 1)
        for name, run in of_one_size.items()
        if name[-1] == "1" and "soft-" not in name
    }
    assert len(equal) == 1


def test_the_number_of_experts_leaves_their_parameters() -> None:
    runs = make_sweep("expert_count", "tiny").runs()
    weights = {
        2 * run.model.width * run.model.expert_dim() * run.model.moe.num_experts
        for run in runs.values()
        if run.model.moe
    }
    assert len(weights) == 1
    assert len({num_expert_params(run.model) for run in runs.values()}) == len(runs)  # biases alone differ


def test_experts_at_equal_slots_cost_as_much_but_for_routing() -> None:
    runs = make_sweep("slots_experts", "tiny").runs()
    assert {round(slots_per_token(run.model), 3) for name, run in runs.items() if name.endswith("x1")} == {
        1.0
    }


def test_arms_follow_the_tokens_of_a_changed_base() -> None:
    """8 x 8 pixels in patches of 1 are 64 tokens, 224 x 224 in patches of 16 are 196."""
    runs = make_sweep("slots_experts", "tiny", {"model.patch_size": 1}).runs()
    assert {run.model.moe.num_experts for run in runs.values() if run.model.moe} >= {2, 64, 128}
    assert {round(slots_per_token(run.model), 3) for run in runs.values()} == {1.0, 2.0}
    for changes, tokens in (({}, 256), ({"model.patch_size": 16}, 196), ({"model.image_size": 112}, 64)):
        found = make_sweep("ablations", "in1k", changes).runs()["identity"].model
        assert found.moe
        assert (found.tokens(), found.moe.num_experts, found.slots()) == (tokens, tokens, 1)


def test_steps_of_long_runs_are_shares_of_the_bases() -> None:
    runs = make_sweep("long_runs", "tiny", {"train.steps": 40}).runs()
    assert {run.train.steps for run in runs.values()} == {10, 20, 40}


def test_a_model_by_name_has_the_classes_of_the_scale() -> None:
    model = to_dict(PRESETS["soft-S/14-256e"])
    run = make_sweep("ablations", "jft", {"model": model}).base.model
    assert (run.num_classes, run.head_bias) == (29_593, pytest.approx(-math.log(29_593)))


def test_a_sweep_trains_by_the_recipe_of_its_paper() -> None:
    """And what the user sets goes over it, whatever kind of schedule it has."""
    assert make_sweep("vmoe", "jft").base.train.schedule.kind == "linear"
    changed = make_sweep("vmoe", "jft", {"train.schedule.warmup_steps": 7}).base.train.schedule
    assert (changed.kind, changed.warmup_steps) == ("linear", 7)
    assert make_sweep("long_runs", "jft").base.train.steps == 4_000_000
    for scale in ("in21k", "jft"):
        assert make_sweep("pareto", scale).base.task.loss == "sigmoid"

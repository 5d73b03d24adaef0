"""The named sweeps hold what their papers list, at every scale, and a user's own file works the same."""

import math
from dataclasses import replace
from pathlib import Path

import pytest

from moe.cost import num_expert_params, slots_per_token, train_flops_6mac
from moe.presets import PRESETS
from orchestrator.codec import flat, to_dict
from orchestrator.errors import UsageError
from orchestrator.planning.preflight import check_claims
from orchestrator.sweeps.catalog import SCALES, SWEEPS, make_sweep
from tests.lanes import mostly_smoke


@pytest.mark.parametrize("scale", mostly_smoke(SCALES, fast=["tiny"]))
def test_every_arm_is_a_config_and_every_claim_is_about_them(scale: str) -> None:
    for name in [name for name, each in SWEEPS.items() if each.runs_at(SCALES[scale])]:
        sweep = make_sweep(name, scale)
        assert sweep.base.name == name
        assert len(sweep.runs()) == len(sweep.arms) * max(1, len(sweep.seeds)) > 3
        counts = check_claims(sweep)
        assert list(counts) == [*sweep.claims]
        for claim, count in counts.items():
            print(f"{name} {scale}: {count:3} comparisons of {claim!r}")
            assert count > 0
        assert "Source:" in (SWEEPS[name].make.__doc__ or "")


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


def test_a_claim_that_compares_nothing_is_refused() -> None:
    sweep = make_sweep("pareto", "tiny")
    both = "family=soft beats best family=token_choice,family=expert_choice at equal size"
    with pytest.raises(UsageError) as refused:
        check_claims(replace(sweep, claims=(both,)))
    assert str(refused.value) == (
        f"claim '{both}' compares nothing: no arm has family=token_choice,family=expert_choice"
    )
    assert check_claims(replace(sweep, arms={}, claims=(both,))) == {}  # a search draws them later
    falls = "family=soft loses less than family=soft as family falls"
    with pytest.raises(UsageError, match=r"family=soft of w16d2-soft-x0\.5 is not a number"):
        check_claims(replace(sweep, claims=(falls,)))


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


def test_a_change_that_arms_set_themselves_is_theirs() -> None:
    runs = make_sweep("ablations", "tiny", {"model.depth": 6}).runs()
    assert {run.model.depth for run in runs.values()} == {6}
    with pytest.raises(UsageError) as refused:
        make_sweep("routers", "jft", {"model.patch_size": 14})
    assert str(refused.value) == (
        "model.patch_size changes nothing: every arm of routers that could have it sets it"
    )
    moe = make_sweep("quickstart", "tiny", {"model.moe.expert_dim": 8}).runs()
    assert moe["w16-dense-seed0"].model.moe is None
    assert moe["w16-soft-seed0"].model.expert_dim() == 8


@pytest.mark.parametrize(
    ("name", "scale", "changes"),
    [
        ("pareto", "jft", {"model.moe.num_experts": 64}),
        ("routers", "in1k", {"model.moe.images_per_group": 1}),
        ("capacity", "tiny", {"model.moe.layers": "last_2"}),
    ],
)
def test_a_change_without_effect_is_refused_though_dense_arms_cannot_have_it(
    name: str, scale: str, changes: dict[str, object]
) -> None:
    with pytest.raises(UsageError, match="changes nothing: every arm"):
        make_sweep(name, scale, changes)


def test_modern_has_routers_at_equal_rows_and_hidden_units() -> None:
    """Every arm computes the hidden units of the dense model for each token: (rows per token) * (units of an
    expert) + the shared ones. The bias is faster in runs of less than 5,000 steps.
    """
    for steps, rate in ((2400, 1e-2), (5000, 1e-3)):
        sweep = make_sweep("modern", "tiny", {"train.steps": steps, "train.seed": 2})
        assert sweep.seeds == (10, 11, 12, 13, 14)
        study = make_sweep("study", "tiny", {"train.steps": steps, "train.seed": 2})
        assert study.changes.items() <= sweep.changes.items()
        rates = {}
        for name, run in sweep.runs().items():
            model, moe = run.model, run.model.moe
            if moe:
                units = slots_per_token(model) * model.expert_dim() + (moe.shared_dim or 0)
                assert units == model.mlp_dim, name
                if balance := flat(moe.router).get("balance.rate"):
                    rates.setdefault(balance, set()).add(name.split("-", 1)[1].rpartition("-")[0])
        assert rates == {rate: {"lossfree", "dropless", "shared", "fine"}}


def test_other_base_seeds_are_other_seeds() -> None:
    for base, seeds in ((0, (0, 1, 2)), (3, (9, 10, 11))):
        sweep = make_sweep("quickstart", "tiny", {"train.seed": base})
        assert sweep.seeds == seeds
        assert {run.train.seed for run in sweep.runs().values()} == {*seeds}


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


def test_a_file_of_ones_own(tmp_path: Path) -> None:
    file = tmp_path / "mine.py"
    file.write_text(
        "from orchestrator.config import RunConfig\n"
        "from orchestrator.sweeps.sweep import Sweep\n"
        "def make():\n    return Sweep(base=RunConfig(name='mine'), arms={'a': {}})\n"
        "def at(scale):\n    return Sweep(base=scale.base, arms={'b': {}})\n"
        "def wrong():\n    return 3\n"
    )
    assert list(make_sweep(f"{file}:make", "tiny").arms) == ["a"]
    assert make_sweep(f"{file}:at", "cifar").base.model.image_size == 32
    with pytest.raises(UsageError, match="must return a Sweep, got int"):
        make_sweep(f"{file}:wrong", "tiny")
    with pytest.raises(UsageError, match="has no function 'nothing'"):
        make_sweep(f"{file}:nothing", "tiny")
    with pytest.raises(UsageError, match=r"no file .*: a function of your own is path/to/file\.py:function"):
        make_sweep(f"{tmp_path}/other.py:make", "tiny")
    with pytest.raises(UsageError, match="unknown sweep 'router'; known: quickstart, study"):
        make_sweep("router", "tiny")
    with pytest.raises(UsageError, match="unknown scale 'huge'; known: tiny, cifar, in1k, deit3, in21k, jft"):
        make_sweep("routers", "huge")


def test_changes_that_need_each_other_are_taken_together() -> None:
    """No image of 8 x 8 is cut into patches of 7 x 7: without the image's size there would be no sweep."""
    sweep = make_sweep("quickstart", "tiny", {"model.image_size": "28", "model.patch_size": "7"})
    assert {(run.model.image_size, run.model.patch_size) for run in sweep.runs().values()} == {(28, 7)}


def test_a_change_to_the_value_that_is_there_is_no_mistake() -> None:
    steps = make_sweep("quickstart", "tiny").base.train.steps
    assert make_sweep("quickstart", "tiny", {"train.steps": str(steps)}).base.train.steps == steps

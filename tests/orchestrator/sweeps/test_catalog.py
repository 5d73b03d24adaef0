"""The named sweeps are configs whose claims compare arms, at every scale; a user's own file works too."""

from dataclasses import replace
from pathlib import Path

import pytest

from moe.cost import slots_per_token
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


def test_a_claim_that_compares_nothing_is_refused() -> None:
    sweep = make_sweep("quickstart", "tiny")
    both = "family=soft beats best family=token_choice,family=expert_choice at equal size"
    with pytest.raises(UsageError) as refused:
        check_claims(replace(sweep, claims=(both,)))
    assert str(refused.value) == (
        f"claim '{both}' compares nothing: no arm has family=token_choice,family=expert_choice"
    )
    assert check_claims(replace(sweep, arms={}, claims=(both,))) == {}  # a search draws them later
    falls = "family=soft loses less than family=soft as family falls"
    with pytest.raises(UsageError, match=r"family=soft of w16-soft is not a number"):
        check_claims(replace(sweep, claims=(falls,)))


def test_a_change_that_arms_set_themselves_is_theirs() -> None:
    runs = make_sweep("upcycle", "tiny", {"model.depth": 6}).runs()
    assert {run.model.depth for run in runs.values()} == {6}
    with pytest.raises(UsageError) as refused:
        make_sweep("quickstart", "tiny", {"model.width": 24})
    assert str(refused.value) == (
        "model.width changes nothing: every arm of quickstart that could have it sets it"
    )
    moe = make_sweep("quickstart", "tiny", {"model.moe.expert_dim": 8}).runs()
    assert moe["w16-dense-seed0"].model.moe is None
    assert moe["w16-soft-seed0"].model.expert_dim() == 8


@pytest.mark.parametrize(
    ("name", "scale", "changes"),
    [
        ("quickstart", "tiny", {"model.moe.num_experts": 4}),
        ("quickstart", "cifar", {"model.moe.images_per_group": 1}),
        ("upcycle", "tiny", {"model.moe.layers": "last_2"}),
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


def test_arms_follow_the_tokens_of_a_changed_base() -> None:
    """Soft MoE has an expert for each token."""
    for patch in (2, 4):
        model = make_sweep("quickstart", "tiny", {"model.patch_size": patch}).runs()["w16-soft-seed0"].model
        assert model.moe
        assert (model.tokens(), model.moe.num_experts) == ((16 // patch) ** 2,) * 2


def test_a_model_by_name_has_the_classes_of_the_scale() -> None:
    model = to_dict(PRESETS["soft-S/14-256e"])
    run = make_sweep("study", "tiny", {"model": model}).base.model
    assert (run.image_side(), run.num_outputs()) == (224, 10)


def test_other_base_seeds_are_other_seeds() -> None:
    for base, seeds in ((0, (0, 1, 2)), (3, (9, 10, 11))):
        sweep = make_sweep("quickstart", "tiny", {"train.seed": base})
        assert sweep.seeds == seeds
        assert {run.train.seed for run in sweep.runs().values()} == {*seeds}


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
    with pytest.raises(UsageError, match=f"unknown scale 'huge'; known: {', '.join(SCALES)}"):
        make_sweep("study", "huge")


def test_changes_that_need_each_other_are_taken_together() -> None:
    """No image of 8 x 8 is cut into patches of 7 x 7: without the image's size there would be no sweep."""
    sweep = make_sweep("quickstart", "tiny", {"model.image_size": "28", "model.patch_size": "7"})
    assert {(run.model.image_size, run.model.patch_size) for run in sweep.runs().values()} == {(28, 7)}


def test_a_change_to_the_value_that_is_there_is_no_mistake() -> None:
    steps = make_sweep("quickstart", "tiny").base.train.steps
    assert make_sweep("quickstart", "tiny", {"train.steps": str(steps)}).base.train.steps == steps

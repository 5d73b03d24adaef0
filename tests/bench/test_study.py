"""The page of the study says what its tables of runs say, and what is missing in them."""

import json
from pathlib import Path
from typing import Any

import pytest

from bench.harness import with_block
from bench.study import add_test_figures, beside, collect, first_round, left
from bench.study_page import (
    BLOCKS,
    EARLIER,
    PAGE,
    claims_block,
    differences_block,
    load_block,
    made,
    operating_block,
    runs_block,
    status_block,
    tuning_block,
)
from bench.study_table import COST, ONE_RATE, TABLE, TEST, VAL, against, judged_by, outcomes, pair, read_table
from orchestrator.errors import UsageError
from orchestrator.sweeps.catalog import SCALES, make_sweep, modern
from orchestrator.sweeps.tuning import Tuning
from tests.lanes import mostly_slow


# The replay takes half a minute.
@pytest.mark.parametrize("name", mostly_slow([*BLOCKS, *EARLIER], {*BLOCKS, *EARLIER} - {"replay"}))
def test_the_page_is_recomputed(name: str) -> None:
    page = PAGE.read_text()
    assert f"<!-- {name} -->" in page
    assert with_block(page, name, made(name, read_table(TABLE))) == page


@pytest.mark.parametrize("path", [ONE_RATE, *([TABLE] if TABLE.exists() else [])])
def test_a_table_has_a_value_for_each_seed(path: Path) -> None:
    table = read_table(path)
    assert table
    assert path == TABLE or len(table["arms"]) == 18
    for arm, entry in table["arms"].items():
        lists = [values for values in entry.values() if isinstance(values, list)]
        assert {len(values) for values in lists} == {len(entry["seeds"])}, arm
        assert set(entry["seeds"]) <= set(table["seeds"])
        assert all(len(curve) == 16 for curve in entry[VAL]), arm


def entry(cost: float, *qualities: float, seeds: tuple[int, ...] = (), **others: Any) -> dict[str, Any]:
    known = {"train.lr": 0.01, "cost/params": 1000.0, "perf/ms_per_image": [0.1] * len(qualities)}
    seeds = seeds or tuple(range(10, 10 + len(qualities)))
    return known | {COST: cost, "seeds": [*seeds], VAL: [[0.1, q] for q in qualities], **others}


def table_of(**arms: dict[str, Any]) -> dict[str, Any]:
    about = {"sweep": "modern", "seeds": [10, 11, 12], "planned": [*make_sweep("modern", "tiny").arms]}
    about |= {"classes": 10, "val_images": 100, "operating": {}, "tuned": {}}
    return about | {"arms": {name.replace("_", "-"): entry for name, entry in arms.items()}}


DENSE = {"w16_dense": entry(1e11, 0.5, 0.6, 0.6), "w32_dense": entry(1e13, 0.7, 0.8, 0.8)}


def test_differences_are_of_the_seeds_that_all_have() -> None:
    """1e12 is halfway between 1e11 and 1e13 on a log scale: dense models have .6, .7, .7 there, by seed."""
    table = table_of(**DENSE, w16_token=entry(1e12, 0.65, 0.7, seeds=(12, 10)))
    found = against(table, VAL, "w16-token", "dense")
    assert found
    assert found.values == pytest.approx([0.1, -0.05])  # of the seeds 10 and 12
    assert pair(table, "w16-token", "w16-dense") == pytest.approx([0.05, 0.2])
    one = table_of(**DENSE, w16_token=entry(1e12, 0.65), w32_token=entry(1e14, 0.9, 0.9, 0.9))
    assert against(one, VAL, "w16-token", "dense") is None  # one seed has no error
    assert against(one, VAL, "w32-token", "dense") is None  # beyond the curve
    assert against(one, VAL, "w16-dense", "token") is None
    assert against(one, VAL, "w16-dense", "soft-e16") is None


def test_a_width_is_decided_together() -> None:
    """+.01 with a standard error of .0017 has p = .029, which Holm doubles beside another such arm; +.1 has
    p = .0003.
    """
    table = table_of(
        w16_dense=entry(1e11, 0.6, 0.6, 0.6),
        w32_dense=entry(1e13, 0.8, 0.8, 0.8),
        w16_token=entry(1e11, 0.607, 0.61, 0.613),
        w16_expert=entry(1e11, 0.607, 0.61, 0.613),
        w32_token=entry(1e13, 0.897, 0.9, 0.903),
        w32_expert=entry(1e13, 0.8, 0.8, 0.8),
    )
    claim, *_ = make_sweep("modern", "tiny").claims
    found = {difference.arm: outcome for difference, outcome in outcomes(table, claim)}
    assert found == {
        "w16-token": "undecided",
        "w16-expert": "undecided",
        "w32-token": "better",
        "w32-expert": "equal",
    }
    head, _, *lines = differences_block(table).splitlines()
    assert head == "| validation accuracy, points of % | w16 | w32 |"
    rows = dict(line.strip("| ").split(" | ", 1) for line in lines)
    assert rows["token"] == "+1.00 (+0.25 to +1.75) | **+10.00 (+9.25 to +10.75)**"
    assert rows["expert"] == "+1.00 (+0.25 to +1.75) | +0.00 (+0.00 to +0.00), equal"
    assert claims_block(table).splitlines()[:6] == [
        f"- `{claim}`: of 4 comparisons",
        "    - 1 better: w32-token",
        "    - 0 worse",
        "    - 1 equal: w32-expert",
        "    - 2 undecided",
        "    - decided with all 4 together: w32-token, w32-expert",
    ]


def test_the_test_images_judge_once_all_arms_have_them() -> None:
    table = table_of(**DENSE)
    assert judged_by(table) == VAL
    table["arms"]["w16-dense"] |= {TEST: [0.1, 0.2, 0.3]}
    assert judged_by(table) == VAL
    assert "| 20.00 ± 5.77 |" in runs_block(table)
    table["arms"]["w32-dense"] |= {TEST: [0.1, 0.2, 0.3]}
    assert judged_by(table) == TEST


def test_a_page_says_what_is_missing() -> None:
    table = table_of(**DENSE, w16_token=entry(1e12, 0.65, 0.7))
    table["planned"] = ["w16-dense", "w16-token", "w32-dense", "w32-token", "w48-dense"]
    assert status_block(table) == (
        "5 arms with 3 seeds each, 10 to 12. **The record is incomplete.** w16-token: 2 of 3 seeds; missing:"
        " w32-token, w48-dense."
    )
    table["planned"] = ["w16-dense", "w32-dense"]
    assert status_block(table) == "2 arms with 3 seeds each, 10 to 12: all runs are complete."
    assert made("runs", None) == made("runs", {"arms": {}}) == "Not measured yet."


def test_load_by_hand() -> None:
    """Experts of w16-fine have 2 rows per token, of which .5 hold one; those of lossfree have 1."""
    load = {"moe/dropped_frac": [0.1, 0.3], "moe/load_cv": [0.5, 0.7], "moe/seats_mean": [0.4, 0.6]}
    load |= {"moe/max_violation": [[3, 2, 1], [1, 1, 1]]}
    table = table_of(w16_fine=entry(1e11, 0.5, 0.6, **load), w16_lossfree=entry(1e11, 0.5, 0.6, **load))
    _, _, lossfree, fine = load_block(table).splitlines()
    assert lossfree == "| w16-lossfree | 20.0 | 0.60 | 2.00 | 1.50 | 1.00 | 50.0 |"
    assert fine.endswith("| 75.0 |")


def test_operating_points_of_the_earlier_study() -> None:
    table = read_table(ONE_RATE)
    assert table
    found = operating_block(table).splitlines()
    assert found[2] == "| **w16-token: k=1 capacity=0.15 priority=max** | 0.252 | 84.38 ± 0.14 |"
    assert found[-1].startswith("18 arms as trained and 273 other settings. Gain in hypervolume: all models:")


def test_the_rate_that_was_chosen_is_bold() -> None:
    table = table_of(w16_dense=entry(1e11, 0.5))
    table["tuned"] = {"w16-dense": {"0.01": [0.5, 0.7], "0.003": [0.5, 0.5], "0.03": [0.2]}}
    assert tuning_block(table).splitlines() == [
        "| validation accuracy, % | 0.003 | 0.01 | 0.03 |",
        "|---|--:|--:|--:|",
        "| w16-dense | 50.00 | **60.00** | 20.00 |",
    ]


@pytest.mark.smoke
def test_a_trained_sweep_is_collected(trained_home: Path) -> None:
    table = collect(f"{trained_home}/tiny")
    assert table["planned"] == [*table["arms"]] == ["dense", "token", "soft"]
    for arm, found in table["arms"].items():
        assert found["seeds"] == [0]
        assert {len(found[name]) for name in (VAL, "cost/device_s", "perf/ms_per_image")} == {1}
        assert ("moe/max_violation" in found) == (arm != "dense")
    assert {len(of_seed) for of_seed in table["arms"]["token"]["moe/max_violation"]} == {3}
    assert table["tuned"] == first_round(f"{trained_home}/tiny-tune") == {}


def test_the_study_may_be_trained_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Arms that a table has stay, with their figures; those that it lacks are trained."""
    about = {"data_digest": "a", "steps": 10}
    old = table_of(w16_dense=entry(1e11, 0.5, 0.6, 0.6), w16_token=entry(1e11, 0.5, 0.6)) | about
    reports = [report("w16-dense", seed) for seed in (10, 11, 12)]
    add_test_figures(reports, old["arms"])
    new = table_of(w32_dense=entry(1e13, 0.7, 0.8, 0.8)) | about
    both = beside(old, new)
    add_test_figures(reports, both["arms"])
    assert {arm: entry.get(TEST) for arm, entry in both["arms"].items()} == {
        "w16-dense": [0.5, 0.5, 0.5],
        "w16-token": None,
        "w32-dense": None,
    }
    again = {arm: {k: v for k, v in known.items() if k != TEST} for arm, known in old["arms"].items()}
    assert beside(old, old | {"arms": again})["arms"] == old["arms"]
    again["w16-dense"][VAL] = [[0.1, 0.7]] * 3
    assert TEST not in beside(old, old | {"arms": again})["arms"]["w16-dense"]
    for other in ({"steps": 20}, {"data_digest": "b"}, {"seeds": [0, 1, 2]}):
        assert beside(old | other, new) == new
    monkeypatch.setattr("bench.study.TABLE", tmp_path / "study.json")
    for kind in {arm.partition("-")[2] for arm in old["planned"]}:
        old["arms"].setdefault(f"w16-{kind}", entry(1e11, 0.5, 0.6, 0.6))
    (tmp_path / "study.json").write_text(json.dumps(old))
    sweep = left(SCALES["tiny"])
    assert [arm for arm in sweep.arms if arm.startswith("w16")] == ["w16-token"]
    assert {arm[:3] for arm in sweep.arms} == {"w16", "w32", "w48"}
    whole = dict.fromkeys(modern(SCALES["tiny"]).arms, entry(1e11, 0.5, 0.6, 0.6))
    (tmp_path / "study.json").write_text(json.dumps(old | {"arms": whole}))
    with pytest.raises(UsageError, match="the sweep has no arms"):
        Tuning(field="train.lr", values=(0.1, 0.2)).first_round(left(SCALES["tiny"]))


def report(arm: str, seed: int) -> dict[str, Any]:
    return {"location": f"/modern/trials/{arm}-seed{seed}/", "metrics": {"acc1": 0.5, "loss": 1.0}}

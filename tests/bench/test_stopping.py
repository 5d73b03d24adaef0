"""Replays of early stopping: what they charge, its rivals on cases by hand, and the made-up sweeps."""

import json
import math
import re
from pathlib import Path

import numpy as np
import pytest

from bench.families import AT, TEST, TUNING, family
from bench.harness import RESULTS, ROOT
from bench.rivals import Promotion, non_dominated
from bench.stopping import RECORDED, Curves, figures, load_curves, num_outcomes, replayed, sweep_curves
from jobs import _sweep_plan
from orchestrator.sweeps.queue import RunToCompletion, TrialState


def curves(costs: dict[str, float], **quality: float) -> Curves:
    """Arms of one seed, whose quality does not change."""
    return Curves(steps=64, cost=costs, quality={(arm, 0): {64: q} for arm, q in quality.items()}, chance=0.0)


def test_what_running_trials_have_cost_is_counted() -> None:
    """Two trials side by side: when the first is complete, at 2, the second has cost 2 as well."""
    run = replayed(RunToCompletion(), curves({"a": 2.0, "b": 6.0}, a=0.5, b=0.6), ["b", "a"])
    assert run.complete == [(4.0, "a"), (8.0, "b")]
    assert run.spent == 8.0


def test_a_budget_admits_what_it_holds_beside_what_runs() -> None:
    """A budget of 4 has promised 2 to the first trial. The second needs 6, and the third fits exactly."""
    costs = {"a": 2.0, "b": 6.0, "c": 2.0}
    run = replayed(RunToCompletion(), curves(costs, a=0.5, b=0.6, c=0.7), ["a", "b", "c"], budget=4.0)
    assert [arm for _, arm in run.complete] == ["a", "c"]
    assert run.spent == 4.0


def test_regrets_by_hand() -> None:
    """Alone, the cheap arm has 0.5 * (1 + log10 1.1) of 0.5 * 1 + 0.9 * log10 1.1."""
    found = figures("cheapest first", [curves({"cheap": 1.0, "dear": 10.0}, cheap=0.5, dear=0.9)])
    end = math.log10(1.1)
    assert found["regret at 0.1"] == [1.0]  # it is complete at 2 of 11, for the dear arm runs beside it
    assert found["regret at 0.2"] == pytest.approx([1 - 0.5 * (1 + end) / (0.5 + 0.9 * end)])
    at_end = [found[name] for name in ("regret at end", "cost", "recall", "best")]
    assert at_end == [[0.0], [1.0], [1.0], [1.0]]


def test_the_page_has_other_exchange_rates() -> None:
    tables = json.loads((RESULTS / "stopping.json").read_text())["tables"]
    page = (ROOT / "docs/early_stopping.md").read_text()
    for name in ("families for tuning", *(f"{recorded}, all seeds" for recorded in RECORDED)):
        of = {record["policy"]: record for record in tables[name]}
        ours = [of[f"ours{loss}"] for loss in (", loss=0.005", "", ", loss=0.03", ", loss=0.05")]
        row = (f"{each['regret at end'][0]:.2%} at {each['cost'][0]:.0%}" for each in ours)
        assert f"| {name} | {' | '.join(row)} |" in page


def test_mo_asha_by_hand() -> None:
    """Of eight arms at the first rung two go on. a, b and c are the front; first comes the cheapest, then the
    point that is furthest from it: c. All others are dominated.
    """
    points = {"a": (1, 0.5), "b": (10, 0.6), "c": (100, 0.9), "d": (100, 0.5), "e": (10, 0.4), "f": (2, 0.3)}
    points |= {"g": (20, 0.2), "h": (50, 0.1)}
    states = [TrialState(name, arm=name, cost=cost, steps=64, need={}) for name, (cost, _) in points.items()]
    for state in states:
        state.reached = {4: points[state.name][1]}
    assert [(job.state.name, job.until) for job in Promotion(non_dominated).jobs(states)] == [
        ("a", 16),
        ("c", 16),
    ]


def test_recorded_curves_have_every_rung() -> None:
    for file in RECORDED.values():
        recorded = load_curves(RESULTS / f"{file}.json")
        for curve in recorded.quality.values():
            for part in (1 / 16, 1 / 8, 1 / 4, 1 / 2, 1):
                assert min(abs(step - part * recorded.steps) for step in curve) <= recorded.steps / 32, file


@pytest.mark.smoke
def test_a_trained_sweep_is_replayed(trained_home: Path) -> None:
    found = sweep_curves(f"{trained_home}/tiny")
    assert set(found.cost) == {"dense", "token", "soft"}
    assert all(set(curve) >= {found.steps} for curve in found.quality.values())
    assert replayed(RunToCompletion(), found, [*found.cost]).spent == pytest.approx(found.total)


def test_the_order_of_writing_is_nothing() -> None:
    assert num_outcomes(load_curves(RESULTS / f"{RECORDED['textures']}.json"), orders=3) == 1


@pytest.mark.parametrize("seed", [*TUNING[:5], *TEST[:5]])
def test_families_are_reproducible_and_in_bounds(seed: int) -> None:
    made, again = family(seed), family(seed)
    assert made.quality.shape == (len(made.cost), made.quality.shape[1], len(AT))
    np.testing.assert_array_equal(made.quality, again.quality)
    known = made.quality[np.isfinite(made.quality)]
    assert made.chance <= known.min() < known.max() <= 1


def test_there_are_300_families_apart_from_those_for_tuning() -> None:
    assert len(TEST) >= 300
    assert not set(TEST) & set(TUNING)


def test_a_plan_prints_the_measured_range() -> None:
    """The cost at which early stopping ended on the recorded sets, with several seeds and with one."""
    tables = json.loads((RESULTS / "stopping.json").read_text())["tables"]
    printed = [int(number) for number in re.findall(r"\d+", _sweep_plan.RECORDED)]
    for seeds, (low, high) in {"all seeds": printed[:2], "one seed": printed[2:]}.items():
        ends = [rows[0]["cost"][0] for name, rows in tables.items() if name.endswith(f", {seeds}")]
        assert len(ends) == len(RECORDED)
        assert (low, high) == (round(100 * min(ends)), round(100 * max(ends))), seeds

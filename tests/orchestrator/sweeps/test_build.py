"""From the directory of a sweep, or from MLflow, to its frontier: seeds, ends, branches, aliases, files."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from jobs.pareto_sweep import print_frontier
from moe.cost import train_flops_6mac
from orchestrator.costs import TIMES
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.runs.lock import locked
from orchestrator.runs.run_directory import acquire_run_dir
from orchestrator.runs.sweep_directory import SUMMARY, SweepDir
from orchestrator.sweeps.build import judged_runs, load_frontier, raised_reference, sweep_frontier
from orchestrator.sweeps.publish import publish
from orchestrator.sweeps.sweep import Sweep, Trunk
from orchestrator.tracking.store import open_tracking
from orchestrator.tracking.sync import Sync
from tests.made_directories import (
    begin,
    change_record,
    change_result,
    end,
    end_sweep,
    pause,
    run_at,
    sweep_record,
)
from tests.mlflow_reader import children, find_sweep

pytestmark = pytest.mark.usefixtures("no_pictures")


def sweep_at(folder: Path, name: str = "s", **fields) -> Sweep:
    return Sweep(base=run_at(folder, name), **{"arms": {"a": {}, "b": {}}, **fields})


def test_a_point_is_the_mean_of_its_seeds_which_all_must_be_complete(tmp_path: Path) -> None:
    ends = {"a-seed0": 0.8, "a-seed1": 0.9, "b-seed0": 0.95, "b-seed1": "ValueError: bad", "c-seed0": 0.99}
    sweep = sweep_at(tmp_path, arms={"a": {}, "b": {}, "c": {}}, seeds=(0, 1))
    frontier = publish(end_sweep(sweep, ends))
    a, b, c = frontier.points
    assert (a.arm, a.status, a.qualities) == ("a", "finished", (0.8, 0.9))
    assert a.quality == pytest.approx(0.85)
    assert (a.run_id, a.runs) == ("a-seed0", (("a-seed1", None),))
    assert (b.arm, b.status) == ("b", "failed")
    assert math.isnan(b.quality)
    assert (c.arm, c.status) == ("c", "stopped"), "its second seed never began"
    assert [p.arm for p in frontier.front] == ["a"]
    states = ["finished"] * 3 + ["failed", "finished", "not started"]
    assert frontier.trials == tuple(zip("aabbcc", states, strict=True))
    (tmp_path / "s/trials/b-seed1/error.txt").unlink()
    frontier, *_ = sweep_frontier(f"{tmp_path}/s", live=True)
    assert [p.status for p in frontier.points] == ["finished", "running", "running"], "a seed will begin"
    assert [p.qualities for p in frontier.points[1:]] == [(), ()], "what is not whole has no spread"


@pytest.mark.parametrize("how", ["stopped", "diverged", "failed"])
def test_what_did_not_finish_is_plotted_at_its_whole_cost_and_never_judged(how: str, tmp_path: Path) -> None:
    sweep = sweep_at(tmp_path)
    frontier = publish(end_sweep(sweep, {"a": 0.8, "b": how}))
    assert [p.status for p in frontier.points] == ["finished", how]
    assert [p.arm for p in frontier.front] == ["a"]
    run = sweep.runs()["b"]
    whole = train_flops_6mac(run.model, images=run.train.steps * run.data.batch_size)
    assert frontier.points[1].cost == whole


def test_the_page_says_how_branches_are_charged(tmp_path: Path) -> None:
    sweep = sweep_at(
        tmp_path, arms={"a": {}}, trunk=Trunk(at=(50, 90), cooldown=9), cost="cost/marginal_train_flops_6mac"
    )
    directory = end_sweep(sweep, {"a-trunk": 0.1, "a-at50": 0.5, "a-at90": 0.6})
    costs = {"cost__marginal_train_flops_6mac": 1e8, "cost__device_s": 2.5, "cost__marginal_device_s": 0.5}
    end(sweep.runs()["a-at90"], 4, val__acc1=0.6, **costs)
    frontier = publish(directory)
    assert frontier.spending[-1] == ("a-at90", 0.5)
    assert [p.arm for p in frontier.points] == ["a-at50", "a-at90"]  # the trunk is no point
    assert {p.cost for p in frontier.points} == {1e8}
    assert "only its own steps" in frontier.note
    assert "only its own steps" in (tmp_path / "s/frontier.html").read_text()
    assert "cost/train_flops_6mac" in frontier.panels


def test_the_reference_stays_where_the_sweep_began(tmp_path: Path) -> None:
    """A dearer arm changes no hypervolume that was told before."""
    sweep = sweep_at(tmp_path)
    directory = end_sweep(sweep, {"a": 0.8}, reference={"cost/train_flops_6mac": 1e10, "val/acc1": 0.1})
    before = sweep_frontier(directory)[0].hypervolume
    end(sweep.runs()["b"], 3, val__acc1=0.5, cost__train_flops_6mac=9e9)
    assert sweep_frontier(directory)[0].hypervolume == before > 0


def test_the_reference_rises_when_an_arm_costs_more(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Else the best arm would count nothing. The command says that hypervolumes do not compare."""
    sweep = sweep_at(tmp_path)
    directory = end_sweep(sweep, {"a": 0.8}, reference={"cost/train_flops_6mac": 1e10, "val/acc1": 0.1})
    before = publish(directory).hypervolume
    end(sweep.runs()["b"], 3, val__acc1=0.9, cost__train_flops_6mac=5e10)
    assert "do not compare" not in caplog.text
    for _ in range(2):
        frontier = publish(directory)
        assert frontier.reference["cost/train_flops_6mac"] == pytest.approx(5.5e10)
        assert frontier.hypervolume > before + 0.5
    assert sweep_record(directory).reference["cost/train_flops_6mac"] == pytest.approx(5.5e10)
    assert caplog.text.count("rises from 1e+10 to 5.5e+10 cost/train_flops_6mac") == 1


@pytest.mark.parametrize(
    ("status", "paused"),
    [("running", "interrupted"), ("interrupted", "interrupted"), ("finished", "stopped")],
)
def test_a_trial_has_one_state_everywhere(
    status: str, paused: str, empty_store: Callable[[Path], str], tmp_path: Path
) -> None:
    """After a kill, after Ctrl-C or the end of the budget, and at the end. What did not fail is not called
    failed, and a quality that is not finite is a failure.
    """
    arms = ("good", "begun", "paused", "broken", "nan", "hot", "new")
    sweep = sweep_at(tmp_path, arms={arm: {} for arm in arms})
    ends = {"good": 0.8, "paused": "stopped", "broken": "bad", "nan": math.nan, "hot": "diverged"}
    directory = end_sweep(sweep, ends, status=status)
    begin(sweep.runs()["begun"])
    states = {"good": "finished", "begun": "interrupted", "paused": paused}
    states |= {"broken": "failed", "nan": "failed", "hot": "diverged"}
    frontier = publish(directory)
    assert {point.arm: point.status for point in frontier.points} == states
    assert dict(frontier.trials) == states | {"new": "not started"}
    page = Path(directory, "frontier.html").read_text()
    assert f"<b>{[*states.values()].count('interrupted')}</b> interrupted" in page

    tracking = open_tracking(empty_store(tmp_path), artifacts=f"{tmp_path}/files")
    Sync(tracking, directory).update()
    runs = {run.name: run for run in children(tracking, find_sweep(tracking, "s").run_id)}
    assert runs["nan"].tags["error"] == "val/acc1 is nan at step 3"
    assert {arm for arm, run in runs.items() if run.status == "KILLED"} == {"begun", "paused"}
    live, *_ = sweep_frontier(directory, live=True)
    assert ("This sweep" in frontier.note, "This sweep" in live.note) == (status != "finished", False)
    running = dict.fromkeys(("begun", "paused"), "running")
    assert {point.arm: point.status for point in live.points} == states | running


def test_a_trial_that_paused_is_drawn_at_its_end(tmp_path: Path) -> None:
    """With the quality, the loss and the costs of its last step, whatever it had at its pauses."""
    sweep = sweep_at(tmp_path)
    run = sweep.runs()["a"]
    directory = end_sweep(sweep, {"b": 0.6})
    other = {"val__loss": 9.0, "cost__train_flops_6mac": 1.0, "cost__device_s": 1.0}
    for step, quality in ((1, 0.5), (2, 0.9)):
        pause(run, step, time_s=float(step), val__acc1=quality, **other)
    end(run, 3, val__acc1=0.8, val__loss=0.7, cost__train_flops_6mac=2e9, cost__device_s=4.0)
    point, _ = sweep_frontier(directory)[0].points
    assert (point.arm, point.status) == ("a", "finished")
    assert (point.quality, point.details["validation loss"]) == (0.8, 0.7)
    assert (point.cost, point.costs["cost/device_s"]) == (2e9, 4.0)


def test_every_number_of_a_point_is_the_mean_of_its_seeds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its weights are those of one of them, by name."""
    sweep = sweep_at(tmp_path, arms={"a": {}}, seeds=(0, 1))
    directory = end_sweep(sweep, {"a-seed0": 0.5, "a-seed1": 0.5})
    for seed, number in enumerate((1.0, 3.0)):
        metrics = {"val__acc1": number, "val__loss": number, "cost__train_flops_6mac": number}
        end(sweep.runs()[f"a-seed{seed}"], 3, **metrics, cost__device_s=number, moe__load_cv=number)
    (point,) = sweep_frontier(directory)[0].points
    numbers = (point.quality, point.cost, point.costs["cost/device_s"], point.details["validation loss"])
    assert numbers == (2, 2, 2, 2)
    assert point.statistics == {"moe/load_cv": 2}
    loaded = list[str]()
    monkeypatch.setattr("orchestrator.sweeps.build.load_checkpoint", loaded.append)
    for name in ("a-seed1", "a-seed0"):
        point.load_run(name)
        assert loaded.pop().endswith(f"{name}/checkpoints/step-00000003")
    change_result(sweep.runs()["a-seed0"], checkpoint="")
    with pytest.raises(UsageError, match="trial 'a-seed0' has no checkpoint in "):
        sweep_frontier(directory)[0].points[0].load_run("a-seed0")


def test_a_search_learns_from_what_finished_on_the_same_data(digits: str, tmp_path: Path) -> None:
    sweep = Sweep(base=run_at(tmp_path, "s", data__path=digits), arms={arm: {} for arm in "abcd"})
    directory = end_sweep(sweep, {"a": 0.8, "b": "diverged", "c": "stopped"})
    pause(sweep.runs()["c"], 1, val__acc1=0.9, cost__train_flops_6mac=1.0)
    with pytest.raises(UsageError, match=f"s was trained on other data than {digits}"):
        judged_runs(directory, sweep)
    change_record(directory, data_digest=open_manifest(digits).digest())
    ((run, *judged),) = judged_runs(directory, sweep)
    assert (run, judged) == (sweep.runs()["a"], [0.8, 1e9])
    assert judged_runs(directory, replace(sweep, quality="val/acc5")) == []
    with pytest.raises(UsageError, match="no sweep in"):
        judged_runs(str(tmp_path), sweep)


def test_cost_is_charged_when_it_was_spent(tmp_path: Path) -> None:
    """A trial that paused early and was stopped spent its seconds before the later trials."""
    sweep = sweep_at(tmp_path, arms={arm: {} for arm in "abc"})
    directory = end_sweep(sweep, {"b": 0.8})
    for arm, time_s, step, seconds in (("a", 10.0, 1, 7.0), ("c", 30.0, 1, 5.0), ("c", 2e9, 2, 6.5)):
        pause(sweep.runs()[arm], step, time_s=time_s, val__acc1=0.5, cost__device_s=seconds)
    assert sweep_frontier(directory)[0].spending == (("a", 7.0), ("c", 5.0), ("b", 2.0), ("c", 1.5))


def test_a_better_checkpoint_than_the_last_is_named(tmp_path: Path) -> None:
    sweep = sweep_at(tmp_path, arms={"a": {}, "b": {}})
    directory = end_sweep(sweep, {"a": 0.5, "b": 0.6})
    change_result(sweep.runs()["b"], best_checkpoint="checkpoints/step-00000002", best_quality=0.7)
    a, b = publish(directory).points
    assert "better checkpoint" not in a.details
    assert b.details["better checkpoint"] == "checkpoints/step-00000002, 0.7"
    assert "checkpoints/step-00000002, 0.7" in Path(directory, "frontier.html").read_text()
    described = json.loads(Path(directory, SUMMARY).read_text())["aliases"]["pareto-best"]["description"]
    assert described.endswith(". Its run has a better checkpoint: checkpoints/step-00000002, 0.7.")


def test_a_knee_of_one_seed_is_not_decided(tmp_path: Path, capsys) -> None:
    directory = end_sweep(sweep_at(tmp_path, arms={"a": {}, "b": {}}), {"a": 0.5, "b": 0.6})
    frontier = publish(directory)
    print_frontier(frontier)
    printed = capsys.readouterr().out
    assert "frontier, knee (one seed, not decided)" in printed
    assert f"Training (GFLOP, 6 {TIMES} MAC)" in printed, "and not 1e+09 FLOPs"
    summary = json.loads(Path(directory, SUMMARY).read_text())
    assert "| b (knee, one seed, not decided) | 0.6000 |" in summary["note"]
    for alias in ("pareto-fast", "pareto-knee", "pareto-best"):
        assert "val/acc1 0.6000 (one seed, not decided)" in summary["aliases"][alias]["description"]


def test_aliases_name_members_of_the_frontier(tmp_path: Path) -> None:
    """Of several seeds the one nearest to the mean; the retrained arm only while it is the knee."""
    sweep = sweep_at(tmp_path, arms={arm: {} for arm in "abcd"}, seeds=(0, 1, 2))
    qualities = {"a": (0.2, 0.3, 0.31), "b": (0.8, 0.81, 0.9), "c": (0.82, 0.83, 0.84), "d": (0.1, 0.1, 0.1)}
    ends = {f"{arm}-seed{seed}": q for arm, seeds in qualities.items() for seed, q in enumerate(seeds)}
    directory = end_sweep(sweep, ends)
    for cost, arm in enumerate("abcd", start=1):
        for seed in range(3):
            run = sweep.runs()[f"{arm}-seed{seed}"]
            quality = ends[f"{arm}-seed{seed}"]
            end(run, 4, weights=f"{arm}{seed}", val__acc1=quality, cost__train_flops_6mac=10.0**cost)
    retrained = run_at(tmp_path, "s/confirm/b")
    end(retrained, 8, weights="longer", val__acc1=0.95, cost__train_flops_6mac=500.0)
    labels = {"directory": "confirm/b", "role": "confirm", "arm": "b"}
    trials = sweep_record(directory).trials
    change_record(directory, trials={**trials, "confirm/b": labels})
    publish(directory)
    summary = json.loads(Path(directory, SUMMARY).read_text())
    arms = (
        f"4 arms {TIMES} 3 seeds = 12 trials. Validation accuracy @1 on digits (val split): mean of 3 seeds"
    )
    for part in ("# Sweep s", arms, "/shards/digits", "| b (knee) | 0.8367 ± 0.0318 |"):
        assert part in summary["note"]
    named = {alias: model["run"] for alias, model in summary["aliases"].items()}
    assert named == {
        "pareto-fast": "a-seed1",
        "pareto-knee": "b-seed1",
        "pareto-best": "b-seed1",
        "confirmed": "confirm/b",
    }
    assert "not decided" not in json.dumps(summary)
    knee = summary["aliases"]["pareto-knee"]
    assert (knee["weights"], knee["checkpoint"]) == ("b1", "checkpoints/step-00000004")
    for part in (
        "Sweep s, arm b, the knee of the frontier",
        "val/acc1 0.8367",
        "mean of 3 seeds: 0.8000, 0.8100, 0.9000",
        "b-seed1",
    ):
        assert part in knee["description"]
    assert "retrained for longer" in summary["aliases"]["confirmed"]["description"]

    # An earlier call retrained another arm.
    change_record(directory, trials={**trials, "confirm/a": {**labels, "arm": "a"}})
    publish(directory)
    assert "confirmed" not in json.loads(Path(directory, SUMMARY).read_text())["aliases"]


def test_facts_of_a_sweep_are_on_its_page(tmp_path: Path) -> None:
    sweep = sweep_at(tmp_path, "one", seeds=(0, 1))
    ends = {"a-seed0": 0.8, "a-seed1": 0.9, "b-seed0": 0.95, "b-seed1": "stopped"}
    tuned = "Tuned train.lr on 2 seeds."
    fields = {"baselines": {"linear": 0.7}, "val_images": 367, "labels": {"tuned": tuned}}
    directory = end_sweep(sweep, ends, **fields)
    first = publish(directory)
    assert tuned in SweepDir(directory).summary()["note"]
    assert first.note == tuned
    assert (first.baselines, first.data) == ({"linear": 0.7}, "367 images of digits (val split)")
    assert "linear <b>0.7000 ± 0.0238</b>" in (tmp_path / "one/frontier.html").read_text()


def test_a_folder_without_a_sweep(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no sweep in"):
        sweep_frontier(str(tmp_path))
    directory = end_sweep(sweep_at(tmp_path), {})
    with pytest.raises(UsageError, match="has no trials yet"):
        sweep_frontier(directory)


@pytest.mark.parametrize(
    ("fewshot", "changes", "drawn"),
    [
        pytest.param({"paths": ["/shards/imagenet"]}, {}, True, marks=pytest.mark.guests),
        ({"paths": ["/shards/flowers"]}, {}, False),
        ({"paths": ["/shards/imagenet", "/shards/flowers"]}, {}, False),
        ({}, {}, False),
        pytest.param(
            *({}, {"data__path": "/shards/in1k", "model__num_classes": 1000}, True), marks=pytest.mark.guests
        ),
        ({}, {"data__path": "/shards/in1k"}, False),
    ],
)
def test_papers_are_drawn_where_the_data_agree(
    fewshot: dict, changes: dict, drawn: bool, tmp_path: Path
) -> None:
    """The digits have 10 classes."""
    base = run_at(tmp_path, "s", **changes, train__fewshot=fewshot)
    sweep = Sweep(base=base, arms={"a": {}, "b": {}}, quality="fewshot/acc_10shot")
    frontier = publish(end_sweep(sweep, {"a": "diverged", "b": "diverged"}, val_images=367))
    assert ("367" in frontier.data) == (not fewshot), "the number is that of the sweep's own data"
    assert {point.images for point in frontier.points} == {0}, "accuracies of few shots have no such error"
    assert bool(frontier.papers) == drawn
    assert ("Published, not counted" in (tmp_path / "s/frontier.html").read_text()) == drawn


def test_arms_that_were_passed_by_are_named(tmp_path: Path) -> None:
    """Those that might have added most come first, and the sum bounds what is lost."""
    passed = {f"arm{n:02}": (n / 1000, 0.1) for n in range(15)}
    directory = end_sweep(sweep_at(tmp_path), {"a": 0.8}, passed=passed)
    note = publish(directory).note
    assert note.startswith("Early stopping passed by 15 arms that were not worth their cost.")
    assert "cost: arm14 (1.40% for 10.0%), arm13" in note
    assert "arm03 (0.30% for 10.0%) and 3 others. Together they were expected to add at most 10.5%." in note
    assert "passed by 15 arms" in (tmp_path / "s/frontier.html").read_text()


def test_no_more_than_everything_is_lost_by_early_stopping(tmp_path: Path) -> None:
    """And where all arms are named there are no others."""
    passed = {f"arm{n:02}": (0.1, 0.1) for n in range(12)}
    note = sweep_frontier(end_sweep(sweep_at(tmp_path), {"a": 0.8}, passed=passed))[0].note
    assert note.endswith("arm11 (10.00% for 10.0%). Together they were expected to add at most 100.0%.")


def test_the_data_of_a_sweep_that_were_moved_are_those_of_its_own_trials_alone(tmp_path: Path) -> None:
    sweep = sweep_at(tmp_path, arms={"a": {}, "b": {"data.path": "/shards/other"}})
    directory = end_sweep(sweep, {"a": 0.5})
    acquire_run_dir(sweep.runs()["b"], "e" * 64)
    base = sweep_record(directory).base
    change_record(directory, base={**base, "data": {**base["data"], "path": "/moved/numerals"}})
    assert sweep_frontier(directory)[0].data == "numerals, other (val split)"


def test_a_sweep_is_opened_by_its_name_while_it_trains_too(tmp_path: Path) -> None:
    sweep = sweep_at(tmp_path)
    directory = end_sweep(sweep, {"a": 0.8, "b": "stopped"}, status="running")
    assert [p.status for p in load_frontier("s", root=str(tmp_path)).points] == ["finished", "interrupted"]
    with locked(directory):
        assert [p.status for p in load_frontier("s", root=str(tmp_path)).points] == ["finished", "running"]


@pytest.mark.parametrize(("highest", "raised"), [(4.9, 5.0), (5.0, 5.5), (6.0, 6.6)])
def test_an_arm_at_the_reference_or_above_raises_it(highest: float, raised: float) -> None:
    """There it would add nothing to the hypervolume."""
    assert raised_reference({"c": 5.0}, {"c": highest}) == {"c": pytest.approx(raised)}

"""Models, sweeps and scales by name: `--model`, `--list`, and plans of data that are not there."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import pareto_sweep, train
from jobs._flags import parse
from jobs._list import FILE, source, written
from jobs._sweep_plan import plan, printed_costs
from orchestrator.config import RunConfig
from orchestrator.errors import UsageError
from orchestrator.sweeps.budget import Device
from orchestrator.sweeps.catalog import SCALES, SWEEPS, make_sweep

Call = Callable[..., tuple[str, str]]


@pytest.mark.parametrize("words", [["--model", "soft-S/14-256e"], ["--set", "model=soft-S/14-256e"]])
def test_a_model_by_its_name(words: list[str], empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The data have its classes, ten; other fields can be set as ever."""
    monkeypatch.setattr(sys, "argv", ["job", *words, "--set", "model.head_bias=-1"])
    model = parse(train.RunFlags, "").applied(RunConfig()).model
    assert (model.image_size, model.patch_size, model.width, model.num_classes) == (224, 14, 384, 10)
    assert model.head_bias == -1
    assert model.moe
    assert (model.moe.num_experts, model.moe.layers) == (256, "last_6")


def test_a_model_that_has_no_name(empty_home: Path, call: Call) -> None:
    assert call(train.main, "--model", "S/15")[0].startswith(
        "error: unknown model 'S/15'; known: debug, S/32"
    )


@pytest.mark.guests  # the lists that are stored have all of them
def test_lists_name_everything(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without building a model, which would take half a minute."""
    monkeypatch.setitem(sys.modules, "moe.cost", None)
    stopped, said = call(train.main, "--list")
    assert stopped == ""
    assert "soft-S/14-256e" in said
    stopped, said = call(pareto_sweep.main, "--list", "--scale", [*SCALES][-1])
    assert stopped == ""
    for name in (*SWEEPS, *SCALES):
        assert name in said
    assert all("MoE" in source(name) for name in SWEEPS)


@pytest.mark.guests
@pytest.mark.smoke  # all models are built
def test_lists_are_what_is_computed() -> None:
    assert FILE.read_text() == written(), "`python -c 'from jobs import _list; _list.write()'` writes it anew"


def test_a_plan_of_small_models_says_what_it_leaves_out(capsys: pytest.CaptureFixture[str]) -> None:
    plan(make_sweep("quickstart", "tiny"), "CPU-core", Device(usd_per_hour=0.05, peak_tflops=0.1), 0.3)
    assert (
        "note: models this small are bound by the start of processes and by data" in capsys.readouterr().out
    )


def test_a_plan_prices_the_round_that_tunes(empty_home: Path, call: Call) -> None:
    """Six arms at w16 with 3 rates and 2 seeds, beside 18 arms with 5 seeds; nothing is trained."""
    words = ["--sweep", "study", "--plan", "--mfu", "0.3", "--tune", "train.lr=3e-3,1e-2,3e-2"]
    stopped, said = call(pareto_sweep.main, *words, "--tune-at", "width=16")
    assert stopped == ""
    rows = {line.split("│")[1].strip(): line.split("│")[2:] for line in said.splitlines() if "│" in line}
    assert {name: int(rows[name][0]) for name in ("first round", "dense", "soft", "all")} == {
        "first round": 36,
        "dense": 15,
        "soft": 30,
        "all": 126,
    }
    flops = {name: float(rows[name][1]) for name in ("first round", "dense", "all")}
    assert 0 < flops["first round"] < flops["dense"] < flops["all"]
    assert "w16-dense@lr0.03-seed1001" in rows
    assert "w32-dense@lr0.03-seed1001" not in rows
    assert "the first round takes more trials if the best value of an arm lies at an end" in said
    stopped, _ = call(pareto_sweep.main, *words, "--tune-at", "width=17")
    assert stopped.startswith(
        "error: no arm has model.width=17, where arms are to be tuned: the arms have 16"
    )


@pytest.mark.guests
@pytest.mark.parametrize("name", ["pareto", "long_runs"])
def test_every_published_arm_has_its_printed_cost(name: str) -> None:
    sweep = make_sweep(name, "jft")
    assert set(printed_costs(sweep)) == set(sweep.published) == set(sweep.arms)


def test_set_goes_before_the_arms(empty_home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["--sweep", "quickstart", "--set", "model.patch_size=2", "--name", "mine"]
    monkeypatch.setattr(sys, "argv", ["job", *words])
    sweep = parse(pareto_sweep.SweepFlags, "").make()
    assert sweep.base.name == "mine"
    assert sweep.changes["w16-soft"]["model.moe.num_experts"] == 64
    words = ["--sweep", "quickstart", "--set", "model.moe.num_experts=4"]
    monkeypatch.setattr(sys, "argv", ["job", *words])
    with pytest.raises(UsageError, match=r"model.moe.num_experts changes nothing: every arm"):
        parse(pareto_sweep.SweepFlags, "").make()

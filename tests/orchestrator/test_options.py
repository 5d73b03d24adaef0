"""One law for options: every field of every config is read, and makes a difference.

A field that is new, that nothing reads, or whose reader is lost, fails here by its name.
"""

import ast
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest

from moe.codec import dataclasses_of, entries_of, hints_of
from moe.config import members
from moe.guests import PACKAGES, join_families
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.sweeps.budget import Budget
from orchestrator.sweeps.driver import SweepOptions
from orchestrator.sweeps.queue import RunToCompletion
from orchestrator.sweeps.search import SearchOptions
from orchestrator.sweeps.stopping import EarlyStopping
from orchestrator.sweeps.sweep import Sweep, Trunk
from orchestrator.tracking.tensorboard import TensorBoardConfig
from tests.lanes import mostly_smoke
from tests.orchestrator.effects import RUN, data_set, observed
from tests.orchestrator.file_cases import in_files
from tests.orchestrator.option_cases import ALL, LAYERS, SMALL, Case, Place, below, joined
from tests.orchestrator.sweep_effects import SWEEP, seen, seen_anew

join_families()  # their members have cases too

ROOT = Path(__file__).parents[2]
OURS = ("moe", "orchestrator", *PACKAGES)
MODELS, TRAINING = joined("MODELS"), joined("TRAINING")
Field = tuple[str, str]  # class, field

# Fields that make no difference by themselves: why, and the test that shows it.
WITHOUT: dict[Field, tuple[str, str, str]] = {
    ("RunConfig", "plugins"): (
        "found in the config: what is given is replaced",
        "tests/orchestrator/test_plugins.py",
        "test_a_config_names_the_plugins_of_its_parts",
    ),
    ("TrainConfig", "costs"): (
        "names costs that a plugin defines",
        "tests/orchestrator/test_costs.py",
        "test_a_sweep_counts_an_energy_and_judges_by_it",
    ),
    ("Sweep", "published"): (
        "names points that a guest has printed",
        "tests/jobs/test_by_name.py",
        "test_every_published_arm_has_its_printed_cost",
    ),
}


def configs() -> dict[str, type]:
    """All configs that a run, a sweep and its options may hold, of every kind, by name."""
    found, waiting = dict[str, type](), list[type]([RunConfig, Sweep, SweepOptions])
    while waiting:
        cls = waiting.pop()
        if cls.__name__ not in found and cls.__module__.split(".")[0] in OURS:
            found[cls.__name__] = cls
            waiting += [
                member
                for hint in hints_of(cls).values()
                for member in (*dataclasses_of(hint), *entries_of(hint))
            ]
    return found


CONFIGS = configs()
FIELDS: list[Field] = [(name, each) for name, cls in CONFIGS.items() for each in hints_of(cls)]
NAMES = {name for _, name in FIELDS}


def values_of(cls: str, name: str, case: Case) -> list[Any]:
    """The other values of a field."""
    if case.other is not ALL:
        return [case.other]
    words = [member for member in members(hints_of(CONFIGS[cls])[name]) if get_origin(member) is Literal]
    return [word for member in words for word in get_args(member)]


def under(path: str, value: Any) -> dict[str, Any]:
    """The change of a field to a value, or those below it."""
    return below(path, value) if isinstance(value, dict) else {path: value}


def check(cls: str, name: str, place: Place, case: Case) -> None:
    """Checks that runs with different values of a field differ in each effect."""
    path = f"{place.at}.{name}" if place.at else name
    base = override(RunConfig(), {**place.given, **case.given})
    runs = {base: "as it is"}
    for value in values_of(cls, name, case):
        runs.setdefault(override(base, under(path, value)), str(value))
    assert len(runs) > 1, f"{path}: {case.other!r} is no other value"
    for effect in (case.by or place.by).split():
        found = dict[str, str]()
        for run, value in runs.items():
            other = found.setdefault(repr(observed(effect, run)), value)
            assert other is value, f"{cls}.{name}: {effect} does not tell {path}={value} from {other}"


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("options")


@pytest.fixture(scope="module")
def places(root: Path) -> list[tuple[str, Place]]:
    return [*{**MODELS, **LAYERS}.items(), *TRAINING.items(), *in_files(root).items()]


def names_read() -> set[str]:
    """The attributes that code reads, and the names for `getattr`; not in what a config checks of itself."""
    found: set[str] = set()
    paths = [path for folder in (*OURS, "jobs") for path in ROOT.glob(f"{folder}/**/*.py")]
    waiting: list[ast.AST] = [ast.parse(path.read_text()) for path in paths]
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.FunctionDef):
            if node.name in ("__post_init__", "check"):
                continue
            inside = [*ast.walk(node)]
            if any(isinstance(each, ast.Name) and each.id == "getattr" for each in inside):
                found |= {
                    each.value for each in inside if isinstance(each, ast.Constant) and each.value in NAMES
                }
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
            found.add(node.attr)
        waiting += ast.iter_child_nodes(node)
    return found


def test_every_field_is_read() -> None:
    there = names_read()
    assert not [f"{cls}.{name}" for cls, name in FIELDS if name not in there], "nothing reads it: remove it"


def test_every_field_has_a_case(places: list[tuple[str, Place]], root: Path) -> None:
    """Of kinds the family is enough. What is listed as without a difference has none."""
    kinds = {(cls, name) for cls, name in FIELDS if name == "kind"}
    cases = {(cls, name) for cls, place in places for name in place.fields} | {*sweep_cases(root)}
    assert {*FIELDS} - cases - kinds - WITHOUT.keys() == set(), "says no difference that it makes"
    assert cases - {*FIELDS} == set(), "is no field"
    assert cases & WITHOUT.keys() == set()
    # Trackers are an option of a sweep, whose case is that of `SweepOptions.trackers`.
    assert {cls for cls, _ in kinds} - {"TensorBoardConfig"} <= {
        cls for cls, _ in [*places, *sweep_cases(root)]
    }


def test_an_observation_repeats(places: list[tuple[str, Place]]) -> None:
    """Else any two would differ."""
    files = dict(places)["DataConfig"].given
    everything = {
        "train.ema.decay": 0.5,
        "train.fewshot.shots": (1,),
        "train.eval_every": 1,
        "data.augment": "mixup",
        "scale.profile_steps": 1,
    }
    for effect in RUN:
        run = override(RunConfig(), {**files, **(everything if effect in ("worker", "read") else {})})
        if effect in ("split", "waits"):
            run = override(run, {"scale.workers": 4})
        assert repr(observed.__wrapped__(effect, run)) == repr(observed.__wrapped__(effect, run)), effect


@pytest.mark.parametrize(
    "part", mostly_smoke(["models", "layers", "training", "files"], fast=["models", "layers", "training"])
)
def test_every_field_of_a_run_makes_a_difference(part: str, root: Path) -> None:
    table = {"models": MODELS, "layers": LAYERS, "training": TRAINING}.get(part) or in_files(root)
    for cls, place in table.items():
        for name, case in place.fields.items():
            for each in case if isinstance(case, list) else [case]:
                check(cls, name, place, each if isinstance(each, Case) else Case(each))


def test_every_kind_makes_a_difference() -> None:
    """Members of a family differ, in the same run where it takes them."""
    found: dict[tuple[str, str], str] = {}
    for cls, place in {**MODELS, **LAYERS, **TRAINING}.items():
        if "kind" in hints_of(CONFIGS[cls]):
            seen = repr(observed(place.by.split()[0], override(RunConfig(), place.given)))
            assert found.setdefault((place.at, seen), cls) == cls


@pytest.mark.parametrize("listed", WITHOUT)
def test_a_field_without_a_difference_has_a_test(listed: Field) -> None:
    _, file, test = WITHOUT[listed]
    assert f"def {test}(" in (ROOT / file).read_text()


# Sweeps: field -> effects, and the sweep and options with one value and with another.

Pair = tuple[Sweep, SweepOptions]


def arms_of(*widths: int) -> dict[str, dict[str, Any]]:
    return {f"w{width}": {"model.width": width} for width in widths}


def widths(trial: Any) -> dict[str, Any]:
    return {"model.width": trial.suggest_int("model.width", 8, 128, step=4)}


def widths_and_depths(trial: Any) -> dict[str, Any]:
    return widths(trial) | {"model.depth": trial.suggest_int("model.depth", 1, 2)}


@cache
def sweep_cases(root: Path) -> dict[Field, list[tuple[str, Pair, Pair]]]:
    home = root / "home"
    home.mkdir()
    files = {"storage": str(home), "data.path": data_set(root), "name": "mine", "train.steps": 8}
    base = override(RunConfig(), SMALL | files)
    old = Sweep(base=override(base, {"name": "old"}), arms=arms_of(8, 16, 32))
    SWEEP["swept"](old, SweepOptions())
    sweep, options = Sweep(base=base, arms=arms_of(8, 16, 24, 32, 40, 48)), SweepOptions()
    claims = ("width=48 beats width=8",)
    drawing = SweepOptions(search=SearchOptions(trials=14, sampler="random"))
    space = replace(sweep, arms={}, space=widths)
    paid = SweepOptions(budget=Budget(hours=1.0), flops_per_s=1e4)
    in_usd = replace(paid, budget=Budget(usd=1.0, usd_per_hour=1.0))
    owned = replace(paid, budget=Budget(owner_hours=1.0))
    uneven = replace(sweep, arms=arms_of(48, 8, 32, 16, 40, 24))
    trunk = replace(sweep, trunk=Trunk(at=(4, 8), cooldown=2))
    found: dict[Field, list[tuple[str, Pair, Pair]]] = {}

    def sweeps(name: str, by: str, value: Any, was: Sweep = sweep, given: SweepOptions = options) -> None:
        found["Sweep", name] = [
            (each, (was, given), (replace(was, **{name: value}), given)) for each in by.split()
        ]

    def of_options(name: str, by: str, value: Any, was: SweepOptions = options, of: Sweep = sweep) -> None:
        found["SweepOptions", name] = [
            (each, (of, was), (of, replace(was, **{name: value}))) for each in by.split()
        ]

    sweeps("base", "trials swept:points", override(base, {"model.mlp_dim": 64}))
    sweeps("arms", "trials swept:points", arms_of(8, 16))
    sweeps("quality", "swept:points swept:names swept:judged", "val/acc5")
    sweeps("cost", "swept:points swept:names swept:judged", "cost/forward_gflops_2mac")
    sweeps("seeds", "trials swept:order", (0, 1))
    sweeps("trunk", "trials swept:order", Trunk(at=(4, 8), cooldown=2))
    sweeps("claims", "swept:verdicts", claims)
    sweeps("space", "swept:drawn", widths_and_depths, space, drawing)
    of_options("mode", "swept:aside", "fresh", of=old)
    of_options("policy", "swept:order", EarlyStopping())
    of_options("max_concurrent", "swept:together", 1)
    of_options("search", "swept:drawn", drawing.search, of=replace(sweep, space=widths))
    of_options("budget", "swept:events", Budget(hours=1.0), replace(paid, budget=Budget()))
    of_options("retrain", "swept:said swept:retrain", 1)
    of_options("flops_per_s", "swept:events", None, paid)
    of_options("labels", "swept:labels", {"team": "a"})
    of_options("trackers", "swept:followed", (TensorBoardConfig(),))
    of_options("measure", "swept:said", "always")
    for cls, name, value in (
        ("EarlyStopping", "chance", 0.1),
        ("EarlyStopping", "loss", 0.5),
        ("RunToCompletion", "cheapest_first", True),
    ):
        by_kind = {"EarlyStopping": EarlyStopping(chance=0.0), "RunToCompletion": RunToCompletion()}
        was = replace(options, policy=by_kind[cls], max_concurrent=1)
        now = replace(was, policy=replace(was.policy, **{name: value}))
        found[cls, name] = [("swept:order", (uneven, was), (uneven, now))]
    for cls, name, value, was in (
        ("Trunk", "at", (2, 8), trunk),
        ("Trunk", "cooldown", 1, trunk),
    ):
        assert was.trunk
        now = replace(was, trunk=replace(was.trunk, **{name: value}))
        found[cls, name] = [("trials", (was, options), (now, options))]
    for name, value, was in (
        ("hours", 1e6, paid),
        ("usd", 1e6, in_usd),
        ("usd_per_hour", 1e-6, in_usd),
        ("owner_hours", 1e6, owned),
    ):
        now = replace(was, budget=replace(was.budget, **{name: value}))
        found["Budget", name] = [("swept:events", (sweep, was), (sweep, now))]
    for name, by, value in (
        ("sampler", "drawn", "tpe"),
        ("trials", "drawn", 5),
        ("warm_start", "said", ("old",)),
    ):
        assert drawing.search
        now = replace(drawing, search=replace(drawing.search, **{name: value}))
        found["SearchOptions", name] = [(f"swept:{by}", (space, drawing), (space, now))]
    return found


def test_every_field_of_a_sweep_makes_a_difference(root: Path) -> None:
    for (cls, name), pairs in sweep_cases(root).items():
        for effect, one, other in pairs:
            assert seen(effect, *one) != seen(effect, *other), f"{cls}.{name}: {effect} is the same"


def test_what_a_sweep_shows_repeats(root: Path) -> None:
    (_, pair, _), *_ = sweep_cases(root)["SearchOptions", "trials"]
    for effect in SWEEP:
        assert seen_anew(effect, *pair) == seen_anew(effect, *pair), effect

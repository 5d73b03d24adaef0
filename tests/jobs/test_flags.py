"""Flags as dataclasses: what they read, and that every mistake is one line."""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest

from jobs import evaluate, pareto_sweep, plan, predict, train
from jobs._cli import Evaluation, Places, source_labels
from jobs._flags import assignment, flag, numbers, parse
from jobs.pareto_sweep import SweepFlags
from orchestrator import tracking
from orchestrator.errors import UsageError
from orchestrator.sweeps.catalog import SCALES, SWEEPS
from orchestrator.tracking.tensorboard import TensorBoardConfig


@dataclass(frozen=True, kw_only=True)
class Group:
    """where"""

    place: str | None = flag(None, "a place")


@dataclass(frozen=True, kw_only=True)
class Flags:
    model: tuple[str, ...] = flag(help="models", positional=True, nargs="+")
    kind: Literal["a", "b"] | None = flag(None, "kind")
    count: int = flag(3, "how many", least=1)
    rate: float | None = flag(None, "rate")
    at: tuple[int, ...] = flag("1,2", "steps", read=numbers(int, "1,2"))
    name: tuple[str, ...] = flag((), "repeated")
    set: tuple[tuple[str, Any], ...] = flag((), "fields", read=assignment, nargs="+")
    loud: bool = flag(False, "loud")
    group: Group

    def __post_init__(self) -> None:
        if self.loud and self.count > 5:
            raise UsageError("too loud")


def test_flags_become_a_dataclass(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["job", "x"])
    assert parse(Flags, "") == Flags(model=("x",), at=(1, 2), group=Group())
    words = "--set a=1 b=2 --name n --place /p --name m --kind b --loud --set c=[1] --rate .5 --at 7"
    monkeypatch.setattr(sys, "argv", ["job", *words.split(), "--count", "2", "--", "x", "y"])
    assert parse(Flags, "") == Flags(
        model=("x", "y"),
        kind="b",
        count=2,
        rate=0.5,
        at=(7,),
        name=("n", "m"),
        set=(("a", "1"), ("b", "2"), ("c", [1])),
        loud=True,
        group=Group(place="/p"),
    )


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("", "the following arguments are required: model"),
        ("x --count 0", "argument --count: must be at least 1, got 0"),
        ("x --count many", "argument --count: 'many' is not a whole number"),
        ("x --rate fast", "argument --rate: 'fast' is not a number"),
        ("x --at 1,a", "argument --at: '1,a': write numbers, e.g. 1,2"),
        ("x --set a", "argument --set: 'a': write FIELD=VALUE"),
        ("x --set a=[1", "argument --set: 'a=[1': "),
        ("x --kind c", "argument --kind: invalid choice: 'c' (choose from"),
        ("x --loud --count 9", "too loud"),
        ("x --nosuch", "unrecognized arguments: --nosuch; --help shows all flags"),
        ("x --cuont=3", "unrecognized arguments: --cuont=3; did you mean --count?"),
    ],
)
def test_a_mistake_is_one_line(
    words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = refused(Flags, words.split(), monkeypatch, capsys)
    assert said.startswith(f"error: {message}")
    assert said.count("\n") == 1


def refused(flags: type, words: list[str], monkeypatch: Any, capsys: Any) -> str:
    monkeypatch.setattr(sys, "argv", ["job", *words])
    with pytest.raises(SystemExit) as stopped:
        parse(flags, "")
    assert stopped.value.code == 2
    return capsys.readouterr().err


def test_set_takes_json_for_null_lists_and_groups() -> None:
    values = {"null": None, "[1, 2]": [1, 2], '{"k": 1}': {"k": 1}, "1": "1", "nullable": "nullable"}
    assert {text: assignment(f"model.moe={text}")[1] for text in values} == values


@pytest.mark.parametrize(
    ("flags", "words", "message"),
    [
        (train.RunFlags, "--resume --fresh", "--resume and --fresh exclude each other"),
        (train.RunFlags, "--model S/16 --set model=S/8", "--model and --set model exclude each other"),
        (train.RunFlags, "--name ../up", "'../up': begin with a letter or digit"),
        (
            train.RunFlags,
            "--name data",
            "'data' is reserved, as are data, evaluation, features, mlartifacts, mlflow.db",
        ),
        (train.RunFlags, "--name mlflow.db.lock", "'mlflow.db.lock' is reserved"),
        (SweepFlags, "--sweep nosuch", "unknown sweep 'nosuch'; known: quickstart"),
        (SweepFlags, "--sweep qickstart", "unknown sweep 'qickstart'; did you mean quickstart?"),
        (SweepFlags, "--sweep no.py:make", "no file no.py"),
        (SweepFlags, "--trials 3", "--trials does nothing without --search"),
        (SweepFlags, "--warm-start a", "--warm-start does nothing without --search"),
        (SweepFlags, "--branch-at 9 --stop-early", "--branch-at plans every trial ahead"),
        (SweepFlags, "--tune train.lr", "--tune: 'train.lr': write e.g. train.lr=3e-3,1e-2"),
        (SweepFlags, "--tune train.lr=a,b", "--tune: 'a,b': write numbers, e.g. 3e-3,1e-2"),
        (SweepFlags, "--tune-at width=16", "--tune-at does nothing without --tune"),
        (SweepFlags, "--tune-seeds 3", "--tune-seeds does nothing without --tune"),
        (SweepFlags, "--tune train.lr=1,2 --branch-at 9", "leave out --search and --branch-at"),
        (SweepFlags, "--tune train.lr=1,2 --search tpe", "leave out --search and --branch-at"),
        (SweepFlags, "--tune train.lr=1,2 --set train.lr=3", "--tune and --set train.lr exclude each other"),
        (SweepFlags, "--budget-hours -1", "--budget-hours: must be above 0, got -1"),
        (SweepFlags, "--budget-usd nan", "--budget-usd: must be above 0, got nan"),
        (SweepFlags, "--owner-hours 0", "--owner-hours: must be above 0, got 0"),
        (SweepFlags, "--confirm -1", "--confirm: must be at least 0, got -1"),
        (Evaluation, "--batch-size 0", "--batch-size: must be at least 1, got 0"),
        (evaluate.EvaluateFlags, "soft --shots 1,x", "'1,x': write numbers, e.g. 1,5,10,25"),
        (evaluate.EvaluateFlags, "soft --seeds 5", "--seeds does nothing without --shots"),
        (evaluate.EvaluateFlags, "soft --grid --per-class", "--per-class does nothing with --grid"),
        (evaluate.EvaluateFlags, "soft --grid --shots 1", "--grid and --shots exclude each other"),
        (evaluate.EvaluateFlags, "soft --repeats 0", "repeats must be at least 1, got 0"),
        (evaluate.EvaluateFlags, "soft --random-subsets 1", "a deviation needs at least 2 random subsets"),
        (plan.PlanFlags, "--json", "--json does nothing without --cost or --check"),
        (plan.PlanFlags, "S/16 B/16", "2 models: layouts are planned for one, --cost compares several"),
        (plan.PlanFlags, "--cost --set train.lr=1", "--set does nothing with --cost"),
        (predict.PredictFlags, "soft --images a", "the following arguments are required: --out"),
        (predict.PredictFlags, "soft --images a --out b --dtype bfloat16", "does nothing without --ep"),
        (predict.PredictFlags, "m --images a --out b --threshold 0 --features", "and --features writes none"),
        (predict.PredictFlags, "m --images a --out b --threshold 1.5", "--threshold 1.5: a probability is"),
        (predict.PredictFlags, "m --images a --out b --threshold nan", "--threshold nan: a probability is"),
        (evaluate.EvaluateFlags, "soft --ep 2", "--ep 2 does nothing without --workers"),
    ],
)
def test_mistakes_of_commands(
    flags: type, words: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(flags, words.split(), monkeypatch, capsys)


def test_one_set_takes_several_fields(monkeypatch: pytest.MonkeyPatch) -> None:
    for flags in (train.RunFlags, plan.PlanFlags):
        monkeypatch.setattr(sys, "argv", ["job", "--set", "train.steps=9", "train.lr=1"])
        assert parse(flags, "").set == (("train.steps", "9"), ("train.lr", "1"))


def test_the_names_are_those_of_the_catalog() -> None:
    assert set(pareto_sweep.SWEEPS) == set(SWEEPS)
    assert set(pareto_sweep.SCALES) == set(SCALES)


def test_a_kind_of_tracker_joins_by_its_name_in_the_stub(monkeypatch: pytest.MonkeyPatch) -> None:
    load = tracking.__getattr__

    def first_used(name: str) -> Any:
        if name != "OtherConfig":
            return load(name)

        @dataclass(frozen=True, kw_only=True)
        class OtherConfig(TensorBoardConfig):
            kind: Literal["other"] = "other"

        return OtherConfig

    monkeypatch.setattr(tracking.TrackerConfig, "kinds", {**tracking.TrackerConfig.kinds})
    monkeypatch.setattr(tracking, "__dir__", lambda: [*tracking.__all__, "OtherConfig"])
    monkeypatch.setattr(tracking, "__getattr__", first_used)
    (tracker,) = train.RunFlags(tracker=("other",), places=Places()).trackers()
    assert tracker.kind == "other"


def test_a_sweep_in_a_file(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    mine = tmp_path / "mine.py"
    mine.write_text("import torch\n\ndef helper(): ...\n\ndef make(): ...\n")
    said = refused(SweepFlags, ["--sweep", str(mine)], monkeypatch, capsys)
    assert f"names no function: write {mine}:FUNCTION; it has helper, make" in said


def test_a_sweep_is_named_after_its_scale(monkeypatch: pytest.MonkeyPatch) -> None:
    for words, name in (([], "study"), (["--scale", "cifar"], "study-cifar")):
        monkeypatch.setattr(sys, "argv", ["job", "--sweep", "study", *words])
        assert parse(SweepFlags, "").named_sweep().base.name == name


def test_the_recorded_command_has_no_password(monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ["--tracking-uri", "postgresql://me:secret@db/mlflow", "--set", "train.lr=1e-3"]
    monkeypatch.setattr(sys, "argv", ["jobs/train.py", *flags])
    recorded = source_labels()["mlflow.source.name"]
    assert "secret" not in recorded
    assert "train.lr=1e-3" in recorded
    monkeypatch.setenv("PATH", "")
    assert source_labels().keys() == {"mlflow.source.name", "mlflow.source.type"}, "without git no commit"

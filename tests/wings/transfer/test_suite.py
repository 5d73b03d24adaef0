"""Suites: reading and refusing files, the arms of a grid of rates, and choosing of them."""

import math
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace

import pytest

from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.data.manifest import open_manifest
from orchestrator.errors import UsageError
from orchestrator.runs.run_directory import Result
from orchestrator.sweeps.queue import Outcome
from wings.transfer.suite import SuiteRow, rates_sweep, read_suite, with_best_rates

VMOE = Path(__file__).parents[3] / "papers" / "vmoe"


def written(folder: Path, digits: str, *rows: str) -> str:
    """A suite beside a link to the digits."""
    if not (folder / "digits").exists():
        (folder / "digits").symlink_to(digits)
    file = folder / "suite.toml"
    file.write_text("\n".join(f"[[rows]]\n{row}" for row in rows))
    return str(file)


def test_a_row_changes_what_it_says(digits: str, tmp_path: Path) -> None:
    every = 'name = "a"\npath = "digits"\ngroup = "g"\nclasses = 10\nsteps = 9\nwarmup = 3\nsize = 16\n'
    every += "crop = true\nflip = false\nrates = [0.5]"
    first, second = read_suite(written(tmp_path, digits, every, 'name = "b"\npath = "digits"'))
    path = str(tmp_path / "digits")
    changes = first.changes()
    assert {name: changes.pop(name) for name in [*changes] if name.startswith("data.augment.")} == {
        "data.augment.crop": {},
        **{f"data.augment.{kind}": "none" for kind in ("inception", "crop_flip", "shift", "flip")},
    }
    assert changes == {
        "data.path": path,
        "model.num_classes": 10,
        "model.image_size": 16,
        "train.lr": 0.5,
        "train.steps": 9,
        "train.schedule.warmup_steps": 3,
    }
    assert second.changes() == {"data.path": path, "model.num_classes": 10}


@pytest.mark.parametrize(
    ("crop", "flip", "augment"),
    [
        (None, None, ["inception", "mixup"]),
        (None, True, ["flip", "mixup"]),
        (True, True, ["crop", "flip", "mixup"]),
        (False, None, ["mixup"]),
    ],
)
def test_crop_and_flip(digits: str, crop: bool | None, flip: bool | None, augment: list[str]) -> None:
    """They take the place of what the run of the others crops and mirrors."""
    row = SuiteRow(name="a", path=digits, crop=crop, flip=flip)
    run = override(override(RunConfig(), {"data.augment": "inception,mixup"}), row.changes())
    assert [member.kind for member in run.data.augment] == augment


GOOD = 'name = "a"\npath = "digits"\n'


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([GOOD + "step = 3"], "row 1 (a): unknown field step; the config has: name, path, group,"),
        ([GOOD + "step = 3"], "did you mean 'steps'?"),
        ([GOOD, 'path = "digits"'], 'row 2 (without a name): it has no name: add name = ".."'),
        ([GOOD, 'name = "b"'], 'row 2 (b): it has no path: add path = ".."'),
        ([GOOD + 'steps = "many"'], "row 1 (a): steps must be an integer or None, got 'many'"),
        ([GOOD + "steps = 0"], "row 1 (a): steps must be at least 1, got 0"),
        ([GOOD + "rates = 0.1"], "row 1 (a): rates must be a tuple of numbers, got 0.1"),
        ([GOOD + "rates = [0.1, 0.1]"], "row 1 (a): rates must be different numbers, got [0.1, 0.1]"),
        ([GOOD + "held_out = 1.0"], "row 1 (a): held_out must be less than 1, got 1.0"),
        ([GOOD + 'crop = "half"'], "row 1 (a): crop must be true or false or None, got 'half'"),
        (
            ['name = "a/b"\npath = "digits"'],
            "row 1 (a/b): name must be letters, digits and . _ - +, got 'a/b'",
        ),
        ([GOOD + "classes = 9"], "row 1 (a): classes = 9, but "),
        ([GOOD + "classes = 9"], "has 10: pack it by the labels of this suite, or correct the number"),
        (['name = "a"\npath = "gone"'], "row 1 (a): path 'gone': no data set at "),
        (['name = "a"\npath = "gone"'], "or give another `root`"),
        ([GOOD, GOOD], "2 rows have the name 'a': names are directories, so rename one"),
        ([], "a suite is a list of [[rows]] and nothing else, found None"),
    ],
)
def test_a_bad_suite_is_refused(digits: str, tmp_path: Path, rows: list[str], message: str) -> None:
    file = written(tmp_path, digits, *rows)
    with pytest.raises(UsageError) as refused:
        read_suite(file)
    assert str(refused.value).startswith(f"{file}: ")
    assert message in str(refused.value)
    assert "\n" not in str(refused.value)


def test_files_that_are_no_suites(digits: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"no suite at .*/gone.toml: "):
        read_suite(str(tmp_path / "gone.toml"))
    (tmp_path / "suite.toml").write_text("rows = [")
    with pytest.raises(UsageError, match=r"suite.toml is not TOML: "):
        read_suite(str(tmp_path / "suite.toml"))
    (tmp_path / "suite.toml").write_text("seeds = 3\nrows = [{}]")
    with pytest.raises(UsageError, match=r"a list of .* and nothing else, found seeds"):
        read_suite(str(tmp_path / "suite.toml"))


def test_paths_are_below_the_root(digits: str, tmp_path: Path) -> None:
    file = written(tmp_path, digits, 'name = "a"\npath = "shards"', f'name = "b"\npath = "{digits}"')
    rows = read_suite(file, root=str(Path(digits).parent))
    assert [row.path for row in rows] == [digits, digits]


def base(tmp_path: Path, digits: str) -> RunConfig:
    return override(RunConfig(), {"name": "tuned", "storage": str(tmp_path), "data.path": digits})


def test_rates_are_tried_on_pieces_of_train(digits: str, tmp_path: Path) -> None:
    """A set of one rate has no arm, and the test images are in no piece."""
    rows = [
        SuiteRow(name="a", path=digits, rates=(0.1, 0.01), held_out=0.2),
        SuiteRow(name="b", path=digits, rates=(0.1,)),
    ]
    sweep = rates_sweep(base(tmp_path, digits), rows)
    assert sweep.base.name == "tuned-rates"
    runs = sweep.runs()
    assert {name: run.train.lr for name, run in runs.items()} == {"a-lr0.1": 0.1, "a-lr0.01": 0.01}
    (path,) = {run.data.path for run in runs.values()}
    pieces = open_manifest(path)
    assert pieces.rows("train") + pieces.rows("val") == open_manifest(digits).rows("train")
    assert rates_sweep(base(tmp_path, digits), rows[1:]).arms == {}


def test_a_piece_that_would_be_empty_names_its_row(digits: str, tmp_path: Path) -> None:
    row = SuiteRow(name="a", path=digits, rates=(0.1, 0.01), held_out=1e-4)
    with pytest.raises(UsageError, match=r"row a: held_out: 0.0001 of the .* use another fraction"):
        rates_sweep(base(tmp_path, digits), [row])


def ended(accuracy: float) -> Result:
    status = "diverged" if math.isnan(accuracy) else "finished"
    return Result(status=status, step=9, metrics={"val/acc1": accuracy})


def chosen(outcomes: Mapping[str, Outcome]) -> tuple[dict[str, float], dict[str, str]]:
    rows = [
        SuiteRow(name="a", path="p", rates=(0.3, 0.1, 0.01)),
        SuiteRow(name="b", path="p", rates=(0.5,)),
        SuiteRow(name="c", path="p"),
    ]
    ready, reasons = with_best_rates(rows, outcomes, "val/acc1")
    return {row.name: row.rates[0] if row.rates else math.inf for row in ready}, reasons


def test_the_best_rate_is_chosen() -> None:
    """The lowest of equally good ones; a rate that diverged is none."""
    others = {"b": 0.5, "c": math.inf}
    good = {"a-lr0.3": ended(0.7), "a-lr0.1": ended(0.8), "a-lr0.01": ended(0.6)}
    assert chosen(good) == ({"a": 0.1, **others}, {})
    assert chosen(good | {"a-lr0.01": ended(0.8)}) == ({"a": 0.01, **others}, {})
    assert chosen(good | {"a-lr0.1": ended(math.nan)}) == ({"a": 0.3, **others}, {})
    assert chosen(dict.fromkeys(good, ended(math.nan))) == (
        others,
        {"a": "all rates diverged, 0.01 too: give lower ones"},
    )
    assert chosen(good | {"a-lr0.3": "no space"}) == (others, {"a": "rate 0.3: no space"})
    assert chosen({}) == (
        others,
        {"a": "; ".join(f"rate {r:g}: it has not been trained" for r in (0.3, 0.1, 0.01))},
    )


@pytest.mark.parametrize(("file", "groups"), [("vtab1k.toml", [7, 4, 8]), ("transfer.toml", [3, 2])])
def test_the_suites_of_the_papers(file: str, groups: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Their fields are known, and their numbers are in bounds."""
    listed = tomllib.loads((VMOE / file).read_text())["rows"]
    classes = {row["path"]: range(row["classes"]) for row in listed}
    packed = "wings.transfer.suite.open_manifest"
    monkeypatch.setattr(packed, lambda path: SimpleNamespace(classes=classes[Path(path).name]))
    rows = read_suite(str(VMOE / file))
    assert [sum(row.group == group for row in rows) for group in {row.group: 0 for row in rows}] == groups
    assert {row.size for row in rows} == {384}
    if file == "vtab1k.toml":
        assert {(row.steps, row.rates) for row in rows} == {(1250, (0.01,))}
        still = {"clevr_count", "clevr_distance", "dmlab", "kitti_distance", "dsprites_location"}
        assert {row.name for row in rows if not row.crop} == still
        upright = {"dsprites_location", "dsprites_orientation", "smallnorb_azimuth"}
        assert {row.name for row in rows if not row.flip} == upright
    else:
        assert [row.steps for row in rows] == [20_000, 5_000, 5_000, 250, 250]
        assert [row.held_out for row in rows] == [0.01, 0.02, 0.02, 0.1, 0.1]

"""Every row of the papers has a state and names what exists, with values that are taken; a test of a lane
runs it, or it says that none does; the page is made from the rows.
"""

import ast
import inspect
import re
import shlex
from collections.abc import Iterator
from functools import cache
from itertools import groupby, pairwise
from pathlib import Path
from typing import get_args

import pytest

from jobs._main import COMMANDS
from moe import ViT, routers
from moe.presets import PRESETS
from orchestrator.codec import flat, override
from orchestrator.config import RunConfig
from orchestrator.costs import known_costs
from orchestrator.errors import UsageError
from orchestrator.frontier.published import DRAWABLE
from orchestrator.sweeps.build import WORST_FIRST
from orchestrator.sweeps.catalog import SCALES, SWEEPS, make_sweep
from orchestrator.training.metrics import described_metrics
from papers import STUDIES
from papers.rows import NOT_RUN, PAPERS, Row, State, count, page, rows
from tests.commands import check_settings, flags_of
from tests.golden import FAMILIES

ROOT = Path(__file__).parents[2]
ROWS = rows()
JOBS = {*COMMANDS.values()}
LANES = {"": "`make test`", "smoke": "`make test-smoke`", "slow": "`make test-all`"}
SETTING = r"(model|train|task|data|scale)\.[\w.]+(=.*)?"
NAMED = {  # what else stands in code marks -> whether it exists
    "contribution_ratio": lambda: (
        "contribution_ratio" in (ROOT / "papers/routing_analysis/report.py").read_text()
    ),
    "diverged": lambda: "diverged" in WORST_FIRST,
    "n1": lambda: "n1" in make_sweep("expert_count", "tiny").arms,
    "return_routings=True": lambda: "return_routings" in inspect.signature(ViT.forward).parameters,
    "moe.ViT": lambda: True,
}


def codes(row: Row) -> list[str]:
    return re.findall(r"`([^`]+)`", row.how)


def test_the_page_is_made_from_the_rows() -> None:
    """`python -c "from papers.rows import page; print(page(), end='')" > docs/papers.md` makes it anew."""
    assert (ROOT / "docs" / "papers.md").read_text() == page()


def test_every_paper_has_all_its_rows() -> None:
    numbers = {letter: [row.id for row in of] for letter, of in groupby(ROWS, lambda row: row.id[0])}
    assert {letter: len(ids) for letter, ids in numbers.items()} == {
        "A": 51,
        "B": 22,
        "C": 21,
        "D": 16,
        "E": 42,
    }
    for letter, ids in numbers.items():
        assert ids == [f"{letter}{i:02}" for i in range(1, len(ids) + 1)]
    assert numbers.keys() == PAPERS.keys()
    assert count(ROWS).startswith("152 rows: ")


def test_a_row_is_whole() -> None:
    for row in ROWS:
        assert row.state in get_args(State), row
        assert row.what, row
        assert row.how, row
        assert "|" not in row.what + row.how, row
        assert codes(row) or row.state != "works", f"{row.id} names no command, setting or test"


def test_commands_and_settings_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = []
    for row in ROWS:
        settings = [code for code in codes(row) if re.fullmatch(SETTING, code)]
        if settings and (refusal := refused(settings, monkeypatch)):
            wrong.append(f"{row.id}: {refusal}")
        for code in codes(row):
            if code not in settings:
                try:
                    check(code, monkeypatch)
                except (AssertionError, KeyError, OSError, UsageError, SystemExit) as error:
                    wrong.append(f"{row.id}: `{code}`: {error!r}")
    assert not wrong, "\n".join(wrong)


def refused(settings: list[str], monkeypatch: pytest.MonkeyPatch) -> str:
    """Why no kind of router takes the settings together, and has the fields without a value."""
    given = [setting for setting in settings if "=" in setting]
    others = [setting for setting in settings if "=" not in setting]
    refusals = []
    for kind in [getattr(routers, name)().kind for name in routers.__all__ if name != "RouterConfig"]:
        words = ["--name", "a", "--set", "model.depth=12", f"model.moe.router.kind={kind}", *given]
        try:
            run = override(RunConfig(), dict(flags_of("train", words, monkeypatch).set))
        except UsageError as error:
            refusals.append(f"{kind}: {error}")
        else:
            missing = [field for field in others if field not in flat(run)]
            if not missing:
                return ""
            refusals.append(f"{kind}: no field {missing}")
    return "; ".join(refusals)


def check(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises if the code in a row is no command, file, metric, golden or name."""
    first, *words = shlex.split(code)
    if first.startswith("--"):
        check(f"jobs/pareto_sweep.py {code}", monkeypatch)
    elif re.match(r"((papers|wings)/)?jobs/", first):
        assert first.removesuffix(".py").replace("/", ".") in JOBS
        flags = flags_of(first.removesuffix(".py").replace("/", "."), words, monkeypatch)
        given = dict(pairwise([*words, ""]))
        names = {"--sweep": SWEEPS, "--scale": SCALES, "--published": DRAWABLE, "--model": PRESETS}
        for flag, known in names.items():
            value = given.get(flag, "--")
            assert value.startswith("--") or value in known or "finetune" in first, f"unknown {value}"
        if "study" in first:
            assert words[0] in STUDIES
        if "plan" in first:
            assert all(word.startswith("--") or word in PRESETS for word in words)
        if "--scale" not in given or "--sweep" in given:
            check_settings(flags)
    elif re.fullmatch(r"[\w/]+\.(py|md)", first):
        text = (ROOT / first).read_text()
        for word in words:
            assert f"{word.removeprefix('--')}=" in text
    elif "/" in code:
        assert code in {*described_metrics(), *known_costs()}
    else:
        assert code in FAMILIES or NAMED[code]()


def test_defaults_are_those_that_a_row_says() -> None:
    said = [row for row in ROWS if "default" in row.how]
    assert len(said) == 2
    run = flat(override(RunConfig(), {"model.moe.router.kind": "token_choice"}))
    for row in said:
        for name, value in (code.split("=") for code in codes(row)):
            assert run[name] == float(value), (row.id, name, run[name])


@cache
def lanes(file: str) -> dict[str, str]:
    """The tests of a file, and the lane of each. A test of which only some cases are slow counts as fast."""

    def mark(nodes: list[ast.expr]) -> str:
        marked = {
            name for node in nodes for name in LANES if name and ast.unparse(node).endswith(f"mark.{name}")
        }
        return "slow" if "slow" in marked else "smoke" if marked else ""

    tree = ast.parse((ROOT / file).read_text())
    whole = [
        node.value
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "pytestmark"
    ]
    return {
        node.name: LANES[mark([*whole, *node.decorator_list])]
        for node in tree.body
        if isinstance(node, ast.FunctionDef) and node.name.startswith("test")
    }


def test_a_lane_runs_what_works() -> None:
    """The test of a row is in the lane that the page says, and its file has the row's flags or fields."""
    wrong = []
    for row in ROWS:
        if row.state == "not built" or row.lane == NOT_RUN:
            assert not row.test, row.id
            continue
        file, _, name = row.test.partition("::")
        if row.lane.removesuffix(", its arms") != lanes(file).get(name):
            wrong.append(f"{row.id}: {row.test} is of lane {lanes(file).get(name)}")
        text = (ROOT / file).read_text().lower()
        if not any(touched(code, file, text) for code in codes(row)):
            wrong.append(f"{row.id}: {file} has none of {codes(row)}")
    assert not wrong, "\n".join(wrong)


def touched(code: str, file: str, text: str) -> bool:
    """Whether a test's file has every part of a command, setting, metric, name or family, in one spelling."""
    return all(any(word.lower() in text for word in words) or file in words for words in parts(code))


def parts(code: str) -> Iterator[tuple[str, ...]]:
    first, *words = shlex.split(code)
    is_command = re.match(r"((papers|wings)/)?jobs/", first)
    if is_command or first.startswith("--"):
        every = [*words] if is_command else [first, *words]
        if is_command and not {"--sweep", "--published"} & {*words}:
            yield (Path(first).stem,)
        for word, after in pairwise([*every, ""]):
            if word in ("--sweep", "--scale", "--published"):
                yield after, {"--sweep": "SWEEPS", "--scale": "SCALES", "--published": "DRAWABLE"}[word]
            elif word.startswith("--"):
                yield word, word.removeprefix("--").replace("-", "_")
        if "study" in first:
            yield words[0], words[0].replace("-", "_")
    elif re.fullmatch(SETTING, code):
        name, _, value = code.partition("=")
        yield (name.removesuffix(".kind").rpartition(".")[2],)
        if value.isalpha() and value not in ("true", "false"):
            yield (value,)
    elif code in FAMILIES:
        yield "tests/test_goldens.py", "goldens"
    elif code.endswith((".py", ".md")):
        yield (code,)
    else:
        yield (code.rpartition("/")[2],)

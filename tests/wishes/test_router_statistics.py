"""A wish: a router with statistics of its own. One file outside of the tree, a command with `--plugin`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from jobs import train
from orchestrator.plugins import load_plugins
from orchestrator.runs.run_directory import RunDir
from orchestrator.tracking.projection import project_run
from orchestrator.training.metrics import described_metrics

WISH = '''
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from moe.routers import ExpertChoiceConfig
from moe.routers.expert_choice import ExpertChoiceRouter
from moe.routing import Statistic


@dataclass(frozen=True, kw_only=True)
class WatchedConfig(ExpertChoiceConfig):
    """Expert choice that tells how much each of its experts is wanted."""

    kind: Literal["watched"] = "watched"
    described: ClassVar = {
        **ExpertChoiceConfig.described,
        "wanted": Statistic("fraction", "tokens' gates that an expert gets", per="expert"),
        "widest": Statistic("fraction", "the largest gate of any token", per="layer"),
    }

    def build(self, *, dim, num_experts):
        return Watched(self, dim=dim, num_experts=num_experts)


class Watched(ExpertChoiceRouter):
    def forward(self, *args, **options):
        routing = super().forward(*args, **options)
        gates_GSE = routing.gates_GSE.detach()
        own = {"wanted": gates_GSE.mean((0, 1)), "widest": gates_GSE.amax()} if routing.stats else {}
        return replace(routing, stats={**routing.stats, **own})
'''


@pytest.fixture
def wish(tmp_path: Path, new_process: Callable[[], None]) -> str:
    (tmp_path / "watched.py").write_text(WISH)
    return str(tmp_path / "watched.py")


def test_its_statistics_are_in_reports_and_in_the_table(
    wish: str, tmp_path: Path, empty_store: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gates of a token add up to 1. Microbatches and workers add up to what one pass of one would find."""
    (tmp_path / "home").mkdir()
    empty_store(tmp_path / "home")
    monkeypatch.setenv("MOE_FRONTIER_HOME", str(tmp_path / "home"))
    changes = (
        "model.depth=4 model.moe.router.kind=watched train.steps=4 train.report_every=2 train.microbatch=32"
    )
    args = ["--plugin", wish, "--name", "wish", *(a for each in changes.split() for a in ("--set", each))]
    monkeypatch.setattr(sys, "argv", ["train", *args])
    train.main()
    own = RunDir(str(tmp_path / "home/wish"))
    *_, last = [json.loads(line) for line in Path(own.file("metrics.jsonl")).read_text().splitlines()]
    record = own.record()
    assert record
    model = record.config["model"]
    experts = model["moe"]["num_experts"]
    assert last["metrics"]["moe/wanted"] == pytest.approx(1 / experts)
    assert not [name for name in last["metrics"] if name.startswith("routing")]

    shown = project_run(own.path, record, labels={}, live=False)
    table = shown.tables["routing.json"]
    assert table["columns"] == ["step", "statistic", "block", "expert", "value"]
    blocks = range(1, model["depth"], 2)
    places = [(b, e) for b in blocks for e in range(experts)]
    wanted = {(row[2], row[3]): row[4] for row in table["data"] if row[1] == "wanted"}
    assert [*wanted] == places
    assert len({*wanted.values()}) == len(places)
    for block in blocks:
        assert sum(wanted[block, expert] for expert in range(experts)) == pytest.approx(1)
    widest = {(row[2], row[3]): row[4] for row in table["data"] if row[1] == "widest"}
    assert [*widest] == [(block, None) for block in blocks]
    assert sum(widest.values()) / len(blocks) == pytest.approx(last["metrics"]["moe/widest"])
    assert {row[0] for row in table["data"]} == {4}


def test_they_are_described_as_others(wish: str) -> None:
    load_plugins([wish])
    assert described_metrics()["moe/wanted"] == ("fraction", "tokens' gates that an expert gets")

"""`papers/jobs/inspect_routing.py` as a user runs it, for every router."""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from jobs import train
from orchestrator.checkpoint.models import ModelRef
from orchestrator.codec import override
from orchestrator.config import RunConfig
from orchestrator.training.fit import fit
from papers.jobs import inspect_routing
from tests.lanes import mostly_slow

SMALL = {
    "model.width": 16,
    "model.heads": 2,
    "model.mlp_dim": 16,
    "model.depth": 2,
    "model.moe.layers": "last_2",
    "model.moe.num_experts": 4,
    "train.steps": 2,
}
OTHERS = {
    "expert_choice": {
        "model.moe.router.kind": "expert_choice",
        "model.moe.images_per_group": 2,
        "model.pooling": "token",
    },
    "soft": {"model.moe.router.kind": "soft", "model.moe.router.slots_per_expert": 2},
    "mixture": {"model.moe.router.kind": "mixture"},
}
DENSE = {field: value for field, value in SMALL.items() if "moe" not in field} | {"model.moe": None}
MODELS = {"dense": DENSE} | {router: {**SMALL, **changes} for router, changes in OTHERS.items()}
Call = Callable[..., tuple[str, str]]


@pytest.fixture(scope="module")
def home(empty_store: Callable[[Path], str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A storage with a run of each router that was called for; MLflow knows `token_choice` alone."""
    home = tmp_path_factory.mktemp("home")
    empty_store(home)
    return home


@pytest.fixture(scope="module")
def train_once(home: Path, digits: str) -> Callable[[str], None]:
    @cache
    def trained(name: str) -> None:
        if name == "token_choice":
            sets = [word for field, value in SMALL.items() for word in ("--set", f"{field}={value}")]
            with pytest.MonkeyPatch.context() as patch:
                args = ["train", "--name", name, "--data", digits, "--storage", str(home), *sets]
                patch.setattr(sys, "argv", args)
                train.main()
        elif name in MODELS:
            place = {"name": name, "data.path": digits, "storage": str(home)}
            fit(override(RunConfig(), {**MODELS[name], **place}))

    return trained


@pytest.fixture
def call(home: Path, train_once: Callable[[str], None], call: Call) -> Call:
    """``call("soft", "--images", "9")``: what it exits with, and what it prints."""

    def inspect(name: str, *args: str) -> tuple[str, str]:
        train_once(name)
        return call(inspect_routing.main, name, *args, "--storage", str(home))

    return inspect


@pytest.mark.parametrize("router", mostly_slow(["token_choice", *OTHERS], fast=["token_choice"]))
def test_every_router(
    home: Path, train_once: Callable[[str], None], call: Call, tmp_path: Path, router: str
) -> None:
    """A row per block, a page with all pictures, tables that are whole; in MLflow, too, where it is known."""
    train_once("token_choice")
    args = ("--images", "70", "--examples", "2", "--capacities", "0.5,0.001", "--out", str(tmp_path))
    stopped, printed = call(router, *args)
    assert not stopped
    assert "70 images" in printed
    assert ("not drawn: capacity 0.001" in printed) == (router in ("token_choice", "expert_choice"))
    found = {file.name for file in tmp_path.iterdir()}
    pictures = {name for name in found if name.endswith(".png")}
    assert {"overview.png", "classes.png", "positions.png", "histograms.png"} <= pictures
    assert ("discarded_00.png" in pictures) == (router in ("token_choice", "expert_choice"))
    assert ("combine_01.png" in pictures) == ("slots.png" in pictures) == (router == "soft")
    assert ("flips.png" in pictures) == (router != "mixture")
    html = (tmp_path / "routing.html").read_text()
    assert html.count("data:image/png;base64,") == len(pictures)
    assert json.loads((tmp_path / "layers.json").read_text())["block"] == [0, 1]
    assert set(json.loads((tmp_path / "figures.json").read_text())["block"]) == {0, 1}
    logged = {file.name for file in (home / "mlartifacts").rglob("routing/*/step-*/*")}
    if router == "token_choice":
        assert logged == found
    else:
        assert "MLflow has no run" in printed


@pytest.mark.smoke
def test_where_pages_go(
    home: Path, call: Call, digits: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the storage; to another folder if it is new or holds such a page, and never among the images. A
    page may be of one layer, and of training images.
    """
    monkeypatch.chdir(tmp_path)
    few = ("soft", "--split", "train", "--layers", "1", "--images", "9", "--examples", "2")
    stopped, printed = call(*few)
    assert not stopped
    assert "9 images" in printed
    page = home / "routing/soft"
    assert (page / "routing.html").exists()
    assert json.loads((page / "layers.json").read_text())["block"] == [1]
    assert not (page / "dispatch_00.png").exists()
    for _ in range(2):
        assert not call(*few, "--out", "page")[0]
    assert [path.name for path in tmp_path.iterdir()] == ["page"]
    monkeypatch.setattr(ModelRef, "load", None)
    holds = "holds other files (page): choose a new or an empty folder"
    assert call(*few, "--out", ".")[0] == f"error: --out {tmp_path} {holds}"
    stopped, _ = call(*few, "--out", f"{digits}/page")
    assert stopped.startswith(f"error: --out {digits}/page and the source {digits} lie in each other")


@pytest.mark.parametrize(
    ("args", "says"),
    [
        (("dense",), "no routers to look into"),
        (("soft", "--layers", "0,7,5"), "7, 5 are not MoE blocks; the MoE blocks of soft are (0, 1)"),
        (("nobody",), "nobody"),
    ],
    ids=lambda value: value[-1] if isinstance(value, tuple) else "",
)
def test_mistakes_are_one_line(call: Call, args: tuple[str, ...], says: str) -> None:
    stopped, _ = call(*args)
    assert stopped.startswith("error: ")
    assert says in stopped
    assert "\n" not in stopped

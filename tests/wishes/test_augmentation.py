"""A wish: an augmentation of one's own. One file outside of the tree, and two commands with `--plugin`."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest
import torch

from jobs import train
from orchestrator.data.images import Transform
from orchestrator.plugins import load_plugins
from tests.parts import png

WISH = '''
from dataclasses import dataclass
from random import Random
from typing import Literal

from torch import Tensor

from moe.config import Fraction
from orchestrator import AugmentationConfig


@dataclass(frozen=True, kw_only=True)
class InvertConfig(AugmentationConfig):
    """Inverts a fraction of the images."""

    kind: Literal["invert"] = "invert"
    fraction: Fraction = 0.5

    def apply(self, image: Tensor, rng: Random) -> Tensor:
        return 255 - image if rng.random() < self.fraction else image
'''
SHORT = ("--name", "wish", "--set", "train.steps=4", "--set", "train.report_every=2")


@pytest.fixture
def wish(tmp_path: Path, new_process: Callable[[], None]) -> str:
    (tmp_path / "invert.py").write_text(WISH)
    return str(tmp_path / "invert.py")


@pytest.fixture
def home(tmp_path: Path, empty_store: Callable[[Path], str], monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "home").mkdir()
    empty_store(tmp_path / "home")
    monkeypatch.setenv("MOE_FRONTIER_HOME", str(tmp_path / "home"))
    return tmp_path / "home"


def call(monkeypatch: pytest.MonkeyPatch, *args: str) -> str:
    """Returns what `train` exits with."""
    monkeypatch.setattr(sys, "argv", ["train", *args])
    try:
        train.main()
    except SystemExit as stop:
        return str(stop.code or "")
    return ""


def test_it_changes_pixels_at_its_place(wish: str) -> None:
    load_plugins([wish])
    from orchestrator import RunConfig, override

    run = override(RunConfig(), {"data.augment": "flip,invert", "data.augment.invert.fraction": "1"})
    assert [member.kind for member in run.data.augment] == ["flip", "invert"]
    image = torch.arange(192, dtype=torch.uint8).view(8, 8, 3)
    found = Transform(size=8, augment=run.data.augment)(png(image.numpy()), "key")
    expected = image.permute(2, 0, 1)
    assert torch.equal(found, 255 - (expected.flip(-1) if Random("key").random() < 0.5 else expected))


def test_it_trains_by_name(wish: str, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run keeps a copy of it; without it the name is unknown, and the names that there are listed."""
    refused = call(monkeypatch, *SHORT, "--set", "data.augment=invert")
    assert "unknown data.augment.kind 'invert'; known: color_jitter, crop, crop_flip, cutmix," in refused
    augment = "data.augment=[inception, {kind: invert, fraction: 0.2}]"
    assert call(monkeypatch, "--plugin", wish, *SHORT, "--set", augment) == ""
    config = json.loads((home / "wish" / "config.json").read_text())["config"]
    assert config["data"]["augment"] == [{"kind": "inception"}, {"kind": "invert", "fraction": 0.2}]
    assert [plugin.partition("@")[0] for plugin in config["plugins"]] == ["invert.py"]
    assert (home / "wish" / "plugins" / "invert.py").read_text() == WISH
    assert json.loads((home / "wish" / "result.json").read_text())["status"] == "finished"

"""A wish: a backbone with the names of its published weights, in one file of a user's own."""

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file

from moe import load
from orchestrator import load_plugins
from wings.jobs import import_weights

NET = """
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self

import torch
from torch import nn

from moe import AS_TRAINED, Head, ImageModelConfig, Model, Output, PositiveInt


@dataclass(frozen=True, kw_only=True)
class PatchNetConfig(ImageModelConfig):
    kind: Literal["patch_net"] = "patch_net"
    image_size: PositiveInt = 8
    num_classes: PositiveInt = 10
    width: PositiveInt = 4

    def build(self, *, seed: int | None = 0) -> "PatchNet":
        return PatchNet(self, seed=seed)

    def tokens(self) -> int:
        return 4

    def size(self) -> str:
        return f"w{self.width}"

    @classmethod
    def published(cls, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Self, Mapping[str, str]] | None:
        if "features.0.weight" not in shapes:
            return None
        width, _, side, _ = shapes["features.0.weight"]
        classes = shapes["classifier.weight"][0]
        names = {
            f"{ours}.{part}": f"{theirs}.{part}"
            for ours, theirs in (("stem", "features.0"), ("head", "classifier"))
            for part in ("weight", "bias")
        }
        return cls(width=width, image_size=2 * side, num_classes=classes), names


class PatchNet(Model[PatchNetConfig]):
    def add_layers(self) -> None:
        config = self.config
        self.stem = nn.Conv2d(3, config.width, config.image_size // 2, config.image_size // 2)
        self.head = Head(config.width, config.num_classes, 0.0)

    def units(self) -> list[nn.Module]:
        return []

    def output(self, images: Any, routing: Any) -> Output:
        logits = self.head(self.stem(images).flatten(2).mean(2)).float()
        return Output({"logits": logits}, images.new_zeros(()), {}, ())
"""


def test_published_weights_of_a_model_of_ones_own(
    call: Callable[..., tuple[str, str]], tmp_path: Path
) -> None:
    plugin = tmp_path / "patch_net_wish.py"
    plugin.write_text(NET)
    load_plugins([plugin])
    theirs = {
        "features.0.weight": torch.randn(6, 3, 4, 4),
        "features.0.bias": torch.randn(6),
        "classifier.weight": torch.randn(5, 6),
        "classifier.bias": torch.randn(5),
    }
    save_file(theirs, str(tmp_path / "patch_net.safetensors"))
    words = [f"{tmp_path}/patch_net.safetensors", "--out", f"{tmp_path}/ours", "--mean", "half"]
    stopped, said = call(import_weights.main, *words)
    assert stopped == "", said
    model, images = load(f"{tmp_path}/ours"), torch.rand(2, 3, 8, 8) * 2 - 1
    stem = torch.nn.functional.conv2d(images, theirs["features.0.weight"], theirs["features.0.bias"], 4)
    logits = stem.flatten(2).mean(2) @ theirs["classifier.weight"].T + theirs["classifier.bias"]
    assert torch.allclose(model(images).logits, logits, atol=1e-5)

"""The scales at which a named sweep can run: what its models are built on, and how they are trained."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Any, cast

from moe.models import ViTConfig
from orchestrator.codec import override
from orchestrator.config import DataConfig, RunConfig, TrainConfig
from orchestrator.data.augment import InceptionConfig, MixupConfig, RandAugmentConfig

Changes = Mapping[str, Any]  # dotted fields of a run, with their values
UNCHANGED: Changes = MappingProxyType({})
STUDIES = ("study", "modern")  # made for Fashion-MNIST


@dataclass(frozen=True, kw_only=True)
class Scale:
    """The base run and the sizes of a sweep's arms.

    Attributes:
        base: the run that arms change; its model is dense, and has the size of sweeps that do not vary it.
        sizes: name -> changes of the base, smallest first.
        experts: their number in sweeps that do not vary it; other sweeps take multiples and fractions.
        slots: slots per token in sweeps that vary them.
        bases: sweep -> changes of the base: the size and the recipe that its paper has for it.
        sizes_of: sweep -> its own sizes in place of `sizes`.
        released: sweep -> arms that its paper trained on the data of this scale alone.
        data: the source of the images that come with the project; empty: there are none.
        data_of: sweep -> its own source in place of `data`.
    """

    base: RunConfig
    sizes: Mapping[str, Changes]
    experts: int
    slots: tuple[int, ...] = (1, 2)
    bases: Mapping[str, Changes] = field(default_factory=dict)
    sizes_of: Mapping[str, Mapping[str, Changes]] = field(default_factory=dict)
    released: Mapping[str, Mapping[str, Changes]] = field(default_factory=dict)
    data: str = ""
    data_of: Mapping[str, str] = field(default_factory=dict)

    def add(
        self, sweep: str, *, base: Changes, sizes: Mapping[str, Changes] | None = None, data: str = ""
    ) -> None:
        """Gives a sweep of a guest its recipe at this scale: changes of the base, its sizes, its images."""
        for table, value in ((self.bases, base), (self.sizes_of, sizes), (self.data_of, data)):
            if value:
                cast(dict[str, Any], table)[sweep] = value

    def of(self, sweep: str, changes: Changes) -> "Scale":
        """Returns the scale as the function of a sweep gets it: its base has the changes of the sweep, and
        over them those of the user, so that arms are computed for the tokens that there are.
        """
        base = override(override(self.base, self.bases.get(sweep, {})), changes)
        return replace(self, base=base, sizes=self.sizes_of.get(sweep, self.sizes))

    def source(self, sweep: str) -> str:
        """Returns the source of the images that come with the project for a sweep; empty: there is none."""
        return self.data_of.get(sweep, self.data)


def vit_size(width: int, depth: int, heads: int, patch_size: int | None = None) -> dict[str, Any]:
    """A ViT's size, its MLPs four times as wide as it."""
    fields = {"width": width, "depth": depth, "heads": heads, "mlp_dim": 4 * width}
    fields |= {"patch_size": patch_size} if patch_size else {}
    return {f"model.{name}": value for name, value in fields.items()}


_TINY = RunConfig(
    model=ViTConfig(image_size=8, patch_size=2, width=48, depth=4, heads=3, mlp_dim=192, num_classes=10),
    data=DataConfig(batch_size=64),
    train=TrainConfig(steps=220, lr=3e-3, report_every=20),  # 10 epochs of the digits
)

_QUICKSTART = {  # 4 epochs of the cluttered digits
    "model.image_size": 16,
    "model.patch_size": 4,
    "data.batch_size": 128,
    "train.steps": 380,
    "train.report_every": 95,
    "scale.reshard_after_forward": False,  # its weights are smaller than its activations
}
_STUDY = {  # for Fashion-MNIST, 28 x 28 in 16 patches: 5.6 epochs of 55,000 images
    "model.image_size": 28,
    "model.patch_size": 7,
    "data.batch_size": 128,
    "data.augment": "flip",
    "train.steps": 2400,
    "train.report_every": 100,
    "train.eval_every": 150,  # the rung of early stopping, 1/8, is among them
}
_STUDY_SIZES = {"w16": vit_size(16, 2, 2), "w32": vit_size(32, 2, 4), "w48": vit_size(48, 2, 3)}


_CIFAR = RunConfig(
    model=ViTConfig(image_size=32, patch_size=4, width=192, depth=12, heads=3, mlp_dim=768, num_classes=10),
    data=DataConfig(
        batch_size=512,
        augment=(InceptionConfig(), RandAugmentConfig(operations=2), MixupConfig(alpha=0.2)),
        eval_crop=1.0,
    ),
    train=TrainConfig(steps=19_500, lr=1e-3, report_every=50, eval_every=975),  # 200 epochs
)

TINY = Scale(  # digits, seconds to a minute per arm on a CPU
    base=_TINY,
    sizes={
        "w16d2": vit_size(16, 2, 2),
        "w32d2": vit_size(32, 2, 2),
        "w32d4": vit_size(32, 4, 2),
        "w64d4": vit_size(64, 4, 4),
        "w96d6": vit_size(96, 6, 6),
    },
    experts=8,
    bases={
        "quickstart": _QUICKSTART,
        **dict.fromkeys(STUDIES, _STUDY),
    },
    sizes_of={
        "quickstart": {"w16": vit_size(16, 2, 2), "w24": vit_size(24, 2, 2), "w32": vit_size(32, 2, 2)},
        **dict.fromkeys(STUDIES, _STUDY_SIZES),
    },
    data="digits",
    data_of={"quickstart": "cluttered-digits", **dict.fromkeys(STUDIES, "")},
)
CIFAR = Scale(  # 32 x 32: an hour per arm on a GPU, by the planner
    base=_CIFAR,
    sizes={"Ti8": vit_size(192, 12, 3, 8), "Ti4": vit_size(192, 12, 3, 4), "S4": vit_size(384, 12, 6, 4)},
    experts=16,
)

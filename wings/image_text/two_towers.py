"""Two towers, one for images and one for texts, whose outputs are compared by their angle.

Source: the models of LiT (Zhai et al. 2022, https://arxiv.org/abs/2111.07991) and SigLIP (Zhai et al. 2023,
https://arxiv.org/abs/2303.15343) in big_vision, and those of Soft MoE's section 4 and appendix F.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import ClassVar, Literal, NamedTuple

import torch
from torch import Tensor, nn

from moe.config import PositiveFloat, PositiveInt
from moe.cost import model_costs
from moe.init import Draw, constant, mix
from moe.layer import MoEConfig
from moe.model import Activations, Costs, Model, ModelConfig, Output, begins_so, unit_shapes
from moe.models.vit import ViTConfig
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.routing import RoutingInput
from wings.image_text.text_tower import TextConfig

TEXT_SALT = 1 << 20  # of keys for the noise of the text tower; smaller salts are blocks'


class ImageText(NamedTuple):
    """The input of two towers: either may be None.

    images: (B, 3, H, W) in -1..1, or (B, D), what the image tower made of them before.
    tokens: (B, length) int, as the text tower's tokenizer returns them.
    """

    images: Tensor | None = None
    tokens: Tensor | None = None

    def to(self, dtype: torch.dtype) -> "ImageText":
        """Returns the same with images in another data type."""
        return self._replace(images=None if self.images is None else self.images.to(dtype))


@dataclass(frozen=True, kw_only=True)
class TwoTowersConfig(ModelConfig):
    """An image tower and a text tower.

    Attributes:
        image: any model with a head; the head is left out, and its input represents the image.
        text: the text tower; a linear layer projects its output to the size of the image's.
        embed_dim: size of what is compared, to which another linear layer then projects the image tower's
            output; None: that output itself, as in LiT.
        scale, bias: initial values of the factor of cosines and of what is added to their product. The factor
            is learnt as its logarithm; a softmax loss does not use the bias.
    """

    kind: Literal["two_towers"] = "two_towers"
    image: ModelConfig = ViTConfig()
    text: TextConfig = TextConfig()
    embed_dim: PositiveInt | None = None
    scale: PositiveFloat = 10.0
    bias: float = -10.0

    gives: ClassVar = ("image", "text", "scale")
    starts_from: ClassVar = "image."

    @property
    def head(self) -> str:
        return f"image.{self.image.head}"

    @property
    def whole_batch(self) -> bool:
        return self.image.whole_batch

    def routed(self) -> ModelConfig:
        """Returns the tower whose routers others mean: that of images, unless only texts have experts."""
        return self.image if self.image.moe or not self.text.moe else self.text

    def check(self) -> None:
        object.__setattr__(self, "moe", self.routed().moe)  # no field: it is that of a tower
        image_features(self.image)
        experts = [tower.moe.num_experts for tower in (self.image, self.text) if tower.moe]
        if len({*experts}) > 1:
            raise ValueError(f"both towers must have as many experts, got {experts[0]} and {experts[1]}")

    def build(self, *, seed: int | None = 0) -> "TwoTowers":
        return TwoTowers(self, seed=seed)

    def example(self, count: int) -> Tensor:
        return self.image.example(count)

    def image_side(self) -> int:
        return self.image.image_side()

    def tokens(self) -> int:
        return self.routed().tokens()

    def size(self) -> str:
        return f"{self.image.size()}-text-{self.text.size()}"

    def with_moe(self, moe: MoEConfig) -> "TwoTowersConfig":
        if self.routed() is self.image:
            return replace(self, image=self.image.with_moe(moe))
        return replace(self, text=self.text.with_moe(moe))

    def costs(
        self, overrides: RoutingOverrides = AS_TRAINED, *, number: int = 4, frozen: Sequence[str] = ()
    ) -> Costs:
        towers = zip((self.image, self.text), self._overrides(overrides), strict=True)
        image, text = (model_costs(tower, point, number=number) for tower, point in towers)
        features = image_features(self.image)
        macs = {f"image_{part}": count for part, count in image.macs.items()}
        macs |= {f"text_{part}": count for part, count in text.macs.items()}
        macs["image_head"] = features * (self.embed_dim or 0)
        macs["text_head"] = self.text.width * (self.embed_dim or features)
        of_image, of_text = image.activations, text.activations
        if begins_so("image.", frozen):
            # The images are there all the while, as they came and as they were computed with.
            images = (4 + number) * 3 * self.image.image_side() ** 2
            activations = of_text._replace(saved=[images + of_text.saved[0], *of_text.saved[1:]])
        elif begins_so("text.", frozen):
            activations = of_image
        else:
            saved = [of_image.saved[0] + of_text.saved[0], *of_image.saved[1:], *of_text.saved[1:]]
            stream, widest = max(of_image.stream, of_text.stream), max(of_image.widest, of_text.widest)
            activations = Activations(saved, stream, widest)
        return Costs(macs, max(image.largest, text.largest), activations)

    def _overrides(self, overrides: RoutingOverrides) -> tuple[RoutingOverrides, RoutingOverrides]:
        return (overrides, AS_TRAINED) if self.routed() is self.image else (AS_TRAINED, overrides)


class TwoTowers(Model[TwoTowersConfig]):
    """The module of a `TwoTowersConfig`.

    A tower without trainable weights is frozen: it is evaluated, without noise and auxiliary loss.
    """

    def add_layers(self) -> None:
        config = self.config
        self.image, self.text = config.image.build(seed=None), config.text.build(seed=None)
        self.image.set_submodule(config.image.head, nn.Identity())
        features = image_features(config.image)
        if config.embed_dim:
            self.project_image = nn.Linear(features, config.embed_dim)
        self.project_text = nn.Linear(config.text.width, config.embed_dim or features)
        self.temperature = Temperature(config.scale, config.bias)

    def units(self) -> Sequence[nn.Module]:
        return [*self.image.units(), *self.text.units()]

    def layers_above(self) -> dict[str, int]:
        towers = {"image.": self.image, "text.": self.text}
        inside = {tower + name: n for tower, m in towers.items() for name, n in m.layers_above().items()}
        return dict.fromkeys(dict(self.named_parameters()), 0) | inside

    def output(self, images: Tensor | ImageText, routing: RoutingInput) -> Output:
        """Embeds images, texts, or both. The heads ``image`` and ``text`` are (B, D), of any length; those of
        an input that is None are left out. ``scale`` (B, 2) has the logarithm of the factor, and the bias.

        Raises ValueError as other models do.
        """
        inputs = images if isinstance(images, ImageText) else ImageText(images)
        overrides = self.config._overrides(routing.overrides)
        heads, outputs = dict[str, Tensor](), list[Output]()
        if inputs.images is not None:
            z_BD = inputs.images
            if z_BD.ndim > 2:
                outputs.append(_run(self.image, z_BD, routing._replace(overrides=overrides[0])))
                (z_BD,) = outputs[-1].heads.values()
            heads["image"] = self.project_image(z_BD) if self.config.embed_dim else z_BD
        if inputs.tokens is not None:
            keys = None if routing.keys is None else mix(routing.keys, TEXT_SALT)
            found = _run(self.text, inputs.tokens, routing._replace(keys=keys, overrides=overrides[1]))
            outputs.append(found)
            heads["text"] = self.project_text(found.heads["pooled"])
        rows = len(next(iter(heads.values())))
        heads["scale"] = self.temperature(rows)
        aux = [output.aux for output in outputs]
        return Output(
            heads,
            torch.stack(aux).sum() if aux else heads["scale"].new_zeros(()),
            _together([output.stats for output in outputs if output.stats]),
            tuple(routing for output in outputs for routing in output.routings),
        )


class Temperature(nn.Module):
    """The factor of cosines, as its logarithm, and what is added to their product. Both stay float32."""

    in_float32: ClassVar = True

    def __init__(self, scale: float, bias: float) -> None:
        super().__init__()
        self.initial = scale, bias
        self.log_scale_1 = nn.Parameter(torch.empty(1))
        self.bias_1 = nn.Parameter(torch.empty(1))

    def draws(self) -> dict[str, Draw]:
        scale, bias = self.initial
        return {"log_scale_1": constant(math.log(scale)), "bias_1": constant(bias)}

    def forward(self, rows: int) -> Tensor:
        """Returns both for each of some rows, (rows, 2)."""
        return torch.cat([self.log_scale_1, self.bias_1]).expand(rows, 2)


def image_features(config: ModelConfig) -> int:
    """Returns the size of the head's input. Raises ValueError if the model has no linear head."""
    if config.gives == ("logits",):
        dense = unit_shapes(replace(config, moe=None))[0]  # which several models have in common
        if len(shape := dense.get(f"{config.head}.weight", ())) == 2:
            return shape[1]
    raise ValueError(f"an image tower has a linear head; a model of kind {config.kind!r} has none")


def _run(tower: Model, inputs: Tensor, routing: RoutingInput) -> Output:
    if any(param.requires_grad for param in tower.parameters()):
        return tower(inputs, *routing)
    tower.eval()
    with torch.no_grad():
        output = tower(inputs, *routing._replace(keys=None))
    return output._replace(aux=torch.zeros_like(output.aux))


def _together(stats: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """Returns the statistics of all layers that every tower with experts has."""
    names = [name for name in stats[0] if all(name in each for each in stats)] if stats else []
    return {name: torch.cat([each[name] for each in stats]) for name in names}

"""The names of a project's tensors, and the facts about a model that tensors do not hold."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from torch import Tensor

from orchestrator.data.preparation import AS_IT_IS, Preparation
from orchestrator.errors import UsageError
from wings.weights.tensors import ForeignWeights, Lazy

Resize = Callable[[Tensor, int], Tensor]  # (1, D, old, old), new -> (1, D, new, new)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
NORMALISATIONS = {"imagenet": IMAGENET, "half": HALF}


@dataclass(frozen=True, kw_only=True)
class TensorNames:
    """Their names of a ViT's tensors, before ``weight`` or ``bias``; empty: there is none.

    Attributes:
        block: what the names of block {i} begin with. `norm1` to `gate` follow it.
        scale1, scale2: LayerScale of attention and MLP, which is folded into the layer before it.
        pool_in: queries, keys and values of the pooling in one tensor, in place of `pool_q` and `pool_kv`.
        harmless: pattern of tensors that may be left out.
    """

    embed: str
    class_token: str
    position: str
    block: str
    norm1: str
    qkv: tuple[str, ...]
    out: str
    norm2: str
    up: str
    down: str
    norm: str
    head: str
    scale1: str = ""
    scale2: str = ""
    experts_in: str = ""
    experts_out: str = ""
    gate: str = ""
    norm_q: str = ""
    norm_k: str = ""
    pre_logits: str = ""
    probe: str = ""
    pool_in: str = ""
    pool_q: tuple[str, ...] = ()
    pool_kv: tuple[str, ...] = ()
    pool_norm_q: str = ""
    pool_norm_k: str = ""
    pool_out: str = ""
    pool_norm: str = ""
    pool_up: str = ""
    pool_down: str = ""
    harmless: str = r"(?!)"


@dataclass(frozen=True, kw_only=True)
class Facts:
    """Facts about a model that its tensors do not hold.

    Attributes:
        heads: of attention; None: unknown.
        heads_stated: whether the source states them; else they follow a rule of its library.
        mean, std: of the source's normalisation of pixels in 0..1, by channel; None: unknown.
        mean_stated: whether the source states them; else they are what its library always takes.
        evaluation: fields of `DataConfig`.
        resize: how the source's library resizes position embeddings.
        classes: their names, as a list or by number; of an `Import` by output; None: unknown.
        output: the meaning of the head: an image has one of the classes, or each by itself.
        preparation: of images before they are resized, as a model of ours that was exported says.
        sizes: fields of the model that a config beside the weights states, as ``width`` and ``depth``.
        pooling: as a config has it; None: as the tensors say.
        assumed: what was not found anywhere, and is the default of the library.
    """

    heads: int | None
    heads_stated: bool = True
    gelu: Literal["tanh", "exact"]
    resize: Resize
    norm_eps: float = 1e-6
    mean: tuple[float, ...] | None
    std: tuple[float, ...] | None
    mean_stated: bool = True
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    classes: Any = None
    output: Literal["softmax", "sigmoid"] = "softmax"
    preparation: Preparation = AS_IT_IS
    sizes: Mapping[str, int] = field(default_factory=dict)
    pooling: Literal["gap", "token", "map"] | None = None
    assumed: tuple[str, ...] = ()
    licence: str = ""

    def __post_init__(self) -> None:
        if (given := self.normalisation) is None:
            return
        mean, std = given
        whole = len(mean) == len(std) == 3 and all(map(math.isfinite, [*mean, *std]))
        if not whole or min(std) <= 0 or not all(0 <= channel <= 1 for channel in mean):
            raise UsageError(
                f"mean {mean} and std {std} must be three numbers each, of pixels in 0..1, and std above 0"
            )

    @property
    def normalisation(self) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
        """Mean and std; None if one of them is unknown."""
        return None if self.mean is None or self.std is None else (self.mean, self.std)

    def normalised_by(self, said: Mapping[str, Any]) -> "Facts":
        """Returns the facts with the ``data.mean`` and ``data.std`` that a user says of weights that do not.

        Raises:
            UsageError: if they contradict the source, or are no numbers.
        """
        if not said:
            return self
        mean, std = said.get("data.mean"), said.get("data.std")
        if std is None and isinstance(mean, str) and mean in NORMALISATIONS:
            std = mean  # a name is that of both
        given = replace(self, mean=_numbers("mean", mean), std=_numbers("std", std))
        if self.mean_stated and self.normalisation not in (None, given.normalisation):
            raise UsageError(
                f"`data.mean` {mean} and `data.std` {std}: the weights have {self.mean} and {self.std}"
            )
        return given


def by_channel(value: Any) -> tuple[float, ...] | None:
    """Returns the numbers that a config has for all channels, or for each."""
    return (value,) * 3 if isinstance(value, float) else None if value is None else tuple(value)


def _numbers(which: Literal["mean", "std"], said: Any) -> tuple[float, ...]:
    if isinstance(said, str) and said in NORMALISATIONS:
        return NORMALISATIONS[said][which == "std"]
    try:
        return tuple(float(number) for number in (said.split(",") if isinstance(said, str) else said))
    except (TypeError, ValueError):
        found = "is missing" if said is None else said
        example = ",".join(map(str, IMAGENET[which == "std"]))
        raise UsageError(
            f"`data.{which}` {found}: say {' or '.join(NORMALISATIONS)}, or three numbers, as {example};"
            " numbers of one want those of the other"
        ) from None


@dataclass(frozen=True, kw_only=True)
class WeightsKind:
    """A project whose weights are read.

    Attributes:
        patches: pattern of the name of its patch embedding's weights, by which it is recognised.
        read: returns its tensors, the names that they have by then, and the facts. It raises UsageError for a
            model that ours cannot be.
    """

    name: str
    patches: str
    read: Callable[[ForeignWeights], tuple[Mapping[str, Lazy], TensorNames, Facts]]

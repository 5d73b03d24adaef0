"""The names of a project's tensors, and the facts about a model that tensors do not hold."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import Tensor

from orchestrator.checkpoint.foreign.tensors import ForeignWeights, Lazy
from orchestrator.data.preparation import AS_IT_IS, Preparation
from orchestrator.errors import UsageError

Resize = Callable[[Tensor, int], Tensor]  # (1, D, old, old), new -> (1, D, new, new)
IMAGENET = ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
HALF = ((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))


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
        mean, std: of the source's normalisation of pixels in 0..1, by channel.
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
    mean: Sequence[float] = HALF[0]
    std: Sequence[float] = HALF[1]
    evaluation: Mapping[str, Any] = field(default_factory=dict)
    classes: Any = None
    output: Literal["softmax", "sigmoid"] = "softmax"
    preparation: Preparation = AS_IT_IS
    sizes: Mapping[str, int] = field(default_factory=dict)
    pooling: Literal["gap", "token", "map"] | None = None
    assumed: tuple[str, ...] = ()
    licence: str = ""

    def __post_init__(self) -> None:
        numbers = [*self.mean, *self.std]
        whole = len(self.mean) == len(self.std) == 3 and all(map(math.isfinite, numbers))
        if not whole or min(self.std) <= 0:
            raise UsageError(
                f"mean {self.mean} and std {self.std} must be three numbers each, and std above 0"
            )


@dataclass(frozen=True, kw_only=True)
class WeightsKind:
    """A project whose weights are read.

    Attributes:
        recognises: whether tensors of these names are its.
        read: returns its tensors, the names that they have by then, and the facts. It raises UsageError for a
            model that ours cannot be.
    """

    name: str
    recognises: Callable[[Mapping[str, Lazy]], bool]
    read: Callable[[ForeignWeights], tuple[Mapping[str, Lazy], TensorNames, Facts]]

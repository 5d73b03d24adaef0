"""Contrastive learning: of the images and captions of a batch, those that belong together have the largest
cosine.

Source: CLIP (Radford et al. 2021, https://arxiv.org/abs/2103.00020) for the softmax, SigLIP (Zhai et al.
2023, https://arxiv.org/abs/2303.15343) for the sigmoid loss; LiT (Zhai et al. 2022,
https://arxiv.org/abs/2111.07991) if the image tower is frozen (`train.freeze`). Soft MoE, section 4 and
appendix F, trains with them.

Dimensions: b pairs of this worker, B of all workers, D the size of an embedding, C classes, K captions of an
image, L tokens.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from moe.codec import to_dict
from moe.config import PositiveInt
from moe.init import mix
from moe.model import Model, ModelConfig
from moe.parallel import first_row, gather
from orchestrator.data.batch import Batch, normalize
from orchestrator.data.fields import Field
from orchestrator.data.manifest import open_manifest
from orchestrator.data.text import TextField, read_tokenizer
from orchestrator.tasks.base import ClassNames, Heads, TaskConfig
from wings.image_text.text_tower import TextConfig
from wings.image_text.two_towers import ImageText
from wings.image_text.zero_shot import ZeroShot, check_names, embed_classes, unit

CAPTION_SALT = 1 << 21  # of keys that choose a caption; smaller salts are the model's
ROWS = 1024  # of the matrix of cosines that are in memory at a time
OUTSIDE = -1e30  # added to the logit of what is no pair


@dataclass(frozen=True, kw_only=True)
class ContrastiveConfig(TaskConfig):
    """Contrastive learning of images and captions.

    Attributes:
        loss: cross-entropy over the batch, in both directions (``softmax``), or a binary one for each pair
            (``sigmoid``).
        captions: captions of an image that are read, of which each step draws one; further ones are left out.
        equal_captions: whether an image and the caption of another image that has equal words belong
            together (``match``) or not (``differ``, as in the papers).
        classes: names for zero-shot classification; commands take those of the data.
        templates: texts that name a class, with ``{}`` in the name's place.
    """

    kind: Literal["contrastive"] = "contrastive"
    loss: Literal["softmax", "sigmoid"] = "softmax"
    captions: PositiveInt = 5
    equal_captions: Literal["differ", "match"] = "differ"
    classes: tuple[str, ...] = ()
    templates: tuple[str, ...] = ("a photo of a {}",)

    qualities: ClassVar = ("val/zero_shot_acc1", "val/text_acc1")
    needs: ClassVar = ("image", "text", "scale")
    scope: ClassVar = "batch"
    described: ClassVar = {
        "train/loss_pairs": ("nats", "the part of the training loss from images and captions"),
        "train/loss_of_chance": ("nats", "that loss if nothing is learnt: of equal cosines, best bias"),
        "train/scale": ("-", "factor of the cosines"),
        "train/bias": ("-", "what is added to them; a softmax loss has no use for it"),
        "train/text_acc1": ("fraction", "images of the batch whose caption has the largest cosine"),
        "val/zero_shot_acc1": ("fraction", "validation images whose class's texts have the largest cosine"),
        "val/text_acc1": (
            "fraction",
            "images of an evaluation's batches whose caption has the largest cosine",
        ),
        "val/loss": ("nats", "mean loss over the batches of an evaluation, without auxiliary losses"),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_names(self.classes, self.templates)

    @property
    def output(self) -> Literal["embedding"]:
        return "embedding"

    @property
    def quality(self) -> str:
        return self.qualities[0 if len(self.classes) > 1 else 1]

    def fields(self, model: ModelConfig) -> Mapping[str, Field]:
        text = text_of(model)
        return {"text": TextField(tokenizer=text.tokenizer, length=text.length, captions=self.captions)}

    def check(self, model: ModelConfig) -> None:
        super().check(model)
        text_of(model)

    def chance(self, model: ModelConfig) -> float:
        """Returns that of zero-shot classification. Among the captions of a batch it depends on their number,
        and 0 stands for it.
        """
        return 1 / len(self.classes) if len(self.classes) > 1 else 0.0

    def for_data(self, model: ModelConfig, path: str) -> Mapping[str, Any]:
        found, classes = dict[str, Any](), open_manifest(path).classes
        if not text_of(model).tokenizer.vocabulary:
            tokenizer = read_tokenizer(path)
            found = {"model.text.tokenizer": to_dict(tokenizer), "model.text.vocabulary": tokenizer.size()}
        if not self.classes and len(classes) > 1:
            found["task.classes"] = classes
        return found

    def inputs(self, batch: Batch) -> ImageText:
        """Returns images, and of each a caption that its place in the run decides."""
        image, text_BKL = batch["image"], batch["text"]
        count_B = (text_BKL[:, :, 0] >= 0).sum(1).clamp(min=1)
        chosen_B = mix(batch.key, CAPTION_SALT).remainder(count_B)
        tokens_BL = text_BKL[torch.arange(len(chosen_B), device=chosen_B.device), chosen_B].clamp(min=0)
        return ImageText(image if image.is_floating_point() else normalize(image), tokens_BL)

    def loss_share(self, heads: Heads, batch: Batch, batch_size: int) -> tuple[Tensor, dict[str, Tensor]]:
        pairs = self._pairs(heads, batch)
        loss, right = pair_losses(self.loss, pairs)
        share, part = loss.sum() / pairs.valid_B.sum(), len(batch) / batch_size
        scale, bias = heads["scale"].detach().mean(0) * part
        return share, {
            "train/loss_pairs": share.detach(),
            "train/loss_of_chance": scale.new_full((), chance_loss(self.loss, batch_size) * part),
            "train/scale": (scale / part).exp() * part,
            "train/bias": bias,
            "train/text_acc1": right.sum() / pairs.valid_B.sum(),
        }

    def scores(self, heads: Heads, batch: Batch) -> dict[str, Tensor]:
        loss_b, right_b = pair_losses(self.loss, self._pairs(heads, batch))
        sums = {"loss": loss_b.sum(), "right": right_b.sum(), "samples": batch.valid.sum()}
        if "classes" in heads:
            best_b = (unit(heads["image"]) @ heads["classes"].T).argmax(-1, keepdim=True)
            sums["zero_shot"] = ((best_b == batch["label"]).any(-1) * batch.valid).sum()
        return sums

    def metrics(self, sums: Mapping[str, Tensor]) -> dict[str, float]:
        names = {"text_acc1": "right", "loss": "loss", "zero_shot_acc1": "zero_shot"}
        return {name: float(sums[key] / sums["samples"]) for name, key in names.items() if key in sums}

    def class_names(self, classes: tuple[str, ...], templates: tuple[str, ...]) -> ClassNames | None:
        if not (self.classes or classes or templates):
            return None
        return ClassNames(classes=classes or self.classes, templates=templates or self.templates)

    def by_names(self, model: ModelConfig, names: ClassNames) -> Callable[[Model], ZeroShot]:
        text_of(model).tokenizer.check_known()
        check_names(names.classes, names.templates)
        return lambda trained: ZeroShot(trained, names.classes, names.templates).eval()

    def before_scores(self, model: Model) -> Heads:
        """Returns ``classes``, (C, D): the mean of the units of all texts that name a class, of length 1."""
        if len(self.classes) < 2:
            return {}
        return {"classes": embed_classes(model, self.classes, self.templates)}

    def _pairs(self, heads: Heads, batch: Batch) -> "Pairs":
        text_bL = self.inputs(batch).tokens
        assert text_bL is not None
        key_b = batch.key if self.equal_captions == "differ" else equal_rows_key(text_bL)
        return Pairs.of(heads["image"], heads["text"], heads["scale"], batch.valid, key_b)


class Pairs(NamedTuple):
    """The pairs of this worker (b) and of all workers (B).

    image_bD, text_bD, image_BD, text_BD: of length 1.
    log_scale, bias: scalars.
    valid_b, valid_B: 0 for padding, which is no pair of anything.
    key_b, key_B: equal for texts that count as the same.
    first: number of this worker's first pair.
    """

    image_bD: Tensor
    text_bD: Tensor
    image_BD: Tensor
    text_BD: Tensor
    log_scale: Tensor
    bias: Tensor
    valid_b: Tensor
    valid_B: Tensor
    key_b: Tensor
    key_B: Tensor
    first: int

    @classmethod
    def of(cls, image: Tensor, text: Tensor, scale: Tensor, valid: Tensor, key: Tensor) -> "Pairs":
        """Makes them of the towers' outputs on this worker; all workers call it together."""
        image, text = unit(image), unit(text)
        log_scale, bias = scale.mean(0)
        every = gather(image), gather(text), gather(valid), gather(key)
        first = first_row(len(image))
        return cls(image, text, *every[:2], log_scale, bias, valid, every[2], key, every[3], first)


def pair_losses(kind: Literal["softmax", "sigmoid"], pairs: Pairs) -> tuple[Tensor, Tensor]:
    """Returns the part of the loss of each of this worker's pairs, (b,), and whether the caption of its image
    is found among all, (b,); both are 0 for padding. The parts of all workers add up to B times the loss.

    No more than `ROWS` rows of cosines are in memory; the backward pass computes them again.
    """
    loss_of, losses, right = softmax_rows if kind == "softmax" else sigmoid_rows, [], []
    for start in range(0, len(pairs.image_bD), ROWS):
        loss_r, right_r = checkpoint(
            loss_of, pairs, slice(start, start + ROWS), use_reentrant=False, preserve_rng_state=False
        )
        losses.append(loss_r)
        right.append(right_r)
    return torch.cat(losses) * pairs.valid_b, torch.cat(right) * pairs.valid_b


def softmax_rows(pairs: Pairs, rows: slice) -> tuple[Tensor, Tensor]:
    """Returns the mean of the cross-entropies of image to captions and of caption to images."""
    match_rB = matches(pairs, rows)
    target_rB = match_rB / match_rB.sum(1, keepdim=True)
    outside_B = OUTSIDE * (1 - pairs.valid_B)
    losses, found = [], []
    for one, other in ((pairs.image_bD, pairs.text_BD), (pairs.text_bD, pairs.image_BD)):
        logits_rB = pairs.log_scale.exp() * (one[rows] @ other.T) + outside_B
        losses.append(-(target_rB * logits_rB.log_softmax(1)).sum(1))
        found.append(logits_rB)
    return (losses[0] + losses[1]) / 2, first_is_match(found[0], match_rB)


def sigmoid_rows(pairs: Pairs, rows: slice) -> tuple[Tensor, Tensor]:
    """Returns the sums of binary cross-entropies of an image and each caption."""
    match_rB = matches(pairs, rows)
    logits_rB = pairs.log_scale.exp() * (pairs.image_bD[rows] @ pairs.text_BD.T) + pairs.bias
    loss_rB = F.softplus(torch.where(match_rB > 0, -logits_rB, logits_rB))
    outside_B = OUTSIDE * (1 - pairs.valid_B)
    return (loss_rB * pairs.valid_B).sum(1), first_is_match(logits_rB + outside_B, match_rB)


def matches(pairs: Pairs, rows: slice) -> Tensor:
    """Returns 1 where an image and a caption belong together, else 0, (r, B)."""
    own_r = torch.arange(len(pairs.key_b), device=pairs.key_b.device)[rows] + pairs.first
    match_rB = (pairs.key_b[rows, None] == pairs.key_B) & (pairs.valid_B > 0)
    return (match_rB | F.one_hot(own_r, len(pairs.key_B)).bool()).to(pairs.image_BD.dtype)


def first_is_match(logits_rB: Tensor, match_rB: Tensor) -> Tensor:
    """Returns whether the largest logit of a row, the first of equal ones, is that of a match."""
    best_r = logits_rB.detach().argmax(1, keepdim=True)
    return match_rB.gather(1, best_r)[:, 0]


def chance_loss(kind: Literal["softmax", "sigmoid"], batch_size: int) -> float:
    """Returns the loss of a model all of whose cosines are equal, with the bias that is then best."""
    n = batch_size
    if kind == "softmax" or n == 1:
        return math.log(n)
    return math.log(n) + (n - 1) * math.log(n / (n - 1))


def equal_rows_key(tokens_bL: Tensor) -> Tensor:
    """Returns a number of each row of tokens, (b,) int64, that is equal for equal rows."""
    key_b = tokens_bL.new_zeros(len(tokens_bL), dtype=torch.int64)
    for column in tokens_bL.long().unbind(1):
        key_b = mix(key_b ^ column, 0)
    return key_b


def text_of(model: ModelConfig) -> TextConfig:
    """Returns how a model reads text. Raises ValueError if it reads none."""
    text = getattr(model, "text", None)
    if text is None:
        raise ValueError(f"a model of kind {model.kind!r} reads no text, as one of kind 'two_towers' does")
    return text

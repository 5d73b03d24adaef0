"""Zero-shot classification, embeddings for retrieval, and the pixel baseline, of models of images and texts.

Source: the evaluations of CLIP (Radford et al. 2021) and LiT (Zhai et al. 2022), which table 3 of Soft MoE
reports.
"""

import tomllib
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor

from moe.model import Model
from moe.overrides import AS_TRAINED, RoutingOverrides
from moe.parallel import first_row, gather, this_rank
from moe.tokenizers import canonical
from orchestrator import storage
from orchestrator.data.batch import Batch, normalize
from orchestrator.data.fields import BytesField
from orchestrator.data.text import captions_of
from orchestrator.errors import UsageError
from orchestrator.evaluation.scores import Scores, on_this_rank, refuse_not_finite
from orchestrator.tasks import ClassificationConfig
from orchestrator.tasks.base import ClassNames
from wings.image_text.contrastive import text_of
from wings.image_text.two_towers import ImageText
from wings.image_text.zero_shot import check_names, embed_classes, unit

CAPTIONS = {"text": BytesField(length=4096)}  # what `embed_pairs` reads of an image's captions


def read_class_names(path: str) -> ClassNames:
    """Reads a TOML file with ``classes``, a list of names by label, and ``templates``, texts with ``{}``.

    Raises UsageError if it cannot be read, or names or templates cannot tell classes apart.
    """
    try:
        tree = tomllib.loads(storage.read_bytes(storage.absolute(path)).decode())
        known = {"classes", "templates"}
        if unknown := sorted(tree.keys() - known):
            raise ValueError(f"it has {unknown[0]!r}, and takes classes and templates")
        if missing := sorted(known - tree.keys()):
            raise ValueError(f"it has no list of {missing[0]}")
        for name, values in tree.items():
            if not isinstance(values, list) or not all(isinstance(value, str) and value for value in values):
                raise ValueError(f"{name} must be a list of texts")
        names = ClassNames(classes=tuple(tree["classes"]), templates=tuple(tree["templates"]))
        check_names(names.classes, names.templates)
    except OSError as error:
        raise UsageError(f"no file of class names at {path}: {error}") from None
    except ValueError as error:
        raise UsageError(f"class names of {path}: {error}") from None
    return names


@torch.no_grad()
def zero_shot_scores(
    model: Model, batches: Iterable[Batch], names: ClassNames, point: RoutingOverrides = AS_TRAINED
) -> dict[str, Scores]:
    """Returns the scores of a classifier of all templates, under ``all``, and of each template alone. All
    ranks call it together, and have the same scores.
    """
    sets = {"all": names.templates} | {template: (template,) for template in names.templates}
    weights = {name: embed_classes(model, names.classes, templates) for name, templates in sets.items()}
    found = {name: Scores(ClassificationConfig()) for name in sets}
    for batch in batches:
        here = on_this_rank(point, model, len(batch))
        image = unit(model(normalize(batch["image"]), batch.valid, routing_overrides=here).heads["image"])
        for name, scores in found.items():
            scores.add({"logits": image @ weights[name].T}, batch)
    return {name: scores.of_all_ranks() for name, scores in found.items()}


class EmbeddedPairs(NamedTuple):
    """Images (I, D) and captions (T, D) of a split, of length 1, and of each caption the numbers of its image
    and of its words, (T,).

    captions: their texts. keys: the place of each image in the split.
    """

    image_ID: Tensor
    text_TD: Tensor
    image_T: Tensor
    words_T: Tensor
    captions: list[str]
    keys: list[int]


@torch.no_grad()
def embed_pairs(model: Model, batches: Iterable[Batch]) -> EmbeddedPairs:
    """Embeds every image that can be decoded, and all its captions, which batches have as `CAPTIONS`. All
    ranks call it together, and have all pairs. Raises UsageError if there is none, or one is not finite.
    """
    text = text_of(model.config)
    images, texts, owners, keys, captions = [], [], [], [], []
    for batch in batches:
        image = gather(unit(model(normalize(batch["image"]), batch.valid).heads["image"]))
        rows = (gather(batch.valid) > 0).nonzero()[:, 0]
        stored = gather(batch["text"])[rows].cpu().numpy()
        own = [captions_of(row.tobytes().rstrip(b"\0")) for row in stored]
        owners += [len(keys) + i for i, some in enumerate(own) for _ in some]
        found = [caption for some in own for caption in some]
        tokens = text.tokenizer.encode(found, text.length).to(rows.device)
        images.append(image[rows].cpu())
        texts += [_embedded(model, part, len(batch)).cpu() for part in tokens.split(len(image))]
        captions += found
        keys += gather(batch.key)[rows].tolist()
    if not keys:
        raise UsageError("none of the images of the split can be decoded")
    numbers = {words: number for number, words in enumerate(dict.fromkeys(map(canonical, captions)))}
    words = [numbers[canonical(caption)] for caption in captions]
    image_ID, text_TD, image_T = torch.cat(images), torch.cat(texts), torch.tensor(owners)
    lost_I = ~image_ID.isfinite().all(1)
    lost_I[image_T[~text_TD.isfinite().all(1)]] = True
    refuse_not_finite(int(lost_I.sum()), len(keys))
    return EmbeddedPairs(image_ID, text_TD, image_T, torch.tensor(words), captions, keys)


def _embedded(model: Model, tokens_TL: Tensor, share: int) -> Tensor:
    """Returns the texts' embeddings, of length 1, of which each rank computes its share of so many."""
    count, mine = len(tokens_TL), slice(first_row(share), first_row(share) + share)
    padding = share * this_rank()[1] - count
    tokens = F.pad(tokens_TL, (0, 0, 0, padding))[mine]
    valid = F.pad(torch.ones(count, device=tokens.device), (0, padding))[mine]
    return gather(unit(model(ImageText(None, tokens), valid).heads["text"]))[:count]


def nearest_pixels(train: Iterable[Batch], test: Iterable[Batch]) -> float:
    """Returns the accuracy of the label of the nearest training image by its pixels: what it takes to
    recognise pictures that look like those of training, without learning anything.
    """
    known, labels = _pixels(train)
    right = total = 0
    for rows, truth in _each(test):
        # The distance without the part that is the same for all training images.
        distance = (known**2).sum(1) - 2 * rows @ known.T
        right += int((labels[distance.argmin(1)] == truth).sum())
        total += len(rows)
    return right / total


def _each(batches: Iterable[Batch]) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int64]]]:
    for batch in batches:
        valid = batch.valid > 0
        image = normalize(batch["image"][valid]).flatten(1)
        yield image.cpu().numpy(), batch["label"][valid][:, 0].cpu().numpy()


def _pixels(batches: Iterable[Batch]) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    images, labels = zip(*_each(batches), strict=True)
    return np.concatenate(images), np.concatenate(labels)

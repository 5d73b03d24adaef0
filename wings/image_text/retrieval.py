"""Retrieval: the rank of an image's captions among all captions, and of a caption's image among all images.

Source: the recalls of CLIP (Radford et al. 2021, table 13) and LiT, as big_vision and open_clip compute them:
an image counts as found if at least one of its captions is. Wrong answers of an equal score count as ahead,
so that a model that gives all the same score finds nothing; other libraries let the order of the data decide.

Dimensions: I images, T texts, D the size of an embedding, Q queries.
"""

import math
from collections import Counter
from typing import NamedTuple

import torch
from torch import Tensor

ROWS = 1024  # of the matrix of scores that are in memory at a time


class Found(NamedTuple):
    """The rank, from 1, of the best right answer to each query, and how many answers are right: (Q,) each."""

    ranks_Q: Tensor
    right_Q: Tensor


def image_ranks(image_ID: Tensor, text_TD: Tensor, image_T: Tensor, words_T: Tensor | None = None) -> Found:
    """Looks for the captions of each image that has one, in the order of images.

    `image_T` is the number of each caption's image. Captions with equal numbers in `words_T` are the same,
    and right for the images of all of them; by default each is another.
    """
    words_T = torch.arange(len(image_T)) if words_T is None else words_T
    found = []
    for rows in image_T.unique().split(ROWS):
        has_QW = torch.zeros(len(rows), int(words_T.max()) + 1, dtype=torch.bool)
        query, text = (rows[:, None] == image_T).nonzero().unbind(1)
        has_QW[query, words_T[text]] = True
        found.append(_found(image_ID[rows] @ text_TD.T, has_QW[:, words_T]))
    return Found(*(torch.cat(each) for each in zip(*found, strict=True)))


def text_ranks(image_ID: Tensor, text_TD: Tensor, image_T: Tensor, words_T: Tensor | None = None) -> Found:
    """Looks for the image of each caption among all images. Arguments are those of `image_ranks`."""
    words_T = torch.arange(len(image_T)) if words_T is None else words_T
    found = []
    for text_QD, words_Q in zip(text_TD.split(ROWS), words_T.split(ROWS), strict=True):
        right_QI = torch.zeros(len(words_Q), len(image_ID), dtype=torch.bool)
        query, text = (words_Q[:, None] == words_T).nonzero().unbind(1)
        right_QI[query, image_T[text]] = True
        found.append(_found(text_QD @ image_ID.T, right_QI))
    return Found(*(torch.cat(each) for each in zip(*found, strict=True)))


def _found(scores: Tensor, right: Tensor) -> Found:
    """Returns ranks by (Q, candidates) scores, of which those that are `right` are."""
    right = right.to(scores.device)
    best = scores.masked_fill(~right, -torch.inf).amax(1, keepdim=True)
    return Found(1 + ((scores >= best) & ~right).sum(1), right.sum(1))


def chance_recall(right_Q: Tensor, candidates: int, k: int) -> float:
    """Returns the recall at k of an order by chance, of queries with so many right answers each."""
    known, k = Counter(right_Q.tolist()), min(k, candidates)
    missed = {right: math.comb(candidates - right, k) / math.comb(candidates, k) for right in known}
    return 1 - sum(count * missed[right] for right, count in known.items()) / known.total()


def recalls(ranks_Q: Tensor, ks: tuple[int, ...] = (1, 5, 10)) -> dict[str, float]:
    """Returns the fraction of queries with a right answer among the first k as ``r<k>``, and the median rank
    as ``median_rank``.
    """
    found = {f"r{k}": float((ranks_Q <= k).double().mean()) for k in ks}
    return found | {"median_rank": float(ranks_Q.double().quantile(0.5).floor())}

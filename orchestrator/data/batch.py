"""The batches that a model trains on, and the parts that they are joined from."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Traffic(NamedTuple):
    """Requests to S3 for images, and the bytes that they fetch."""

    requests: int = 0
    bytes: int = 0


class SampleLocation(NamedTuple):
    """The place of a sample in training: its epoch, its shard's number, and its row there."""

    epoch: int
    shard: int
    row: int


class DecodeError(NamedTuple):
    """An image that could not be decoded, and why."""

    shard: str
    row: int
    key: str
    reason: str


class Batch(NamedTuple):
    """B images of a step, with what training needs to know about them.

    image: (B, 3, H, W) uint8, channels last in memory.
    label: (B,) int64, the first label of each image.
    valid: (B,) float32, 0 for slots that evaluation ignores: padding, and images that cannot be decoded.
    key: (B,) int64, the slot's number in the run (or in the validation set), the same for any number of
        workers; router noise depends on it.
    sample: (B,) int64, the `index.sample_ids` of each image's key.
    mix: (B, 5) float32, how the image is mixed with its neighbour, as `augment.draw` returns it.
    others: (B, K) int64, the further labels of each image, -1 where it has fewer. K is 0 for data sets whose
        images have one label each.
    bad: images that could not be decoded while this batch was read.
    traffic: what was fetched from S3 for it.
    """

    image: Tensor
    label: Tensor
    valid: Tensor
    key: Tensor
    sample: Tensor
    mix: Tensor
    others: Tensor
    bad: tuple[DecodeError, ...] = ()
    traffic: Traffic = Traffic()

    def tensors(self) -> tuple[Tensor, ...]:
        return self[:-2]

    def label_sets(self) -> Tensor:
        """Returns (B, 1 + K) int64: all labels of each image, -1 where it has fewer."""
        return torch.cat([self.label.unsqueeze(1), self.others], 1)

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Returns the batch with `function` applied to every tensor."""
        return Batch(*map(function, self.tensors()), bad=self.bad, traffic=self.traffic)


class PartialBatch(NamedTuple):
    """n slots of a worker's share of a batch, as numpy arrays; image is (n, H, W, 3)."""

    image: NDArray[np.uint8]
    label: NDArray[np.int64]
    valid: NDArray[np.float32]
    key: NDArray[np.int64]
    sample: NDArray[np.int64]
    mix: NDArray[np.float32]
    others: NDArray[np.int64]
    bad: list[DecodeError]
    traffic: Traffic


def join_batches(parts: Sequence[PartialBatch]) -> Batch:
    """Concatenates the parts of a batch in their order."""
    *arrays, bad, traffic = zip(*parts, strict=True)
    image, *fields = (torch.from_numpy(np.concatenate(array)) for array in arrays)
    return Batch(
        image.permute(0, 3, 1, 2),
        *fields,
        bad=tuple(error for errors in bad for error in errors),
        traffic=Traffic(*map(sum, zip(*traffic, strict=True))),
    )

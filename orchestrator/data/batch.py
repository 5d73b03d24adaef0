"""The batches that a model trains on, and the parts that they are joined from."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class Traffic(NamedTuple):
    """Requests to an object storage for images, and the bytes that they fetch."""

    requests: int = 0
    bytes: int = 0


class SampleLocation(NamedTuple):
    """The place of a sample in training: its epoch, its shard's number, its row there, and its view."""

    epoch: int
    shard: int
    row: int
    view: int


class DecodeError(NamedTuple):
    """An image that could not be decoded, and why."""

    shard: str
    row: int
    key: str
    reason: str


@dataclass(frozen=True, kw_only=True, eq=False)
class Batch:
    """B samples of a step, with what training needs to know about them.

    fields: name -> tensor with a row per sample: `image` (B, 3, H, W) uint8, channels last in memory; `label`
        (B, M) int64, -1 where an image has fewer labels than another; `mix` (B, 5) float32, how the image is
        mixed with its neighbour, as `augment.base.draw` returns it, where a run mixes images.
    valid: (B,) float32, 0 for slots that evaluation ignores: padding, and images that cannot be decoded.
    key: (B,) int64, the slot's number in the run (or in the validation set), the same for any number of
        workers; router noise depends on it.
    sample: (B,) int64, the `index.sample_ids` of each sample's key.
    bad: images that could not be decoded while this batch was read.
    traffic: what was fetched from an object storage for it.
    """

    fields: Mapping[str, Tensor]
    valid: Tensor
    key: Tensor
    sample: Tensor
    bad: tuple[DecodeError, ...] = ()
    traffic: Traffic = Traffic()

    def __getitem__(self, name: str) -> Tensor:
        return self.fields[name]

    def __len__(self) -> int:
        return len(self.key)

    def tensors(self) -> list[Tensor]:
        return [*self.fields.values(), self.valid, self.key, self.sample]

    def map(self, function: Callable[[Tensor], Tensor]) -> "Batch":
        """Returns the batch with `function` applied to every tensor."""
        fields = {name: function(tensor) for name, tensor in self.fields.items()}
        valid, key, sample = map(function, (self.valid, self.key, self.sample))
        return replace(self, fields=fields, valid=valid, key=key, sample=sample)

    def split(self, samples: int) -> list["Batch"]:
        """Returns the batch in parts of so many samples, without `bad` and `traffic`."""
        alone, starts = replace(self, bad=(), traffic=Traffic()), range(0, len(self), samples)
        return [alone.map(itemgetter(slice(first, first + samples))) for first in starts]


def concatenated(batches: Sequence[Batch]) -> Batch:
    """Returns the samples of batches in their order as one batch."""

    def cat(tensors: Iterable[Tensor]) -> Tensor:
        return torch.cat([*tensors])

    return Batch(
        fields={name: cat(batch[name] for batch in batches) for name in batches[0].fields},
        valid=cat(batch.valid for batch in batches),
        key=cat(batch.key for batch in batches),
        sample=cat(batch.sample for batch in batches),
        bad=tuple(error for batch in batches for error in batch.bad),
        traffic=Traffic(*map(sum, zip(*(batch.traffic for batch in batches), strict=True))),
    )


class PartialBatch(NamedTuple):
    """n slots of a worker's share of a batch, as numpy arrays; an image is (n, H, W, 3)."""

    fields: dict[str, NDArray[Any]]
    valid: NDArray[np.float32]
    key: NDArray[np.int64]
    sample: NDArray[np.int64]
    bad: list[DecodeError]
    traffic: Traffic


def join_batches(parts: Sequence[PartialBatch]) -> Batch:
    """Concatenates the parts of a batch in their order."""

    def joined(arrays: Iterable[NDArray[Any]]) -> Tensor:
        # Concatenated as arrays, because torch warns of parts that another process lent, which are read-only.
        tensor = torch.from_numpy(np.concatenate([*arrays]))
        return tensor.permute(0, 3, 1, 2) if tensor.ndim == 4 else tensor

    return Batch(
        fields={name: joined(part.fields[name] for part in parts) for name in parts[0].fields},
        valid=joined(part.valid for part in parts),
        key=joined(part.key for part in parts),
        sample=joined(part.sample for part in parts),
        bad=tuple(error for part in parts for error in part.bad),
        traffic=Traffic(*map(sum, zip(*(part.traffic for part in parts), strict=True))),
    )


def normalize(images: Tensor) -> Tensor:
    """Maps uint8 to float in -1..1, as the papers' code does."""
    return images.float() / 127.5 - 1

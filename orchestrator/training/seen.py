"""What a run has read: a fingerprint of its samples in order, and the images that could not be decoded."""

import csv
import io
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor

from moe.noise import mix
from moe.parallel import sum_over_ranks
from orchestrator import storage
from orchestrator.data.batch import Batch, DecodeError
from orchestrator.errors import UsageError

BAD_IMAGES = "bad_images.csv"  # in the run's directory, and among its artifacts
COUNTED_FROM = 1000  # images: of few, one bad is many
SHOWN = 20


class Seen:
    """Of this worker's batches; `gather` has that of all workers.

    The fingerprint is a sum over samples, of a hash of each and its place in the run, so it does not depend
    on how they are shared out: runs that have the same after a step have read the same samples in the same
    places.
    """

    def __init__(self, *, fingerprint: int = 0, bad: list[DecodeError]) -> None:
        """With what all workers had read before."""
        first = not dist.is_initialized() or dist.get_rank() == 0
        self._sum = torch.tensor(fingerprint if first else 0)
        self._bad = {DecodeError(*one): None for one in bad}

    def training(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches."""
        for batch in self.validation(batches):
            self._sum = self._sum.to(batch.key.device) + _hashes(batch).sum()
            yield batch

    def validation(self, batches: Iterator[Batch]) -> Iterator[Batch]:
        """The same batches, of which only what is bad counts."""
        for batch in batches:
            self._bad |= dict.fromkeys(batch.bad)
            yield batch

    def gather(self) -> tuple[int, list[DecodeError]]:
        """The fingerprint, and what is bad, each once; to be called by all workers together."""
        if dist.is_initialized() and dist.get_world_size() > 1:
            everyone: list[list[DecodeError]] = [[]] * dist.get_world_size()
            dist.all_gather_object(everyone, list(self._bad))
            self._bad = {bad: None for one in everyone for bad in one}
        return int(sum_over_ranks(self._sum.clone())), sorted(self._bad)


def shown(fingerprint: int) -> float:
    """As a metric: the 48 bits that every store holds exactly."""
    return float(fingerprint % 2**48)


def check_bad(bad: list[DecodeError], *, read: int, epoch: int, most: float) -> None:
    """`read`: images so far; `epoch`: images of one.

    Raises:
        UsageError: if more than the part `most` of them is bad.
    """
    base = max(read, min(epoch, COUNTED_FROM))
    if len(bad) > most * base:
        lines = "".join(f"\n  {one.shard} row {one.row}, {one.key}: {one.reason}" for one in bad[:SHOWN])
        more = f"\n  .. and {len(bad) - SHOWN} more" if len(bad) > SHOWN else ""
        raise UsageError(
            f"{len(bad)} of {base} images cannot be decoded, more than data.max_bad_frac={most:g}:"
            f"{lines}{more}\n{BAD_IMAGES} in the run's directory has all; mend them, or raise"
            " data.max_bad_frac"
        )


def save_bad(directory: str, bad: list[DecodeError]) -> None:
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(DecodeError._fields)
    writer.writerows(bad)
    storage.write_bytes(storage.join(directory, BAD_IMAGES), text.getvalue().encode())


def _hashes(batch: Batch) -> Tensor:
    return mix(batch.sample, batch.key)

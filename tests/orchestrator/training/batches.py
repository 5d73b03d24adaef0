"""Batches that are made from tensors."""

from dataclasses import replace

import torch
from torch import Tensor

from orchestrator.data.batch import Batch


def make_batch(image: Tensor, label: Tensor, *, valid: int | None = None) -> Batch:
    """Returns a batch of unmixed images of one label each, the first `valid` of which are valid."""
    place = torch.arange(len(label))
    is_valid = (place < (len(label) if valid is None else valid)).float()
    return Batch(fields={"image": image, "label": label[:, None]}, valid=is_valid, key=place, sample=place)


def with_fields(batch: Batch, **fields: Tensor) -> Batch:
    return replace(batch, fields={**batch.fields, **fields})

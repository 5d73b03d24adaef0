"""Images of any data set for a model that is trained: in the order of their shards, without augmentation."""

from collections.abc import Iterator
from dataclasses import replace

import torch

from orchestrator.config import DataConfig, RunConfig, ScaleConfig
from orchestrator.data.batch import Batch
from orchestrator.data.loader import in_process, prefetched
from orchestrator.data.stream import Split, Stream, in_order
from orchestrator.errors import UsageError
from orchestrator.evaluation.classes import classes_of
from orchestrator.evaluation.trained import Trained


def evaluation_run(run: RunConfig, *, path: str, batch_size: int) -> RunConfig:
    """`run` on other images, in one process.

    Raises:
        UsageError: if the batch does not hold whole routing groups.
    """
    was = run.data
    try:
        data = DataConfig(path=path, batch_size=batch_size, eval_crop=was.eval_crop, cache_gb=was.cache_gb)
        return replace(run, data=data, scale=ScaleConfig(), train=replace(run.train, microbatch=None))
    except ValueError as error:
        raise UsageError(f"--batch-size {batch_size}: {error}") from None


def batches(stream: Stream, device: torch.device) -> Iterator[Batch]:
    """All images of an `in_order` stream, once; the last batch is filled up with empty slots."""
    return prefetched(in_process(stream, stream.steps()), device)


def images_of(
    model: Trained, *, path: str, split: Split, batch_size: int, device: torch.device
) -> Iterator[Batch]:
    """Every image of a split once, as the model sees it in evaluation, with its labels."""
    found = batches(in_order(evaluation_run(model.run, path=path, batch_size=batch_size), split), device)
    labels = classes_of(model, path).labels
    if labels is None:
        return found
    label_of = torch.tensor(labels, device=device)
    return (batch._replace(label=label_of[batch.label]) for batch in found)


def device() -> torch.device:
    """What evaluation runs on: a GPU where there is one."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")

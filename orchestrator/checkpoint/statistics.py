"""Running statistics for averaged weights, which no step of training has computed.

They come from the first batches of the run. Where the data set is read anew, a log line says which it was.
"""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from moe.batch_norm import renew_statistics
from orchestrator.config import RunConfig
from orchestrator.data.stream import Stream, in_process, open_stream, prefetched
from orchestrator.errors import UsageError

log = logging.getLogger(__name__)
STEPS = 20  # of training, whose batches statistics are computed from


def inputs_for_statistics(stream: Stream, device: torch.device) -> Iterator[tuple[Any, Tensor]]:
    """Yields the inputs of the first batches of a run, and which of them are valid."""
    for batch in prefetched(in_process(stream, range(STEPS)), device):
        yield stream.run.task.inputs(batch), batch.valid


def with_own_statistics(tensors: dict[str, Tensor], run: RunConfig) -> dict[str, Tensor]:
    """Returns the tensors of an average of models of `run`, with running statistics of its own if the model
    has any. One process computes them from whole batches of training images.

    Raises:
        UsageError: if the training images are gone.
    """
    if not run.model.whole_batch:
        return tensors
    model = run.model.build(seed=None)
    model.load_state_dict(tensors)
    model.freeze(*run.train.freeze)  # whose statistics are their own
    try:
        stream = open_stream(run, "train", 0, 1)
        renew_statistics(model, inputs_for_statistics(stream, torch.device("cpu")))
        log.info("running statistics of the average: from %d batches of %s", STEPS, run.data.path)
    except (UsageError, OSError) as error:
        raise UsageError(
            f"averaged weights of a model of kind {run.model.kind!r} need running statistics of their own,"
            f" from the training images of {run.name}: {error}"
        ) from None
    return model.state_dict()

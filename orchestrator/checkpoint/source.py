"""Where weights come from: a checkpoint or an exported file, read alike."""

import warnings
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader
from torch.distributed.checkpoint.api import CheckpointException

from orchestrator import storage
from orchestrator.checkpoint.find import agreed, located
from orchestrator.checkpoint.manifest import Manifest
from orchestrator.checkpoint.single_file import SUFFIX, SingleFileReader, read_header
from orchestrator.checkpoint.state import first_failure
from orchestrator.checkpoint.tensors import Reader

warnings.filterwarnings("ignore", "torch.distributed is disabled")  # one process is meant


class Source(NamedTuple):
    """`location`: the checkpoint's folder, or the file; `step`: of its run, None if the file does not say."""

    location: str
    step: int | None
    reader: Reader


def open_source(location: str, group: dist.ProcessGroup | None = None) -> Source:
    """Raises as `located` and `read_header` do, on all workers of `group`."""
    location = storage.absolute(location)
    if location.endswith(SUFFIX):
        header = agreed(lambda: read_header(location), group)
        step = header.metadata.get("step", "")  # of somebody else's file it may be anything
        reader = SingleFileReader(location, header)
        return Source(location, int(step) if step.isdecimal() else None, reader)
    folder, manifest = located(location, group)
    return Source(folder, manifest.step, weights_reader(folder, manifest))


def weights_reader(folder: str, manifest: Manifest) -> Reader:
    return Reader(folder, [name for name in manifest.files if name.startswith("weights")])


def tensors_in(reader: Reader) -> dict[str, Tensor]:
    """Every tensor by its name in the model, on the meta device: shape and dtype without numbers."""
    saved: Any = reader.read_metadata().state_dict_metadata
    return {
        name.removeprefix("weights."): torch.empty(tensor.size, dtype=tensor.properties.dtype, device="meta")
        for name, tensor in saved.items()
    }


def read(reader: Reader, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None = None) -> None:
    """Fills tensors, sharded or not, in place. Raises OSError."""
    wanted = {f"weights.{name}": tensor for name, tensor in tensors.items()}
    try:
        state_dict_loader.load(wanted, storage_reader=reader, process_group=group, no_dist=group is None)
    except CheckpointException as error:  # it is no Exception, and would pass by those who wait for one
        worker, cause = first_failure(error)
        raise OSError(f"reading {reader.folder} failed: worker {worker}: {cause!r}") from error

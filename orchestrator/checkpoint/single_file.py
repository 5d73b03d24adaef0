"""All weights in one safetensors file, named as in `ViT.state_dict()`, with metadata in its header.

Format: https://github.com/huggingface/safetensors#format. The library knows no S3, and writes files that only
their owner may read: so the bytes are moved here.
"""

import json
import os
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from moe.load import DTYPES
from orchestrator import storage
from orchestrator.checkpoint.parts import Place
from orchestrator.checkpoint.tensors import Reader
from orchestrator.errors import UsageError

SUFFIX = ".safetensors"


@dataclass(frozen=True, kw_only=True)
class Header:
    """Attributes:
    metadata: what was written beside the tensors.
    tensors: name -> dtype, shape, first byte and end after `begin`.
    begin: where the tensors begin in the file.
    bytes: of the file.
    """

    metadata: Mapping[str, str]
    tensors: Mapping[str, Mapping[str, Any]]
    begin: int
    bytes: int


class SingleFileReader(Reader):
    """Lets DCP read the file as it reads a checkpoint's: every rank what it needs."""

    def __init__(self, location: str, header: Header) -> None:
        folder, _, name = location.rpartition("/")
        super().__init__(folder, [name])
        self.header = header

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, Place] = {}
        for name, entry in self.header.tensors.items():
            shape, (first, end) = torch.Size(entry["shape"]), entry["data_offsets"]
            offset, fqn = torch.Size([0] * len(shape)), f"weights.{name}"
            properties = TensorProperties(dtype=DTYPES[entry["dtype"]])
            tensors[fqn] = TensorStorageMetadata(properties, shape, [ChunkStorageMetadata(offset, shape)])
            place = Place(tuple(shape), self.files[0], self.header.begin + first, end - first)
            places[MetadataIndex(fqn, offset)] = place
        return Metadata(tensors, storage_data=places)


def read_header(location: str) -> Header:
    """Raises UsageError if it is no safetensors file, not all of one, or holds an unknown dtype;
    FileNotFoundError.
    """
    with storage.open_to_read(location) as file:
        size = file.size()
        length = int.from_bytes(file.read_at(8, 0), "little")
        content = file.read_at(length, 8) if 8 + length <= size else b""
    try:
        tensors = json.loads(content)
        metadata = tensors.pop("__metadata__", {})
        end = max((entry["data_offsets"][1] for entry in tensors.values()), default=0)
        unknown = {entry["dtype"] for entry in tensors.values()} - DTYPES.keys()
    except (ValueError, TypeError, KeyError, AttributeError):
        raise UsageError(f"{location} is no safetensors file") from None
    if 8 + length + end != size:
        raise UsageError(f"{location} has {size} bytes, its header says {8 + length + end}: it is not whole")
    if unknown:
        raise UsageError(f"{location} holds {', '.join(sorted(unknown))}; known: {', '.join(DTYPES)}")
    return Header(metadata=metadata, tensors=tensors, begin=8 + length, bytes=size)


def write(path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> None:
    """Whole or not at all, without a copy of the tensors. Raises OSError."""
    write_each(path, tensors, metadata, tensors.__getitem__)


def write_each(
    path: str, tensors: Mapping[str, Tensor], metadata: Mapping[str, str], numbers: Callable[[str], Tensor]
) -> None:
    """As `write`, with one tensor in memory at a time: `tensors` say dtype and shape, and may be on the meta
    device; `numbers` is asked for each of them.
    """
    codes = {dtype: code for code, dtype in DTYPES.items()}
    # large ones first: each then begins at a multiple of its own size
    names = sorted(tensors, key=lambda name: -tensors[name].itemsize)
    header: dict[str, Any] = {"__metadata__": metadata}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.nbytes
        offsets = [begin, end]
        header[name] = {"dtype": codes[tensor.dtype], "shape": [*tensor.shape], "data_offsets": offsets}
    content = json.dumps(header).encode()
    content += b" " * (-len(content) % 8)
    temporary = f"{path}.{uuid.uuid4().hex}.tmp"
    storage.make_folder(os.path.dirname(path))
    try:
        with storage.open_to_write(temporary) as stream:
            stream.write(len(content).to_bytes(8, "little") + content)
            for name in names:
                stream.write(numbers(name).contiguous().reshape(-1).view(torch.uint8).numpy())
        storage.flush(temporary)
        os.replace(temporary, path)
    finally:
        Path(temporary).unlink(missing_ok=True)

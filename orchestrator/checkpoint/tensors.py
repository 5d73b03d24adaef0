"""Tensors to files and back, for DCP: it plans which rank moves which part, this file moves the bytes.

Names begin with ``weights.`` or ``optimizer.``; each kind has its own files, so that one can go while the
other stays. A rank hashes what it writes while it writes it.
"""

import dataclasses
import hashlib
import json
import os
import uuid
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from orchestrator import storage
from orchestrator.checkpoint.manifest import CHUNK, File
from orchestrator.checkpoint.parts import Place, Window, bytes_of, part_of

KINDS = ("weights", "optimizer")
T = TypeVar("T")


class Written(NamedTuple):
    place: Place
    file: File  # all of it


class Writer(StorageWriter):
    """Every rank writes one file of each kind; then the first one writes the indices and commits.

    Args:
        temporary: token of this attempt -> the folder that it writes to.
        commit: (that folder, its files): makes them a checkpoint; on the first rank.
    """

    def __init__(
        self, temporary: Callable[[str], str], commit: Callable[[str, dict[str, File]], None]
    ) -> None:
        self.temporary = temporary
        self.commit = commit
        self.rank = 0
        self.token: str | None = None  # of the files of this attempt, which never writes over others

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.rank = kwargs["rank"]

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        self.token = uuid.uuid4().hex[:8]
        storage.make_folder(self.temporary(self.token))
        return [dataclasses.replace(plan, storage_data=self.token) for plan in plans]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        results: list[WriteResult] = []
        token: str = plan.storage_data
        for kind in KINDS:
            items = [item for item in plan.items if item.index.fqn.startswith(f"{kind}.")]
            if items:
                results += self._write(f"{kind}-{self.rank:05d}.{token}.bin", token, items, planner)
        return _done(results)

    def _write(
        self, name: str, token: str, items: list[WriteItem], planner: SavePlanner
    ) -> list[WriteResult]:
        places, digest, begin = [], hashlib.sha256(), 0
        with storage.open_to_write(storage.join(self.temporary(token), name)) as stream:
            for item in items:
                tensor: Tensor = planner.resolve_data(item)  # pyright: ignore[reportAssignmentType]
                content = bytes_of(tensor.detach().cpu().contiguous())
                for i in range(0, len(content), CHUNK):
                    stream.write(content[i : i + CHUNK])
                    digest.update(content[i : i + CHUNK])
                places.append(Place(tuple(tensor.shape), name, begin, len(content)))
                begin += len(content)
        file = File(sha256=digest.hexdigest(), bytes=begin)
        return [
            WriteResult(item.index, place.bytes, Written(place, file))
            for item, place in zip(items, places, strict=True)
        ]

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        assert self.token
        folder, files = self.temporary(self.token), dict[str, File]()
        for kind in KINDS:
            mine = [r for rank in results for r in rank if r.index.fqn.startswith(f"{kind}.")]
            if mine:
                files |= {r.storage_data.place.file: r.storage_data.file for r in mine}
                name, content = f"{kind}.{self.token}.json", _index(metadata, mine)
                with storage.open_to_write(storage.join(folder, name)) as stream:
                    stream.write(content)
                files[name] = File(sha256=hashlib.sha256(content).hexdigest(), bytes=len(content))
        self.commit(folder, files)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def storage_meta(self) -> StorageMeta | None:
        return None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


class Reader(StorageReader):
    """Reads what `files` (of a manifest) hold."""

    def __init__(self, folder: str, files: Iterable[str]) -> None:
        self.folder = folder
        self.files = list(files)

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        # no `kwargs`: DCP would take it for an offer to go on without the other ranks when reading fails
        tensors: dict[str, Any] = {}
        places: dict[MetadataIndex, Place] = {}
        for name in (name for name in self.files if name.endswith(".json")):
            for fqn, entry in json.loads(storage.read_bytes(storage.join(self.folder, name))).items():
                chunks = [
                    (torch.Size(offset), Place(tuple(shape), *where))
                    for offset, shape, *where in entry["parts"]
                ]
                tensors[fqn] = TensorStorageMetadata(
                    TensorProperties(dtype=getattr(torch, entry["dtype"])),
                    torch.Size(entry["shape"]),
                    [ChunkStorageMetadata(offset, torch.Size(place.shape)) for offset, place in chunks],
                )
                places |= {MetadataIndex(fqn, offset): place for offset, place in chunks}
        return Metadata(tensors, storage_data=places)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self.metadata = metadata

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        by_file: dict[str, list[tuple[Place, ReadItem]]] = {}
        for item in plan.items:
            place: Place = self.metadata.storage_data[item.storage_index]
            by_file.setdefault(place.file, []).append((place, item))
        for name, items in by_file.items():
            with storage.open_to_read(storage.join(self.folder, name)) as file:
                window = Window(file)
                for place, item in sorted(items, key=lambda pair: pair[0].begin):
                    saved: Any = self.metadata.state_dict_metadata[item.storage_index.fqn]
                    part = part_of(window, place, saved.properties.dtype, item)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(part)
                    planner.commit_tensor(item, target)
        return _done(None)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True


def _index(metadata: Metadata, results: Iterable[WriteResult]) -> bytes:
    """name -> dtype, shape, and of every part: offset in the tensor, then its `Place`."""
    entries: dict[str, Any] = {}
    for result in results:
        name = result.index.fqn
        if name not in entries:
            whole: Any = metadata.state_dict_metadata[name]
            dtype = str(whole.properties.dtype).removeprefix("torch.")
            entries[name] = {"dtype": dtype, "shape": list(whole.size), "parts": []}
        entries[name]["parts"].append([list(result.index.offset or ()), *result.storage_data.place])
    return json.dumps(entries).encode()


def _done(value: T) -> Future[T]:
    future: Future[T] = Future()
    future.set_result(value)
    return future

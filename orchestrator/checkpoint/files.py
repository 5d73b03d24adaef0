"""Writing a run's tensors to safetensors files, and reading them in any layout.

torch.distributed.checkpoint plans which rank moves which part of a tensor, so any layout loads any other. Its
Hugging Face storage writes and reads the files; it knows local folders only, so files go to an object
storage and come from there through a temporary folder of the node. Nothing is pickled.
"""

import json
import os
import tempfile
import warnings
from collections import ChainMap
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.futures import Future

from moe.layout import local_part
from orchestrator import storage
from orchestrator.checkpoint.manifest import (
    CheckpointManifest,
    DamagedError,
    File,
    check_files,
    hashed,
    is_whole,
    on_every_rank,
    on_first_rank,
    rank_in,
    verify_checkpoint,
)
from orchestrator.errors import UsageError

SUFFIX = ".safetensors"
OPTIMIZER = "optimizer."  # begins the names of the optimiser's tensors; weights are named as in the model
EMA = "ema"  # the average of a parameter, in the state of its optimiser
# A file is built in memory, so a worker's share is spread over about MOST_FILES files of FILE_BYTES or more.
FILE_BYTES = 16 << 20
MOST_FILES = 16
THREADS = 4  # that read files: a hash takes longer than reading and copying
FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
# A single process without a process group is intended.
warnings.filterwarnings("ignore", "torch.distributed is disabled")


def state_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Returns references to all tensors that training continues from. An optimiser without state gets the
    state before its first update.
    """
    # The weights come first, because this shards again what an evaluation left gathered.
    weights: dict[str, Any] = get_model_state_dict(model)
    is_new = not optimizer.state
    moments: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=FLAT)
    if is_new:
        # torch made the state by an update without gradients, which counted as a step and decayed weights.
        for state in optimizer.state.values():
            for value in state.values():
                value.zero_()
    return weights | {f"{OPTIMIZER}{n}": value for n, value in moments.items() if isinstance(value, Tensor)}


def write(
    folder: str,
    token: str,
    state: Mapping[str, Tensor],
    parts: Mapping[str, Tensor],
    group: dist.ProcessGroup | None,
) -> dict[str, File]:
    """Writes this rank's share into `folder`, and returns the files of all ranks:
    ``weights-<rank>-<number>.<token>.safetensors`` and ``optimizer-..``.

    token: a name of this attempt to save, so that files of two attempts are never mixed.
    state: tensors, which may be spread over ranks.
    parts: this rank's parts of the tensors, or copies that do not change while training continues.

    Raises:
        CheckpointException, OSError: if writing failed on any rank.
    """
    rank = rank_in(group)
    number_of = _file_numbers(state, dist.get_world_size(group) if group else 1)
    weights = {number for name, number in number_of.items() if not name.startswith(OPTIMIZER)}

    def move(source: Path) -> dict[str, File]:
        """Gives this rank's files their final names in `folder`."""
        files = {}
        for path in sorted(source.iterdir()) if source.exists() else []:
            # torch's name is shard-<rank>-model-<number>-of-<count>.safetensors.
            number = int(path.name.split("-")[3])
            kind = "weights" if number in weights else "optimizer"
            name = f"{kind}-{rank:05d}-{number:03d}.{token}{SUFFIX}"
            sort_metadata(path)
            files[name] = hashed(str(path))
            if storage.is_local(folder):
                storage.flush(str(path))
                path.rename(Path(storage.absolute(folder), name))
            else:
                storage.upload(str(path), storage.join(folder, name))
                path.unlink()
        with suppress(FileNotFoundError):
            source.rmdir()
        return files

    storage.make_folder(folder)
    with _on_this_node(folder) as local:
        mine = Path(local, f"rank-{rank:05d}")
        writer = HuggingFaceStorageWriter(str(mine), fqn_to_index_mapping=number_of, save_distributed=True)
        writer.sync_files = False  # `move` flushes the files
        state_dict_saver.save(
            dict(state),
            storage_writer=writer,
            planner=_SaveParts(parts),
            process_group=group,
            no_dist=group is None,
        )
        return dict(ChainMap(*on_every_rank(lambda: move(mine), group)))


def sort_metadata(path: Path) -> None:
    """Sorts the metadata of a safetensors file, whose order the library leaves to chance, so that files of
    equal tensors are equal."""
    with path.open("r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        assert len(text) <= length, path
        file.seek(8)
        file.write(text.ljust(length))


def load_state(
    folder: str,
    manifest: CheckpointManifest,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: dist.ProcessGroup | None = None,
) -> None:
    """Fills the model, and the optimiser if given, in place, whatever layout wrote the checkpoint. Each file
    is hashed as it is read.

    Raises:
        ValueError: if tensors are missing, unknown, or of another shape or dtype; then nothing was filled.
        DamagedError: naming the files that differ from what was written; a part may have been filled.
        OSError: if reading fails.
    """
    weights: dict[str, Any] = get_model_state_dict(model)
    wanted = weights if optimizer is None else state_of(model, optimizer)
    if len(wanted) > len(weights) and not manifest.has_optimizer():
        raise ValueError(f"{folder} holds weights only: training cannot continue from it")
    names = manifest.weights() if optimizer is None else list(manifest.files)
    try:
        with open_tensors(folder, names, group, manifest) as reader:
            _check_same(folder, reader.tensors(), wanted)
            fill(wanted, reader, group)
            unread = set(names).difference(*on_every_rank(lambda: reader.found_whole, group))
            check_files(folder, unread, manifest, group)
    except Exception as error:
        # A damaged header may look like another model, or be unreadable.
        if not isinstance(error, DamagedError):
            verify_checkpoint(folder, group, weights_only=optimizer is None)
        raise
    set_model_state_dict(model, {name: wanted[name] for name in weights})
    if optimizer is not None:
        set_moments(model, optimizer, wanted)


def set_moments(model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Tensor]) -> None:
    """Sets the optimiser's state to what `state_of` returned, filled since."""
    moments: dict[str, Any] = get_optimizer_state_dict(model, optimizer, options=FLAT)
    moments |= {n.removeprefix(OPTIMIZER): t for n, t in state.items() if n.startswith(OPTIMIZER)}
    set_optimizer_state_dict(model, optimizer, moments, options=FLAT)


def fill_part(target: Tensor, whole: Tensor, kept: float = 0.0) -> None:
    """Fills this rank's part of `target` from `whole`, to which `kept` times what it holds is added."""
    if isinstance(target, DTensor):
        (part,) = target.__create_chunk_list__()
        for dim, (offset, length) in enumerate(zip(part.offsets, part.sizes, strict=True)):
            whole = whole.narrow(dim, offset, length)
    with torch.no_grad():
        mine = local_part(target)
        mine.copy_(whole + kept * mine if kept else whole)


def fill(
    tensors: Mapping[str, Tensor], reader: "WeightsReader", group: dist.ProcessGroup | None = None
) -> None:
    """Fills tensors, sharded or not, in place.

    Raises:
        DamagedError: if the reader has a manifest, and files differ from what was written.
        OSError: if reading fails.
    """
    try:
        state_dict_loader.load(
            dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None
        )
    except CheckpointException as error:  # not an Exception, which callers expect
        worker, cause = first_failure(error)
        causes = [cause for cause, _ in error.failures.values()]
        if all(isinstance(cause, DamagedError) for cause in causes):
            raise DamagedError(", ".join(sorted(map(str, causes)))) from None
        location = reader.remote or reader.path
        raise OSError(f"reading {location} failed: worker {worker}: {cause!r}") from error


def first_failure(error: CheckpointException) -> tuple[int, BaseException]:
    """Returns the first worker that failed and its error; the same on every worker."""
    worker, (cause, _) = next(iter(error.failures.items()))
    return worker, cause


class WeightsReader(HuggingFaceStorageReader):
    """Reads the named files of a local folder, and ignores the others.

    With `remote`, the folder is empty at first and gets copies of the files at `remote`: on the first worker
    the headers of all files, on each worker the whole files that it has to read.

    With `manifest`, each file is hashed before a worker takes tensors from it, so that its bytes come from
    storage once: the tensors are read from the page cache. `found_whole` has the names of these files.
    """

    def __init__(
        self,
        folder: str,
        names: Sequence[str],
        group: dist.ProcessGroup | None = None,
        remote: str | None = None,
        manifest: CheckpointManifest | None = None,
    ) -> None:
        super().__init__(folder)
        self.fs = _Listed(names)
        self.remote = remote
        self.manifest = manifest
        self.found_whole: set[str] = set()
        self.metadata = on_first_rank(self._read_headers, group)
        for found in (self.metadata.storage_data or {}).values():
            found.relative_path = str(Path(folder, Path(found.relative_path).name))
        self._copied: set[str] = set()

    def _read_headers(self) -> Metadata:
        if self.remote:
            for path in map(Path, self.fs.ls(self.path)):
                header, size = read_header(storage.join(self.remote, path.name))
                path.write_bytes(header)
                os.truncate(path, size)
        try:
            return super().read_metadata()
        except SafetensorError as error:
            raise UsageError(f"{self.remote or self.path} holds no whole safetensors file: {error}") from None

    def read_metadata(self) -> Metadata:
        return self.metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items: dict[str, list[ReadItem]] = {}
        for item in plan.items:
            items.setdefault(self.storage_data[item.storage_index].relative_path, []).append(item)

        def read(path: str) -> str | None:
            """Returns the name of the file if it is damaged."""
            name = Path(path).name
            if self.remote and path not in self._copied:
                with open(path, "wb") as target:
                    target.writelines(storage.pieces(storage.join(self.remote, name)))
                self._copied.add(path)
            if self.manifest:
                if not is_whole(path, self.manifest.files[name]):
                    return name
                self.found_whole.add(name)
            super(WeightsReader, self).read_data(replace(plan, items=items[path]), planner)

        with ThreadPoolExecutor(THREADS) as pool:
            if damaged := sorted(filter(None, pool.map(read, items))):
                raise DamagedError(", ".join(damaged))
        done = Future[None]()
        done.set_result(None)
        return done

    def tensors(self, device: str = "meta") -> dict[str, Tensor]:
        """Returns an unfilled tensor for each tensor in the files; on the meta device without memory."""
        saved: Any = self.metadata.state_dict_metadata
        return {
            name: torch.empty(tensor.size, dtype=tensor.properties.dtype, device=device)
            for name, tensor in saved.items()
        }


def read_header(location: str) -> tuple[bytes, int]:
    """Returns the beginning of a safetensors file, which describes its tensors, and the bytes of the file."""
    with storage.open_to_read(location) as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(0)
        first = file.read(8)
        length = int.from_bytes(first, "little")
        return first + (file.read(length) if length < size else b""), size


@contextmanager
def open_tensors(
    folder: str,
    names: Sequence[str],
    group: dist.ProcessGroup | None = None,
    manifest: CheckpointManifest | None = None,
) -> Iterator[WeightsReader]:
    """Opens files of a folder; those elsewhere are copied to a temporary folder as they are needed. With
    `manifest`, each file is hashed as it is read.

    Raises:
        UsageError: if a file is not a whole safetensors file.
    """
    with _on_this_node(folder) as local:
        yield WeightsReader(local, names, group, None if storage.is_local(folder) else folder, manifest)


class _Listed(FileSystem):
    """A file system whose folders list only the named files."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = names

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        return [str(Path(path, name)) for name in self.names]


class _SaveParts(DefaultSavePlanner):
    """Plans by how the state is spread over workers, and writes the given parts of it."""

    def __init__(self, parts: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.parts = parts

    def lookup_object(self, index: MetadataIndex) -> Any:
        return self.parts[index.fqn].contiguous()


def _check_same(folder: str, saved: Mapping[str, Tensor], wanted: Mapping[str, Tensor]) -> None:
    """Raises ValueError, on every worker, if the tensors differ in names, shapes or dtypes."""
    wrong = []
    for name in sorted(saved.keys() | wanted.keys(), key=lambda name: (name.startswith(OPTIMIZER), name)):
        before, now = saved.get(name), wanted.get(name)
        if now is None:
            wrong.append(f"{name} has no place")
        elif before is None:
            wrong.append(f"{name} is not in it")
        elif (before.shape, before.dtype) != (now.shape, now.dtype):
            was, is_now = (f"{tensor.dtype} {tuple(tensor.shape)}" for tensor in (before, now))
            wrong.append(f"{name} is {was} in the checkpoint, {is_now} in the model")
    if wrong:
        more = f"; and {len(wrong) - 5} more" if len(wrong) > 5 else ""
        raise ValueError(f"{folder} holds another model: {'; '.join(wrong[:5])}{more}")


def _file_numbers(state: Mapping[str, Tensor], ranks: int) -> dict[str, int]:
    """Returns name -> number of its file, from 1: weights before the optimiser."""
    share = {name: tensor.numel() * tensor.itemsize // ranks for name, tensor in state.items()}
    most = max(FILE_BYTES, sum(share.values()) // MOST_FILES)
    numbers: dict[str, int] = {}
    number = 0
    for is_optimizer in (False, True):
        number, filled = number + 1, 0
        for name in (name for name in state if name.startswith(OPTIMIZER) == is_optimizer):
            if filled and filled + share[name] > most:
                number, filled = number + 1, 0
            numbers[name], filled = number, filled + share[name]
    return numbers


@contextmanager
def _on_this_node(folder: str) -> Iterator[str]:
    """Yields the path of `folder`, or of a temporary folder if it is in an object storage."""
    if storage.is_local(folder):
        yield storage.absolute(folder)
    else:
        with tempfile.TemporaryDirectory(prefix="checkpoint-") as local:
            yield local

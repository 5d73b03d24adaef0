"""Files of weights that other projects write, opened by their content. No pickle is executed.

Shapes are known before anything is read: a plan over `Lazy` tensors is refused, or read, as a whole.
"""

import hashlib
import json
import zipfile
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from orchestrator import storage
from orchestrator.errors import UsageError, reason_of
from wings.weights.msgpack_index import read_index

SAFETENSORS_FLOATS = ("F32", "F16", "BF16", "F64")
FLAGS = (SimpleNamespace, "argparse.Namespace")  # how timm and MAE save theirs: values, and no code
FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


@dataclass(frozen=True, kw_only=True)
class Lazy:
    """A tensor that is read when it is wanted, as float32.

    Attributes:
        sources: names in the file that it is made from.
        how: what is done to them; empty: nothing.
        wrong: a dtype that weights do not have, as that of a counter; empty: they may have it.
    """

    sources: tuple[str, ...]
    shape: tuple[int, ...]
    read: Callable[[], Tensor]
    how: str = ""
    wrong: str = ""

    def map(self, how: str, of: Callable[[Tensor], Tensor]) -> "Lazy":
        return combine(how, lambda tensors: of(tensors[0]), [self])


def combine(how: str, of: Callable[[Sequence[Tensor]], Tensor], parts: Sequence[Lazy]) -> Lazy:
    """Returns what `of` makes of several tensors; on the meta device it gives the shape."""
    shape = of([torch.empty(part.shape, device="meta") for part in parts]).shape
    steps = [*dict.fromkeys(part.how for part in parts if part.how), *([how] if how else [])]
    return Lazy(
        sources=tuple(name for part in parts for name in part.sources),
        shape=tuple(shape),
        read=lambda: of([part.read() for part in parts]),
        how=", ".join(steps),
        wrong=next((part.wrong for part in parts if part.wrong), ""),
    )


def zero_tensor(*shape: int) -> Lazy:
    return Lazy(sources=(), shape=shape, read=lambda: torch.zeros(shape), how="zeros")


@dataclass(frozen=True, kw_only=True)
class ForeignWeights:
    """Weights of another project.

    Attributes:
        tensors: by their names there; in a file of torch after those of the dicts around them.
        config: the content of ``config.json`` beside them, if there is one.
        preprocessor: that of ``preprocessor_config.json``, or the part of ``processor_config.json`` in its
            place.
        notes: what a user should know about how it was read.
    """

    location: str
    files: tuple[Path, ...]
    tensors: Mapping[str, Lazy]
    config: Mapping[str, Any] | None = None
    preprocessor: Mapping[str, Any] | None = None
    notes: list[str] = field(default_factory=list)

    @cached_property
    def sha256(self) -> str:
        """The digest of all files, one after the other."""
        digest = hashlib.sha256()
        for path in self.files:
            for piece in storage.pieces(str(path)):
                digest.update(piece)
        return digest.hexdigest()


def open_foreign(location: str) -> ForeignWeights:
    """Opens a folder, a file or the prefix of an index of weights.

    Raises:
        UsageError: if there is nothing, it is cut or damaged, it is of no known format, or it holds pickled
            objects.
    """
    path = Path(location).expanduser()
    notes: list[str] = []
    prefix = Path(str(path).removesuffix(".index"))
    if Path(f"{prefix}.index").is_file():
        tensors = _lazy_arrays(read_index(prefix))
        files = (Path(f"{prefix}.index"), *sorted(prefix.parent.glob(f"{prefix.name}.data-*")))
        return ForeignWeights(location=location, files=files, tensors=tensors, notes=notes)
    if path.is_file():
        tensors = _read(path, notes)
        return ForeignWeights(location=location, files=(path,), tensors=tensors, notes=notes)
    if not path.is_dir():
        raise UsageError(f"no file or folder {location}")
    if (path / "manifest.ocdbt").exists():
        raise UsageError(f"{location} is an Orbax checkpoint, which needs jax: save its parameters as .npz")
    files = _files_of(path)
    tensors: dict[str, Lazy] = {}
    for file in files:
        tensors |= _read(file, notes)
    config, preprocessor = (_json(path / f"{name}.json") for name in ("config", "preprocessor_config"))
    if preprocessor is None:  # transformers 5 writes that of a model with a tokenizer into this file
        nested = (_json(path / "processor_config.json") or {}).get("image_processor")
        preprocessor = nested if isinstance(nested, dict) else None
    return ForeignWeights(
        location=location,
        files=files,
        tensors=tensors,
        config=config,
        preprocessor=preprocessor,
        notes=notes,
    )


def _files_of(folder: Path) -> tuple[Path, ...]:
    """The files with the tensors of a folder, as timm and Hugging Face write them."""
    for name in ("model.safetensors", "pytorch_model.bin"):
        if (folder / name).is_file():
            return (folder / name,)
        index = _json(folder / f"{name}.index.json")
        if index is not None:
            shards = index.get("weight_map")
            if not isinstance(shards, dict) or not shards:
                raise UsageError(f"{folder / name}.index.json has no weight_map")
            files = [folder / str(shard) for shard in sorted({*map(str, shards.values())})]
            if lost := [file.name for file in files if not file.is_file() or file.parent != folder]:
                raise UsageError(f"{folder} lacks {', '.join(lost)}, which its index names")
            return tuple(files)
    raise UsageError(f"{folder} has no model.safetensors or pytorch_model.bin")


def _json(path: Path) -> dict[str, Any] | None:
    if not path.is_file():
        return None
    try:
        content = json.loads(path.read_bytes())
    except (ValueError, RecursionError):
        raise UsageError(f"{path} is not JSON: it is cut or damaged") from None
    if not isinstance(content, dict):
        raise UsageError(f"{path} holds no settings but a {type(content).__name__}")
    return content


def format_of(path: Path) -> Literal["safetensors", "zip", "pickle", "unknown"]:
    """Returns what the first bytes of a file say that it is, whatever its name."""
    with path.open("rb") as file:
        start = file.read(9)
    if start[8:9] == b"{":
        return "safetensors"
    return "zip" if start.startswith(b"PK") else "pickle" if start.startswith(b"\x80") else "unknown"


def _read(path: Path, notes: list[str]) -> dict[str, Lazy]:
    match format_of(path):
        case "safetensors":
            return _safetensors(path)
        case "pickle":
            return _torch(path, notes)
        case "unknown":
            raise UsageError(
                f"{path} is no file of weights that is known: safetensors, .npz, a state dict of torch, or an"
                " index with data files as V-MoE has them"
            )
    try:
        with zipfile.ZipFile(path) as archive:
            members, broken = archive.namelist(), archive.testzip()  # torch checks no checksums
    except Exception as error:  # zipfile raises nearly anything for damaged files
        raise UsageError(f"{path} is not a whole file: it is cut or damaged ({reason_of(error)})") from None
    if broken:
        raise UsageError(f"{path} is damaged: {broken} has another checksum")
    return _npz(path) if any(name.endswith(".npy") for name in members) else _torch(path, notes)


def _safetensors(path: Path) -> dict[str, Lazy]:
    try:
        with safe_open(path, "pt") as file:
            shapes = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
            dtypes = {name: file.get_slice(name).get_dtype() for name in shapes}
    except (SafetensorError, OSError) as error:
        raise UsageError(f"{path} is not a whole safetensors file: {error}") from None
    wrong = {name: "" if dtype in SAFETENSORS_FLOATS else dtype for name, dtype in dtypes.items()}
    return {
        name: Lazy(
            sources=(name,), shape=shape, read=partial(_from_safetensors, path, name), wrong=wrong[name]
        )
        for name, shape in shapes.items()
    }


def _from_safetensors(path: Path, name: str) -> Tensor:
    with safe_open(path, "pt") as file:
        return file.get_tensor(name).float()


def _npz(path: Path) -> dict[str, Lazy]:
    try:
        with np.load(path) as file:
            arrays = {name: file[name] for name in file.files}
    except Exception as error:  # numpy and zipfile raise nearly anything for damaged files
        raise UsageError(f"{path} cannot be read: {reason_of(error)}") from None
    return _lazy_arrays(arrays)


def _lazy_arrays(arrays: Mapping[str, np.ndarray]) -> dict[str, Lazy]:
    found = {}
    for name, array in arrays.items():
        if array.dtype == np.dtype("V2"):  # how numpy stores bfloat16
            array = (array.view(np.uint16).astype(np.uint32) << 16).view(np.float32)
        wrong = "" if array.dtype.kind == "f" else str(array.dtype)
        found[name] = Lazy(sources=(name,), shape=array.shape, read=partial(_from_numpy, array), wrong=wrong)
    return found


def _from_numpy(array: np.ndarray) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, dtype=np.float32))


def _torch(path: Path, notes: list[str]) -> dict[str, Lazy]:
    try:
        with path.open("rb") as file, torch.serialization.safe_globals([FLAGS]):
            content = torch.load(file, map_location="cpu", weights_only=True)  # of a path, the suffix decides
    except Exception as error:
        text = str(error)
        if "weights_only" in text or "Weights only" in text or "Unsupported" in text:
            raise UsageError(
                f"{path} holds pickled objects beside tensors, which could run code, and is not opened: save"
                " its state dict alone, as safetensors"
            ) from None
        raise UsageError(f"{path} is not a whole file of torch: {reason_of(error)}") from None
    if not isinstance(content, Mapping):
        raise UsageError(f"{path} holds no state dict but a {type(content).__name__}")
    if others := [str(n) for n, value in content.items() if not isinstance(value, Mapping | Tensor)]:
        notes.append(f"no tensors, and left out: {shortened(others)}")
    return {
        name: Lazy(
            sources=(name,),
            shape=tuple(tensor.shape),
            read=tensor.float,
            wrong="" if tensor.dtype in FLOATS else str(tensor.dtype),
        )
        for name, tensor in _tensors_in(content).items()
    }


def _tensors_in(content: Mapping[Any, Any]) -> dict[str, Tensor]:
    """Returns the tensors of nested dicts by their path, as ``optimizer.state.0.exp_avg``."""
    found, queue, seen = dict[str, Tensor](), deque([("", content)]), set[int]()
    while queue:
        path, tree = queue.popleft()
        if id(tree) in seen:  # a pickle may hold itself
            continue
        seen.add(id(tree))
        for key, value in tree.items():
            if isinstance(value, Tensor):
                found[f"{path}{key}"] = value
            elif isinstance(value, Mapping):
                queue.append((f"{path}{key}.", value))
    return found


def shortened(names: Sequence[str]) -> str:
    return f"{', '.join(names[:5])}{' ..' if len(names) > 5 else ''}"
